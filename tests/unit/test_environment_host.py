"""Episodes in real processes: answers, deadlines, kills, and many that wait at once. A small driver stands for the rollouts."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from learner.environments.environment import Done, ModelTurn
from learner.environments.guess_digits import GuessDigits
from learner.environments.guess_number import GuessNumber
from learner.environments.host import EnvironmentHost
from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.environments.settings import EnvironmentSection
from learner.tasks.guess_number import SYMBOLS
from learner.tasks.port import EnvironmentSource, EpisodeEnd, Prompt, Score, Task
from learner.tasks.registry import make_task
from netem.demo.tiny_model import char_tokenizer
from p2p.errors import ShoalError, UsageError

TOKENIZER = char_tokenizer("<>?!")
EOS = TOKENIZER.eos_token_id
PATIENCE_S = 60.0

SOURCE = '''
import asyncio, os, subprocess, time
from pathlib import Path
from learner.environments.environment import Done, Environment

class Sync(Environment):
    """Counts turns; a word makes it misbehave."""
    def begin(self, row, seed):
        self.n, self.row, self.counts = 0, row, 0
    def respond(self, turn):
        self.n += 1
        self.counts += turn.text == "count"
        if turn.text == "hang":
            time.sleep(3600)
        if turn.text == "die":
            os._exit(3)
        if turn.text == "raise":
            raise RuntimeError("no such thing")
        if turn.text == "odd":
            return 7
        if turn.text == "nan":
            return Done(float("nan"))
        if turn.text == "parts":
            return Done({"a": 0.5, "b": 0.25})
        if turn.text == "end":
            return Done(float(self.n))
        return str(self.n)
    def reward(self):
        return 0.5 + self.counts

class Slow(Environment):
    async def respond(self, turn):
        await asyncio.sleep(1.0)
        return Done(1.0)

class Blocks(Environment):
    async def respond(self, turn):
        if turn.text == "hang":
            time.sleep(3600)
        if turn.text == "wait":
            await asyncio.sleep(3600)
        return Done(1.0)

class Fickle(Environment):
    def respond(self, turn):
        return str(os.getpid())

class Needs(Sync):
    """Cannot be made while a file beside it says so."""
    def __init__(self):
        needed = Path(__file__).with_suffix(".needed")
        if needed.exists():
            if needed.read_text() == "once":
                needed.unlink()
            raise OSError("it is away")

class Reads(Sync):
    def respond(self, turn):
        return str(len(os.read(0, 100)))

class Starts(Sync):
    def begin(self, row, seed):
        super().begin(row, seed)
        child = subprocess.Popen(["sleep", "3600"])
        Path(__file__).with_suffix(".pid").write_text(str(child.pid))

class Once(Sync):
    replayable = False
'''


class Custom(Task):
    name = "custom"

    def __init__(self, file: Path, kind: str) -> None:
        self.environment = EnvironmentSource(f"{file}:{kind}")
        self.value: Any = None

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, "?", {"n": index, "value": self.value}, where=f"rows.jsonl, row {index}")


def sampled(text: str) -> tuple[int, ...]:
    return (*TOKENIZER.encode(text, add_special_tokens=False), EOS)


class Driver:
    """Takes the rollouts' part: keeps the tokens, samples scripted turns."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host
        self.turns: dict[EpisodeKey, tuple[Turn, ...]] = {}

    def take(self, member: int, text: str, over: str = "") -> EpisodeKey:
        key = EpisodeKey(1, member)
        self.turns[key] = (*self.turns.get(key, ()), Turn(sampled(text)))
        self.host.respond(Episode(key, 7, self.turns[key], over))
        return key

    async def answer(self) -> TurnAnswer:
        with trio.fail_after(PATIENCE_S):
            answer = await self.host.answers.receive()
        turns = self.turns[answer.key]
        assert answer.number == len(turns)
        self.turns[answer.key] = (*turns[:-1], turns[-1]._replace(given=answer.given))
        return answer

    async def says(self, member: int, text: str, over: str = "") -> TurnAnswer:
        self.take(member, text, over)
        answer = await self.answer()
        assert answer.key.member == member
        return answer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@asynccontextmanager
