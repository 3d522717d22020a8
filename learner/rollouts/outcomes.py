"""What the collector is asked for and what it answers: sampling settings, finished groups, the outcome of one event.

Plain values. Must not know nodes, the ledger or rewards' meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.tasks.port import Score
from learner.trajectory import Group, Trajectory
from p2p.errors import Refusal
from p2p.protocol.rollout import Span
from p2p.version import Version

TRUNCATED = "truncated"
"""How a sequence ended that would have gone on: the learner cut it where it was, because a step waited for it. A word of its own,
since neither the answer nor the token budget was at its end; no node may say it."""

Cancel = tuple[tuple[str, str], ...]
"""(node, request id) that must stop"""


@dataclass(frozen=True, slots=True)
class Sampling:
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished member of a group, not rewarded yet."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish: str
    """"stop", "length" or TRUNCATED"""
    node: str
    """who made the last token"""
    seed: int


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    group_id: int
    task_index: int
    version: Version
    """the version it was reserved at"""
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]
    surplus: tuple[int, ...] = ()
    """tokens of each member that was not needed any more, as far as it had come"""

    @property
    def oldest(self) -> Version:
        return min(span.version for sample in self.samples for span in sample.spans)

    def rewarded(self, scores: Sequence[Score]) -> Group:
        """The group as the trainer takes it, with one score a sample in order."""
        return Group(
            self.group_id,
            self.task_index,
            tuple(
                Trajectory(
                    self.prompt_ids, s.ids, s.logprobs, s.spans, score.reward, s.finish, s.node, s.seed, score.exact
                )
                for s, score in zip(self.samples, scores, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokens were appended; `tokens` of them. `finished` is the group when this was its last token, and `cancel` then what nodes
    still do for members that it did not need."""

    request_id: str
    tokens: int
    finished: FinishedGroup | None = None
    cancel: Cancel = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a group has come."""

    ended: tuple[int, ...]
    """tokens of each member that has ended"""
    running: tuple[int, ...]
    """tokens so far of each that has not, in order of member"""
    missing: int
    """so many must still end"""

    @property
    def tokens(self) -> int:
        return sum(self.ended) + sum(self.running)

    @property
    def longest(self) -> tuple[int, ...]:
        """Tokens of those that `Collector.cut` would end where they are: those that have made most, as many as are missing. Fewer
        when no more have a token."""
        return tuple(sorted((n for n in self.running if n), reverse=True)[: self.missing])


@dataclass(frozen=True, slots=True)
class Ignored:
    """A late event of an attempt or group that is over: nobody's fault."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EventRefused:
    """The event is not used and nothing else changed: it came from a node that does not hold this request."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Requeued:
    """The node gave the trajectory up, or was refused (`refusal` says why). `request_id` is the new attempt, waiting
    for a node; `cancel` is the old one, which that node must stop. `tokens` were still accepted from it."""

    request_id: str
    cancel: tuple[str, str]
    """(node, old request id)"""
    refusal: Refusal | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class GroupAborted:
    """The failure budget of one member is used up. `cancel` are the (node, request id) still running in the group."""

    group_id: int
    reason: str
    cancel: Cancel
    refusal: Refusal


Outcome = Accepted | Ignored | EventRefused | Requeued | GroupAborted
