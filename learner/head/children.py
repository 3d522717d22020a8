"""The processes that a learner keeps: its trainer, and the node with its local engine. Thin shell.

They die with the learner. Must not know what is trained or generated.
"""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path

import trio

from learner.config import LocalEngineSection
from learner.head.head import Head
from learner.head.local_engine import NAME
from p2p.errors import ShoalError, UsageError
from p2p.processes import Process, last_line, python_command, start

log = logging.getLogger("shoal.learner")

LOCAL_ENGINE = "local-engine"
"""The folder, in the run's, of the node with the learner's local engine."""

TRAINER = "learner.trainer.trainer"
"""The module of our trainer. It is a process of its own, and only that one imports torch."""

RANKS = "learner.trainer.ranks.launch"
"""The module that starts it as several processes, for `trainer.devices` above 1."""

NODE = "shoal"
"""The local engine's node is started as a user starts one, by `shoal node`: the learner must not import the node's package."""

AGAIN_S = (1.0, 60.0)
"""When the local engine's node ends, another is started so many seconds later: doubled each time up to the second number, until
a node lives that long."""

BAD_INPUT = 2
"""The exit status of a program of ours that cannot run with such settings: to start it again would not help."""


async def watch_external(head: Head) -> None:
    """Wait for the end of a trainer that is not ours. ShoalError when it comes before the run's."""
    await head.trainer_gone.wait()
    if not head.finished.is_set():
        raise ShoalError("the trainer is gone; start the learner again with --resume")


async def keep_trainer(head: Head, run_dir: Path) -> None:
    """Run our trainer until it ends. UsageError or ShoalError when that is before the run's end."""
    log_file = run_dir / "logs" / "trainer.log"
    devices = head.config.trainer.devices
    command = python_command(TRAINER, str(run_dir)) if devices == 1 else python_command(RANKS, str(run_dir), str(devices))
    process = start(command, stdout=log_file, stderr=subprocess.STDOUT)
    status = await _end_of(process)
    if not head.finished.is_set():
        reason = f"the trainer ended with status {status}: {last_line(log_file)}"
        if status == BAD_INPUT:
            raise UsageError(reason)
        raise ShoalError(f"{reason} (more in {run_dir}/logs/trainer.log; go on with --resume)")


async def _end_of(process: Process) -> int:
    """Wait for its exit status. When the wait is cancelled the process is killed."""
    try:
        # The stubs that mypy finds (trio-typing's, which libp2p brings) are older than trio.
        return await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)  # type: ignore[call-arg]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


async def keep_local_engine(head: Head, run_dir: Path, section: LocalEngineSection) -> None:
    """Run the node with the learner's local engine for as long as the run, and start it again when it ends. UsageError when it
    cannot run with such settings."""
    s, folder, pause = section, run_dir / LOCAL_ENGINE, AGAIN_S[0]
    log_file = run_dir / "logs" / f"{LOCAL_ENGINE}.log"
    options = [
        "node", "--join", str(folder / "ticket.txt"), "--dir", str(folder), "--name", NAME,
        "--listen", "/ip4/127.0.0.1/tcp/0", "--engine", s.engine, "--capacity", str(s.capacity), "--threads", str(s.threads),
        "--dtype", s.dtype, "--device", s.device, "--json",
    ]  # fmt: skip
    options += ["--engine-python", s.engine_python] if s.engine_python else []
    for key, value in s.engine_set.items():
        options += ["--engine-set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    command = python_command(NODE, *options)
    while not head.finished.is_set():
        began = trio.current_time()
        status = await _end_of(start(command, stdout=log_file, stderr=subprocess.STDOUT))
        if head.finished.is_set():
            return
        said = last_line(log_file)
        if status == BAD_INPUT:
            raise UsageError(f"local_engine: the learner's local engine cannot run: {said.removeprefix('shoal: ')}")
        pause = AGAIN_S[0] if trio.current_time() - began > AGAIN_S[1] else pause
        log.warning("the learner's local engine ended with status %d (%s); again in %.0f s", status, said, pause)
        await trio.sleep(pause)
        pause = min(2 * pause, AGAIN_S[1])
