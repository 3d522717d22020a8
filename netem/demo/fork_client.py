"""Processes forked from one that has imported everything (`python -m netem.demo.fork_server`), as the demo holds its
others. Must not know
what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netem.demo.child_env import CHILD_ENV, die_with_parent
from p2p.errors import ShoalError

READY_S = 120.0
"""Until everything is imported, on a busy machine."""


class WarmParent:
    """`start` asks for a process and gets it within some hundredths of a second."""

    def __init__(self, log: Path) -> None:
        with open(log, "ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "netem.demo.fork_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                env=CHILD_ENV, process_group=0, preexec_fn=die_with_parent, bufsize=0,
            )  # fmt: skip
        self._log = log
        self._pending = b""
        self._ended: dict[int, int] = {}
        self._until("ready", READY_S)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def start(self, arguments: Sequence[str], out: Path, log: Path) -> WarmProcess:
        request = {"argv": list(arguments), "out": str(out), "log": str(log)}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._gone() from None
        return WarmProcess(self, self._until("pid", 10.0)["pid"])

    def ended(self, pid: int) -> int | None:
        self._read()
        return self._ended.get(pid)

    def close(self) -> None:
        """What still runs is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _until(self, key: str, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for answer in self._read():
                if key in answer:
                    return answer
            time.sleep(0.01)
        raise ShoalError(f"no answer from the warm parent within {timeout_s:.0f} s")

    def _read(self) -> list[dict[str, Any]]:
        """What it has said since the last look, without the ends of processes."""
        assert self._process.stdout is not None
        data = self._process.stdout.read(1 << 16)
        if data == b"":
            raise self._gone()
        *lines, self._pending = (self._pending + (data or b"")).split(b"\n")
        answers = [json.loads(line) for line in lines]
        self._ended |= {a["pid"]: a["status"] for a in answers if "status" in a}
        return [a for a in answers if "status" not in a]

    def _gone(self) -> ShoalError:
        said = self._log.read_text(errors="replace").strip().splitlines()
        return ShoalError(f"the warm parent ended: {said[-1] if said else 'it said nothing'}")


class WarmProcess:
    """As subprocess.Popen."""

    def __init__(self, parent: WarmParent, pid: int) -> None:
        self._parent, self.pid = parent, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ended(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        began = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
