"""A process of environments: runs many episodes at once, on an asyncio loop, with threads for what is not async.

Its parent's socket is standard input. It ends when its parent closes that, however the parent ends. Must not know tokens,
groups, trio or torch.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from learner.environments.confining import confine_environment, leave_room_for_threads, needs_consent, stopped_by
from learner.environments.environment import Done, Environment, ModelTurn, ToolCall, oddities, tools_of
from learner.environments.loading import load_environment
from learner.environments.tools import call_tool, find_calls, tool_schemas
from learner.environments.wire import (
    AskTurn,
    ChildPong,
    ChildReady,
    ChildSetup,
    ForgetEpisode,
    PingChild,
    ToChild,
    ToolStopped,
    TurnSaid,
    TurnWrong,
    pack,
    unpack,
)
from learner.rewards.sandbox import limit_memory
from learner.tasks.turns import check_messages
from p2p.errors import UsageError

MAX_THREADS = 64
"""Calls of environments and tools that are not async and run at once in a process; others wait. They may all be waiting for
something slow, and a thread takes some 100 kB."""

CHECK_S = 0.5
"""Between two looks at whether the loop still runs: far below any sensible `turn_s`."""


class _Nonsense(Exception):
    """An environment returned what is no reply; says what."""


class _Episode:
    """One environment and what runs in it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.environment: Environment | None = None
        self.tools: Mapping[str, Callable[..., Any]] = {}
        self.taken = self.calls = self.errors = 0
        self.over = ""
        """the limit that made an end of it, where its environment did not"""
        self.began = time.monotonic()
        self.task: asyncio.Task[None] | None = None


