"""Trajectories and groups as the learner holds them, from their last token to the trainer. Must not know torch, the network or
the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import msgpack

from learner.tasks.port import EpisodeEnd, Score
from p2p.protocol.rollout import Span
from p2p.version import Version

TRUNCATED: Literal["truncated"] = "truncated"
"""How a sequence ended that would have gone on: the learner cut it where it was, because a step waited for it. A word of its own,
since neither the answer nor the token budget was at its end; no node may say it."""

Finish = Literal["stop", "length", "truncated"]
"""How a trajectory ended: with a stop token, with its token budget, or as TRUNCATED (`rollout.truncate_stuck_s`), which a trainer
may mask."""


class Maker(NamedTuple):
    """A node that made tokens of a trajectory, from `start` on until the next maker's."""

    start: int
    node: str
    """its peer id"""


class Gap(NamedTuple):
    """Completion tokens [start, stop) that an environment gave: the model read them and did not sample them."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sample of a group that has ended. Once it was scored it has a reward; only then it goes to journal and trainer."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """everything after the prompt, sampled and given"""
    logprobs: tuple[float, ...]
    """behaviour log probability of each completion token (nats); 0.0 where it was given"""
    spans: tuple[Span, ...]
    """cover what was sampled of [0, len(completion_ids)) in order, versions never going back"""
    finish: Finish
    node: str
    """peer id of the node that made the last token"""
    seed: int
    makers: tuple[Maker, ...] = ()
    """in order, where more than one node made tokens; empty: `node` made them all"""
    reward: float | None = None
    """None: not scored yet"""
    exact: bool = False
    """the task's own notion of fully right, for `reward_first/last` style reports"""
    given: tuple[Gap, ...] = ()
    """what an environment gave between turns, in order; empty for a completion of one turn"""
    parts: Mapping[str, float] = field(default_factory=dict)
    """of the reward, as in `Score.parts`"""
    end: EpisodeEnd | None = None
    """of an episode, as in `Score.end`"""

    @property
    def sampled_tokens(self) -> int:
        """Completion tokens that the model made."""
        return len(self.completion_ids) - sum(gap.stop - gap.start for gap in self.given)

    @property
    def oldest(self) -> Version:
        """The version of the oldest sampled token."""
        return min(span.version for span in self.spans)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt, trained on together (advantages are relative within the group)."""

    group_id: int
    task_index: int
    """which prompt: `Task.prompt(task_index)`"""
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest(self) -> Version:
        """The group's version: the oldest over its members' spans (StaleFlow, section 3)."""
        return min(t.oldest for t in self.trajectories)

    @property
    def rewards(self) -> list[float]:
        """One a trajectory, in order. ValueError when one was not scored."""
        rewards = [t.reward for t in self.trajectories if t.reward is not None]
        if len(rewards) < len(self.trajectories):
            raise ValueError(f"group {self.group_id} is not scored")
        return rewards

    def made_by(self, node: str) -> bool:
        """Whether this node made a token of it."""
        return any(node == t.node or any(node == maker.node for maker in t.makers) for t in self.trajectories)

    @property
    def is_scored(self) -> bool:
        """Whether every trajectory has its reward: an environment gives it with the end of an episode."""
        return all(t.reward is not None for t in self.trajectories)

    @property
    def equal(self) -> bool:
        """Whether all have the same reward: then none is better than its group, and there is nothing to learn from."""
        return len(set(self.rewards)) == 1

    def shaped(self, most: int, soft: int) -> list[float]:
        """`rewards` as they are trained on: less `overlong_penalty`."""
        pairs = zip(self.rewards, self.trajectories, strict=True)
        return [reward - overlong_penalty(t.sampled_tokens, most, soft) for reward, t in pairs]

    def scored(self, scores: Sequence[Score]) -> Group:
        """The group with one score a trajectory, in order."""
        pairs = zip(self.trajectories, scores, strict=True)
        return replace(
            self, trajectories=tuple(replace(t, reward=s.reward, exact=s.exact, parts=s.parts) for t, s in pairs)
        )


def overlong_penalty(length: int, most: int, soft: int) -> float:
    """What is subtracted from the reward of a completion of `length` sampled tokens, of `most` at most: 0 up to most - soft, from
    there on evenly up to 1 (DAPO, arXiv 2503.14476, equation 13)."""
    return 0.0 if soft <= 0 else min(1.0, max(0.0, (length - (most - soft)) / soft))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Finished groups handed to the trainer while the rest of the step's buffer may still be generating.

    `last` says that the buffer is complete with these groups: take the optimizer step after them.
    """

    step: int
    """the learner version that consumes them: optimizer steps done before this step"""
    groups: tuple[Group, ...]
    last: bool
    total: int = 0
    """groups the whole step will hold, so that the loss can be normalised before all of them are here"""


def pack_groups(groups: Sequence[Group]) -> bytes:
    """Scored groups as msgpack, for the journal and for micro-batch files."""
    return msgpack.packb([[g.group_id, g.task_index, [_packed(t) for t in g.trajectories]] for g in groups])


def _packed(t: Trajectory) -> list[object]:
    spans = [[s.version.epoch, s.version.step, s.start, s.stop] for s in t.spans]
    packed = [t.prompt_ids, t.completion_ids, t.logprobs, spans, t.reward, t.finish, t.node, t.seed, t.exact, t.makers]
    return [*packed, t.given, dict(t.parts), t.end]


class _Later(NamedTuple):
    """Fields that journals and files of earlier programs end before."""

    makers: Sequence[Sequence[Any]] = ()
    given: Sequence[Sequence[int]] = ()
    parts: Mapping[str, float] = {}
    end: Sequence[Any] | None = None


def unpack_groups(data: bytes) -> tuple[Group, ...]:
    """Inverse of `pack_groups`. A journal from before makers, or given tokens, were written has trajectories without them."""
    return tuple(
        Group(
            group_id,
            task_index,
            tuple(
                Trajectory(
                    prompt_ids=tuple(prompt), completion_ids=tuple(completion), logprobs=tuple(logprobs),
                    spans=tuple(Span(Version(epoch, step), start, stop) for epoch, step, start, stop in spans),
                    finish=finish, node=node, seed=seed, reward=reward, exact=exact,
                    makers=tuple(Maker(*maker) for maker in _Later(*rest).makers),
                    given=tuple(Gap(*gap) for gap in _Later(*rest).given), parts=_Later(*rest).parts,
                    end=EpisodeEnd(*end) if (end := _Later(*rest).end) is not None else None,
                )
                for prompt, completion, logprobs, spans, reward, finish, node, seed, exact, *rest in trajectories
            ),
        )
        for group_id, task_index, trajectories in msgpack.unpackb(data)
    )  # fmt: skip
