"""Trajectories and groups as the learner holds them. Must not know torch, the network or the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack

from p2p.protocol.rollout import Span
from p2p.version import Version


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished sample of a group, as the trainer sees it."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """behaviour log probability of each completion token (nats)"""
    spans: tuple[Span, ...]
    """cover [0, len(completion_ids)) in order, versions never going back"""
    reward: float
    finish: str
    """"stop", "length", or "truncated": cut by the learner where it was (`rollout.truncate_stuck_s`); a trainer may mask it"""
    node: str
    """peer id of the node that made the last token"""
    seed: int
    exact: bool = False
    """the task's own notion of fully right, for `reward_first/last` style reports"""

    @property
    def oldest(self) -> Version:
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
    extra: dict[str, Any] = field(default_factory=dict)


def pack_groups(groups: tuple[Group, ...]) -> bytes:
    """msgpack, for the journal and for micro-batch files."""
    return msgpack.packb(
        [
            [
                g.group_id,
                g.task_index,
                [
                    [
                        list(t.prompt_ids),
                        list(t.completion_ids),
                        list(t.logprobs),
                        [[s.version.epoch, s.version.step, s.start, s.stop] for s in t.spans],
                        t.reward,
                        t.finish,
                        t.node,
                        t.seed,
                        t.exact,
                    ]
                    for t in g.trajectories
                ],
            ]
            for g in groups
        ]
    )


def unpack_groups(data: bytes) -> tuple[Group, ...]:
    """Inverse of `pack_groups`."""
    return tuple(
        Group(
            group_id,
            task_index,
            tuple(
                Trajectory(
                    tuple(prompt),
                    tuple(completion),
                    tuple(logprobs),
                    tuple(Span(Version(e, s), a, b) for e, s, a, b in spans),
                    reward,
                    finish,
                    node,
                    seed,
                    exact,
                )
                for prompt, completion, logprobs, spans, reward, finish, node, seed, exact in trajectories
            ),
        )
        for group_id, task_index, trajectories in msgpack.unpackb(data)
    )
