"""The scoring process: keeps a task, or a built-in reward function, ready and forks one worker an answer. Must not know torch,
groups or the network.

Scorers of free text may evaluate it, so an answer is code of a stranger. The worker that meets it has given up the network,
files, other processes and all but a little memory and time (`learner/rewards/sandbox.py`), lives for this one answer, and
can tell us nothing but a reward: it changes neither this process nor the next answer's worker. This process never looks at
answers. Where the function can (`BuiltIn.examined`), the answer's code has a second worker to itself, and the one that tells the
reward runs our tests alone: then an answer cannot claim its own reward.

It ends when its parent closes the socket, however the parent ends. (Not by the parent-death signal: that one comes when the
parent's *thread* ends, and a replacement is started from a worker thread.)
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import math
import os
import select
import signal
import socket
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from learner.rewards import sandbox
from learner.rewards.built_in import BuiltIn, make_built_in
from learner.rewards.examinee import Examinee
from learner.rewards.examiner import AnswerProcess
from learner.rewards.frames import PipeEnds, receive_frame, send_frame
from learner.tasks.port import Prompt, Score, Task
from learner.tasks.registry import make_task
from p2p.errors import UsageError
from p2p.processes import die_with_parent

MEMORY = 1 << 30
"""Address space of a worker; Python with sympy and numpy takes a quarter of it."""

MAX_SAID = 500
"""Bytes a worker may say: a score, or the end of an error's text."""

_SCORE = struct.Struct(">d?")


SCORING_PACKAGES = ("reasoning_gym", "sympy", "numpy", "math_verify", "latex2sympy2_extended", "antlr4", "jsonschema")
"""Packages that scorers use, and that may import more of themselves late."""


def readable() -> list[str]:
    """Where Python's modules lie: what an import that a scorer makes late may read."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages", "lib-dynload")]
    for name in SCORING_PACKAGES:  # wherever they were installed
        module = sys.modules.get(name)
        paths += list(getattr(module, "__path__", []))
    return paths


class Exam(NamedTuple):
    """An answer that is code, and what is to be done with the process that runs it."""

    code: str
    grade: Callable[[AnswerProcess], Score]


class _TaskAnswers:
    """Answers to problems of a task, by number."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._prompt: Prompt | None = None

    def scorer(self, request: dict[str, Any]) -> Callable[[], Score] | dict[str, Any]:
        """What a worker is to call; or the answer, where there is nothing to call."""
        index, held_out, completion = request["index"], request["held_out"], request["completion"]
        prompt = self._prompt
        if prompt is None or (prompt.index, prompt.held_out) != (index, held_out):  # a group's answers come in a row
            prompt = self._prompt = self._task.held_out(index) if held_out else self._task.prompt(index)
        if prompt.text != request["text"]:
            return {"error": "the task made another problem of the same number here", "differs": True}
        return partial(self._task.score, prompt, completion)


class _FunctionAnswers:
    """Answers to rows of data, by a built-in reward function. What the row says is ours, so it is looked at here; the answer only
    in a worker."""

    def __init__(self, function: BuiltIn) -> None:
        self._function = function

    def scorer(self, request: dict[str, Any]) -> Callable[[], Score] | Exam | dict[str, Any]:
        """As that of a task. {unscored} says what is wrong with the row, {reward: None} that the function does not apply."""
        try:
            wanted = self._function.wanted(request["columns"])
        except UsageError as error:
            return {"unscored": str(error)}
        except Exception as error:
            return {"unscored": f"{type(error).__name__}: {error}"}
        if wanted is None:
            return {"reward": None}
        if self._function.examined:
            return Exam(self._function.code_of(request["completion"]), partial(self._examine, wanted))
        return partial(self._score, wanted, request["completion"])

    def _score(self, wanted: Any, completion: str) -> Score:
        reward = float(self._function.score(wanted, completion))
        return Score(reward, reward >= 1.0)

    def _examine(self, wanted: Any, answer: AnswerProcess) -> Score:
        reward = float(self._function.examine(wanted, answer))
        return Score(reward, reward >= 1.0)


