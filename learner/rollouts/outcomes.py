"""What the collector is asked for and what it answers: sampling settings, whole groups, the outcome of one event.

Plain values. Must not know nodes, the ledger or rewards' meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from learner.environments.port import Episode, EpisodeKey
from learner.rollouts.stop_strings import StopStrings
from learner.trajectory import Group
from p2p.errors import Refusal

Cancel = tuple[tuple[str, str], ...]
"""(node, request id) that must stop"""


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """What bounds an episode, beside `Sampling.max_new_tokens`, which bounds all of it, given tokens included."""

    max_turns: int
    """turns of the model"""
    turn_tokens: int = 0
    """sampled tokens of one turn; 0: no bound of its own"""


@dataclass(frozen=True, slots=True)
class Sampling:
    max_new_tokens: int
    """of the whole completion: of an episode, what its environment gives included"""
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    turns: TurnLimits | None = None
    """None: a completion is one turn, and nobody answers it"""
    stop: StopStrings | None = None
    """strings that end a turn, beside `stop_ids`"""

    def turn_end(self, start: int) -> int:
        """Completion tokens at which a turn that begins at `start` ends with its budget."""
        if self.turns is None or not self.turns.turn_tokens:
            return self.max_new_tokens
        return min(self.max_new_tokens, start + self.turns.turn_tokens)


class PromptFeature(NamedTuple):
    """What a group's lengths are foretold from."""

    task_index: int
    feature: float
    """the prompt's own length in tokens"""


@dataclass(frozen=True, slots=True)
class WholeGroup:
    """A group that has as many members as it needs, and so leaves the collector. None of its trajectories is scored yet."""

    group: Group
    surplus: tuple[int, ...] = ()
    """tokens of each member that was not needed any more, as far as it had come"""
    cancel: Cancel = ()
    """what nodes still do for members that it did not need"""


class Stay(NamedTuple):
    """What a sequence came to at the node that has it."""

    tokens: int = 0
    """that were made there"""
    since: float = 0.0
    """when the node was given it"""


NO_STAY = Stay()
"""Nothing has ended."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokens were appended; `tokens` of them. `whole` is the group when this was the last token that it needed. `cancel` is what
    the node goes on with though a stop string ended it."""

    request_id: str
    tokens: int
    whole: WholeGroup | None = None
    cancel: Cancel = ()
    gave_up: tuple[str, ...] = ()
    """nodes that had said they could not do what ended here"""
    stay: Stay = NO_STAY
    """of what ended here"""


@dataclass(frozen=True, slots=True)
class GroupProgress:
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


class BegunAnew(NamedTuple):
    """An episode could not be set back and begins from its first prompt: the journal must forget its tokens."""

    group_id: int
    member: int
    request_id: str
    """the new attempt, which waits for a node"""
    reason: str


class EnvironmentWork(NamedTuple):
    """What whoever runs the episodes is to hear."""

    ask: tuple[Episode, ...]
    """their last turns wait for an answer"""
    forget: tuple[EpisodeKey, ...]
    """no answer is wanted any more"""


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
    breach: bool = False
    """what it sent is nothing that a node may send"""
    since: float = 0.0
    """when the node was given it"""
    made: int = 0
    """tokens that the node made of it since then"""


@dataclass(frozen=True, slots=True)
class GroupAborted:
    """The failure budget of one member is used up, or its environment failed. `cancel` are the (node, request id) still running
    in the group."""

    group_id: int
    reason: str
    cancel: Cancel
    refusal: Refusal | None = None
    """None: no node is at fault"""
    breach: bool = False
    """what the last one sent is nothing that a node may send"""
    task_index: int | None = None
    """the group's prompt, where nodes are at fault"""


Outcome = Accepted | Ignored | EventRefused | Requeued | GroupAborted | BegunAnew
