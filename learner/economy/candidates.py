"""What activation is told of nodes, its rules, and its decisions. Values only.

Must not know how a decision comes about (`activation`), nor how rates are measured (`rates`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from learner.economy.rates import Estimate
from p2p.protocol.prices import State

ACTIVE: State = "active"
WARM: State = "warm"
ASLEEP: State = "asleep"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that is there. One that has left is not named any more."""

    peer: str
    usd_per_hour: float
    """price while it is active"""
    rate: Estimate
    state: State = ASLEEP
    """what was last decided of it, done or not"""
    ready: bool = False
    """it serves a version that is current enough; until then an active one is a joiner, and counts for nothing"""
    idle_usd_per_hour: float = 0.0
    """price while it is not active"""
    catch_up_s: float = math.inf
    """seconds from being activated until it is ready; inf: nobody knows"""
    download: float = math.inf
    """bytes per second of its downlink"""
    own_price: bool = False
    """it said itself what it costs: once the budget is spent it is let go"""


@dataclass(frozen=True, slots=True)
class Rules:
    """What activation goes by; mostly [activation] of the configuration."""

    margin: float = 0.1
    """active nodes make this share more than is required (ECHO-2's epsilon, arXiv 2602.02192)"""
    release: float = 0.25
    """nodes are released only while those that stay make this share more than is required"""
    dwell_s: float = 120.0
    """seconds for which a reason to release, swap or top up must hold without a break, and a node must have been active"""
    swap_share: float = 0.1
    """share by which another set must be cheaper for a swap"""
    explore_share: float = 0.05
    """share of the spending that may go to nodes of unknown speed"""
    explore_s: float = 120.0
    """seconds that a node is tried, once it is ready"""
    join_s: float = 300.0
    """seconds after which a joiner that is not ready is given up for a while (or twice the time that it was thought to take)"""
    max_usd_per_hour: float = math.inf
    budget_usd: float = math.inf
    drain_s: float = 20.0
    """seconds that nodes still cost after they were told to stop; the budget is kept free of that"""
    z: float = 1.0
    """standard deviations that are taken off a rate's mean to be careful"""
    overlap: bool = True
    """nodes generate while they receive a version (`demand`)"""


@dataclass(frozen=True, slots=True)
class Change:
    peer: str
    to: State
    why: str
    """for people"""


@dataclass(frozen=True, slots=True)
class Decision:
    active: frozenset[str]
    changes: tuple[Change, ...]
    """against the states that the candidates came with"""
    required: float
    """tokens per second, without margin; inf before the first step, or when no capacity suffices"""
    supply: float
    """tokens per second of active nodes that are ready, by lower bounds"""
    usd_per_hour: float
    """price of all candidates in these states"""
    spread_s: float
    short_by: float
    """tokens per second that supply lacks now; 0 before the first step"""
    blocked: str
    """"" or why there is not more, for people"""
