"""What activation is told of nodes, by what rules it decides, and what it says. Values only.

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
    """A node that is there. One that has left is simply not named any more."""

    peer: str
    usd_per_hour: float
    """while it is active"""
    rate: Estimate
    state: State = ASLEEP
    """what was last decided of it, done or not: "active", "warm" (gets versions, makes nothing) or "asleep" """
    ready: bool = False
    """it serves a version that is current enough; until then an active one is a joiner, and counts for nothing"""
    idle_usd_per_hour: float = 0.0
    """while it is not active: what it costs to have it"""
    catch_up_s: float = math.inf
    """from being activated until it is ready; inf: nobody knows"""
    download: float = math.inf
    """bytes per second"""
    version_usd: float = 0.0
    """egress of one version to it"""
    catch_up_usd: float = 0.0
    """egress of what it must download when it comes back"""


@dataclass(frozen=True, slots=True)
class Rules:
    margin: float = 0.1
    """active nodes make so much more than is required (eps)"""
    release: float = 0.25
    """nodes go only while those that stay make so much more"""
    dwell_s: float = 120.0
    """a reason to release, swap or top up must hold without a break for so long, and a node was active for as long"""
    swap_share: float = 0.1
    """another set must be cheaper by so much"""
    explore_share: float = 0.05
    """of what is spent, that may go to nodes of which nothing is known"""
    explore_s: float = 120.0
    """a node is tried for so long, once it is ready"""
    join_s: float = 300.0
    """a joiner that is not ready by then (or after twice the time it was thought to take) is given up for a while"""
    max_usd_per_hour: float = math.inf
    budget_usd: float = math.inf
    drain_s: float = 20.0
    """nodes that are told to stop cost for so long more: the budget is kept free of that"""
    z: float = 1.0
    """standard deviations by which a rate is thought lower than its mean"""
    overlap: bool = True
    """nodes go on while they receive (`demand`)"""


@dataclass(frozen=True, slots=True)
class Change:
    peer: str
    to: State
    why: str
    """for people"""


@dataclass(frozen=True, slots=True)
class Decision:
    active: frozenset[str]
    warm: frozenset[str]
    asleep: frozenset[str]
    changes: tuple[Change, ...]
    """against the states that the candidates came with"""
    required: float
    """tokens per second, without margin; inf before the first step, or when no capacity suffices"""
    supply: float
    """of active nodes that are ready, by lower bounds"""
    coming: float
    """of those that still catch up"""
    usd_per_hour: float
    """of all candidates, in these states"""
    spread_s: float
    short_by: float
    """tokens per second that supply lacks now; 0 before the first step"""
    blocked: str
    """"" or why there is not more, for people"""
