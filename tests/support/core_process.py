"""An engine core in a process of another environment, driven step by step: for suites that ask for an EngineCore.

`CoreProcess` is the test's side and a core itself; run as a program, this file is the other side (`core_process.py FD`). Unlike
production's child it makes no step unasked. It may be made anew with other settings, and sabotaged.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from node.engine.child import make_core
from node.engine.pipe import Call, CallRefused, Events, Failed, Message, PipeDecoder, Reply, encode
from node.engine.port import CommitResult, EngineCore, EngineStats, StateFile
from p2p.errors import Refusal
from p2p.protocol.rollout import Generate, TokenEvent

ROOT = Path(__file__).resolve().parents[2]


class CoreProcess(EngineCore):
    """A core of `kind` that runs under `python`; its output goes to `log`."""

    def __init__(self, python: str, kind: str, settings: dict[str, Any], log: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs, open(log, "ab") as out:
            self.process = subprocess.Popen(
                [python, str(Path(__file__).resolve()), str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=out,
                stderr=out, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        self._sock, self._decoder, self._id = ours, PipeDecoder(), 0
        self.make(kind, settings)

    def _call(self, method: str, *args: Any) -> Any:
        self._id += 1
        self._sock.sendall(encode(Call(self._id, method, args)))
        events: list[TokenEvent] = []
        while True:
            data = self._sock.recv(1 << 18)
            if not data:
                raise RuntimeError(f"the core's process ended with status {self.process.wait()}")
            for message in self._decoder.feed(data):
                match message:
                    case Events(batch):
                        events += batch
                    case Reply(_, _, value):
                        return events if method in ("step", "interrupt") else value
                    case CallRefused(_, reason, version, cause):
                        raise Refusal(reason, version=version, cause=cause)
                    case Failed(_, text):
                        raise RuntimeError(text)

    def make(self, kind: str, settings: dict[str, Any]) -> None:
        """Another core in place of the one that is there."""
        self.settings = settings
        self._call("make", kind, settings)

    def sabotage(self, fills: int, reloads: int = 0) -> None:
        """The next so many copies of weights, and so many dense reloads, put wrong values in place (vLLM only)."""
        self._call("sabotage", fills, reloads)

    def load(self, model_dir: Path, state: StateFile) -> None:
        self._call("load", model_dir, state)

    def add(self, request: Generate) -> None:
        self._call("add", request)

    def step(self) -> list[TokenEvent]:
        return self._call("step")

    def has_work(self) -> bool:
        return self._call("has_work")

    def interrupt(self, request_ids: Sequence[str] | None = None) -> list[TokenEvent]:
        return self._call("interrupt", None if request_ids is None else tuple(request_ids))

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._call("abort", None if request_ids is None else tuple(request_ids))

    def stage(self, state: StateFile) -> None:
        self._call("stage", state)

    def commit(self) -> CommitResult:
        return self._call("commit")

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        return self._call("score", tuple(prompt_ids), tuple(completion_ids), temperature)

    def stats(self) -> EngineStats:
        return self._call("stats")

    def close(self) -> None:
        self._sock.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class CorePool:
    """Cores for tests: one that nobody holds any more serves again, since starting one takes many seconds."""

    def __init__(self, python: str, kind: str, log: Path) -> None:
        self._start = (python, kind)
        self._log = log
        self._all: list[CoreProcess] = []

    def core(self, **settings: Any) -> EngineCore:
        free = [core for core in self._all if sys.getrefcount(core) <= 3]  # the list, `core`, the argument
        python, kind = self._start
        match = next((core for core in free if core.settings == settings), None)
        if match is not None:
            return match
        if free:
            free[0].make(kind, settings)
            return free[0]
        self._all.append(CoreProcess(python, kind, settings, self._log))
        return self._all[-1]

    def close(self) -> None:
        for core in self._all:
            core.close()


def serve(sock: socket.socket) -> None:
    core: EngineCore | None = None
    decoder = PipeDecoder()

    def answer(call: Call) -> list[Message]:
        nonlocal core
        try:
            if call.method == "make":
                if core is not None:
                    core.close()
                if call.args[0] == "vllm":
                    _look_here()
                core = make_core(call.args[0], dict(call.args[1]))
                return [Reply(call.id, call.method, None)]
            if call.method == "sabotage":
                _sabotage(*call.args)
                return [Reply(call.id, call.method, None)]
            value = getattr(core, call.method)(*call.args)
        except Refusal as refusal:
            return [CallRefused(call.id, refusal.reason, refusal.version, refusal.cause)]
        except Exception as error:
            traceback.print_exc()
            return [Failed(call.id, f"{type(error).__name__}: {error}")]
        if call.method in ("step", "interrupt"):
            return [Events(value), Reply(call.id, call.method, [])]
        return [Reply(call.id, call.method, value)]

    while data := sock.recv(1 << 16):
        for message in decoder.feed(data):
            assert isinstance(message, Call)
            for reply in answer(message):
                sock.sendall(encode(reply))


def _look_here() -> None:
    """vLLM looks at each architecture that is new on a machine in a process of its own, lest this one touches a GPU too early:
    some 15 s each. Here there is no GPU."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # vLLM has no setting for it


def _sabotage(fills: int, reloads: int) -> None:
    from node.engine.vllm import weights as vllm_weights

    copy_rightly = getattr(vllm_weights, "copy_rightly", vllm_weights.copy_all)
    load_rightly = getattr(vllm_weights, "load_rightly", vllm_weights.load_by_name)
    left = {"fills": fills, "reloads": reloads}

    def copy_all(targets: list[Any], parts: list[Any]) -> None:
        copy_rightly(targets, parts)
        for target in targets[: left["fills"]]:
            target.mul_(1.5)
        left["fills"] = max(0, left["fills"] - len(targets))

    def load_by_name(model: Any, source: Any) -> Any:
        loaded = load_rightly(model, source)
        if left["reloads"] > 0:
            left["reloads"] -= 1
            next(model.parameters()).mul_(1.5)
        return loaded

    vllm_weights.copy_rightly, vllm_weights.load_rightly = copy_rightly, load_rightly  # type: ignore[attr-defined]
    vllm_weights.copy_all, vllm_weights.load_by_name = copy_all, load_by_name


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        inherited.setblocking(True)
        serve(inherited)
