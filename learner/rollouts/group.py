"""A group while it is generated: its members, what their requests are called, what their tokens must be. Pure.

A request id is "{group_id}.{member}.{attempt}". Attempts go up across a restart of the learner too: each epoch numbers its own
from `first_attempt(epoch)` on, so that a late token of an earlier epoch is never taken for one of this, whatever that epoch's
last attempts were. Must not know which groups there are, who waits or who works (`collector`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.journal.records import ReservedGroup
from learner.rollouts.event_checks import Expected
from learner.rollouts.group_spec import GroupSpec
from learner.rollouts.outcomes import Sampling, Stay
from learner.tasks.port import Score
from learner.trajectory import Finish, Gap, Maker, Trajectory
from p2p.protocol.rollout import Completion, Generate
from p2p.version import Version

ATTEMPTS = 10**9
"""Attempts that an epoch can make of one trajectory: each takes a message, so no run gets there."""


def first_attempt(epoch: int) -> int:
    """Number of the first attempt that a learner of this epoch makes of any trajectory."""
    return max(0, epoch - 1) * ATTEMPTS


@dataclass(slots=True)
class RunningSample:
    seed: int
    limit: int
    """completion tokens at which its present turn ends: `Sampling.turn_end`"""
    completion: Completion = field(default_factory=Completion)
    given: list[Gap] = field(default_factory=list)
    """what its environment gave, in order"""
    finish: Finish | None = None
    """None: it goes on"""
    score: Score | None = None
    """its environment's, which ends an episode"""
    asked: bool = False
    """its last turn waits for the environment's answer: it is neither waiting for a node nor held by one"""
    over: str = ""
    """as in `Episode`, once the environment was told so"""
    cut: bool = False
    """it was ended where it stood, and waits only for its score"""
    life: int = 0
    """how often it was begun anew"""
    prefer: str = ""
    """the node that may still hold the keys and values of its tokens"""
    attempt: int = 0
    node: str = ""
    """who works on it; "" when it waits or is finished"""
    last_node: str = ""
    """who made its last token"""
    makers: list[Maker] = field(default_factory=list)
    """every node that made tokens of it, in order"""
    since: float = 0.0
    """when that node was given it"""
    had: int = 0
    """completion tokens that it had then"""
    failures: float = 0.0
    failed_on: set[str] = field(default_factory=set)
    gave_up: set[str] = field(default_factory=set)
    """nodes that said they could not do it"""

    @property
    def made_here(self) -> int:
        """Completion tokens that were made since it was last given to a node."""
        return len(self.completion.ids) - self.had

    @property
    def stay(self) -> Stay:
        """At the node that has it, or had it last."""
        return Stay(self.made_here, self.since)

    @property
    def waits(self) -> bool:
        """Whether it waits for a node."""
        return not self.node and not self.finish and not self.asked

    @property
    def turn_start(self) -> int:
        """Where its present turn begins, in completion tokens."""
        return self.given[-1].stop if self.given else 0

    def give(self, ids: Sequence[int], sampling: Sampling) -> None:
        """Its environment's answer: the next turn begins after it."""
        start = len(self.completion.ids)
        self.completion.give(ids)
        self.given.append(Gap(start, start + len(ids)))
        self.limit = sampling.turn_end(start + len(ids))

    def drop_unused(self) -> None:
        """Without what was given for a turn that has no token: nobody trains on that."""
        if self.given and self.turn_start == len(self.completion.ids):
            start = self.given.pop().start
            del self.completion.ids[start:], self.completion.logprobs[start:]

    def begin(self, sampling: Sampling) -> None:
        """It has no token, and no turn."""
        self.completion, self.given, self.makers = Completion(), [], []
        self.last_node = self.prefer = self.over = ""
        self.asked = self.cut = False
        self.limit = sampling.turn_end(0)

    def cut_to(self, position: int) -> None:
        """It has its first `position` tokens alone, and goes on from there."""
        self.completion.cut(position)
        self.makers = [maker for maker in self.makers if maker.start < position]
        self.last_node = self.makers[-1].node if self.makers else ""
        self.prefer, self.finish = "", None

    def made_by(self, node: str, start: int) -> None:
        """The tokens from `start` on are of `node`."""
        if node != self.last_node:
            self.last_node = node
            self.makers.append(Maker(start, node))


