"""Groups are checked and cut into forwards. Pure; must not know torch or the network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from learner.trainer.advantages import group_advantages
from learner.trainer.forward.layout import PromptLoad, RowTokens, packed_tokens
from learner.trainer.objectives.port import Objective
from learner.trainer.settings import TrainerConfig
from learner.trajectory import Gap, Group, Trajectory
from p2p.errors import ShoalError
from p2p.protocol.rollout import Span
from p2p.version import Version

WORTH_IT = 0.25
"""Share of one forward: pending rows that fill less wait for more groups, since a tiny forward is nearly all overhead."""

FORWARD_COST = 0.125
"""Share of the token budget that one more forward must save in padding. With it, steps of long-tailed lengths took a fifth less
time than with the fewest forwards."""

HALF_FULL = 0.5
"""Share of one forward: the last forward of a cut waits when it fills less, so that later rows fill it up."""


class BadBatch(ShoalError):
    """A group that must not be trained on; the message names step, group and reason."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a row must know of its whole group, whose other rows may be in other forwards."""

    rows: int = 1
    """completions that are trained on"""
    tokens: int = 1
    """their sampled tokens"""
    constant: float = 0.0
    """`Objective.group_constant`"""


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One sequence of a forward."""

    group_id: int
    trajectory: Trajectory
    advantage: float
    group: GroupFacts = GroupFacts()


def check_group(group: Group, version: Version, max_staleness: int) -> None:
    """The invariant, a second time (the ledger holds it first): consume_version - oldest_span_version <= max_staleness.

    `version` is the learner's: its epoch and the steps done. BadBatch when a span is too old, newer than the learner,
    of a future epoch, when spans and given ranges together do not cover the tokens, or when tokens and logprobs do not pair
    up. What was given has no version: the age of a trajectory is that of its oldest sampled token.
    """

    def refuse(reason: str) -> BadBatch:
        return BadBatch(f"step {version.step}, group {group.group_id}: {reason}")

    if not group.trajectories:
        raise refuse("no trajectories")
    for number, t in enumerate(group.trajectories):
        who = f"trajectory {number} (node {t.node})"
        if not t.prompt_ids or not t.completion_ids:
            raise refuse(f"{who} has an empty prompt or completion")
        if len(t.logprobs) != len(t.completion_ids):
            raise refuse(f"{who} has {len(t.completion_ids)} tokens and {len(t.logprobs)} logprobs")
        at = 0
        pieces: list[Span | Gap] = [*t.spans, *t.given]
        for piece in sorted(pieces, key=lambda piece: piece.start):
            if piece.start != at or piece.stop <= piece.start:
                raise refuse(f"{who}: spans and given tokens do not cover the completion in order")
            at = piece.stop
        if at != len(t.completion_ids):
            raise refuse(f"{who}: spans and given tokens cover {at} of {len(t.completion_ids)} tokens")
        if not t.spans:
            raise refuse(f"{who} has no sampled token")
        if any(logprob for gap in t.given for logprob in t.logprobs[gap.start : gap.stop]):
            raise refuse(f"{who} has log probabilities of tokens that were given")
        for span in t.spans:
            if span.version.epoch > version.epoch:
                raise refuse(f"{who} has version {span.version}, of a future epoch (learner is at {version})")
            if span.version.step > version.step:
                raise refuse(f"{who} has version {span.version}, newer than the learner's {version}")
            age = version.step - span.version.step
            if age > max_staleness:
                raise refuse(f"{who} has version {span.version}, {age} steps old; max_staleness is {max_staleness}")


def rows_of(group: Group, config: TrainerConfig, objective: Objective) -> list[ForwardRow]:
    """Every sequence of a group that is trained on, with its advantage, in order."""
    advantages = group_advantages(
        group.shaped(config.max_new_tokens, config.overlong_tokens),
        scale=config.scale_advantages == "group", leave_one_out=config.baseline == "others",
    )  # fmt: skip
    kept = [
        (t, float(a))
        for t, a in zip(group.trajectories, advantages, strict=True)
        if t.finish == "stop" or config.overlong == "train"
    ]
    if not kept:
        return []
    facts = GroupFacts(
        len(kept), sum(t.sampled_tokens for t, _ in kept), objective.group_constant([sampled_logprobs(t) for t, _ in kept])
    )
    return [ForwardRow(group.group_id, t, a, facts) for t, a in kept]


def sampled_logprobs(trajectory: Trajectory) -> list[float]:
    """log mu of the sampled tokens, in order."""
    given = {at for gap in trajectory.given for at in range(gap.start, gap.stop)}
    return [logprob for at, logprob in enumerate(trajectory.logprobs) if at not in given]


def token_steps(trajectory: Trajectory) -> list[int]:
    """The step of the version that made each sampled token, in order."""
    spans = sorted(trajectory.spans, key=lambda span: span.start)
    return [span.version.step for span in spans for _ in range(span.start, span.stop)]


def row_tokens(rows: Sequence[ForwardRow]) -> list[RowTokens]:
    """What a forward reads of them."""
    return [RowTokens(r.trajectory.prompt_ids, r.trajectory.completion_ids, r.trajectory.given) for r in rows]


def fill_forwards(rows: Sequence[ForwardRow], budget: int, share_prompts: bool = True) -> Iterator[list[ForwardRow]]:
    """Forwards of at most `budget` tokens each (a single longer row goes alone), for rows that are packed: in their order, so
    that a group's completions stand beside each other and share their prompt, whose tokens then count once in each forward."""
    pack, filled, loads = list[ForwardRow](), 0, dict[tuple[int, ...], PromptLoad]()
    for row in rows:
        prompt, tail = row.trajectory.prompt_ids, len(row.trajectory.completion_ids) - 1
        before = loads.get(prompt, PromptLoad(len(prompt)))
        more = before.plus(tail).tokens(share_prompts) - before.tokens(share_prompts)
        if pack and filled + more > budget:
            yield pack
            pack, filled, loads, before, more = [], 0, {}, PromptLoad(len(prompt)), len(prompt) + tail
        pack.append(row)
        loads[prompt] = before.plus(tail)
        filled += more
    if pack:
        yield pack


