"""Evaluations of several turns, on a mock clock with twins of the swarm and of the environment's processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from learner.environments.port import Episode, EpisodeKey, TurnAnswer
from learner.evaluation.episode import LIVES, EpisodeLimits
from learner.evaluation.plan import EvalPlan, Schedule
from learner.evaluation.playing import EpisodeDesk, EpisodePlayer
from learner.evaluation.problems import Evaluation, make_evaluation
from learner.evaluation.result import EvalOutcome
from learner.evaluation.runner import NEWER_S, STALL_S, Evaluations
from learner.requests.port import Ask
from learner.tasks.guess_number import HIGHER, LOWER, SYMBOLS, GuessNumberTask
from learner.tasks.port import Score
from p2p.version import Version
from tests.support.request_twin import STOP, RequestTwin, one_version
from tests.swarm.test_evaluation_runner import Letters, v

PROMPTS, NUMBERS, GUESSES = 12, 16, 5


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def halve(ask: Ask) -> tuple[int, ...]:
    """A player who listens. What it wrote before ended with STOP each time."""
    low, high, guess = 0, NUMBERS - 1, -1
    for token in ask.prompt_ids[1:]:
        if chr(token) == LOWER:
            high = guess - 1
        elif chr(token) == HIGHER:
            low = guess + 1
        elif token != STOP:
            guess = SYMBOLS.find(chr(token))
    return (ord(SYMBOLS[(low + high) // 2]), STOP)


class RunnerTwin:
    """The built-in game without processes: answers after `after` seconds."""

    def __init__(self, after: float = 0.5) -> None:
        self._send, self.answers = trio.open_memory_channel[TurnAnswer](10_000)
        self.after, self.desk = after, EpisodeDesk(GuessNumberTask(0, NUMBERS, GUESSES))
        self.asked: list[Episode] = []
        self.open: set[EpisodeKey] = set()
        self.most_open = 0
        self.wrong: Callable[[Episode], TurnAnswer | None] = lambda episode: None
        self.nursery: trio.Nursery

    def respond(self, episode: Episode) -> None:
        self.asked.append(episode)
        self.open.add(episode.key)
        self.most_open = max(self.most_open, len(self.open))
        self.nursery.start_soon(self._answer, episode)

    async def _answer(self, episode: Episode) -> None:
        await trio.sleep(self.after)
        if episode.key in self.open:
            self._send.send_nowait(self.wrong(episode) or self._said(episode))

    def _said(self, episode: Episode) -> TurnAnswer:
        n, secret = len(episode.turns), self.desk.task.prompt(episode.task_index).entry["secret"]
        guess = SYMBOLS.find(chr(episode.turns[-1].sampled[0]))
        if guess == secret:
            return TurnAnswer(episode.key, n, score=Score(1.0 - 0.05 * (n - 1), True))
        if episode.over or n >= GUESSES:
            return TurnAnswer(episode.key, n, score=Score(0.0, False))
        return TurnAnswer(episode.key, n, ids(LOWER if secret < guess else HIGHER))

    def forget(self, keys: Sequence[EpisodeKey]) -> None:
        self.open -= set(keys)


class Stand:
    """Evaluations of episodes, and what they found."""

    def __init__(self, twin: RequestTwin, runner: RunnerTwin, made: Sequence[Evaluation]) -> None:
        self.runner, self.found = runner, list[EvalOutcome]()
        pairs = [(one, Schedule(one.plan, last=100, done=None)) for one in made]
        self.evaluations = Evaluations(pairs, twin, served=twin.served, write=self.found.append)

    async def until(self, what: Callable[[], bool], seconds: float = 120.0) -> None:
        with trio.fail_after(seconds):
            while not what():
                await trio.sleep(0.05)


def evaluation(runner: RunnerTwin, name: str = "", *, turn_s: float = 60.0, **changes: Any) -> Evaluation:
    values: dict[str, Any] = {
        "prompts": PROMPTS, "samples": 1, "every": 10, "at_start": True, "at_end": True, "temperature": 0.0, "top_p": 1.0,
        "max_new_tokens": 32, "stop_ids": (STOP,), "seed": 1,
    }  # fmt: skip
    desk = runner.desk
    return make_evaluation(
        EvalPlan(name=name, **(values | changes)), desk.task.source, Letters(), held_out=True,
        player=lambda problems: EpisodePlayer(desk, EpisodeLimits(8, 2), first=desk.task.take(problems), turn_s=turn_s),
    )  # fmt: skip


@asynccontextmanager
async def stand(twin: RequestTwin, runner: RunnerTwin, *made: Evaluation) -> AsyncIterator[Stand]:
    async with trio.open_nursery() as nursery:
        runner.nursery = nursery
        stand = Stand(twin, runner, made or [evaluation(runner)])
        nursery.start_soon(runner.desk.run, runner)
        nursery.start_soon(stand.evaluations.run)
        yield stand
        nursery.cancel_scope.cancel()
    assert twin.active == 0 and not runner.open, "nothing is left asked for"


async def test_whole_episodes_are_played_of_one_version(autojump_clock) -> None:
    twin, runner = one_version(v(0), answer=halve), RunnerTwin()
    async with stand(twin, runner) as s:
        await s.until(lambda: bool(s.found))
        [found] = s.found
        assert found.whole and found.exact == 1.0 and 0.8 <= found.reward < 1.0, "halving finds each of sixteen numbers"
        assert {ask.exact_version for ask in twin.asked} == {v(0)} and {a.request_class for a in twin.asked} == {"evaluation"}
        assert PROMPTS < len(twin.asked) == len(runner.asked) <= PROMPTS * GUESSES, "a request for each turn"
        assert found.length == sum(2 * len(e.turns) for e in lasts(runner)) / PROMPTS, "of sampled tokens"
    for e in runner.asked:  # no token of an earlier turn ever changes
        whole = next(last for last in lasts(runner) if last.key == e.key)
        assert whole.turns[: len(e.turns) - 1] == e.turns[:-1] and whole.turns[len(e.turns) - 1].sampled == e.turns[-1].sampled
    held_out = [GuessNumberTask(0, NUMBERS, GUESSES).held_out(i).entry for i in range(PROMPTS)]
    assert [runner.desk.task.prompt(i).entry for i in range(PROMPTS)] == held_out


def lasts(runner: RunnerTwin) -> list[Episode]:
    """Each episode as it was asked about last."""
    return list({e.key: e for e in runner.asked}.values())


async def test_samples_of_a_prompt_are_episodes_of_their_own(autojump_clock) -> None:
    def sometimes(ask: Ask) -> tuple[int, ...]:
        return halve(ask) if ask.seed % 3 else (ord("!"), STOP)  # lower than any number

    twin, runner = one_version(v(0), answer=sometimes), RunnerTwin()
    async with stand(twin, runner, evaluation(runner), evaluation(runner, "often", samples=8, temperature=1.0)) as s:
        await s.until(lambda: len(s.found) == 2)
        often = max(s.found, key=lambda found: found.plan.samples)
        assert often.whole and 0.1 < often.exact < 0.95 and often.exact < often.passes[2] < often.passes[8]
        assert len({e.key for e in runner.asked}) == PROMPTS * 9


async def test_a_slow_environment_holds_no_place_of_a_node(autojump_clock) -> None:
    twin, runner = one_version(v(0), places=1, answer=halve), RunnerTwin(after=STALL_S * 1.5)
    async with stand(twin, runner, evaluation(runner, turn_s=STALL_S)) as s:
        await s.until(lambda: bool(s.found), 2 * STALL_S * GUESSES)
        assert s.found[0].whole and runner.most_open == PROMPTS, "all wait at once, and none is taken for stuck"


async def test_a_version_that_goes_begins_all_episodes_anew(autojump_clock, caplog) -> None:
    caplog.set_level("INFO", "shoal.evaluation")
    twin, runner = one_version(v(0), places=2, answer=halve), RunnerTwin()
    async with stand(twin, runner) as s:
        await trio.sleep(1.5)
        assert runner.open and not s.found
        before = set(runner.open)
        twin.serve(v(1))
        await s.until(lambda: bool(s.found))
        assert s.found[0].whole and s.found[0].version == Version(1, 1)
        assert "begins anew with version 1.1" in caplog.text
        again = [e for e in runner.asked if e.key not in before and len(e.turns) == 1]
        assert len({e.task_index for e in again}) == PROMPTS, "no turn of the version before is kept"


async def test_a_lost_episode_costs_its_prompt(autojump_clock, caplog) -> None:
    twin, runner = one_version(v(0), answer=halve), RunnerTwin()
    runner.wrong = lambda e: TurnAnswer(e.key, len(e.turns), failed="row 3: it raised") if e.task_index == 3 else None
    async with stand(twin, runner) as s:
        await s.until(lambda: bool(s.found))
        assert s.found[0].prompts == PROMPTS - 1 and s.found[0].exact == 1.0
        assert "prompt 3 is not scored: row 3: it raised (said once)" in caplog.text


async def test_an_episode_that_cannot_be_set_back_begins_anew_and_not_for_ever(autojump_clock, caplog) -> None:
    def wrong(e: Episode) -> TurnAnswer | None:
        second = len(e.turns) == 2
        if second and (e.task_index == 0 or (e.task_index == 1 and e.key.life < 2)):
            return TurnAnswer(e.key, 2, anew="its process ended")
        return None

    twin, runner = one_version(v(0), answer=halve), RunnerTwin()
    runner.wrong = wrong
    async with stand(twin, runner) as s:
        await s.until(lambda: bool(s.found))
        lives = {i: {e.key.life for e in runner.asked if e.task_index == i} for i in range(2)}
        late = {i for i in range(2) if any(len(e.turns) == 2 for e in runner.asked if e.task_index == i)}
        assert late == {0, 1}, "both need two turns, or this shows nothing"
        assert lives == {0: set(range(LIVES)), 1: {0, 1, 2}} and s.found[0].prompts == PROMPTS - 1
        assert f"begun anew {LIVES} times, last because its process ended" in caplog.text


async def test_without_an_environment_nothing_waits(autojump_clock, caplog) -> None:
    twin, runner = one_version(v(0), answer=halve), RunnerTwin(after=30.0)
    async with stand(twin, runner) as s:
        await trio.sleep(10)
        runner.desk.close("its process does not start")
        await trio.sleep(NEWER_S + 1)
        assert not s.found and not s.evaluations.running()
        assert "its process does not start (said once)" in caplog.text and "found nothing" in caplog.text
        runner.open.clear()  # it is gone: nothing can be forgotten there
