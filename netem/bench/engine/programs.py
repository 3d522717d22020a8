"""The measured processes of the engine's environment, each a `vllm_alone`: started, asked, held still while others are measured.

Must not know what they measure."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from node.engine.process import packages
from p2p.errors import ShoalError
from p2p.processes import child_environment, last_line, signal_group, start

PROGRAM = Path(__file__).with_name("vllm_alone.py")


class VllmProgram:
    """One of them. It gets no processor time but while it is asked: an idle engine of several processes may spin."""

    def __init__(self, kind: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self._kind, self._process, self._log = kind, process, log

    async def ask(self, **what: Any) -> dict[str, Any]:
        """Its answer. ShoalError when it ends instead."""
        signal_group(self._process, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        """Its next answer, after which it is held still. ShoalError when it ends instead."""
        assert self._process.stdout is not None
        line = await trio.to_thread.run_sync(self._process.stdout.readline)
        if not line:
            raise ShoalError(f"the {self._kind} process ended with status {self._process.wait()}: {last_line(self._log)}")
        signal_group(self._process, signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def open_vllm_program(kind: str, settings: dict[str, Any], python: str, log: Path) -> AsyncIterator[VllmProgram]:
    """Started and ready. `-P`: nothing that lies beside the program is importable, as it is another environment's."""
    with packages(python) as root, open(log, "wb") as out:  # noqa: ASYNC230
        process = start(
            [python, "-P", str(PROGRAM), kind, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out,
            environment=child_environment(root=root),
        )  # fmt: skip
        try:
            program = VllmProgram(kind, process, log)
            await program.answer()
            yield program
        finally:
            signal_group(process, signal.SIGKILL)
            process.wait()