@dataclass(slots=True)
class RunningGroup:
    group_id: int
    task_index: int
    version: Version
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    members: list[RunningSample]
    extra: int = 0
    """members beyond need: the group is whole once all but so many have ended"""

    @property
    def needed(self) -> int:
        return len(self.members) - self.extra

    def request_name(self, index: int) -> str:
        """The request id of a member's present attempt."""
        return f"{self.group_id}.{index}.{self.members[index].attempt}"  # as RequestName writes it, and four times as fast


class RequestName(NamedTuple):
    """What a request id says."""

    group_id: int
    member: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.group_id}.{self.member}.{self.attempt}"


def parse_request(request_id: str) -> RequestName | None:
    """The three numbers of a request id in their one spelling, None for any other text."""
    parts = request_id.split(".")
    if len(request_id) > 64 or len(parts) != 3 or not all(p.isascii() and p.isdigit() for p in parts):
        return None
    name = RequestName(*map(int, parts))
    return name if str(name) == request_id else None


def member_name(request_id: str) -> str:
    """The parts of a request's name that stay from attempt to attempt: "group.member"."""
    return request_id.rpartition(".")[0]


def running_group(reserved: ReservedGroup, spec: GroupSpec, sampling: Sampling, members: list[RunningSample]) -> RunningGroup:
    """A reserved group, with what it is made from."""
    return RunningGroup(
        reserved.group_id, reserved.task_index, reserved.version, spec.prompt_ids, sampling, members=members,
        extra=reserved.extra,
    )  # fmt: skip


def min_version(group: RunningGroup, member: RunningSample) -> Version:
    """What a node must be at to go on with it."""
    return member.completion.spans[-1].version if member.completion.spans else group.version


def finish_of(group: RunningGroup, member: RunningSample) -> Finish | None:
    """How its tokens show that its present turn has ended; None when they do not."""
    ids = member.completion.ids
    if len(ids) <= member.turn_start:
        return None
    stop = group.sampling.stop
    if ids[-1] in group.sampling.stop_ids or (stop is not None and stop.ended(ids, member.turn_start)):
        return "stop"
    return "length" if len(ids) >= member.limit else None


def trajectory(group: RunningGroup, member: RunningSample) -> Trajectory:
    """What a member that has ended comes to."""
    assert member.finish is not None
    return so_far(group, member)


def so_far(group: RunningGroup, member: RunningSample) -> Trajectory:
    """What a member comes to if it ends here."""
    made, score = member.completion, member.score
    return Trajectory(
        prompt_ids=group.prompt_ids, completion_ids=tuple(made.ids), logprobs=tuple(made.logprobs), spans=tuple(made.spans),
        finish=member.finish or "length", node=member.last_node, seed=member.seed,
        makers=tuple(member.makers) if len(member.makers) > 1 else (), given=tuple(member.given),
        reward=score.reward if score else None, exact=bool(score and score.exact), parts=score.parts if score else {},
        end=score.end if score else None,
    )  # fmt: skip


def generate(group: RunningGroup, index: int, member: RunningSample) -> Generate:
    """What a node is asked for: seed and sampling as in every attempt, the tokens so far as a prefix, given ones included."""
    return Generate(
        group.request_name(index), group.prompt_ids, max_new_tokens=member.limit,
        stop_ids=group.sampling.stop_ids, seed=member.seed, min_version=min_version(group, member),
        temperature=group.sampling.temperature, top_p=group.sampling.top_p, prefix_ids=tuple(member.completion.ids),
    )  # fmt: skip


def expected(group: RunningGroup, member: RunningSample, published: Container[Version], vocab_size: int | None) -> Expected:
    """What the next tokens of this member must be."""
    return Expected(
        held=len(member.completion.ids), limit=member.limit, stop_ids=group.sampling.stop_ids,
        least=min_version(group, member), published=published, vocab_size=vocab_size,
    )  # fmt: skip
