"""What a run's groups are made of: its settings, and from them each group's prompt, seeds and digest. Pure.

The same in every epoch, so that a learner that starts again can go on with what the one before had; `spec_digest` tells
when it cannot. Must not know which groups there are, nor who generates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import blake3
import msgpack

from learner.dispatch.dispatcher import USUAL_STRATEGIES, Strategies
from learner.rollouts.outcomes import Sampling
from learner.tasks.port import Task
from learner.tasks.prompting import encode_prompt
from learner.trajectory import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    max_staleness: int
    groups_per_step: int
    samples: int
    seed: int
    sampling: Sampling
    micro_batch_groups: int
    """hand groups to the trainer once so many are there (or the step is complete)"""
    stall_s: float = 120.0
    """a node that has work and makes no token for so long loses it to others"""
    finish_s: float = 0.0
    """how long a node may hold a newer version back so that what it runs ends under the weights it began with; 0: not at all"""
    strategies: Strategies = USUAL_STRATEGIES
    keep_equal: bool = True
    """train also on groups whose members all have the same reward"""
    overlong_tokens: int = 0
    """the trainer lowers rewards in so many last tokens (`Group.shaped`): such rewards are what must differ"""
    extra_groups: int = 0
    """groups reserved for a step beyond those it takes; the surplus is aborted"""
    extra_samples: int = 0
    """members of a group beyond `samples`; it is whole with those that end first"""
    truncate_stuck_s: float = 0.0
    """truncate sequences that alone have kept the trainer waiting for so many seconds; 0: never"""

    def takes(self, group: Group) -> bool:
        """Whether a group with its rewards is trained on. One in which none is better than another teaches nothing."""
        return self.keep_equal or len(set(group.shaped(self.sampling.max_new_tokens, self.overlong_tokens))) > 1


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a group is made from. `spec_digest` is all of it in one number, with the sampling."""

    prompt_ids: tuple[int, ...]
    seeds: list[int]
    spec_digest: int


def make_spec(
    settings: RolloutSettings, task: Task, tokenizer: Any, vocab_size: int, task_index: int, group_id: int, samples: int,
    extra: int = 0,
) -> GroupSpec:  # fmt: skip
    """What a group's tokens follow from, beside the weights: the same in every epoch, unless the run is resumed with
    another task, tokenizer, seed or sampling; then the digest differs, and its tokens are of no use. The first `samples` members
    have the same seeds with `extra` more and without."""
    sampling = settings.sampling
    prompt_ids = encode_prompt(tokenizer, task.prompt(task_index), task.chat_format)
    seeds = [mix(settings.seed, task_index, group_id, member) for member in range(samples + extra)]
    sampled: list[object] = [sampling.max_new_tokens, sampling.stop_ids, sampling.temperature, sampling.top_p, vocab_size]
    if extra:  # not else: digests of groups without are what they always were
        sampled.append(extra)
    if sampling.stop is not None:
        sampled.append(list(sampling.stop.strings))
    if sampling.turns is not None:
        sampled.append([sampling.turns.max_turns, sampling.turns.turn_tokens])
    digest = blake3.blake3(msgpack.packb([prompt_ids, seeds, sampled])).digest(8)
    return GroupSpec(prompt_ids, seeds, int.from_bytes(digest) >> 1)


def mix(*values: int) -> int:
    """A 63-bit seed from a few integers (splitmix64 over them in turn): same in every process, for ever."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
