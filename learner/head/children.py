"""The processes that a learner keeps: its trainer, and the node with its local engine. Thin shell.

They die with the learner. Must not know what is trained or generated.
"""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import trio

from learner.config import LocalEngineSection
from learner.head.head import Head
from learner.head.local_engine import NAME
from p2p.errors import ShoalError, UsageError

log = logging.getLogger("shoal.learner")

LOCAL_ENGINE = "local-engine"
"""The folder, in the run's, of the node with the learner's local engine."""

AGAIN_S = (1.0, 60.0)
"""When the local engine's node ends, another is started so long after: doubled each time up to the second, until one lives that
long."""


async def watch_external(head: Head) -> None:
    await head.trainer_gone.wait()
    if not head.finished.is_set():
        raise ShoalError("the trainer is gone; start the learner again with --resume")


async def keep_trainer(head: Head, run_dir: Path) -> None:
    """Our trainer, a process of its own that dies with us. Its end before the run's is the run's end."""
    with _log_file(run_dir / "logs" / "trainer.log") as out:
        # Not trio.open_process: it forks from a worker thread, and the parent-death signal comes when that thread ends.
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "learner.trainer.trainer", str(run_dir)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, process_group=0, preexec_fn=_die_with_parent,
        )  # fmt: skip
    head.trainer_process = process  # type: ignore[attr-defined]
    await _ended(process)
    if not head.finished.is_set():
        last = _last_line(run_dir / "logs" / "trainer.log")
        reason = f"the trainer ended with status {process.returncode}: {last}"
        if process.returncode == 2:
            raise UsageError(reason)
        raise ShoalError(f"{reason} (more in {run_dir}/logs/trainer.log; go on with --resume)")


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Returns when it has; cancelled, it is killed."""
    try:
        # The stubs that mypy finds (trio-typing's, which libp2p brings) are older than trio.
        await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)  # type: ignore[call-arg]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def _log_file(path: Path) -> Any:
    file: IO[bytes]
    with open(path, "ab") as file:
        yield file


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _die_with_parent() -> None:
    """PR_SET_PDEATHSIG: a trainer without its head would train on nothing."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)


async def keep_local_engine(head: Head, run_dir: Path, section: LocalEngineSection) -> None:
    """The node with the learner's local engine, for as long as the run: started again when it ends. UsageError when it cannot run
    with such settings."""
    s, folder, pause = section, run_dir / LOCAL_ENGINE, AGAIN_S[0]
    command = [
        sys.executable, "-m", "shoal", "node", "--join", str(folder / "ticket.txt"), "--dir", str(folder), "--name", NAME,
        "--listen", "/ip4/127.0.0.1/tcp/0", "--engine", s.engine, "--capacity", str(s.capacity), "--threads", str(s.threads),
        "--dtype", s.dtype, "--device", s.device, "--json",
    ]  # fmt: skip
    command += ["--engine-python", s.engine_python] if s.engine_python else []
    for key, value in s.engine_set.items():
        command += ["--engine-set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    while not head.finished.is_set():
        began = trio.current_time()
        with _log_file(run_dir / "logs" / f"{LOCAL_ENGINE}.log") as out:
            process = subprocess.Popen(  # noqa: ASYNC220
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, process_group=0,
                preexec_fn=_die_with_parent,
            )  # fmt: skip
        await _ended(process)
        if head.finished.is_set():
            return
        said = _last_line(run_dir / "logs" / f"{LOCAL_ENGINE}.log")
        if process.returncode == 2:
            raise UsageError(f"local_engine: the learner's local engine cannot run: {said.removeprefix('shoal: ')}")
        pause = AGAIN_S[0] if trio.current_time() - began > AGAIN_S[1] else pause
        log.warning("the learner's local engine ended with status %d (%s); again in %.0f s", process.returncode, said, pause)
        await trio.sleep(pause)
        pause = min(2 * pause, AGAIN_S[1])

