"""The Engine port, in its two halves. Must not know peers, manifests or the learner.

`EngineCore` is synchronous and lives in the engine's own child process; adapters (transformers, vLLM, scripted fake)
implement it. `Engine` is the agent's asynchronous view of one: `EngineProcess` (a child process behind a socket), or in tests a
core that is stepped inside trio, on a mock clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from p2p.layout import Layout
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version

if TYPE_CHECKING:
    import trio  # the agent's; an engine's own environment may lack it


@dataclass(frozen=True, slots=True)
class StateFile:
    """A whole state on local disk: a flat file in `layout`'s form holding `version`. Engines map it read-only.

    `changed` are the names of the tensors that differ from the version the engine serves now; None means all.
    """

    path: Path
    layout: Layout
    version: Version
    changed: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int
    """sequences being decoded"""
    waiting: int
    """sequences accepted and not yet prefilled"""
    tokens: int
    """tokens generated since the engine started"""
    tokens_per_s: float
    """over the last few seconds"""
    kv_bytes: int
    version: Version
    kv_tokens: int = 0
    """tokens whose keys and values the engine can hold at once, over all sequences; 0 where it knows of no bound"""
    arithmetic: str = ""
    """engine/dtype/device that it computes with ("transformers/float32/cpu"); "" where it says nothing"""
    keeps: bool = False
    """what runs goes on with the keys and values of older weights after a commit, so that its tokens are of no one version"""


@dataclass(frozen=True, slots=True)
class CommitResult:
    version: Version
    pause_s: float
    """from the last token under the old version to the moment the engine could make the first under the new one"""
    apply_s: float
    """time spent copying weights inside that pause"""


class EngineBroken(Exception):
    """A core can no longer vouch for its weights: its process must end, and another one be started from the state on disk."""


class EngineCore(Protocol):
    """What an adapter implements. One thread calls it; no call blocks longer than one decoding step or one commit."""

    def load(self, model_dir: Path, state: StateFile) -> None:
        """Build the model from `model_dir` (config.json, tokenizer files; no weights) and fill it from `state`.
        Refusal when the architecture is unknown or a tensor is missing, unexpected or of another shape."""

    def add(self, request: Generate) -> None:
        """Accept a sequence. Refusal with cause BEHIND when the engine's version < request.min_version or exact_version, with
        cause PAST when it is newer than exact_version. Refusal without a cause when the prompt is empty, over the context length
        or holds a token id outside the vocabulary, or when the request id is in use."""

    def step(self) -> list[TokenEvent]:
        """Admit what waits, decode one token for every running sequence, retire what ended. [] when idle."""

    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""

    def interrupt(self, request_ids: Sequence[str] | None = None) -> list[TokenEvent]:
        """Stop these sequences (None: all) at the token boundary; one event each with finish="interrupt". Every token
        they made has already been returned by `step`. Unknown ids are ignored (they may have just finished)."""

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Forget these sequences (None: all) without an event."""

    def stage(self, state: StateFile) -> None:
        """Prepare `state` beside the served weights, without touching them. Replaces an earlier stage."""

    def commit(self) -> CommitResult:
        """Put the staged weights in place, between two tokens. Running sequences go on: tokens from here on carry the new
        version, and their keys and values are recomputed under the new weights (exact) unless the adapter was set to keep them.
        Sequences that ask for another version exactly end here with "interrupt"; the next `step` returns their events.
        RuntimeError when nothing is staged. On any failure the old weights serve on and the stage is dropped; EngineBroken when
        the adapter cannot be sure of that."""

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """float32 [len(completion_ids)]: log probability of each completion token under the served weights."""

    def stats(self) -> EngineStats:
        """How the core is, now."""

    def close(self) -> None:
        """End all requests without an event and let go of the model; another can be loaded afterwards."""


class EngineDied(Exception):
    """The engine process ended or stopped answering; the message says how. Every sequence it ran is lost here."""


class Engine(Protocol):
    """The agent's view of one engine. Every method raises EngineDied once the engine is gone."""

    async def load(self, model_dir: Path, state: StateFile) -> None:
        """As EngineCore.load."""

    async def add(self, request: Generate) -> None:
        """As EngineCore.add; a Refusal crosses the process boundary as a Refusal."""

    @property
    def events(self) -> trio.MemoryReceiveChannel[list[TokenEvent]]:
        """Batches of token events, in order, closed when the engine is gone. The consumer must keep up: the buffer is
        bounded and the engine waits when it is full."""

    async def interrupt(self, request_ids: Sequence[str] | None = None) -> None:
        """The interrupted sequences' last events arrive through `events`."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """As EngineCore.abort."""

    async def stage(self, state: StateFile) -> None:
        """As EngineCore.stage."""

    async def commit(self) -> CommitResult:
        """As EngineCore.commit; RuntimeError and Refusal as the core raised them, EngineDied for EngineBroken."""

    async def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """As EngineCore.score."""

    async def stats(self) -> EngineStats:
        """As EngineCore.stats."""

    async def aclose(self) -> None:
        """End the engine: politely, then SIGKILL after a few seconds. Idempotent, never raises."""