class _Host:
    def __init__(self, make: Callable[[], Environment], setup: ChildSetup, writer: Callable[[object], None]) -> None:
        self._make, self._setup, self._write = make, setup, writer
        self._episodes: dict[int, _Episode] = {}
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._stray = 0
        """threads that still run for an episode that does not wait for them any more"""
        self.beat = time.monotonic()
        self.loop = asyncio.get_running_loop()

    async def beats(self) -> None:
        while True:
            self.beat = time.monotonic()
            await asyncio.sleep(CHECK_S)

    def watch(self) -> None:
        """In a thread: when the loop has not run for `turn_s`, the episode that holds it is named, and this process ends."""
        while True:
            time.sleep(CHECK_S)
            if time.monotonic() - self.beat < self._setup.turn_s + 2 * CHECK_S:
                continue
            task = asyncio.current_task(self.loop)
            if task is not None and task.get_name().isdigit():
                why = f"it held its process for more than turn_s = {self._setup.turn_s:g} s (async code that waits must await)"
                self._write(TurnWrong(int(task.get_name()), why, stuck=True))
            os._exit(1)

    def take(self, message: ToChild) -> None:
        if isinstance(message, PingChild):
            self._write(ChildPong())
        elif isinstance(message, ForgetEpisode):
            self._forget(message.episode)
        else:
            if message.first == 0:
                self._forget(message.episode)
            episode = self._episodes.setdefault(message.episode, _Episode(message.episode))
            episode.task = asyncio.create_task(self._answer(episode, message), name=str(message.episode))

    def _forget(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        if episode.task is not None:
            episode.task.cancel()
        if episode.environment is not None:
            closing = asyncio.create_task(self._close(episode.environment))
            episode.task = closing  # so that somebody holds it

    async def _close(self, environment: Environment) -> None:
        try:
            await asyncio.wait_for(self._call(environment.close), self._setup.turn_s)
        except Exception as error:
            print(f"close: {type(error).__name__}: {error}", file=sys.stderr)

    async def _answer(self, episode: _Episode, ask: AskTurn) -> None:
        try:
            said = await self._take_turns(episode, ask)
            try:
                self._write(said)
            except (ValueError, TypeError) as error:
                raise _Nonsense(str(error)) from None
        except asyncio.CancelledError:
            raise
        except TimeoutError as error:
            late = str(error) or f"no answer within turn_s = {self._setup.turn_s:g} s"
            self._write(TurnWrong(ask.episode, late, stuck=self._stray > 0))
        except _Nonsense as error:
            self._write(TurnWrong(ask.episode, str(error)[:300]))
        except BaseException as error:
            limit = stopped_by(error, self._setup)
            why = f"{type(error).__name__}: {error!s:.300}{f' ({limit})' if limit else ''}"
            _let_go(error)
            full = isinstance(error, MemoryError) or "can't start new thread" in why
            self._write(TurnWrong(ask.episode, why, stuck=full))

    def _limit(self, episode: _Episode, call: ToolCall, error: BaseException) -> str:
        """Which limit stopped a tool; the head hears of it."""
        why = stopped_by(error, self._setup)
        _let_go(error)
        if why:
            self._write(ToolStopped(episode.number, episode.taken, f"tool {call.name:.80} was stopped by {why}: {error!s:.200}"))
        return why

    async def _take_turns(self, episode: _Episode, ask: AskTurn) -> TurnSaid:
        if ask.first == 0:
            async with asyncio.timeout(self._setup.turn_s):
                episode.environment = environment = self._make()
                episode.tools = tools_of(environment)
                await self._call(environment.begin, ask.row, ask.seed)
        if episode.environment is None or episode.taken != ask.first:
            raise _Nonsense("the process has not got its earlier turns")
        answers: list[list[dict[str, Any]]] = []
        if not ask.turns:
            async with asyncio.timeout(self._setup.turn_s):
                episode.over = ask.over
                return _ended(ask, answers, await self._reward(episode.environment), episode)
        for i, text in enumerate(ask.turns):
            last = i == len(ask.turns) - 1
            over = ask.over if last else ""
            if last and not over and time.monotonic() - episode.began > self._setup.episode_s:
                over = "time"
            async with asyncio.timeout(self._setup.turn_s):
                reply = await self._turn(episode, text, over)
            episode.taken += 1
            if isinstance(reply, Done):
                return _ended(ask, answers, reply, episode)
            answers.append(reply)
        return TurnSaid(ask.episode, ask.first, answers)

    async def _turn(self, episode: _Episode, text: str, over: str) -> list[dict[str, Any]] | Done:
        environment = episode.environment
        assert environment is not None
        told: list[Any] = []
        calls: Any = ()
        if episode.tools:
            found = find_calls(text, environment.tool_parser, episode.taken)
            calls = found.calls
            limit = partial(self._limit, episode)
            told = list(await asyncio.gather(*(call_tool(episode.tools, call, self._in_thread, limit) for call in calls)))
            told += [
                {"role": "tool", "name": "", "tool_call_id": "c00000000", "content": f"error: {wrong}"} for wrong in found.wrong
            ]
            episode.calls += len(told)
            episode.errors += sum(str(message["content"]).startswith("error: ") for message in told)
        turn = ModelTurn(text, episode.taken, calls, tuple(told), over)
        reply = await self._call(environment.respond, turn)
        if isinstance(reply, Done):
            return reply
        if over:
            episode.over = over
            return await self._reward(environment)
        if isinstance(reply, str):
            return [{"role": "user", "content": reply}]
        messages = [reply] if isinstance(reply, Mapping) else list(reply) if isinstance(reply, (list, tuple)) else None
        if messages is None or not all(isinstance(m, Mapping) for m in messages):
            raise _Nonsense(f"respond returned {reply!r:.80}: neither text, messages nor Done")
        wrong = check_messages(messages)
        if wrong:
            raise _Nonsense(f"respond returned {wrong}")
        return [dict(m) for m in messages]

    async def _reward(self, environment: Environment) -> Done:
        reward = await self._call(environment.reward)
        return reward if isinstance(reward, Done) else Done(reward)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        if getattr(type(getattr(function, "__self__", None)), function.__name__, None) in _OURS:
            value = function(*arguments)  # the base class's does nothing that waits
        else:
            value = await self._in_thread(function, *arguments)
        return await value if isinstance(value, Awaitable) else value

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Daemon threads: one that hangs must not keep the process."""
        async with self._threads:
            done: asyncio.Future[Any] = self.loop.create_future()

            def settle(value: Any, error: BaseException | None) -> None:
                if not done.done():
                    done.set_result(value) if error is None else done.set_exception(error)

            def run() -> None:
                value: Any = None
                failed: BaseException | None = None
                try:
                    value = function(*arguments, **named)
                except StopIteration as error:  # a future does not take it
                    failed = RuntimeError(f"StopIteration: {error}")
                except BaseException as error:
                    failed = error
                self.loop.call_soon_threadsafe(settle, value, failed)

            threading.Thread(target=run, daemon=True).start()
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                if not done.done():
                    self._stray += 1
                    done.add_done_callback(self._found)
                    if self._stray > MAX_THREADS:
                        os._exit(1)  # the episodes are set back in a fresh process
                raise

    def _found(self, _: asyncio.Future[Any]) -> None:
        self._stray -= 1


_OURS = (Environment.begin, Environment.respond, Environment.close, Environment.reward)
"""What the base class does by itself: it needs no thread."""


def _let_go(error: BaseException) -> None:
    """After a MemoryError: what the failed calls still hold, by the error's own traceback. The next call needs it."""
    if isinstance(error, MemoryError):
        traceback.clear_frames(error.__traceback__)
        gc.collect()


def _ended(ask: AskTurn, answers: list[list[dict[str, Any]]], done: Done, episode: _Episode) -> TurnSaid:
    parts = dict(done.reward if isinstance(done.reward, Mapping) else done.parts)
    try:
        parts = {str(name): float(value) for name, value in parts.items()}
        reward = sum(parts.values()) if parts and isinstance(done.reward, Mapping) else float(done.reward)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _Nonsense(f"a reward of {done.reward!r:.80}") from None
    if not math.isfinite(reward):
        raise _Nonsense(f"a reward of {reward}")
    exact = reward >= 1 if done.exact is None else bool(done.exact)
    return TurnSaid(
        ask.episode, ask.first, answers, done=True, reward=reward, exact=exact, parts=parts, over=episode.over,
        calls=episode.calls, errors=episode.errors,
    )  # fmt: skip


async def _serve(sock: socket.socket, pending: bytearray, setup: ChildSetup, make: Callable[[], Environment]) -> None:
    writing = threading.Lock()

    def write(message: object) -> None:
        data = pack(message)
        with writing:
            sock.sendall(data)

    host = _Host(make, setup, write)
    beats = asyncio.create_task(host.beats())
    threading.Thread(target=host.watch, daemon=True).start()
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[bytes] = asyncio.Queue(64)

    def read() -> None:
        while True:
            try:
                data = sock.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                if os.getpgrp() == os.getpid() and not setup.sandbox:
                    os.killpg(0, signal.SIGKILL)  # what environments started too; in the sandbox nothing is, and no signal sent
                os._exit(0)  # the parent is gone
            asyncio.run_coroutine_threadsafe(messages.put(data), loop).result()

    threading.Thread(target=read, daemon=True).start()
    while not beats.done():
        for message in unpack(pending, ToChild):
            host.take(message)
        pending += await messages.get()


def main() -> int:
    """First message: `ChildSetup`. Answers `ChildReady`, then serves until the parent closes the socket."""
    with socket.socket(fileno=os.dup(0)) as sock, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # an environment, and what it starts, must not read from the socket or hold it open
        buffer = bytearray()
        setups: list[ChildSetup] = []
        while not setups:
            data = sock.recv(1 << 16)
            if not data:
                return 0
            buffer += data
            setups = unpack(buffer, ChildSetup)[:1]
        setup = setups[0]
        made = _made(setup, _give_up(setup))
        sock.sendall(pack(made.said))
        if made.make is not None:
            asyncio.run(_serve(sock, buffer, setup, made.make))
    return 0


def _give_up(setup: ChildSetup) -> list[str]:
    """The limits of this process, before any code of a user's runs in it. What of the sandbox could not be had."""
    if setup.memory_bytes:
        limit_memory(setup.memory_bytes)
        leave_room_for_threads()
    return confine_environment(setup) if setup.sandbox else []


class _Made(NamedTuple):
    """What a process can run."""

    said: ChildReady
    make: Callable[[], Environment] | None = None
    """None: nothing, and what is said is why"""


def _made(setup: ChildSetup, missing: list[str]) -> _Made:
    """The environment made once, to see that it can be and what it says of itself."""
    refused = "" if setup.allow_unconfined else needs_consent(setup.name, missing)
    if refused:
        return _Made(ChildReady(error=refused))
    try:
        kind = load_environment(setup.name)
        environment = kind(**setup.options)
        find_calls("", environment.tool_parser, 0)
        said = ChildReady(
            tools=tool_schemas(environment), replayable=bool(kind.replayable), missing=missing, warnings=oddities(environment)
        )
        return _Made(said, lambda: kind(**setup.options))
    except BaseException as error:
        limit = stopped_by(error, setup)
        why = str(error) if isinstance(error, UsageError) else (
            f"environment {setup.name} cannot be made: {type(error).__name__}: {error!s:.300}"
        )  # fmt: skip
        return _Made(ChildReady(error=f"{why}{f' ({limit})' if limit else ''}"))


if __name__ == "__main__":
    sys.exit(main())
