"""Plays the episodes of evaluations: the model's turns by whoever samples, the answers by an environment's processes.

A thin shell around `EvalEpisode`. The environment's processes are the evaluations' own, so training's episodes wait for none of
these. Must not know nodes, versions or processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import trio

from learner.environments.port import EpisodeKey, EpisodeRunner, TurnAnswer
from learner.evaluation.episode import LIVES, EpisodeLimits, EpisodeLost, EvalEpisode
from learner.evaluation.result import SampledAnswer
from learner.requests.port import Ask
from learner.tasks.port import Prompt, Task

SampleTurn = Callable[[Ask], Awaitable[SampledAnswer | None]]
"""One turn of the model; None when it cannot be had."""


class PlayedTask(Task):
    """A task as its evaluations' environment sees it: only problems that are evaluated, by numbers of their own."""

    def __init__(self, task: Task) -> None:
        self.source = task
        """the task itself"""
        self.name, self.environment, self.chat_format, self.stop = task.name, task.environment, task.chat_format, task.stop
        self._problems: list[Prompt] = []

    def take(self, problems: Sequence[Prompt]) -> int:
        """The number of the first of these, which follow each other."""
        self._problems += problems
        return len(self._problems) - len(problems)

    def prompt(self, index: int) -> Prompt:
        return self._problems[index]


class EpisodeDesk:
    """Hands the answers of one environment to the evaluations that wait for them. `run` it; until then nobody is answered."""

    def __init__(self, task: Task) -> None:
        self.task = PlayedTask(task)
        self._runner: EpisodeRunner | None = None
        self._waiting: dict[EpisodeKey, _Slot] = {}
        self._numbers = count(1)
        self._gone = ""

    def number(self) -> int:
        """What no other episode is called."""
        return next(self._numbers)

    async def run(self, runner: EpisodeRunner) -> None:
        """Until it is cancelled."""
        self._runner = runner
        async for answer in runner.answers:
            slot = self._waiting.get(answer.key)
            if slot is not None and slot.turns == answer.number:
                slot.settle(answer)

    def close(self, why: str) -> None:
        """The environment is gone for good: who waits is told so, and who asks later."""
        self._gone = why
        for key, slot in self._waiting.items():
            slot.settle(TurnAnswer(key, slot.turns, failed=why))

    async def answer(self, episode: EvalEpisode, turn: SampledAnswer) -> SampledAnswer | TurnAnswer | None:
        """What the environment makes of the model's turn: the whole episode; an answer that is `anew`; or None, and the model
        goes on. EpisodeLost where it fails."""
        asked = episode.sampled(turn)
        while True:
            if self._gone or self._runner is None:
                raise EpisodeLost(self._gone or "its environment does not run")
            slot = self._waiting[asked.key] = _Slot(len(asked.turns))
            try:
                self._runner.respond(asked)
                answer = await slot.settled()
            finally:
                del self._waiting[asked.key]
            if answer.anew:
                return answer
            found = episode.answered(answer)
            if found is None or isinstance(found, SampledAnswer):
                return found
            asked = found

    def forget(self, key: EpisodeKey) -> None:
        """The episode is over, or given up."""
        if self._runner is not None and not self._gone:
            self._runner.forget([key])


class _Slot:
    """Where one answer is waited for, to an episode of so many turns."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self._event = trio.Event()
        self._answer: TurnAnswer | None = None

    def settle(self, answer: TurnAnswer) -> None:
        self._answer = self._answer or answer
        self._event.set()

    async def settled(self) -> TurnAnswer:
        await self._event.wait()
        assert self._answer is not None
        return self._answer


class EpisodePlayer:
    """Plays one evaluation's samples. `first` is the number of its first problem at the desk, `turn_s` what a turn of the
    environment may take, in seconds."""

    def __init__(self, desk: EpisodeDesk, limits: EpisodeLimits, *, first: int, turn_s: float) -> None:
        self._desk, self._limits, self._first, self.turn_s = desk, limits, first, turn_s

    async def play(self, prompt: int, ask: Ask, sample: SampleTurn, heard: Callable[[], None]) -> SampledAnswer | None:
        """A sample of the evaluation's prompt number `prompt`, with its score; None when a turn of the model cannot be had.
        `heard()` is called when the environment says something. EpisodeLost where it fails."""
        number, why = self._desk.number(), ""
        for life in range(LIVES):
            episode = EvalEpisode(ask, self._limits, EpisodeKey(number, 0, life), self._first + prompt)
            try:
                while True:
                    turn = await sample(episode.next_ask())
                    if turn is None:
                        return None
                    said = await self._desk.answer(episode, turn)
                    heard()
                    if isinstance(said, SampledAnswer):
                        return said
                    if said is not None:
                        why = said.anew
                        break
            finally:
                self._desk.forget(episode.key)
        raise EpisodeLost(f"begun anew {LIVES} times, last because {why}")
