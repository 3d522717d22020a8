"""The processes that run a task's episodes, as the rollouts see them (`EpisodeRunner`). trio; must not know nodes, versions or
torch.

The head has all tokens of an episode, so a process keeps nothing that matters: when one ends, its episodes are set back in a
fresh one by taking their turns again. What an environment then says must be what it said before, token for token.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import trio

from learner.environments.home import EnvironmentHome, EnvironmentTold
from learner.environments.port import Episode, EpisodeKey, TurnAnswer
from learner.environments.settings import EnvironmentSection
from learner.environments.wire import (
    AskTurn,
    ChildPong,
    ChildReady,
    ChildSetup,
    ForgetEpisode,
    PingChild,
    ToHead,
    ToolStopped,
    TurnSaid,
    TurnWrong,
    pack,
    unpack,
)
from learner.tasks.letters_and_sums import draw
from learner.tasks.port import EpisodeEnd, Score, Task
from learner.tasks.turns import TurnRenderer
from p2p.errors import ShoalError, UsageError
from p2p.processes import python_command, signal_group

log = logging.getLogger("shoal.environments")

CHILD = "learner.environments.host_child"
"""The module that a process of environments runs."""

MAX_EPISODES = 65_536
"""Episodes that are open at once; further ones fail. Far above any run's reservations: it bounds the memory of a mistake."""

MAX_LOST = 3
"""Processes that an episode may lose while it waits for an answer; it fails with the last. One may be somebody else's fault."""

MUTE_S = 20.0
"""Seconds beyond `turn_s` for which a process may say nothing. It answers pings between all else; a busy machine is slow."""

START_S = 120.0
"""Seconds until a process is ready: importing the environment and what it needs, on a busy machine."""

RETRY_S = 2.0
"""Seconds until a process that did not start is started again."""

RELAY_S = 1.0
"""Seconds until what a process printed before its end is read, or dropped."""

PING_S = 5.0
"""Seconds between two pings."""

MOST_OVER = 20
"""Characters of the limit's name that ended an episode: ours are shorter, and a process is a user's."""


@dataclass(slots=True)
class _Open:
    """An episode that is not over."""

    episode: Episode
    number: int
    """what the process calls it"""
    process: _Process
    taken: int = 0
    """turns that the process has taken"""
    waits: bool = True
    lost: int = 0


@dataclass(slots=True, eq=False)
class _Process:
    """One child, while it lives, and what is to be written to it."""

    queue: list[bytes] = field(default_factory=list)
    filled: trio.Event = field(default_factory=trio.Event)
    open: int = 0
    ready: bool = False
    started: bool = False
    pid: int = 0

    def write(self, data: bytes) -> None:
        self.queue.append(data)
        self.filled.set()


