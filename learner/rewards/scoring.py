"""Rewards for text that strangers wrote: in this process for our own tasks, in a sandboxed child for scorers that are not.

Synchronous, for a worker thread of the head and for the trainer's evaluation. Must not know groups, torch or the network.
What runs in the child is `learner/rewards/scoring_child.py`.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from learner.rewards.sandbox import landlock_version
from learner.rewards.scoring_child import problems_digest, receive_frame, send_frame
from learner.tasks.port import Confined, Prompt, Score, Task
from p2p.errors import ShoalError, UsageError
from p2p.processes import ROOT, python_command, start

log = logging.getLogger("shoal.scoring")

ANSWER_S = 4.0
"""Longest an answer may take to score: the slowest honest ones (symbolic integrals) take half a second."""

SLACK_S = 30.0
"""What the child may take besides: making the problem, forking, a busy machine. A child that is later is replaced."""

START_S = 120.0
"""Until a child is ready: importing sympy and reasoning-gym, on a busy machine."""

COMPLAIN_S = 10.0
"""Between two log lines about answers that could not be scored: a node can send thousands."""

CHILD = "learner.rewards.scoring_child"
"""The module that the scoring process runs."""

_NOTHING = Score(0.0, False)
_told: set[str] = set()
"""What this process has said is missing: once, however many scorers it makes."""


def check_scoring(task: Task, *, allow_unconfined: bool = False) -> None:
    """UsageError when this task's scorer may run answers as code and this machine cannot keep it from our files."""
    if task.confined is not None and task.confined.runs_answers and not allow_unconfined and not landlock_version():
        raise UsageError(_unconfined(task.confined))


def _unconfined(confined: Confined) -> str:
    return (
        f"task {confined.name} evaluates answers as code, and this system has no Landlock to keep them from your files "
        "(Linux 5.13 or later, enabled); task.allow_unconfined = true runs it all the same"
    )


class _Gone(Exception):
    """The child is not there, or not in order; says why."""


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
        self.task, self.allow_unconfined, self._answer_s, self._now = task, allow_unconfined, answer_s, now
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False
        self._complained, self._unsaid = -math.inf, 0

    def __enter__(self) -> Scorer:
        if self.task.confined is not None:
            with self._lock:
                self._start(self.task.confined)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child; a `score` in another thread then raises ShoalError. Idempotent."""
        self._closed = True
        child = self._child
        if child is not None:
            child.end()

    @property
    def pid(self) -> int | None:
        """The child's process id; None without one."""
        return self._child.process.pid if self._child is not None else None

    def score(self, prompt: Prompt, completion: str) -> Score:
        """The reward of a completion's text."""
        confined = self.task.confined
        if confined is None:
            try:
                return self.task.score(prompt, completion)
            except Exception as error:
                self._complain(prompt, f"{type(error).__name__}: {error}")
                return _NOTHING
        with self._lock:
            return self._ask(confined, prompt, completion)

    # ---- inside

    def _ask(self, confined: Confined, prompt: Prompt, completion: str) -> Score:
        request = {"index": prompt.index, "held_out": prompt.held_out, "text": prompt.text, "completion": completion}
        why = ""
        for _ in range(2):  # a child that was killed between two answers is not this answer's fault
            try:
                if self._child is None:
                    self._start(confined)
                assert self._child is not None
                answer = self._child.ask(request, self._answer_s + SLACK_S)
            except _Gone as error:
                why = f"the scoring process is replaced: {error}"
                self._drop()
                continue
            except ValueError as error:  # more than a message holds
                why = str(error)
                break
            if answer.get("differs"):
                raise ShoalError(f"{_differs(confined)} (problem {prompt.index})")
            reward, exact = answer.get("reward"), answer.get("exact")
            if isinstance(reward, float) and 0.0 <= reward <= 1.0:
                return Score(reward, exact is True)
            why = str(answer.get("error", f"a reward of {reward!r:.40}"))
            break
        self._complain(prompt, why)
        return _NOTHING

    def _start(self, confined: Confined) -> None:
        """A fresh child, ready. ShoalError when it fails twice."""
        check_scoring(self.task, allow_unconfined=self.allow_unconfined)
        why = ""
        for _ in range(2):
            if self._closed:
                raise ShoalError("the scorer is closed")
            child = self._child = _Child()
            if self._closed:  # `close` came while the child was being made and did not see it
                child.end()
            setup = {"name": confined.name, "seed": confined.seed, "options": confined.options, "answer_s": self._answer_s}
            try:
                ready = child.ask(setup, START_S)
            except _Gone as error:
                why = f"{error}; it said: {child.last_line()}"
                self._drop()
                continue
            if ready.get("problems") != problems_digest(self.task):
                self._drop()
                raise UsageError(_differs(confined))
            missing = ready.get("missing") or []
            if "Landlock" in missing and confined.runs_answers and not self.allow_unconfined:
                self._drop()
                raise UsageError(_unconfined(confined))
            self._tell(missing)
            return
        raise ShoalError(f"the scoring process of task {confined.name} does not start: {why}")

    def _tell(self, missing: list[Any]) -> None:
        text = ", ".join(map(str, missing))
        if missing and text not in _told:
            _told.add(text)
            log.warning("answers are scored without %s: not to be had on this system", text)

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None
        if self._closed:
            raise ShoalError("the scorer is closed")

    def _complain(self, prompt: Prompt, why: str) -> None:
        if self._now() - self._complained < COMPLAIN_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        log.warning("an answer to problem %d counts for nothing: %.200s%s", prompt.index, ascii(why)[1:-1], more)
        self._complained, self._unsaid = self._now(), 0


