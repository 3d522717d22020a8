"""The port for sampling from the current policy outside of training: evaluation, and the endpoint. Must not know nodes, HTTP or
torch.

A request is taken by the head's dispatcher, goes to a node, and to another one with all its tokens when that dies: whoever asked
notices nothing but a pause.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from learner.rollouts.stop_strings import StopStrings
from p2p.errors import ShoalError
from p2p.version import Version

RequestClass = Literal["evaluation", "serving"]
"""Classes beside training, whose sequences the ledger reserves. Each has a share of the nodes and a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sequence to sample."""

    request_class: RequestClass
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    temperature: float = 1.0
    """0 is greedy"""
    top_p: float = 1.0
    min_version: Version | None = None
    """no token may be of an older one; None: any"""
    exact_version: Version | None = None
    """every token must be of this one"""
    stop: StopStrings | None = None
    """strings that end it, beside `stop_ids`"""


@dataclass(frozen=True, slots=True)
class Made:
    """Tokens that follow each other, all of one version."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """nats, under the distribution that each was drawn from"""
    version: Version
    finish: str = ""
    """"stop" or "length" with the sequence's last tokens, "" before"""


class Busy(ShoalError):
    """So many requests of this class wait already that one more is not taken: later."""


class NoSuchVersion(ShoalError):
    """No node serves the version that was asked for. `later` says whether one may."""

    def __init__(self, what: str, *, later: bool) -> None:
        super().__init__(what)
        self.later = later


class Requests(Protocol):
    """Samples on the swarm's nodes."""

    def sample(self, ask: Ask) -> AbstractAsyncContextManager[AsyncIterator[Made]]:
        """The sequence's tokens as they come, ended by one with a `finish`. Leaving the block cancels what is not made yet.

        Busy and NoSuchVersion on entering, and NoSuchVersion also later, when the last node of an exact version goes.
        ShoalError when the sequence cannot be made: nodes refuse it, or the run ends.
        """
