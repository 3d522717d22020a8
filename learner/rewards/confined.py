"""A child that scores answers in the sandbox, started anew when it is gone. Blocking; must not know prompts, groups or weights.

What runs in the child is `learner/rewards/scoring_child.py`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from learner.rewards.answer_budget import AnswerBudget
from learner.rewards.scoring_process import KeptProcess, ProcessGone
from p2p.errors import ShoalError, UsageError
from p2p.processes import ROOT

log = logging.getLogger("shoal.scoring")

SLACK_S = 30.0
"""What the child may take besides: making the problem, forking, a busy machine. A child that is later is replaced."""

START_S = 120.0
"""Until a child is ready: importing sympy and reasoning-gym, on a busy machine."""

CHILD = "learner.rewards.scoring_child"
"""The module that the scoring process runs."""

COMPLAIN_S = 10.0
"""Between two log lines about answers that could not be scored: a node can send thousands."""

_told: set[str] = set()
"""What this process has said of sandboxes: once, however many scorers it makes."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a child is made for."""

    name: str
    """for messages: "task reverse", "reward regex" """
    setup: Mapping[str, Any]
    """the child's first message, but for its deadline"""
    runs_answers: bool
    """it may run an answer as code"""
    examined: bool = False
    """it does so in a process that cannot tell a reward"""
    problems: bytes = b""
    """digest that the child must find as well; b"": none"""


def unconfined(name: str) -> str:
    """Why something that runs answers is refused here."""
    return (
        f"{name} evaluates answers as code, and this system has no Landlock to keep them from your files "
        "(Linux 5.13 or later, enabled); task.allow_unconfined = true runs it all the same"
    )


def other_problems(name: str) -> str:
    """What a person must do about a task that the child sees differently."""
    return (
        f"{name} draws other problems in another process (they follow Python's hash order): "
        "set PYTHONHASHSEED=0 in the environment"
    )


class ConfinedChild(KeptProcess):
    """One child for one subject. One answer at a time, from any thread; `close` may come from another one.

    Raises ShoalError only where no answer could be scored any more: the child does not start twice in a row, or is closed.
    """

    def __init__(self, subject: Subject, *, allow_unconfined: bool, answer_s: float) -> None:
        super().__init__()
        self.subject, self._allow_unconfined, self._answer_s = subject, allow_unconfined, answer_s
        self._budget = AnswerBudget(answer_s)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the child says of one answer; {error} where it is the answer's fault that it says nothing."""
        with self._lock:
            return self._ask(request)

    # ---- inside

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        why = ""
        for _ in range(2):  # a child that was killed between two answers is not this answer's fault
            try:
                if self._process is None:
                    self._start()
                assert self._process is not None
                answer_s, began = self._budget.answer_s, time.monotonic()
                said = self._process.ask({**request, "answer_s": answer_s}, self._answer_s + SLACK_S)
                if said.get("late"):
                    self._budget.ran_out(answer_s, time.monotonic() - began)
                    return {"error": f"no score within {self._answer_s:g} s"}
                return said
            except ProcessGone as error:
                why = f"the scoring process is replaced: {error}"
                self._drop()
            except ValueError as error:  # more than a message holds
                return {"error": str(error)}
        return {"error": why}

    def _start(self) -> None:
        why = ""
        for _ in range(2):
            process = self._make(CHILD, clean_environment(), own_folder=True)
            try:
                ready = process.ask(dict(self.subject.setup), START_S)
            except ProcessGone as error:
                why = f"{error}; it said: {process.last_line()}"
                self._drop()
                continue
            self._check(ready)
            return
        raise ShoalError(f"the scoring process of {self.subject.name} does not start: {why}")

    def _check(self, ready: Mapping[str, Any]) -> None:
        wrong = str(ready.get("refused", ""))
        if not wrong and ready.get("problems") != self.subject.problems:
            wrong = other_problems(self.subject.name)
        missing = ready.get("missing") or []
        if self.subject.runs_answers and not self.subject.examined and self.subject.name not in _told:
            _told.add(self.subject.name)
            log.warning(
                "%s runs answers as code in the process that scores them: one that is made for it can claim its own reward",
                self.subject.name,
            )
        if not wrong and "Landlock" in missing and self.subject.runs_answers and not self._allow_unconfined:
            wrong = unconfined(self.subject.name)
        if wrong:
            self._drop()
            raise UsageError(wrong)
        text = ", ".join(map(str, missing))
        if missing and text not in _told:
            _told.add(text)
            log.warning("answers are scored without %s: not to be had on this system", text)


def clean_environment() -> dict[str, str]:
    """Nothing of ours goes along: no variables (but where modules lie, and what decides which problems some tasks draw), no file,
    no descriptor; one thread, because a namespace cannot be left by a process of several."""
    environment = {
        "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1", "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in [*sys.path, str(ROOT)]),
    }  # fmt: skip
    return environment | {name: os.environ[name] for name in ("PYTHONHASHSEED",) if name in os.environ}


class Complaints:
    """Log lines about answers that count for nothing, now and then. From any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last, self._unsaid = -math.inf, 0

    def say(self, where: str, why: str) -> None:
        """An answer to the problem `where` could not be scored."""
        if self._now() - self._last < COMPLAIN_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        log.warning("an answer to %s counts for nothing: %.200s%s", where, ascii(why)[1:-1], more)
        self._last, self._unsaid = self._now(), 0