def _differs(confined: Confined) -> str:
    return (
        f"task {confined.name} draws other problems in another process (they follow Python's hash order): "
        "set PYTHONHASHSEED=0 in the environment"
    )


class _Child:
    """One scoring process and our end of its socket."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="shoal-score-")
        self._said: IO[bytes] = tempfile.TemporaryFile()
        ours, theirs = socket.socketpair()
        self._sock = ours
        # Nothing of ours goes along: no variables (but where modules lie, and what decides which problems some tasks draw), no
        # file, no descriptor; one thread, because a namespace cannot be left by a process of several.
        environment = {
            "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1", "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in [*sys.path, str(ROOT)]),
        }  # fmt: skip
        environment |= {name: os.environ[name] for name in ("PYTHONHASHSEED",) if name in os.environ}
        with theirs:
            # It may outlive the thread that starts it, which may be a worker's; it ends when our socket does.
            self.process = start(
                python_command(CHILD), environment=environment, cwd=Path(self._folder), stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL, stderr=self._said, outlive=True,
            )  # fmt: skip

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """_Gone when there is no answer; ValueError, and nothing was sent, when the request is too large."""
        try:
            self._sock.settimeout(timeout_s)
            send_frame(self._sock, request)
        except OSError as error:
            raise _Gone(f"{error} (status {self.process.poll()})") from None
        try:
            return receive_frame(self._sock)
        except TimeoutError:
            raise _Gone(f"it did not answer within {timeout_s:g} s") from None
        except (OSError, EOFError, ValueError) as error:
            raise _Gone(f"{error} (status {self._status()})") from None

    def _status(self) -> int | None:
        try:
            return self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None

    def last_line(self) -> str:
        if self._said.closed:
            return "nothing"
        self._said.seek(0)
        lines = self._said.read(1 << 16).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    def end(self) -> None:
        """Killed, reaped, its folder gone. Idempotent; from any thread."""
        self.process.kill()
        self.process.wait()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who waits for an answer
        except OSError:
            pass  # gone already
        self._sock.close()
        self._said.close()
        shutil.rmtree(self._folder, ignore_errors=True)
