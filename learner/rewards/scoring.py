"""Rewards by a task's own score: in this process for our own tasks, in a sandboxed child for scorers that are not.

Synchronous, for a worker thread of the head. Must not know groups, torch or the network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from learner.rewards.confined import Complaints, ConfinedChild, Subject, other_problems, unconfined
from learner.rewards.sandbox import landlock_version
from learner.rewards.scoring_child import problems_digest
from learner.tasks.port import Prompt, Score, Task, check_score
from p2p.errors import ShoalError, UsageError

ANSWER_S = 4.0
"""Longest an answer may take to score: the slowest honest ones (symbolic integrals) take half a second."""

NOTHING = Score(0.0, False)
"""What an answer is worth that could not be scored by its own fault."""


def check_scoring(task: Task, *, allow_unconfined: bool = False) -> None:
    """UsageError when this task's scorer may run answers as code and this machine cannot keep it from our files."""
    if task.confined is not None:
        check_confined(f"task {task.confined.name}", runs_answers=task.confined.runs_answers, allow_unconfined=allow_unconfined)


def check_confined(name: str, *, runs_answers: bool, allow_unconfined: bool) -> None:
    """UsageError when `name` runs answers as code and this machine cannot keep it from our files."""
    if runs_answers and not allow_unconfined and not landlock_version():
        raise UsageError(unconfined(name))


def place_of(prompt: Prompt) -> str:
    """Which problem, for a person."""
    return prompt.where or f"problem {prompt.index}"


def task_subject(task: Task) -> Subject:
    """What a child must be made for to score this task's answers, which are confined."""
    confined = task.confined
    assert confined is not None
    setup = {"name": confined.name, "seed": confined.seed, "options": confined.options}
    return Subject(f"task {confined.name}", setup, confined.runs_answers, problems=problems_digest(task))


def child_score(prompt: Prompt, completion: str, child: ConfinedChild, *, complaints: Complaints) -> list[Score]:
    """The one score that a task's child gives a completion. Blocks."""
    answer = child.ask({"index": prompt.index, "held_out": prompt.held_out, "text": prompt.text, "completion": completion})
    if answer.get("differs"):
        raise ShoalError(f"{other_problems(child.subject.name)} ({place_of(prompt)})")
    reward = answer.get("reward")
    if isinstance(reward, float) and math.isfinite(reward):
        return [Score(reward, answer.get("exact") is True)]
    complaints.say(place_of(prompt), str(answer.get("error", f"a reward of {reward!r:.40}")))
    return [NOTHING]


class Scorer:
    """Scores a task's answers; a context manager. An answer that raises, takes too long or kills the process that scores it
    is worth nothing, and said in the log. One answer at a time, from any thread; `close` may come from another one.

    Raises ShoalError only where no answer could be scored any more: the child does not start twice in a row, or it does not
    draw the problems that we do.
    """

    def __init__(
        self,
        task: Task,
        *,
        allow_unconfined: bool = False,
        answer_s: float = ANSWER_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task, self.allow_unconfined = task, allow_unconfined
        self._complaints = Complaints(now)
        self._child: ConfinedChild | None = None
        if task.confined is not None:
            self._child = ConfinedChild(task_subject(task), allow_unconfined=allow_unconfined, answer_s=answer_s)

    def __enter__(self) -> Scorer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Have a child, where one is needed."""
        if self._child is not None:
            check_scoring(self.task, allow_unconfined=self.allow_unconfined)
            self._child.start()

    def close(self) -> None:
        """Ends the child; a `score` in another thread then raises ShoalError. Idempotent."""
        if self._child is not None:
            self._child.close()

    @property
    def pid(self) -> int | None:
        """The child's process id; None without one."""
        return self._child.pid if self._child is not None else None

    def score(self, prompt: Prompt, completion: str) -> Score:
        """The reward of a completion's text."""
        if self._child is None:
            try:
                return check_score(self.task.score(prompt, completion))
            except Exception as error:
                self._complaints.say(place_of(prompt), f"{type(error).__name__}: {error}")
                return NOTHING
        check_scoring(self.task, allow_unconfined=self.allow_unconfined)
        return child_score(prompt, completion, self._child, complaints=self._complaints)[0]