async def driver(task: Task, **settings: Any) -> AsyncIterator[Driver]:
    host = EnvironmentHost(task, TOKENIZER, [EOS], EnvironmentSection(**settings))
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        yield Driver(host)
        nursery.cancel_scope.cancel()


def given(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def run(body: Callable[[], Awaitable[None]]) -> None:
    trio.run(body)


def test_the_game_is_played_over_a_process() -> None:
    task = make_task("guess_number", 1)
    secret = task.prompt(7).entry["secret"]
    symbols = "0123456789abcdef"

    async def body() -> None:
        async with driver(task) as d:
            low, high, turn = 0, 16, 0
            while True:
                middle = (low + high) // 2
                answer = await d.says(0, symbols[middle])
                if answer.score is not None:
                    break
                low, high = (low, middle) if answer.given == given("<") else (middle + 1, high)
                turn += 1
            assert middle == secret and answer.score.exact and answer.score.reward == pytest.approx(1 - 0.25 * turn / 5)
            for member, none in enumerate(("zz", ""), 1):  # no guess: nothing, and at once
                score = (await d.says(member, none)).score
                assert score == Score(0.0, False, {"found": 0.0, "narrowed": 0.0}, EpisodeEnd())

    run(body)


def test_a_game_that_is_lost_is_worth_what_its_hints_ruled_out_and_never_as_much_as_one_that_is_won() -> None:
    async def lose(*guesses: int) -> Done:
        game = GuessNumber(numbers=16, guesses=len(guesses))
        game.begin({"secret": 9}, 0)
        for number, guess in enumerate(guesses):
            reply = await game.respond(ModelTurn(SYMBOLS[guess], number))
        assert isinstance(reply, Done) and not reply.exact
        return reply

    async def body() -> None:
        rewards = {g: (await lose(*g)).reward for g in [(0, 0), (0, 3), (7, 11), (8, 10), (35, 35)]}
        narrowed = [dict(parts)["narrowed"] for parts in rewards.values()]  # type: ignore[arg-type]
        assert narrowed == pytest.approx([0.5 * (1 - math.log(left, 16)) for left in (15, 12, 3, 1, 16)])
        assert max(narrowed) == 0.5 < 1 - 0.25  # more than the last guess costs

    trio.run(body)


def test_who_copies_what_is_right_and_tries_something_else_elsewhere_finds_every_secret() -> None:
    task = make_task("guess_digits", 1, {"digits": 2, "symbols": 3, "guesses": 3})

    async def find(index: int) -> Done:
        assert task.environment is not None
        game = GuessDigits(**task.environment.options)
        game.begin(task.prompt(index).entry, 0)
        guess = "00"
        for number in range(3):
            reply = await game.respond(ModelTurn(guess, number))
            if isinstance(reply, Done):
                return reply
            assert isinstance(reply, str)
            guess = "".join(right if right in "012" else str(number + 1) for right in reply.removesuffix("?"))
        raise AssertionError("it goes on after its last guess")

    async def body() -> None:
        for index in range(9):
            done = await find(index)
            last = int(max(task.prompt(index).entry["secret"]))  # the guess that finds it
            assert done.exact and done.reward == {"found": pytest.approx(0.5 * (1 - 0.25 * last / 3)), "heeded": 0.5}

    trio.run(body)


def test_a_game_of_digits_rewards_who_heeds_every_hint_and_what_is_no_guess_gets_nothing() -> None:
    async def last(*guesses: str, of: int = 3) -> object:
        game = GuessDigits(symbols="012", guesses=of)
        game.begin({"secret": "012"}, 0)
        for number, guess in enumerate(guesses):
            reply = await game.respond(ModelTurn(guess, number))
        return reply

    def lost(heeded: float) -> Done:
        return Done({"found": 0.0, "heeded": pytest.approx(0.5 * heeded)}, exact=False)

    async def body() -> None:
        assert [await last(g) for g in ("000", "210", "120")] == ["0aa?", "c1a?", "bca?"]
        assert await last("012", of=1) == Done({"found": 0.5, "heeded": 0.5}, exact=True)
        assert await last("000", of=1) == lost(1.0)  # there was no hint to heed
        assert await last("000", "011", of=2) == lost(1.0)  # all agrees with "0aa?"
        assert await last("000", "100", of=2) == lost(0.0)
        assert await last("120", "001", "010") == lost(5 / 6)  # "0" is tried again in the last place
        for none in ("", "01", "0122", "013", "0a2", "²12"):
            assert await last("000", none) == Done({"found": 0.0, "heeded": 0.0}, exact=False)

    trio.run(body)


def test_what_goes_wrong_names_the_prompt_and_hurts_nobody_else(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Sync"), turn_s=5) as d:
            assert (await d.says(0, "a")).given == given("1")
            for member, (text, why) in enumerate([("raise", "RuntimeError: no such thing"), ("odd", "7"), ("nan", "nan")], 1):
                failed = (await d.says(member, text)).failed
                assert "rows.jsonl, row 7" in failed and why in failed and "\n" not in failed
            parts = (await d.says(5, "parts")).score
            assert parts is not None and parts.reward == 0.75 and parts.parts == {"a": 0.5, "b": 0.25}
            over = (await d.says(6, "a", over="turns")).score
            assert over is not None and over.reward == 0.5 and not over.exact
            end = (await d.says(0, "end")).score
            assert end is not None and end.reward == 2.0 and end.exact

    run(body)


@pytest.mark.parametrize("kind", ["Sync", "Once"])
def test_an_episode_that_is_over_while_its_answer_is_under_way_gets_a_score(file: Path, kind: str) -> None:
    async def body() -> None:
        async with driver(Custom(file, kind)) as d:
            key = d.take(0, "a")
            d.host.respond(Episode(key, 7, d.turns[key], "time"))
            d.host.respond(Episode(key, 7, d.turns[key], "time"))
            score = (await d.answer()).score
            assert score is not None and score.reward == 0.5
            assert (await d.says(1, "a")).given == given("1"), "it was told once"

    run(body)


@pytest.mark.parametrize("kind", ["Sync", "Once"])
def test_an_episode_that_is_over_after_its_answer_is_scored_without_taking_a_turn_again(file: Path, kind: str) -> None:
    async def body() -> None:
        async with driver(Custom(file, kind)) as d:
            for _ in range(2):
                answer = await d.says(0, "count")
            turns = (*d.turns[answer.key][:-1], Turn(sampled("count")))
            d.host.respond(Episode(answer.key, 7, turns, "length"))
            score = (await d.answer()).score
            assert score is not None and score.reward == 2.5
            for _ in range(2):
                await d.says(1, "count")
            key = d.take(1, "count")
            d.host.respond(Episode(key, 7, d.turns[key], "time"))
            score = (await d.answer()).score
            assert score is not None and score.reward == 3.5, "the answer under way came first"

    run(body)


def nested(depth: int) -> list[Any]:
    row: list[Any] = []
    for _ in range(depth):
        row = [row]
    return row


@pytest.mark.parametrize("value", [1 << 64, nested(100_000)], ids=["integer", "nested"])
def test_a_row_that_cannot_be_sent_fails_its_episode(file: Path, value: Any) -> None:
    task = Custom(file, "Sync")
    task.value = value

    async def body() -> None:
        async with driver(task) as d:
            failed = (await d.says(0, "a")).failed
            assert "rows.jsonl, row 7" in failed and "cannot be handed to a process" in failed
            task.value = 1
            assert (await d.says(1, "a")).given == given("1")

    run(body)


def test_episodes_are_set_back_when_their_process_is_killed(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Sync")) as d:
            for _ in range(3):
                await d.says(0, "a")
            await d.says(1, "a")
            os.kill(d.host.pids[0], signal.SIGKILL)
            assert (await d.says(0, "b")).given == given("4"), "it took three turns again"
            score = (await d.says(1, "end")).score
            assert score is not None and score.reward == 2.0

    run(body)


@pytest.mark.parametrize(("kind", "why"), [("Fickle", "otherwise"), ("Once", "replayable")])
def test_an_episode_that_cannot_be_set_back_begins_anew(file: Path, kind: str, why: str) -> None:
    async def body() -> None:
        async with driver(Custom(file, kind)) as d:
            await d.says(0, "a")
            os.kill(d.host.pids[0], signal.SIGKILL)
            answer = await d.says(0, "b")
            assert why in answer.anew and not answer.failed
            key = EpisodeKey(1, 0, life=1)
            d.turns[key] = (Turn(sampled("a")),)
            d.host.respond(Episode(key, 7, d.turns[key]))
            assert (await d.answer()).given

    run(body)


def test_a_hung_environment_costs_its_own_episode(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Sync"), turn_s=1) as d:
            await d.says(0, "a")
            pid = d.host.pids[0]
            assert "turn_s = 1" in (await d.says(1, "hang")).failed
            assert (await d.says(0, "b")).given == given("2")
            assert d.host.pids != [pid]

    run(body)


def test_async_code_that_waits_or_blocks_costs_its_own_episode(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Blocks"), turn_s=1) as d:
            pid = d.host.pids[0]
            assert "turn_s = 1" in (await d.says(0, "wait")).failed
            assert d.host.pids == [pid], "only its task was cancelled"
            assert "must await" in (await d.says(1, "hang")).failed
            assert (await d.says(2, "a")).score is not None

    run(body)


def test_an_environment_that_kills_its_process_fails(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Sync")) as d:
            assert "ended 3 times" in (await d.says(0, "die")).failed
            assert (await d.says(1, "a")).given == given("1")

    run(body)


def test_two_hundred_episodes_wait_at_once_in_one_process(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Slow"), turn_s=30) as d:
            keys = {d.take(member, "a") for member in range(200)}  # one second each: in a row they would miss any deadline
            with trio.fail_after(PATIENCE_S):
                assert {(await d.answer()).key for _ in range(200)} == keys
            assert len(d.host.pids) == 1

    run(body)


def test_episodes_that_are_forgotten_are_not_answered(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Slow")) as d:
            d.host.forget([d.take(0, "a")])
            d.take(1, "a")
            assert (await d.answer()).key.member == 1

    run(body)


def test_an_environment_that_is_not_there_is_one_clear_line(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Missing")):
            pass

    missing = pytest.RaisesExc(UsageError, match="mine.py has no 'Missing'")
    with pytest.RaisesGroup(missing, flatten_subgroups=True):
        run(body)


def test_a_constructor_that_fails_in_a_fresh_process_is_called_again(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Needs")) as d:
            await d.says(0, "a")
            needed = file.with_suffix(".needed")
            needed.write_text("once")
            os.kill(d.host.pids[0], signal.SIGKILL)
            assert (await d.says(0, "a")).given == given("2")
            needed.write_text("always")
            os.kill(d.host.pids[0], signal.SIGKILL)
            await d.says(0, "a")

    twice = pytest.RaisesExc(ShoalError, match="does not start: .*it is away")
    with pytest.RaisesGroup(twice, flatten_subgroups=True):
        run(body)


def test_an_environment_finds_nothing_on_its_standard_input(file: Path) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Reads"), turn_s=5) as d:
            assert (await d.says(0, "a")).given == given("0")

    run(body)


@pytest.mark.parametrize("ends", ["with the run", "by itself"])
def test_what_an_environment_starts_ends_with_its_process(file: Path, ends: str) -> None:
    async def body() -> None:
        async with driver(Custom(file, "Starts")) as d:
            await d.says(0, "a")
            started.append(int(file.with_suffix(".pid").read_text()))
            if ends == "by itself":
                os.kill(d.host.pids[0], signal.SIGKILL)
                await d.says(0, "a")
                await gone()

    async def gone() -> None:
        with trio.fail_after(PATIENCE_S):
            while process_runs(started[0]):
                await trio.sleep(0.05)

    started: list[int] = []
    run(body)
    run(gone)


def process_runs(pid: int) -> bool:
    """Also where it is dead and nobody has reaped it, it does not run."""
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()
    return state not in ("", "Z")
