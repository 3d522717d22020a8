"""The port for sequences that nodes hold beside training's. Must not know who asked for them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from learner.rollouts.outcomes import Cancel
from p2p.errors import Refusal
from p2p.protocol.generation import GenerateRequest, Rejected
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version

GivenOut = dict[str, list[GenerateRequest]]
"""Node -> what it is asked for."""


class Footprint(NamedTuple):
    """What sequences take of a node's key-value memory, in tokens."""

    context: float = 0.0
    """held now, prompts included"""
    growth: float = 0.0
    """that will probably still be made"""


class Taken(NamedTuple):
    """What came of an event."""

    tokens: int = 0
    """that were accepted"""
    refusal: Refusal | None = None
    """what is held against the node"""
    cancel: Cancel = ()
    """(node, request id) that must stop"""
    late: bool = False
    """of an attempt or sequence that is over: nobody's fault"""
    made: int = 0
    """tokens of the sequence that the node made in all, where it has ended as asked"""


NOTHING = Footprint()
"""What no sequence takes."""


class BesideTraining(Protocol):
    """Sequences of other classes, at the same nodes."""

    def given(self, out: GivenOut) -> None:
        """Training gives nodes these now. What is to go out with them is added."""

    def owns(self, peer: str, request_id: str) -> bool:
        """Whether a request of this name at `peer` is none of training's."""

    def published(self, version: Version) -> None:
        """Tokens of this version may come from now on."""

    def load(self, peer: str) -> int:
        """How many of them a node holds."""

    def working(self, peer: str) -> list[str]:
        """Their request ids."""

    def footprint(self, peer: str) -> Footprint:
        """What they take of its memory."""

    def progress(self) -> dict[str, dict[str, int]]:
        """Node -> request id -> completion tokens so far."""

    def on_tokens(self, peer: str, run: TokenEvent) -> Taken:
        """Tokens of one of them, and what came of them; what nodes must stop was told to them."""

    def on_rejected(self, peer: str, message: Rejected) -> None:
        """`peer` did not take one of them, or gave it back."""

    def take(self, peer: str, request_id: str, reason: str) -> None:
        """It makes no progress at `peer`: it goes elsewhere. The caller tells the node."""

    def on_node_lost(self, peer: str) -> int:
        """What the node held goes to others: how many."""


class NothingBeside(BesideTraining):
    """Training alone."""

    def given(self, out: GivenOut) -> None:
        pass

    def owns(self, peer: str, request_id: str) -> bool:
        return False

    def published(self, version: Version) -> None:
        pass

    def load(self, peer: str) -> int:
        return 0

    def working(self, peer: str) -> list[str]:
        return []

    def footprint(self, peer: str) -> Footprint:
        return NOTHING

    def progress(self) -> dict[str, dict[str, int]]:
        return {}

    def on_tokens(self, peer: str, run: TokenEvent) -> Taken:
        return Taken()

    def on_rejected(self, peer: str, message: Rejected) -> None:
        pass

    def take(self, peer: str, request_id: str, reason: str) -> None:
        pass

    def on_node_lost(self, peer: str) -> int:
        return 0
