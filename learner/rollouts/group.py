"""A group while it is generated: its members, what their requests are called, what their tokens must be. Pure.

A request id is "{group_id}.{member}.{attempt}". Attempts go up across a restart of the learner too: each epoch numbers its own
from `first_attempt(epoch)` on, so that a late token of an earlier epoch is never taken for one of this, whatever that epoch's
last attempts were. Must not know which groups there are, who waits or who works (`collector`).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from learner.rollouts.outcomes import Sampling
from learner.trajectory import Finish, Trajectory
from p2p.protocol.rollout import FINISH_REASONS, Completion, Generate, TokenEvent
from p2p.version import Version

MIN_LOGPROB = -60.0
"""No sampler draws a token that is less likely (e^-60); the trainer's importance weights would overflow on it."""

ATTEMPTS = 10**9
"""Attempts that an epoch can make of one trajectory: each takes a message, so no run gets there."""


def first_attempt(epoch: int) -> int:
    """Number of the first attempt that a learner of this epoch makes of any trajectory."""
    return max(0, epoch - 1) * ATTEMPTS


@dataclass(slots=True)
class RunningSample:
    seed: int
    completion: Completion = field(default_factory=Completion)
    finish: Finish | None = None
    """None: it goes on"""
    attempt: int = 0
    node: str = ""
    """who works on it; "" when it waits or is finished"""
    last_node: str = ""
    failures: int = 0
    failed_on: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RunningGroup:
    group_id: int
    task_index: int
    version: Version
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    members: list[RunningSample]
    exact_version: Version | None = None
    extra: int = 0
    """members beyond need: the group is whole once all but so many have ended"""

    @property
    def needed(self) -> int:
        return len(self.members) - self.extra


def request_name(group_id: int, member: int, attempt: int) -> str:
    return f"{group_id}.{member}.{attempt}"


def member_of(request_id: str) -> int:
    """The member that a request id of ours is for."""
    return int(request_id.split(".")[1])


def parse_request(request_id: str) -> tuple[int, int, int] | None:
    """The three numbers of a request id in their one spelling, None for any other text."""
    parts = request_id.split(".")
    if len(request_id) > 64 or len(parts) != 3 or not all(p.isascii() and p.isdigit() for p in parts):
        return None
    group_id, member, attempt = (int(p) for p in parts)
    return (group_id, member, attempt) if request_name(group_id, member, attempt) == request_id else None


def min_version(group: RunningGroup, member: RunningSample) -> Version:
    """What a node must be at to go on with it."""
    return member.completion.spans[-1].version if member.completion.spans else group.version


def has_ended(group: RunningGroup, member: RunningSample) -> bool:
    """Whether its tokens show an end."""
    ids = member.completion.ids
    return bool(ids) and (len(ids) >= group.sampling.max_new_tokens or ids[-1] in group.sampling.stop_ids)


def end(group: RunningGroup, member: RunningSample) -> None:
    """Its tokens show that it has ended (`has_ended`): say how."""
    member.finish = "stop" if member.completion.ids[-1] in group.sampling.stop_ids else "length"


def trajectory(group: RunningGroup, member: RunningSample) -> Trajectory:
    """What a member that has ended comes to."""
    made = member.completion
    assert member.finish is not None
    return Trajectory(
        prompt_ids=group.prompt_ids, completion_ids=tuple(made.ids), logprobs=tuple(made.logprobs), spans=tuple(made.spans),
        finish=member.finish, node=member.last_node, seed=member.seed,
    )  # fmt: skip


def generate(group: RunningGroup, index: int, member: RunningSample) -> Generate:
    """What a node is asked for: seed and sampling as in every attempt, the tokens so far as a prefix."""
    return Generate(
        request_name(group.group_id, index, member.attempt),
        group.prompt_ids,
        group.sampling.max_new_tokens,
        group.sampling.stop_ids,
        member.seed,
        min_version(group, member),
        group.sampling.temperature,
        group.sampling.top_p,
        tuple(member.completion.ids),
        group.exact_version,
    )


def fault(
    group: RunningGroup, member: RunningSample, event: TokenEvent, published: Container[Version], vocab_size: int | None
) -> str | None:
    """What is wrong with an event of the node that holds this member, beyond what Completion.add checks."""
    if not event.whole:
        return f"{len(event.packed_ids)} bytes of token ids with {len(event.packed_logprobs)} of logprobs"
    held, sampling, ids = member.completion.ids, group.sampling, event.ids
    if ids:
        if event.version not in published:
            return f"version {event.version} was never published"
        if event.version < min_version(group, member):
            return f"version {event.version} is older than {min_version(group, member)}"
        if group.exact_version not in (None, event.version):
            return f"version {event.version} is not {group.exact_version}, which was asked for exactly"
        if float(event.logprobs.min()) < MIN_LOGPROB:
            return f"logprob {float(event.logprobs.min())} of a sampled token"
        if len(held) + len(ids) > sampling.max_new_tokens:
            return f"{len(held) + len(ids)} tokens of {sampling.max_new_tokens} asked for"
        if any(token in sampling.stop_ids for token in ids[:-1]):
            return "tokens after a stop token"
        if any(not 0 <= t < (vocab_size or 1 << 31) for t in ids):
            return "a token id outside the vocabulary"
    last = ids[-1] if ids else None
    if event.finish == "stop" and last not in sampling.stop_ids:
        return "finished with stop and made no stop token"
    if event.finish == "length" and len(held) + len(ids) < sampling.max_new_tokens:
        return f"finished with length at {len(held) + len(ids)} of {sampling.max_new_tokens} tokens"
    if event.finish not in FINISH_REASONS:
        return f"unknown finish {event.finish!r:.40}"
    return None
