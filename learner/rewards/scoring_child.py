"""The scoring process: keeps a task ready and forks one worker an answer. Must not know torch, groups or the network.

Scorers of free text may evaluate it, so an answer is code of a stranger. The worker that meets it has given up the network,
files, other processes and all but a little memory and time (`learner/rewards/sandbox.py`), lives for this one answer, and
can tell us nothing but a reward: it changes neither this process nor the next answer's worker. This process never looks at
answers.

It ends when its parent closes the socket, however the parent ends. (Not by the parent-death signal: that one comes when the
parent's *thread* ends, and a replacement is started from a worker thread.)
"""

from __future__ import annotations

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
from typing import Any

import msgpack

from learner.rewards import sandbox
from learner.tasks.port import Prompt, Task
from learner.tasks.registry import make_task
from p2p.processes import die_with_parent

MAX_FRAME = 8 << 20
"""Bytes of one message either way: a prompt and a completion, generously."""

MEMORY = 1 << 30
"""Address space of a worker; Python with sympy and numpy takes a quarter of it."""

MAX_SAID = 500
"""Bytes a worker may say: a score, or the end of an error's text."""

_SCORE = struct.Struct(">d?")


def send_frame(sock: socket.socket, message: dict[str, Any]) -> None:
    """ValueError for a message over MAX_FRAME, and nothing was sent."""
    data = msgpack.packb(message, unicode_errors="surrogatepass")
    if len(data) > MAX_FRAME:
        raise ValueError(f"{len(data)} bytes are too long to score")
    sock.sendall(struct.pack(">I", len(data)) + data)


def receive_frame(sock: socket.socket) -> dict[str, Any]:
    """EOFError when the other side is gone; ValueError when it sends no message of ours."""
    (size,) = struct.unpack(">I", _read(sock, 4))
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    message = msgpack.unpackb(_read(sock, size), unicode_errors="surrogatepass")
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError("the other side closed the socket")
        data += piece
    return bytes(data)


def readable() -> list[str]:
    """Where Python's modules lie: what an import that a scorer makes late may read."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages", "lib-dynload")]
    for name in ("reasoning_gym", "sympy", "numpy"):  # wherever they were installed
        module = sys.modules.get(name)
        paths += list(getattr(module, "__path__", []))
    return paths


class _Workshop:
    """Answers requests {index, held_out, text, completion} with {reward, exact} or {error}."""

    def __init__(self, task: Task, sock: socket.socket, answer_s: float) -> None:
        self._task, self._sock, self._answer_s = task, sock, answer_s
        self._prompt: Prompt | None = None

    def run(self) -> None:
        while True:
            try:
                request = receive_frame(self._sock)
            except EOFError:
                return
            send_frame(self._sock, self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        index, held_out, completion = request["index"], request["held_out"], request["completion"]
        prompt = self._prompt
        if prompt is None or (prompt.index, prompt.held_out) != (index, held_out):  # a group's answers come in a row
            prompt = self._prompt = self._task.held_out(index) if held_out else self._task.prompt(index)
        if prompt.text != request["text"]:
            return {"error": "the task made another problem of the same number here", "differs": True}
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            work(self._task, prompt, completion, writing, self._answer_s)
        os.close(writing)
        said, why = self._listen(reading)
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if said[:1] == b"S" and len(said) == 1 + _SCORE.size:
            reward, exact = _SCORE.unpack(said[1:])
            return {"reward": reward, "exact": exact}
        if said[:1] == b"E":
            return {"error": said[1:].decode(errors="replace")}
        return {"error": why or f"the worker ended with status {os.waitstatus_to_exitcode(status)}"}

    def _listen(self, pipe: int) -> tuple[bytes, str]:
        """What the worker says until it closes the pipe, and why nothing more was heard ("" when it did close)."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(self._sock, getattr(select, "POLLRDHUP", 0))  # other systems than Linux: POLLHUP, always watched
        said = b""
        deadline = time.monotonic() + self._answer_s
        while (left := deadline - time.monotonic()) > 0 and len(said) <= MAX_SAID:
            for fd, _ in poll.poll(left * 1e3):
                if fd != pipe:
                    os._exit(0)  # our parent is gone; the worker goes with us
                piece = os.read(pipe, MAX_SAID + 1)
                if not piece:
                    return said, ""
                said += piece
        return b"", f"no score within {self._answer_s:g} s"


def work(task: Task, prompt: Prompt, completion: str, pipe: int, answer_s: float) -> None:
    """The worker: give everything up, score one answer, say so, end. Never returns."""
    try:
        die_with_parent()
        os.dup2(1, 0)  # standard output is /dev/null, and so are now the parent's socket and our log
        os.dup2(1, 2)
        os.dup2(pipe, 3)
        os.closerange(4, 4096)
        sandbox.limit(memory=MEMORY, cpu_s=math.ceil(answer_s) + 1)
        sandbox.seal()
        try:
            score = task.score(prompt, completion)
            os.write(3, b"S" + _SCORE.pack(score.reward, score.exact))
        except Exception as error:
            os.write(3, b"E" + f"{type(error).__name__}: {error}".encode(errors="replace")[: MAX_SAID - 1])
    finally:
        os._exit(0)


def problems_digest(task: Task) -> bytes:
    """Of a few problems: whether two processes draw the same ones."""
    texts = [p.text for i in range(8) for p in (task.prompt(i), task.held_out(i))]
    return hashlib.blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=16).digest()


def main() -> int:
    """The parent's socket is standard input; its first message {name, seed, options, answer_s} says what to score. Answers
    {missing, problems} when ready: what of the sandbox could not be had, and `problems_digest`."""
    with socket.socket(fileno=os.dup(0)) as sock:
        try:
            setup = receive_frame(sock)
            missing = sandbox.leave_network()
            task = make_task(setup["name"], setup["seed"], setup["options"])
            problems = problems_digest(task)
            os.rmdir(os.getcwd())  # our own folder: nothing can be made in it now, nor be left behind
            missing += sandbox.confine(readable()) + _try_seal()
            gc.freeze()  # a worker's garbage collection would copy every page that it shares with us
            send_frame(sock, {"missing": missing, "problems": problems})
            _Workshop(task, sock, setup["answer_s"]).run()
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
