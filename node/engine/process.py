"""EngineProcess: an engine core in a child process, seen from the agent. Must not import torch, nor know peers.

Tasks: a reader (the socket's messages), a writer (frames are never cut by a cancelled caller), a pump (event batches to
the consumer, credits to the child) and a watchdog. Whatever ends one of them ends the engine: every pending and later
call raises EngineDied and `events` closes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import trio

from node.engine.child import EVENT_WINDOW
from node.engine.pipe import Call, CallRefused, Credit, Events, Failed, Farewell, Message, PipeDecoder, Reply, encode
from node.engine.port import CommitResult, Engine, EngineDied, EngineStats, StateFile
from p2p.errors import Refusal
from p2p.processes import INSTALLED, ROOT, Process, child_environment, end, python_command, start
from p2p.protocol.rollout import Generate, TokenEvent

PROGRESS_S = 30.0
"""An engine that owes an answer and says nothing for so long is stuck: longer than any step or prefill."""

ALLOWANCE_S = {"load": 900.0, "stage": 120.0, "commit": 300.0, "score": 120.0}
"""Calls that may rightly keep the child silent for longer: reading 64 GB from a slow disk is about ten minutes."""

START_S = 180.0
"""From the start of the child to its first answer: importing torch on a busy machine takes up to a minute."""

CHILD = "node.engine.child"
"""The module that an engine's process runs."""

_OURS = ("node", "p2p")
"""The packages of ours that an engine's process needs."""

CLOSE_S = 3.0
"""How long a child may take to end by itself when asked to."""


@dataclass(eq=False)
class _Pending:
    """A call that the child has not answered."""

    id: int
    allowance_s: float
    since: float
    done: trio.Event = field(default_factory=trio.Event)
    reply: Reply | CallRefused | Failed | None = None


EngineStarter = Callable[[list[str], int, dict[str, str]], Process]
"""Starts an engine's process from a command (see `node.engine.child`), the descriptor that stays open in it, and its environment.
It must die with this process."""


def start_program(command: list[str], fd: int, environment: dict[str, str]) -> Process:
    """The starter of every node that is no fork itself. In our own process group: what is sent to a node's reaches its engine."""
    return start(command, environment=environment, pass_fds=[fd], own_session=False)


_starter: EngineStarter = start_program


def register_starter(starter: EngineStarter) -> None:
    """Have engines of this process started by `starter`, in place of `start_program`, from now on."""
    global _starter
    _starter = starter