def cut_forwards(rows: Sequence[ForwardRow], budget: int) -> Iterator[list[ForwardRow]]:
    """Forwards of at most `budget` padded tokens each (a single longer row goes alone), of rows of like lengths, for rows that
    are padded to each other.

    Rows are sorted by length, ties keep their order, and the sorted rows are cut where that costs least (dynamic
    programming): a forward costs its padded tokens and FORWARD_COST. So the cut depends on nothing but `rows`.
    """
    ordered = sorted(rows, key=_length)
    count = len(ordered)
    cost, start = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        width = _length(ordered[end - 1])  # sorted: the last row is the longest
        most = min(end, max(1, budget // width))
        costs = cost[end - most : end] + width * np.arange(most, 0, -1)
        best = int(costs.argmin())
        cost[end], start[end] = costs[best] + FORWARD_COST * budget, end - most + best
    cuts = [count]
    while cuts[-1]:
        cuts.append(int(start[cuts[-1]]))
    for first, end in itertools.pairwise(reversed(cuts)):
        yield ordered[first:end]


@dataclass
class Packer:
    """Cuts a step's rows into forwards while its groups still come, by a rule that looks at nothing but the groups so far.

    So the forwards, and with them every bit of the gradient, depend on the sequence of groups alone, not on how it was
    cut into micro-batches: those only say when rows are here. Every `unit` groups, what is pending is cut, by `fill_forwards`, or
    by `cut_forwards` for a model whose rows are padded (over several groups: sorting many rows is what keeps padding small).
    """

    budget: int
    """tokens of one forward, padding included"""
    unit: int
    """groups between two cuts; a cut waits longer while all that is pending fills less than WORTH_IT of a forward"""
    padded: bool = False
    """rows of a forward are padded to each other"""
    share_prompts: bool = True
    """a prompt of several rows lies once in a forward, where rows are packed"""
    _pending: list[ForwardRow] = field(default_factory=list, init=False, repr=False)
    _groups: int = field(default=0, init=False, repr=False)

    def add(self, rows: Iterable[ForwardRow]) -> list[list[ForwardRow]]:
        """Take one group's rows (there may be none); the forwards that can run now."""
        self._pending.extend(rows)
        self._groups += 1
        if self._groups < self.unit or self.tokens(self._pending) < WORTH_IT * self.budget:
            return []
        packs, self._groups = self.flush(), 0
        if len(packs) > 1 and self.tokens(packs[-1]) < HALF_FULL * self.budget:
            self._pending = packs.pop()
        return packs

    def flush(self) -> list[list[ForwardRow]]:
        """The forwards of everything that is left: the step's groups are all here."""
        rows, budget = self._pending, self.budget
        packs = list(cut_forwards(rows, budget) if self.padded else fill_forwards(rows, budget, self.share_prompts))
        self._pending, self._groups = [], 0
        return packs

    def tokens(self, rows: Sequence[ForwardRow]) -> int:
        """What one forward over these rows computes."""
        return padded_tokens(rows) if self.padded else packed_tokens(row_tokens(rows), share_prompts=self.share_prompts)


def padded_tokens(pack: Sequence[ForwardRow]) -> int:
    """Tokens that a forward over these rows computes."""
    return max(map(_length, pack), default=0) * len(pack)


def _length(row: ForwardRow) -> int:
    return len(row.trajectory.prompt_ids) + len(row.trajectory.completion_ids)
