"""The engine that runs the held version, and how it takes the next one. Must not know manifests, peers or requests.

Whoever starts engines puts them in (`attach`, `detach`); whoever installs versions commits through here. Neither knows the other.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from node.engine.port import CommitResult, Engine, StateFile
from node.install.shadow import Shadow, Staging
from p2p.stages import reached
from p2p.version import Version

log = logging.getLogger("shoal.install")


class EngineSlot:
    """`in_thread(fn, *args)` runs blocking work (disk) off the event loop. `before_commit(version)` is entered when everything is
    ready for the engine to take a version, which it does inside."""

    def __init__(self, shadow: Shadow, model_dir: Path, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self.shadow, self.model_dir, self._in_thread = shadow, model_dir, in_thread
        self.before_commit: Callable[[Version], AbstractAsyncContextManager[object]] = lambda _: nullcontext()
        self.serving: Version | None = None
        """the version the engine runs; None while there is no engine"""
        self.servable = trio.Event()
        """the descriptor and a first version are here, so that an engine can start"""
        self._engine: Engine | None = None
        self._engine_holds: bytes | None = None
        """state digest of the engine's own weights; None: not known, so it must copy all of the next state"""
        self._lock = trio.Lock()

    async def attach(self, engine: Engine) -> None:
        """Load `engine` with the held version; from here on it is updated in place."""
        async with self._lock:
            await engine.load(self.model_dir, self.shadow.state_file())
            self._engine, self._engine_holds, self.serving = engine, self.shadow.digest, self.shadow.version
        log.info("engine serves version %s", self.serving)

    def detach(self) -> None:
        """The engine is gone; versions go on being installed into the shadow."""
        self._engine, self._engine_holds, self.serving = None, None, None

    async def commit(self, staging: Staging, state: StateFile) -> CommitResult:
        """Engine first, shadow second. If the engine cannot, both stay. If only the shadow cannot (a full disk), the
        engine is ahead of it until the next commit, which then copies everything. An engine is never taken back: where the shadow
        starts over from an older anchor, the engine waits for what comes after it."""
        async with self._lock:
            result = CommitResult(state.version, 0.0, 0.0)
            ahead = self.serving is not None and self.serving >= state.version
            if self._engine is not None and not ahead:
                assert staging.held is not None
                result = await self._into_engine(self._engine, state, staging.held.digest)
            await self._in_thread(self.shadow.commit, staging)
            reached(state.version, "on disk")
            if self._engine is not None and not ahead:
                self.serving = state.version
        return result

    async def relabel(self, version: Version, digest: bytes) -> CommitResult:
        """`version` has the very bits that are held, as `digest` says: they serve under its name from here on."""
        async with self._lock:
            self.shadow.adopt(version, digest)
            result = CommitResult(version, 0.0, 0.0)
            if self._engine is not None:
                result = await self._into_engine(self._engine, replace(self.shadow.state_file(), changed=()), digest)
                self.serving = version
        return result

    async def _into_engine(self, engine: Engine, state: StateFile, digest: bytes) -> CommitResult:
        """Swap `state`, which has `digest`, into the engine. What changed is told against the held state, so it is
        only believed while the engine holds that one too."""
        if self._engine_holds is None or self._engine_holds != self.shadow.digest:
            state = replace(state, changed=None)
        self._engine_holds = None
        await engine.stage(state)
        reached(state.version, "engine staged")
        async with self.before_commit(state.version):
            result = await engine.commit()
        reached(state.version, "engine stops", ago_s=result.pause_s)
        reached(state.version, "weights copied", ago_s=result.pause_s - result.apply_s)
        reached(state.version, "engine committed")
        if self._engine is engine:  # else it died meanwhile, and another one may have been loaded
            self._engine_holds = digest
        return result
