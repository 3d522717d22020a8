"""One copy of a sequence that is made only to be checked, and a node that may be given one. Pure, told the time.

Must not know how many there are, nor who is given one: see `probes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from learner.dispatch.node_table import FILL, peak
from learner.rollouts.beside import Footprint
from learner.rollouts.silences import SLOWER, Usual
from learner.trajectory import Trajectory
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.rollout import Completion, Generate
from p2p.version import Version

UNKNOWN_GROWTH = 256
"""Tokens that one which has fewer will probably still make; others as many as they have."""

PROBE_S, MOST_S = 60.0, 600.0
"""Seconds without a token after which a probe is given up, and after which it is in any case."""

ID_BYTES = 4
"""Of a packed token id."""


def footprint_of(request: GenerateRequest) -> Footprint:
    """What a sequence takes that begins. How long it becomes nobody foretells."""
    return Footprint(float(len(request.prompt_ids) // ID_BYTES), float(min(request.max_new_tokens, UNKNOWN_GROWTH)))


class FreeNode(NamedTuple):
    """A node that may be given a probe."""

    peer: str
    version: Version
    """that it serves"""
    free: int
    """places that it has"""
    found_wrong: bool = False
    """it gets nothing else until it has shown what it makes"""
    holds: Footprint = Footprint()
    """what its sequences take of its key-value memory"""
    room: float = 0.0
    """tokens that this memory has; 0 when it does not say"""

    def fits(self, request: GenerateRequest) -> bool:
        """Whether it has memory for one more, as the dispatcher asks it."""
        if not self.room or not self.holds.context:
            return True
        more = footprint_of(request)
        return bool(peak(self.holds.context + more.context, self.holds.growth + more.growth) <= FILL * self.room)


@dataclass(slots=True, eq=False)
class Probe:
    """A copy at its node."""

    number: int
    node: str
    request: Generate
    given: float
    """when"""
    since: float
    """when it was given, or brought its last tokens"""
    patience: float
    """times as long as others it may be silent or slow"""
    began: float | None = None
    """when its first tokens came"""
    completion: Completion = field(default_factory=Completion)
    ended: bool = False
    """as asked"""
    behind: bool = False
    """it is of an older version than its original: its node can tell that it is a copy"""
    over: bool = False
    """nothing more is taken of it"""

    @property
    def tokens(self) -> int:
        """That it has so far."""
        return len(self.completion.ids)

    @property
    def footprint(self) -> Footprint:
        """What it takes now."""
        growth = min(self.request.max_new_tokens - self.tokens, max(self.tokens, UNKNOWN_GROWTH))
        return Footprint(float(len(self.request.prompt_ids) + self.tokens), float(growth))

    def so_far(self) -> Trajectory:
        """What it comes to if it ends here."""
        made = self.completion
        return Trajectory(
            prompt_ids=self.request.prompt_ids, completion_ids=tuple(made.ids), logprobs=tuple(made.logprobs),
            spans=tuple(made.spans), finish="length", node=self.node, seed=self.request.seed,
        )  # fmt: skip

    def late(self, now: float, usual: Usual) -> bool:
        """Whether it is given up. `usual`: what is, of this node's, where an original would be taken for being late."""
        at_once_s = self.patience * usual.at_once_s
        silent_s = at_once_s if self.began is not None else self.patience * usual.begins_s
        if not (0 <= now - self.since < min(PROBE_S, silent_s) and now - self.given < MOST_S):
            return True
        lasts_s = now - self.began if self.began is not None else 0.0
        return lasts_s > at_once_s and SLOWER * self.tokens < lasts_s * usual.tokens_per_s
