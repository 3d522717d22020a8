"""The in-memory twin of TrainerClient, and groups made without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from learner.client.port import ResumeInfo, Weights, WeightSource
from learner.tasks.port import Task
from learner.tasks.prompting import encode_prompt
from learner.trajectory import Group, MicroBatch, Trajectory
from p2p.protocol.rollout import Span
from p2p.version import Version
from p2p.weights.state import FlatState

FIRST = Version(1, 0)


def make_group(
    group_id: int, rng: np.random.Generator, *, size: int = 4, version: Version = FIRST, vocab: int = 48
) -> Group:
    """Random tokens of random lengths with plausible logprobs and mixed rewards."""
    prompt = tuple(int(x) for x in rng.integers(3, vocab, rng.integers(2, 9)))
    trajectories = []
    for i in range(size):
        ids = tuple(int(x) for x in rng.integers(3, vocab, rng.integers(1, 9)))
        logprobs = tuple(float(x) for x in -rng.uniform(2.0, 5.0, len(ids)))
        spans = (Span(version, 0, len(ids)),)
        trajectories.append(
            Trajectory(
                prompt_ids=prompt, completion_ids=ids, logprobs=logprobs, spans=spans,
                reward=float(rng.random()), finish="stop", node="node", seed=i,
            )
        )  # fmt: skip
    return Group(group_id, group_id, tuple(trajectories))


def step_groups(
    step: int, tokenizer: Any, task: Task, *, epoch: int = 1, groups: int = 4, size: int = 4
) -> list[Group]:
    """A step's groups as a function of the step alone, right and wrong answers mixed."""
    made = []
    for g in range(groups):
        index = step * groups + g
        prompt = task.prompt(index)
        rng = np.random.default_rng(index)
        ids = encode_prompt(tokenizer, prompt)
        answer = str(task.solution(prompt))
        trajectories = []
        for i in range(size):
            text = answer if i % 2 else "".join(rng.permutation(list(answer)))
            completion = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
            score = task.score(prompt, text)
            spans = (Span(Version(epoch, max(0, step - g % 2)), 0, len(completion)),)
            logprobs = tuple(float(x) for x in -rng.uniform(0.5, 3.0, len(completion)))
            trajectories.append(
                Trajectory(
                    prompt_ids=ids, completion_ids=completion, logprobs=logprobs, spans=spans,
                    reward=score.reward, finish="stop", node="node", seed=i, exact=score.exact,
                )
            )
        made.append(Group(index, index, tuple(trajectories)))
    return made


def whole_tensors(source: WeightSource, segment_bytes: int = 4096) -> dict[str, tuple[str, np.ndarray]]:
    """What a source gives, put together from whole segments."""
    state = FlatState.in_memory(source.layout)
    for segment in source.layout.segments(segment_bytes):
        found = source.take(segment)
        assert isinstance(found, np.ndarray), "changes, of what was not taken before"
        state.words(segment)[...] = found
    return {t.name: (t.dtype, state.tensor(t.name)) for t in source.layout.tensors}


@dataclass
class FakeClient:
    """Feeds `feed(step)` in `cuts` micro-batches and records every call in order."""

    feed: Any
    """step -> sequence of groups"""
    cuts: int = 1
    start: ResumeInfo = field(default_factory=lambda: ResumeInfo(1, 0, None))
    calls: list[tuple[str, int]] = field(default_factory=list)
    committed: list[tuple[int, Path]] = field(default_factory=list)
    published: dict[int, dict[str, tuple[str, np.ndarray]]] = field(default_factory=dict)
    logs: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    finished: bool = False

    def resume(self) -> ResumeInfo:
        self.calls.append(("resume", self.start.step))
        return self.start

    def batches(self, step: int) -> Iterator[MicroBatch]:
        self.calls.append(("batches", step))
        groups: Sequence[Group] = self.feed(step)
        bounds = np.linspace(0, len(groups), self.cuts + 1).astype(int)
        for i in range(self.cuts):
            part = tuple(groups[bounds[i] : bounds[i + 1]])
            yield MicroBatch(step, part, i == self.cuts - 1, len(groups))

    def commit(self, step: int, checkpoint: Path) -> None:
        assert (checkpoint / "meta.json").is_file(), "committed before it was whole"
        self.calls.append(("commit", step))
        self.committed.append((step, checkpoint))

    def due(self, step: int) -> bool:
        return True

    def publish(self, step: int, tensors: Weights, *, wait: bool = True) -> None:
        self.calls.append(("publish", step))
        if not isinstance(tensors, Mapping):
            tensors.forget()
            tensors = whole_tensors(tensors)
        self.published[step] = {name: (dtype, bits.copy()) for name, (dtype, bits) in tensors.items()}

    def discard(self, step: int, group_ids: Sequence[int], reason: str) -> None:
        self.discarded.extend(group_ids)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.calls.append(("log", step))
        self.logs.append((step, dict(metrics)))

    def finish(self) -> None:
        self.finished = True