class EnvironmentHost:
    """Runs the episodes of one task. `await nursery.start(host.run)` first: it comes back when all processes are ready."""

    def __init__(
        self, task: Task, tokenizer: Any, stop_ids: Sequence[int], settings: EnvironmentSection, *, seed: int = 0
    ) -> None:
        if task.environment is None:
            raise UsageError(f"task {task.name} has no environment")
        self._task, self._source, self._settings = task, task.environment, settings
        self._tokenizer, self._stop_ids, self._seed = tokenizer, frozenset(stop_ids), seed
        self._answer, self.answers = trio.open_memory_channel[TurnAnswer](math.inf)
        self._open: dict[EpisodeKey, _Open] = {}
        self._keys: dict[int, EpisodeKey] = {}
        self._numbers = count(1)
        self._processes = [_Process() for _ in range(settings.workers)]
        self.tools: tuple[dict[str, Any], ...] = ()
        """JSON schemas of its tools, once it runs: what belongs into the task's `ChatFormat`"""
        self._replayable = True
        self._told = EnvironmentTold(self._source.name)

    @property
    def pids(self) -> list[int]:
        """Of the processes that live."""
        return [p.pid for p in self._processes if p.pid]

    # ---- EpisodeRunner

    def respond(self, episode: Episode) -> None:
        """Have the environment answer the episode's last turn; the same question twice is asked once. Where an answer is under
        way and the episode is over since, it is asked for its score when that answer comes (`_take`)."""
        known = self._open.get(episode.key)
        if known is not None:
            if known.waits and len(known.episode.turns) == len(episode.turns):
                known.episode = episode if episode.over else known.episode
                return
            score_only = bool(episode.over) and known.taken == len(episode.turns)
            fits = score_only or known.taken == len(episode.turns) - 1
            known.episode, known.waits = episode, True
            known.taken = known.taken if fits else 0
        elif len(self._open) >= MAX_EPISODES:
            self._tell(TurnAnswer(episode.key, len(episode.turns), failed=f"more than {MAX_EPISODES} open episodes"))
            return
        else:
            process = min(self._processes, key=lambda p: p.open)
            process.open += 1
            known = self._open[episode.key] = _Open(episode, next(self._numbers), process)
            self._keys[known.number] = episode.key
        if known.taken == 0 and len(episode.turns) > 1 and not self._replayable:
            self._give_up(known, anew="its environment cannot be set back (replayable = False)")
        elif known.process.ready:
            self._ask(known)

    def forget(self, keys: Sequence[EpisodeKey]) -> None:
        """These are over, or given up."""
        for key in keys:
            known = self._open.get(key)
            if known is not None:
                self._close(known)

    # ---- inside

    def _close(self, known: _Open) -> None:
        del self._open[known.episode.key], self._keys[known.number]
        known.process.open -= 1
        if known.process.ready:
            known.process.write(pack(ForgetEpisode(known.number)))

    def _tell(self, answer: TurnAnswer) -> None:
        self._answer.send_nowait(answer)

    def _give_up(self, known: _Open, *, failed: str = "", anew: str = "") -> None:
        key, episode = known.episode.key, known.episode
        self._close(known)
        if failed:
            failed = f"{self._place(episode, len(episode.turns))}: {' '.join(failed.split())}"
        self._tell(TurnAnswer(key, len(episode.turns), anew=anew, failed=failed))

    def _renderer(self, chat: bool) -> TurnRenderer:
        return TurnRenderer(self._tokenizer, self._stop_ids, chat, self._task.chat_format, self._task.stop)

    def _ask(self, known: _Open) -> None:
        episode = known.episode
        prompt = self._task.prompt(episode.task_index)
        renderer = self._renderer(prompt.chat)
        texts = [renderer.turn_text(turn.sampled) for turn in episode.turns[known.taken :]]
        row = prompt.entry if known.taken == 0 else None
        # Of the prompt's number, so the members of a group are alike, and a killed learner draws it again. 63 bits: every
        # generator takes them.
        seed = draw(self._seed, "environment", self._task.name, episode.task_index) >> 1
        ask = AskTurn(known.number, known.taken, texts, episode.over, row=row, seed=seed)
        try:
            known.process.write(pack(ask))
        except (ValueError, TypeError) as error:
            self._give_up(known, failed=f"its row and turns cannot be handed to a process: {error}")

    def _heard(self, process: _Process, message: object) -> None:
        """A process said something. ValueError when it makes no sense."""
        if isinstance(message, ToolStopped):
            self._tool_stopped(process, message)
        elif isinstance(message, (TurnSaid, TurnWrong)):
            key = self._keys.get(message.episode)
            known = self._open.get(key) if key is not None else None
            if known is None or known.process is not process or not known.waits:
                return  # given up in the meantime
            if isinstance(message, TurnWrong):
                self._give_up(known, failed=message.why)
                if message.stuck:
                    raise ValueError(message.why)
            else:
                self._take(known, message)
        elif not isinstance(message, ChildPong):
            raise ValueError("it said what it must not say now")

    def _tool_stopped(self, process: _Process, message: ToolStopped) -> None:
        key = self._keys.get(message.episode)
        known = self._open.get(key) if key is not None else None
        if known is None or known.process is not process:
            return
        self._told.stopped(self._place(known.episode, message.turn + 1), message.why)

    def _place(self, episode: Episode, turn: int) -> str:
        prompt = self._task.prompt(episode.task_index)
        return f"environment {self._source.name}, {prompt.where or f'prompt {episode.task_index}'}, turn {turn}"

    def _take(self, known: _Open, said: TurnSaid) -> None:
        """The answers to the last turn, and to those before it that were taken again."""
        episode = known.episode
        turns = episode.turns[known.taken :]
        if said.first != known.taken or len(said.answers) != max(0, len(turns) - said.done):
            early = said.first == known.taken and said.done and len(said.answers) < len(turns)
            if early:
                self._give_up(known, anew="its environment ended sooner when it was set back")
            return  # otherwise: of an earlier question
        renderer = self._renderer(self._task.prompt(episode.task_index).chat)
        wanted = turns[:-1] if episode.over else turns  # the last answer may be of before it was over
        try:
            given = [renderer.given(answer, turn.sampled) for answer, turn in zip(said.answers, wanted, strict=False)]
        except UsageError as error:
            self._give_up(known, failed=str(error))
            return
        if any(ids != turn.given for ids, turn in zip(given, turns[:-1], strict=False)):
            self._give_up(known, anew="its environment answered otherwise when it was set back")
            return
        if said.done:
            self._close(known)
            score = Score(said.reward, said.exact, said.parts, EpisodeEnd(said.over[:MOST_OVER], said.calls, said.errors))
            self._tell(TurnAnswer(episode.key, len(episode.turns), score=score))
            return
        if episode.over:
            if not turns:
                raise ValueError("it was asked for a score, and gave none")
            known.taken = len(episode.turns)
            self._ask(known)
            return
        if not given[-1]:
            self._give_up(known, failed="the environment's answer has no tokens")
            return
        known.taken, known.waits, known.lost = len(episode.turns), False, 0
        self._tell(TurnAnswer(episode.key, len(episode.turns), given=given[-1]))

    # ---- processes

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps the processes until it is cancelled. UsageError when the environment cannot be made."""
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                for process in self._processes:
                    starting.start_soon(nursery.start, self._keep, process)
            task_status.started()

    async def _keep(self, process: _Process, *, task_status: Any) -> None:
        """One process after another in this place. One that does not start twice in a row ends the run."""
        failures = 0
        while True:
            if failures:
                await trio.sleep(RETRY_S)
            ours, theirs = socket.socketpair()
            home = EnvironmentHome(self._settings)
            with theirs:
                child = home.start(python_command(CHILD), theirs.fileno())
            process.pid = child.pid
            try:
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(home.relay, self._source.name)
                    why = await self._serve(process, stream, home.setup(self._source), task_status)
                    child.kill()  # what it printed last is still read
                    nursery.cancel_scope.deadline = trio.current_time() + RELAY_S
                failures = 0 if process.ready else failures + 1
            finally:
                process.ready, process.pid = False, 0
                process.queue.clear()
                with suppress(PermissionError):  # macOS, where only a dead one is left
                    signal_group(child, signal.SIGKILL)  # what environments started too; before `wait`, which frees its id
                child.kill()
                child.wait()
                ours.close()
                home.close()
            if failures >= 2:
                raise ShoalError(f"the process of environment {self._source.name} does not start: {why}")
            log.warning("a process of environment %s is replaced: %.200s", self._source.name, ascii(why)[1:-1])
            if not failures:  # otherwise it had no episodes
                self._lost(process)

    async def _serve(self, process: _Process, stream: trio.SocketStream, setup: ChildSetup, task_status: Any) -> str:
        """With one child until its end; why it ended."""
        buffer = bytearray()
        why = "it closed its socket"
        try:
            with trio.fail_after(START_S):
                await stream.send_all(pack(setup))
                ready = await self._hear(stream, buffer, ChildReady)
        except (ValueError, trio.TooSlowError, trio.BrokenResourceError, EOFError) as error:
            return str(error) or f"it was not ready within {START_S:g} s"
        if ready.error and not process.started:
            raise UsageError(ready.error)
        if ready.error:
            return ready.error  # it could be made before: what it needs may be away for a moment
        self.tools, self._replayable = tuple(ready.tools), ready.replayable
        if not process.ready and not process.started:
            process.started = True
            self._told.ready(ready)
            task_status.started()
        process.ready = True
        for known in [o for o in self._open.values() if o.process is process and o.waits]:
            self._set_back(known)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, stream, process)
            try:
                while True:
                    with trio.fail_after(setup.turn_s + MUTE_S):
                        data = await stream.receive_some()
                    if not data:
                        break
                    buffer += data
                    for message in unpack(buffer, ToHead):
                        self._heard(process, message)
            except trio.TooSlowError:
                why = f"it said nothing for {setup.turn_s + MUTE_S:g} s"
            except (ValueError, trio.BrokenResourceError) as error:
                why = str(error)
            nursery.cancel_scope.cancel()
        return why

    async def _hear(self, stream: trio.SocketStream, buffer: bytearray, kind: type[ChildReady]) -> ChildReady:
        while True:
            data = await stream.receive_some()
            if not data:
                raise EOFError("it ended before it was ready (its output says why)")
            buffer += data
            for message in unpack(buffer, kind):
                return message

    async def _write(self, stream: trio.SocketStream, process: _Process) -> None:
        """What is queued, and pings. It ends with the child: the reader notices."""
        try:
            while True:
                with trio.move_on_after(PING_S) as waiting:
                    await process.filled.wait()
                process.filled = trio.Event()
                queue, process.queue = process.queue, []
                await stream.send_all(b"".join(queue) + (pack(PingChild()) if waiting.cancelled_caught else b""))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await trio.sleep_forever()

    def _lost(self, process: _Process) -> None:
        """Its episodes have to be set back; those that wait are asked again when the next one is ready."""
        for known in [o for o in self._open.values() if o.process is process]:
            known.taken = 0
            known.lost += known.waits
            if known.lost >= MAX_LOST:
                self._give_up(known, failed=f"the process that ran it ended {known.lost} times")

    def _set_back(self, known: _Open) -> None:
        if len(known.episode.turns) > 1 and not self._replayable:
            self._give_up(known, anew="its environment's process ended, and it cannot be set back (replayable = False)")
        else:
            self._ask(known)