class EngineProcess(Engine):
    """See Engine. Made by `open_engine_process`."""

    def __init__(self, process: Process, stream: trio.SocketStream, progress_s: float) -> None:
        self._process, self._stream, self._progress_s = process, stream, progress_s
        self._outbox, self._frames = trio.open_memory_channel[bytes](math.inf)
        self._batches_in, self._batches_out = trio.open_memory_channel[list[TokenEvent]](math.inf)
        self._events_in, self._events_out = trio.open_memory_channel[list[TokenEvent]](EVENT_WINDOW // 4)
        self._pending: dict[int, _Pending] = {}
        self._last_id = 0
        self._heard = trio.current_time()
        self._death = ""
        self._closing = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def events(self) -> trio.MemoryReceiveChannel[list[TokenEvent]]:
        return self._events_out

    async def load(self, model_dir: Path, state: StateFile) -> None:
        await self._call("load", model_dir, state)

    async def add(self, request: Generate) -> None:
        await self._call("add", request)

    async def interrupt(self, request_ids: Sequence[str] | None = None) -> None:
        await self._call("interrupt", None if request_ids is None else tuple(request_ids))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._call("abort", None if request_ids is None else tuple(request_ids))

    async def stage(self, state: StateFile) -> None:
        await self._call("stage", state)

    async def commit(self) -> CommitResult:
        return await self._call("commit")

    async def score(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        return await self._call("score", tuple(prompt_ids), tuple(completion_ids), temperature)

    async def stats(self) -> EngineStats:
        return await self._call("stats")

    async def _call(self, method: str, *args: Any, allowance_s: float | None = None) -> Any:
        """Ask the child and wait. Refusal as the core raised it; RuntimeError for its other exceptions; EngineDied."""
        if self._death:
            raise EngineDied(self._death)
        pending = self._ask(method, args, allowance_s or max(ALLOWANCE_S.get(method, 0.0), self._progress_s))
        try:
            await pending.done.wait()
        finally:
            self._pending.pop(pending.id, None)
        match pending.reply:
            case Reply(_, _, value):
                return value
            case CallRefused(_, reason, version, cause):
                raise Refusal(reason, version=version, cause=cause)
            case Failed(_, text):
                raise RuntimeError(text)
        raise EngineDied(self._death)

    def _ask(self, method: str, args: tuple[Any, ...], allowance_s: float) -> _Pending:
        """Send a call. TypeError, with nothing sent, for an argument that does not cross to the child."""
        self._last_id += 1
        frame = encode(Call(self._last_id, method, args))
        pending = self._pending[self._last_id] = _Pending(self._last_id, allowance_s, trio.current_time())
        self._outbox.send_nowait(frame)
        return pending

    def _die(self, reason: str) -> None:
        """The engine is gone (first reason wins): wake everyone, end the child."""
        if self._death:
            return
        self._death = reason
        self._process.kill()
        for pending in self._pending.values():
            pending.done.set()
        self._batches_in.close()
        self._outbox.close()

    def _exit_reason(self) -> str:
        code = self._process.poll()
        if self._closing:
            return "the engine was closed"
        if code is None:
            return "the engine process closed its socket"
        if code < 0:
            return f"the engine process was ended by {signal.Signals(-code).name}"
        return f"the engine process exited with status {code}"

    async def _read(self) -> None:
        decoder = PipeDecoder()
        reason = ""
        try:
            while data := await self._stream.receive_some(1 << 18):
                self._heard = trio.current_time()
                for message in decoder.feed(data):
                    if isinstance(message, Farewell):
                        reason = message.text
                    else:
                        self._deliver(message)
        except ValueError as error:
            reason = f"the engine process does not speak our protocol: {error}"
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the same as the end of file below
        await self._exited(1.0)  # its exit status says more than the closed socket, and follows at once
        self._die(reason or self._exit_reason())

    async def _exited(self, timeout_s: float) -> None:
        """Wait until the child has ended, at most so long. Polled: a SIGCHLD or pidfd wait would cost more code."""
        with trio.move_on_after(timeout_s):
            while self._process.poll() is None:  # noqa: ASYNC110
                await trio.sleep(0.005)

    def _deliver(self, message: Message) -> None:
        match message:
            case Events(events):
                if not self._death:
                    self._batches_in.send_nowait(events)
            case Reply(id) | CallRefused(id) | Failed(id):
                if pending := self._pending.pop(id, None):
                    pending.reply = message
                    pending.done.set()
            case _:
                raise ValueError(f"unexpected {type(message).__name__}")

    async def _write(self) -> None:
        # The reader sees the end of file and says why.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for frame in self._frames:
                await self._stream.send_all(frame)

    async def _pump(self) -> None:
        """Batches to the consumer in order; a credit for every few that it took."""
        taken = 0
        async with self._events_in:
            async for batch in self._batches_out:
                try:
                    await self._events_in.send(batch)
                except trio.BrokenResourceError:
                    continue  # nobody listens any more: the events are dropped, the engine goes on
                finally:
                    taken += 1
                    if taken == EVENT_WINDOW // 4 and not self._death:
                        self._outbox.send_nowait(encode(Credit(taken)))
                        taken = 0

    async def _watch(self) -> None:
        """Ask for a sign of life when nothing else is asked; end an engine that owes one for too long."""
        while not self._death:
            await trio.sleep(self._progress_s / 4)
            if self._death:
                return
            now = trio.current_time()
            if not self._pending:
                self._ask("stats", (), self._progress_s)
                continue
            owed_since = max(self._heard, min(p.since for p in self._pending.values()))
            allowance = max(p.allowance_s for p in self._pending.values())
            if now - owed_since > allowance:
                self._die(f"the engine process did not answer for {now - owed_since:.1f} s and was killed")

    async def aclose(self) -> None:
        """See `Engine.aclose`."""
        with trio.CancelScope(shield=True):
            if not self._death:
                self._closing = True
                with suppress(OSError):  # already gone
                    self._stream.socket.shutdown(socket.SHUT_WR)
                await self._exited(CLOSE_S)
                self._die("the engine was closed")
            await self._exited(CLOSE_S)
            await self._stream.aclose()


@contextmanager
def packages(python: str, *, root: Path = ROOT, installed: bool = INSTALLED) -> Iterator[Path | None]:
    """A folder where `python` finds our packages, for as long as its process runs (None: it finds them by itself).

    They lie in `root`. Where they are `installed`, all other packages of this environment lie there too, which another
    environment must not see: then the folder is a new one, with links to ours."""
    if not installed:
        yield root
    elif python == sys.executable:
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="shoal-engine-") as folder:
            for name in _OURS:
                os.symlink(root / name, Path(folder) / name)
            yield Path(folder)


@asynccontextmanager
async def open_engine_process(
    kind: str, settings: dict[str, Any], *, python: str = sys.executable, progress_s: float = PROGRESS_S
) -> AsyncIterator[EngineProcess]:
    """Start `kind` (`environment.KINDS`) in a child process and wait until it answers; end it on the way out.

    `python` may be that of another environment, without our package. `settings` must be plain JSON: `threads` (torch's,
    default 1) and `log` (a path for the child's output; default: our stderr), the rest are the core's settings. EngineDied
    when it does not come up.
    """
    with packages(python) as root:
        async with _running(python, kind, settings, child_environment(root=root), progress_s) as engine:
            yield engine


@asynccontextmanager
async def _running(
    python: str, kind: str, settings: dict[str, Any], environment: dict[str, str], progress_s: float
) -> AsyncIterator[EngineProcess]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = python_command(CHILD, str(theirs.fileno()), kind, json.dumps(settings), python=python)
        process = _starter(command, theirs.fileno(), environment)
    engine = EngineProcess(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)), progress_s)
    stillborn: EngineDied | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine._read)
            nursery.start_soon(engine._write)
            nursery.start_soon(engine._pump)
            nursery.start_soon(engine._watch)
            try:
                try:
                    await engine._call("stats", allowance_s=START_S)
                except EngineDied as error:
                    stillborn = error  # raised below, so that it does not come wrapped in the nursery's group
                else:
                    yield engine
            finally:
                await engine.aclose()
                nursery.cancel_scope.cancel()
        if stillborn:
            raise stillborn
    finally:
        end([process], 0.0)
