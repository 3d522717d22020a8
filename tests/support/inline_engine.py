"""InlineEngine, a test double: a core stepped inside trio, each step taking virtual time. Must not know processes.

For tests of agents on a mock clock; the contract is Engine's, deaths included.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import trio

from node.engine.port import CommitResult, Engine, EngineCore, EngineDied, EngineStats, StateFile
from p2p.protocol.rollout import Generate, TokenEvent

BUFFER = 64
"""Event batches the consumer may lag behind before the engine stops decoding, as in a child process."""


class InlineEngine(Engine):
    """See Engine. `step_s` and `commit_s` are the virtual seconds a step and a commit take."""

    def __init__(self, core: EngineCore, *, step_s: float = 0.01, commit_s: float = 0.0) -> None:
        self.core, self.step_s, self.commit_s = core, step_s, commit_s
        self._batches_in, self._batches_out = trio.open_memory_channel[list[TokenEvent]](math.inf)
        self._events_in, self._events_out = trio.open_memory_channel[list[TokenEvent]](BUFFER)
        self._turn = trio.Lock()
        self._changed = trio.Event()
        self._death = ""
        self._dead = trio.Event()

    @property
    def events(self) -> trio.MemoryReceiveChannel[list[TokenEvent]]:
        return self._events_out

    def kill(self, reason: str = "killed") -> None:
        """The engine dies now, as a process would: everything it ran is lost, `events` closes."""
        if not self._death:
            self._death = reason
            self._batches_in.close()
            self._dead.set()
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _alive(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._death:
            raise EngineDied(self._death)

    async def run(self) -> None:
        """Step while there is work, until killed."""
        while not self._death:
            changed = self._changed
            if not self.core.has_work() or self._batches_in.statistics().current_buffer_used >= BUFFER:
                await changed.wait()
                continue
            await trio.sleep(self.step_s)
            async with self._turn:
                if self._death:
                    return
                try:
                    events = self.core.step()
                except Exception as error:
                    self.kill(f"{type(error).__name__}: {error}")
                    return
                if events:
                    self._batches_in.send_nowait(events)

    async def pump(self) -> None:
        """Move batches to the consumer."""
        async with self._events_in:
            async for batch in self._batches_out:
                try:
                    await self._events_in.send(batch)
                except trio.BrokenResourceError:
                    pass  # nobody listens any more: the events are dropped, the engine goes on
                self._wake()

    async def load(self, model_dir: Path, state: StateFile) -> None:
        await self._alive()
        self.core.load(model_dir, state)

    async def add(self, request: Generate) -> None:
        await self._alive()
        self.core.add(request)
        self._wake()

    async def interrupt(self, request_ids: Sequence[str] | None = None) -> None:
        await self._alive()
        if events := self.core.interrupt(request_ids):
            self._batches_in.send_nowait(events)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._alive()
        self.core.abort(request_ids)

    async def stage(self, state: StateFile) -> None:
        await self._alive()
        self.core.stage(state)

    async def commit(self) -> CommitResult:
        async with self._turn:
            await self._alive()
            if self.commit_s:
                with trio.move_on_after(self.commit_s):
                    await self._dead.wait()
            await self._alive()
            result = self.core.commit()
            self._wake()  # it may have ended sequences, whose last events are to come
            return CommitResult(result.version, result.pause_s + self.commit_s, result.apply_s + self.commit_s)

    async def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        await self._alive()
        return self.core.score(prompt_ids, completion_ids, temperature)

    async def stats(self) -> EngineStats:
        await self._alive()
        return self.core.stats()

    async def aclose(self) -> None:
        if not self._death:
            self.kill("the engine was closed")
            self.core.close()


@asynccontextmanager
async def open_inline_engine(
    core: EngineCore, *, step_s: float = 0.01, commit_s: float = 0.0
) -> AsyncIterator[InlineEngine]:
    """Run `core` in a nursery for the length of the block."""
    engine = InlineEngine(core, step_s=step_s, commit_s=commit_s)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        nursery.start_soon(engine.pump)
        try:
            yield engine
        finally:
            await engine.aclose()
            nursery.cancel_scope.cancel()