class _Workshop:
    """Answers each request with {reward, exact}, or with {error} where it is the answer's fault; {late} where its `answer_s`
    seconds were over."""

    def __init__(self, answers: _TaskAnswers | _FunctionAnswers, sock: socket.socket) -> None:
        self._answers, self._sock = answers, sock

    def run(self) -> None:
        while True:
            try:
                request = receive_frame(self._sock)
            except EOFError:
                return
            send_frame(self._sock, self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        score = self._answers.scorer(request)
        if isinstance(score, dict):
            return score
        reading, writing = os.pipe()
        workers = list[int]()
        if isinstance(score, Exam):
            asked, answers = os.pipe(), os.pipe()
            workers.append(_fork(partial(run_answer, score.code), (asked[0], answers[1]), request["answer_s"]))
            workers.append(_fork(partial(examine, score.grade), (writing, answers[0], asked[1]), request["answer_s"]))
            for end in (*asked, *answers):
                os.close(end)
        else:
            workers.append(_fork(partial(tell, score), (writing,), request["answer_s"]))
        os.close(writing)
        said, why = self._listen(reading, request["answer_s"])
        os.close(reading)
        status = 0
        for pid in workers:  # the last one is who tells the reward
            os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
        if said[:1] == b"S" and len(said) == 1 + _SCORE.size:
            reward, exact = _SCORE.unpack(said[1:])
            return {"reward": reward, "exact": exact}
        if said[:1] == b"E":
            return {"error": said[1:].decode(errors="replace")}
        if why:
            return {"error": why, "late": True}
        return {"error": f"the worker ended with status {os.waitstatus_to_exitcode(status)}"}

    def _listen(self, pipe: int, answer_s: float) -> tuple[bytes, str]:
        """What the worker says until it closes the pipe, and why nothing more was heard ("" when it did close)."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(self._sock, getattr(select, "POLLRDHUP", 0))  # other systems than Linux: POLLHUP, always watched
        said = b""
        deadline = time.monotonic() + answer_s
        while (left := deadline - time.monotonic()) > 0 and len(said) <= MAX_SAID:
            for fd, _ in poll.poll(left * 1e3):
                if fd != pipe:
                    os._exit(0)  # our parent is gone; the worker goes with us
                piece = os.read(pipe, MAX_SAID + 1)
                if not piece:
                    return said, ""
                said += piece
        return b"", "no score in time"


REWARD, FIRST, SECOND = 3, 4, 5
"""Descriptors of a worker that tells a reward: the pipe for it; and to an answer's process what it says, and what it is asked."""

HEARD, SAID = 3, 4
"""Descriptors of an answer's process: what it is asked, and what it says. It has no other."""


def _fork(run: Callable[[], None], pipes: Sequence[int], answer_s: float) -> int:
    """A worker that has given up everything but these pipes, which become its descriptors from 3 on. Its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        os.dup2(1, 0)  # standard output is /dev/null, and so are now the parent's socket and our log
        os.dup2(1, 2)
        aside = [fcntl.fcntl(pipe, fcntl.F_DUPFD, 64) for pipe in pipes]  # no number is in the way of another one
        for number, pipe in enumerate(aside, 3):
            os.dup2(pipe, number)
        os.closerange(3 + len(pipes), 4096)
        sandbox.limit(memory=MEMORY, cpu_s=math.ceil(answer_s) + 1)
        sandbox.seal()
        run()
    finally:
        os._exit(0)


def tell(scorer: Callable[[], Score]) -> None:
    """Score one answer and say so."""
    try:
        score = scorer()
        os.write(REWARD, b"S" + _SCORE.pack(score.reward, score.exact))
    except Exception as error:
        os.write(REWARD, b"E" + f"{type(error).__name__}: {error}".encode(errors="replace")[: MAX_SAID - 1])


def examine(grade: Callable[[AnswerProcess], Score]) -> None:
    """Ask the process that runs an answer, and say what that is worth."""
    tell(lambda: grade(AnswerProcess(PipeEnds(FIRST, SECOND))))


def run_answer(code: str) -> None:
    """Run an answer's code as it is asked to."""
    Examinee(code).serve(PipeEnds(HEARD, SAID))


def problems_digest(task: Task) -> bytes:
    """Of a few problems: whether two processes draw the same ones."""
    texts = [p.text for i in range(8) for p in (task.prompt(i), task.held_out(i))]
    return hashlib.blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=16).digest()


def main() -> int:
    """The parent's socket is standard input; its first message says what to score: {name, seed, options} a task's
    problems, {function, options} rows by a built-in reward function. Answers {missing, problems} when ready: what of
    the sandbox could not be had, and `problems_digest`; {refused} where the function cannot be had."""
    with socket.socket(fileno=os.dup(0)) as sock:
        try:
            setup = receive_frame(sock)
            missing = sandbox.leave_network()
            if "function" in setup:
                try:
                    function = make_built_in(setup["function"], setup["options"])
                except UsageError as error:
                    send_frame(sock, {"refused": str(error)})
                    return 2
                answers: _TaskAnswers | _FunctionAnswers = _FunctionAnswers(function)
                problems = b""
            else:
                task = make_task(setup["name"], setup["seed"], setup["options"])
                answers, problems = _TaskAnswers(task), problems_digest(task)
            os.rmdir(os.getcwd())  # our own folder: nothing can be made in it now, nor be left behind
            missing += sandbox.confine(readable()) + _try_seal()
            gc.freeze()  # a worker's garbage collection would copy every page that it shares with us
            send_frame(sock, {"missing": missing, "problems": problems})
            _Workshop(answers, sock).run()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the parent is gone
    return 0


def _try_seal() -> list[str]:
    """Whether workers will have seccomp: tried in a child, because there is no way back from it."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(len(sandbox.seal()))
        finally:
            os._exit(1)
    return [] if os.waitpid(pid, 0)[1] == 0 else ["seccomp"]


if __name__ == "__main__":
    sys.exit(main())
