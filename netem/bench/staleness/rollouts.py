"""A step's groups, made by one version of the weights: prompts, completions, rewards, as the learner hands them to its trainer.

Must not know losses or how old what it makes will be when it is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

import torch

from learner.tasks.letters_and_sums import draw
from learner.tasks.port import Prompt, Task
from learner.tasks.prompting import decode_completion, encode_prompt
from learner.trajectory import TRUNCATED, Group, Trajectory
from netem.bench.staleness.arrivals import cut_at, first_to_end, paces
from netem.bench.staleness.cases import TASKS, Case
from netem.bench.staleness.sampler import Sampler
from p2p.protocol.rollout import Span
from p2p.version import Version

MOST_DRAWN = 8
"""Times a step's groups that are drawn at most where equal ones are replaced: near the end hardly any differ."""


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """One step's groups, and what all that was drawn for it came to."""

    groups: tuple[Group, ...]
    exact: float
    """share of right answers, of everything that was drawn"""
    reward: float
    length: float
    """mean tokens of what was drawn"""
    drawn: int
    """groups"""
    kept_length: float
    """mean tokens of what is trained on"""
    cut: float
    """share of sequences that were cut"""


class RolloutSource:
    """Makes batches, one after another, the same for the same case but for the weights."""

    def __init__(self, case: Case, task: Task, tokenizer: Any, sampler: Sampler) -> None:
        self._case, self._task, self._tokenizer, self._sampler = case, task, tokenizer, sampler
        self._eos = tokenizer.eos_token_id
        self._next = self._batches = 0
        self._spared = list[int]()

    def batch(self, version: int) -> DrawnBatch:
        """The groups of the next step, from the sampler's weights, which are of `version`."""
        case, found, drawn, cut, kept = self._case, list[Group](), list[Group](), 0, list[Group]()
        self._batches += 1
        rng = Random(draw(case.seed, "arrivals", self._batches))
        while len(kept) < case.groups:
            found = self._draw(version, case.groups - len(kept) + case.extra_groups)
            drawn += found
            if case.extra_groups or case.cut_share:
                found, these = self._arrive(found, case.groups - len(kept), rng)
                cut += these
            enough = len(drawn) >= MOST_DRAWN * case.groups
            kept += [g for g in found if case.equal_groups == "train" or not g.equal or enough]
        every = [t for g in drawn for t in g.trajectories]
        of_kept = [t for g in kept for t in g.trajectories]
        return DrawnBatch(
            groups=tuple(kept), exact=fmean(t.exact for t in every), reward=fmean(t.reward or 0.0 for t in every),
            length=fmean(len(t.completion_ids) for t in every), drawn=len(drawn),
            kept_length=fmean(len(t.completion_ids) for t in of_kept), cut=cut / len(every),
        )  # fmt: skip

    def _draw(self, version: int, count: int) -> list[Group]:
        case, most = self._case, TASKS[self._case.task]["most"]
        numbers = [self._spared.pop(0) if self._spared else self._fresh() for _ in range(count)]
        prompts = [self._task.prompt(i) for i in numbers]
        ids = [encode_prompt(self._tokenizer, p) for p in prompts]
        seed = draw(case.seed, "draws", *numbers) % 2**62
        draws = torch.rand(count * case.samples, most, generator=torch.Generator().manual_seed(seed))
        made, at = self._sampler(ids, case.samples, most, draws), Version(0, version)
        groups = list[Group]()
        for g, (number, prompt, prompt_ids) in enumerate(zip(numbers, prompts, ids, strict=True)):
            rows = range(g * case.samples, (g + 1) * case.samples)
            members = (self._scored(prompt, prompt_ids, made.ids[i], made.logprobs[i], at) for i in rows)
            groups.append(Group(number, number, tuple(members)))
        return groups

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1

    def _scored(
        self, prompt: Prompt, prompt_ids: tuple[int, ...], ids: tuple[int, ...], logprobs: tuple[float, ...], at: Version
    ) -> Trajectory:
        score = self._task.score(prompt, self.text(ids))
        return Trajectory(
            prompt_ids=prompt_ids, completion_ids=ids, logprobs=logprobs, spans=(Span(at, 0, len(ids)),), node="",
            finish="stop" if ids[-1] == self._eos else "length", seed=0, reward=score.reward, exact=score.exact,
        )  # fmt: skip

    def text(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return decode_completion(self._tokenizer, ids)

    def _arrive(self, groups: list[Group], keep: int, rng: Random) -> tuple[list[Group], int]:
        lengths, pace = [[len(t.completion_ids) for t in g.trajectories] for g in groups], paces(len(groups), rng)
        chosen = first_to_end(lengths, pace, keep)
        self._spared += [g.task_index for i, g in enumerate(groups) if i not in chosen]
        kept = [groups[i] for i in chosen]
        if not self._case.cut_share:
            return kept, 0
        here = cut_at([lengths[i] for i in chosen], [pace[i] for i in chosen], self._case.cut_share)
        cut = [self._cut(g, row) for g, row in zip(kept, here, strict=True)]
        return cut, sum(t.finish == TRUNCATED for g in cut for t in g.trajectories)

    def _cut(self, group: Group, lengths: Sequence[int]) -> Group:
        prompt = self._task.prompt(group.task_index)
        members = list[Trajectory]()
        for t, n in zip(group.trajectories, lengths, strict=True):
            if n < len(t.completion_ids):
                short = self._scored(prompt, t.prompt_ids, t.completion_ids[:n], t.logprobs[:n], t.oldest)
                t = replace(short, finish=TRUNCATED)
            members.append(t)
        return replace(group, trajectories=tuple(members))

    def held_out(self, count: int) -> dict[str, float]:
        """Greedy answers to held-out problems: the share that is right, and its parts by the length of the right answer."""
        most = TASKS[self._case.task]["most"]
        prompts = [self._task.held_out(i) for i in range(count)]
        made = self._sampler([encode_prompt(self._tokenizer, p) for p in prompts], 1, most)
        right = [self._task.score(p, self.text(ids)).exact for p, ids in zip(prompts, made.ids, strict=True)]
        sizes = [len(self._task.solution(p) or "") for p in prompts]
        parts = {f"of_{n}": fmean(r for r, s in zip(right, sizes, strict=True) if s == n) for n in sorted(set(sizes))}
        return {"all": fmean(right), **(parts if len(parts) > 1 else {})}
