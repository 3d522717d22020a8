"""Scoring strangers' text: the sandbox holds, hangs and kills cost one answer, and honest answers score as they should."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from learner.rewards import scoring as scoring_module
from learner.rewards.sandbox import landlock_version
from learner.rewards.scoring import Scorer, check_scoring
from learner.tasks.letters_and_sums import ReverseTask
from learner.tasks.port import Confined, Prompt, Score, Task
from learner.tasks.registry import make_task
from p2p.errors import ShoalError, UsageError

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0

EVALUATES = "reasoning_gym:string_insertion"
"""Its scorer evaluates an answer that is not right as it stands, and gives 0.1 where the value is a list of the right one."""

needs_landlock = pytest.mark.skipif(not landlock_version(), reason="no Landlock here")


def wait_until(what: str, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task(EVALUATES, 5, {"size": 100})


@pytest.fixture(scope="module")
def scorer(task: Task) -> Iterator[Scorer]:
    with Scorer(task, allow_unconfined=True, answer_s=2.0) as scorer:
        yield scorer


@pytest.fixture
def succeeds(task: Task, scorer: Scorer) -> Callable[..., bool]:
    """`succeeds(expression)`: whether it is true when an answer has it evaluated in the scoring process; in ours, to see that
    the attack is one, with `here=True`."""
    prompt = task.prompt(0)

    def succeeds(expression: str, *, here: bool = False) -> bool:
        answer = f"<answer>[{task.solution(prompt)!r} if ({expression}) else '']</answer>"
        return (task if here else scorer).score(prompt, answer).reward == 0.1

    return succeeds


def plain_task(**confined: Any) -> Task:
    """A light task that asks to be scored in a child."""
    task = ReverseTask(1)
    values: dict[str, Any] = {"name": "reverse", "seed": 1, "options": {}, "runs_answers": False}
    task.confined = Confined(**{**values, **confined})
    return task


# --- the sandbox -----------------------------------------------------------------------------------------------------


@needs_landlock
def test_an_answer_that_is_code_touches_no_file(succeeds: Callable[..., bool], tmp_path: Path) -> None:
    secret, made = tmp_path / "head.key", tmp_path / "made"
    secret.write_text("hidden")
    read = f"open({str(secret)!r}).read() == 'hidden'"
    write = f"open({str(made)!r}, 'w').write('x') == 1"
    chmod = f"__import__('os').chmod({str(secret)!r}, 0o640) is None"
    look = f"'head.key' in __import__('os').listdir({str(tmp_path)!r})"
    assert all(succeeds(attack, here=True) for attack in (read, write, chmod, look)), "these attacks are real"
    made.unlink()
    secret.chmod(0o600)
    assert succeeds("True"), "what the scorer evaluates is evaluated there, too"
    assert not any(succeeds(attack) for attack in (read, write, chmod, look))
    assert not made.exists() and secret.stat().st_mode & 0o777 == 0o600
    assert not succeeds("open('here', 'w').write('x') == 1"), "nor in its own folder"
    assert succeeds("__import__('colorsys').__name__ == 'colorsys'"), "modules can be imported late"


def test_an_answer_that_is_code_reaches_nobody(succeeds: Callable[..., bool]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        call = f"__import__('socket').create_connection({listener.getsockname()!r}, 1)"
        assert succeeds(call, here=True)
        listener.accept()[0].close()
        assert not succeeds(call)
        with pytest.raises(TimeoutError):
            listener.accept()
    for attack in ("socket.socket()", "os.fork() >= 0", "os.system('true') == 0", "os.kill(os.getppid(), 0) is None"):
        module = attack.partition(".")[0]
        code = f"(lambda {module}: {attack})(__import__('{module}'))"
        assert not succeeds(code), attack
    assert not succeeds("'PATH' in __import__('os').environ")
    assert not succeeds("__import__('sys').modules.get('torch')")
    assert not succeeds("len(bytearray(3 << 30)) > 0"), "memory is bounded"


def test_an_answer_does_not_change_the_next_ones_worker(succeeds: Callable[..., bool]) -> None:
    assert succeeds("__import__('builtins').__dict__.update(poison=1) is None")
    assert not succeeds("__import__('builtins').__dict__.get('poison')")


def test_without_landlock_scorers_that_run_answers_need_leave(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    harmless = make_task("reasoning_gym:basic_arithmetic", 0, {"size": 100})
    monkeypatch.setattr(scoring_module, "landlock_version", lambda: 0)
    with pytest.raises(UsageError, match=r"task\.allow_unconfined"):
        check_scoring(task)
    with pytest.raises(UsageError, match=r"task\.allow_unconfined"), Scorer(task):
        pass
    with pytest.raises(UsageError, match=r"task\.allow_unconfined"):
        Scorer(task).score(task.prompt(0), "x")
    check_scoring(task, allow_unconfined=True)
    check_scoring(harmless)
    check_scoring(make_task("reverse"))


@pytest.mark.parametrize(
    ("dataset", "runs"),
    [("countdown", True), ("puzzle24", True), ("n_queens", True), ("spiral_matrix", True), ("binary_matrix", True),
     ("polynomial_multiplication", True), ("simple_integration", True), ("basic_arithmetic", False), ("leg_counting", False)],
)  # fmt: skip
def test_scorers_that_run_answers_are_known(dataset: str, runs: bool) -> None:
    confined = make_task(f"reasoning_gym:{dataset}", 0, {"size": 10}).confined
    assert confined is not None and confined.runs_answers is runs


# --- hangs, kills, crashes -------------------------------------------------------------------------------------------


def test_an_endless_answer_ends_and_the_next_is_scored(task: Task, scorer: Scorer, caplog: pytest.LogCaptureFixture) -> None:
    prompt = task.prompt(1)
    pid, began = scorer.pid, time.monotonic()
    with caplog.at_level(logging.WARNING, "shoal.scoring"):
        assert scorer.score(prompt, "<answer>[9**9**9]</answer>") == Score(0.0, False)
    assert time.monotonic() - began < PATIENCE_S
    assert "problem 1" in caplog.text and "within 2 s" in caplog.text
    assert scorer.score(prompt, str(task.solution(prompt))) == Score(1.0, True)
    assert scorer.pid == pid


def test_a_worker_that_dies_costs_its_own_answer(task: Task, scorer: Scorer) -> None:
    prompt = task.prompt(2)
    assert scorer.score(prompt, "<answer>__import__('os')._exit(0)</answer>") == Score(0.0, False)
    assert scorer.score(prompt, str(task.solution(prompt))).exact


def test_a_killed_child_is_replaced() -> None:
    task = plain_task()
    prompt = task.prompt(0)
    with Scorer(task) as scorer:
        first = scorer.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert scorer.score(prompt, str(task.solution(prompt))) == Score(1.0, True)
        assert scorer.pid not in (None, first)
        last = scorer.pid
    assert last is not None and not psutil.pid_exists(last), "the block's end is the child's"


def test_a_child_that_does_not_start_is_an_error() -> None:
    with pytest.raises(ShoalError, match=r"does not start.*unknown task"), Scorer(plain_task(name="no-such-task")):
        pass


def test_a_child_that_draws_other_problems_is_an_error() -> None:
    with pytest.raises(UsageError, match="PYTHONHASHSEED=0"), Scorer(plain_task(seed=2)):
        pass


def test_closing_ends_a_score_in_another_thread(task: Task) -> None:
    caught: list[BaseException] = []

    def ask() -> None:
        try:
            scorer.score(task.prompt(0), "<answer>[9**9**9]</answer>")
        except ShoalError as error:
            caught.append(error)

    with Scorer(task, allow_unconfined=True, answer_s=10 * PATIENCE_S) as scorer:
        thread = threading.Thread(target=ask)
        thread.start()
        child = psutil.Process(scorer.pid)
        wait_until("a worker", child.children)
        workers = child.children()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and "closed" in str(caught[0])
    wait_until("the worker's end", lambda: all(has_ended(w) for w in workers))
    with pytest.raises(ShoalError, match="closed"):
        scorer.score(task.prompt(0), "x")


def test_nothing_is_left_when_the_learner_is_killed(tmp_path: Path) -> None:
    code = f"""if True:
        from learner.rewards.scoring import Scorer
        from learner.tasks.registry import make_task
        task = make_task({EVALUATES!r}, 5, {{"size": 100}})
        scorer = Scorer(task, allow_unconfined=True, answer_s=600).__enter__()
        print(scorer.pid, flush=True)
        scorer.score(task.prompt(0), "<answer>[9**9**9]</answer>")
    """
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, env=env) as learner:
        assert learner.stdout is not None
        child = psutil.Process(int(learner.stdout.readline()))
        wait_until("a worker", child.children)
        left = [child, *child.children()]
        learner.kill()
    wait_until("their end", lambda: all(has_ended(p) for p in left))
    assert list(tmp_path.iterdir()) == []


def test_our_own_scorers_mistakes_are_worth_nothing_and_said_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ReverseTask):
        def score(self, prompt: Prompt, completion: str) -> Score:
            raise KeyError("oh\nno")

    clock = [0.0]
    task = Broken(0)
    with caplog.at_level(logging.WARNING, "shoal.scoring"), Scorer(task, now=lambda: clock[0]) as scorer:
        assert scorer.pid is None, "no child is needed"
        for _ in range(5):
            assert scorer.score(task.prompt(3), "x") == Score(0.0, False)
        clock[0] += 60
        scorer.score(task.prompt(3), "x")
    assert len(caplog.records) == 2 and "4 more" in caplog.text
    assert all("KeyError" in r.getMessage() and "\n" not in r.getMessage() for r in caplog.records)


# --- honest answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["basic_arithmetic", "countdown", "simple_integration"])
def test_scores_are_those_of_the_task(dataset: str) -> None:
    task = make_task(f"reasoning_gym:{dataset}", 3, {"size": 100})
    with Scorer(task, allow_unconfined=True) as scorer:
        for prompt in (task.prompt(0), task.prompt(7), task.held_out(0)):
            solution = task.solution(prompt)
            for text in (f"so <answer> {solution} </answer>", str(solution), "", "zzz", "1+1", "\x00\ud800é", "x" * 5000):
                assert scorer.score(prompt, text) == task.score(prompt, text), text
            assert scorer.score(prompt, f"<answer>{solution}</answer>").exact


def test_a_text_too_long_to_send_is_worth_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.rewards.frames.MAX_FRAME", 10_000)  # a frame of its real size takes seconds to fill
    task = plain_task()
    with Scorer(task) as scorer:
        pid = scorer.pid
        assert scorer.score(task.prompt(0), "9" * 20_000) == Score(0.0, False)
        assert scorer.score(task.prompt(0), str(task.solution(task.prompt(0)))).exact and scorer.pid == pid
