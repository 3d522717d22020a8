"""A scripted engine without torch: tokens from a hash. For tests of agents, heads and processes.

Must not know models. The token at completion position i is a pure function of (prompt, seed, i, version), so a test
can say what any engine at any version must have produced.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from node.engine.port import CommitResult, EngineStats, StateFile
from node.engine.rows import pinned_elsewhere
from node.engine.slots import SlotCore
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version


class ScriptedToken(NamedTuple):
    """One token of the script."""

    id: int
    logprob: float


def scripted_token(
    prompt_ids: Sequence[int], seed: int, position: int, version: Version, vocab: int
) -> ScriptedToken:
    """The token that a ScriptedCore makes at completion `position`."""
    text = f"{tuple(prompt_ids)}|{seed}|{position}|{version}".encode()
    word = xxhash.xxh3_64_intdigest(text)
    return ScriptedToken(word % vocab, -float(np.float32((word >> 32) / 2**32 * 4 + 1e-3)))


@dataclass(frozen=True, slots=True)
class ScriptedSettings:
    vocab_size: int = 48
    max_context: int = 4096
    max_running: int = 64
    step_s: float = 0.0
    """real seconds that each step sleeps"""
    check_files: bool = True
    """whether load and stage insist on a state file of the layout's length"""
    kv_tokens: int = 0
    """tokens of keys and values that `stats` reports as its room; nothing enforces it"""


class ScriptedCore(SlotCore):
    """See EngineCore. Until `load` is called it serves `version` (default 0.0)."""

    def __init__(self, settings: ScriptedSettings | None = None, *, version: Version | None = None) -> None:
        self.settings = settings or ScriptedSettings()
        super().__init__(vocab=self.settings.vocab_size, max_context=self.settings.max_context, version=version)
        self._layout: Layout | None = None
        self._staged: StateFile | None = None
        self._tokens = 0

    def load(self, model_dir: Path, state: StateFile) -> None:
        """See `EngineCore.load`; the model folder is not read."""
        self._check_file(state)
        self._layout, self._version, self._staged = state.layout, state.version, None
        self.abort()
        self._ended = []

    def _check_file(self, state: StateFile) -> None:
        if not self.settings.check_files:
            return
        have = state.path.stat().st_size if state.path.exists() else -1
        if have < state.layout.nbytes:
            raise Refusal(f"state file of {have} bytes, its layout needs {state.layout.nbytes}", version=state.version)

    def step(self) -> list[TokenEvent]:
        """See `EngineCore.step`."""
        events, self._ended = self._ended, []
        if not self.held:
            return events
        if self.settings.step_s:
            time.sleep(self.settings.step_s)
        while len(self._rows) < self.settings.max_running and self._first_waiting(events):
            self._rows.extend([self._waiting.popleft()])
        if len(self._rows):
            drawn = [
                scripted_token(r.request.prompt_ids, r.request.seed, len(r.ids), self._version, self._vocab)
                for r in self._rows.rows
            ]
            ids, logprobs = np.array([t for t, _ in drawn]), np.array([lp for _, lp in drawn], dtype=np.float32)
            self._keep(self._append(self._rows, ids, logprobs, events))
            self._tokens += len(ids)
        return events

    def stage(self, state: StateFile) -> None:
        """See `EngineCore.stage`. Refusal when the state has other tensors."""
        self._staged = None
        if self._layout is not None and state.layout.tensors != self._layout.tensors:
            raise Refusal("state has other tensors than the model", version=state.version)
        unknown = [n for n in state.changed or () if n not in state.layout.by_name]
        if unknown:
            raise Refusal(f"changed tensor {unknown[0]!r} is not in the state", version=state.version)
        self._check_file(state)
        self._staged = state

    def commit(self) -> CommitResult:
        """See `EngineCore.commit`."""
        if self._staged is None:
            raise RuntimeError("nothing is staged")
        staged, self._staged = self._staged, None
        self._ended += self.interrupt(pinned_elsewhere(self.held, staged.version))
        self._version = staged.version
        return CommitResult(staged.version, 0.0, 0.0)

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """See `EngineCore.score`: the script at seed 0, in which a token that it would not have made scores -20."""
        self._check_score(prompt_ids, completion_ids)
        made = [scripted_token(prompt_ids, 0, i, self._version, self._vocab) for i in range(len(completion_ids))]
        scores = [lp if want == token else -20.0 for (token, lp), want in zip(made, completion_ids, strict=True)]
        return np.array(scores, dtype=np.float32)

    def stats(self) -> EngineStats:
        return EngineStats(
            len(self._rows), len(self._waiting), self._tokens,
            tokens_per_s=0.0, kv_bytes=0, version=self._version, kv_tokens=self.settings.kv_tokens,
        )  # fmt: skip

    def close(self) -> None:
        self.abort()
