"""The process that feeds one service: `python -m learner.tracking.child NAME RUN_DIR`. Blocking; must not know the head.

It follows metrics.jsonl until its standard input ends, which says that the run did: "finished" came first where it came to its
end. Then it tells what is left and ends by itself, also when its learner was killed.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from learner.run_dir import existing_run
from learner.section import read_toml
from learner.tracking.follower import MetricsFollower
from learner.tracking.services import SERVICES, TrackedRun, without_secrets
from learner.tracking.settings import TRACKERS, TrackerName, TrackingSection
from p2p.files import take_lock

POLL_S = 1.0
"""Seconds between two looks at metrics.jsonl: what a person watches moves no faster."""

LAST_S = 120.0
"""Seconds until it ends by force after its run did: a service that hangs then keeps no process."""

LOCK_S = 180.0
"""Seconds that it waits for the process before it, which may still tell what is left of the run's last life."""

FOLDER = "tracking"
"""The folder, in the run's, of what the services' processes keep."""


class _Learner:
    """The other end of standard input."""

    def __init__(self) -> None:
        self.ended, self.good = threading.Event(), False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        said = b""
        while data := os.read(0, 64):
            said = (said + data)[-64:]
        self.good = b"finished" in said
        self.ended.set()
        threading.Timer(LAST_S, os._exit, (1,)).start()


def tracked_run(name: TrackerName, run_dir: Path) -> TrackedRun:
    """What a service is told of the run itself. UsageError where the directory holds none."""
    config = read_toml(run_dir / "config.toml", "configuration")
    settings = TrackingSection.model_validate(config.get("tracking", {}))
    run = existing_run(run_dir, resume=True)
    assert run is not None
    folder = run_dir / ("tensorboard" if name == "tensorboard" else FOLDER)
    folder.mkdir(exist_ok=True)
    return TrackedRun(
        id=run, name=settings.name or f"{run_dir.resolve().name}-{run[:6]}", project=str(getattr(settings, name)), folder=folder,
        config=without_secrets(config),
    )  # fmt: skip


def follow(name: TrackerName, run_dir: Path, learner: _Learner) -> None:
    """Feed one service until the run is over."""
    run = tracked_run(name, run_dir)
    (run_dir / FOLDER).mkdir(exist_ok=True)
    with open(run_dir / FOLDER / f"{name}.lock", "ab") as lock:
        if not take_lock(lock.fileno(), LOCK_S):
            raise RuntimeError("another process feeds it for this run")
        kind = SERVICES[name]
        tracker = kind(run)  # type: ignore[call-arg]
        follower = MetricsFollower(run_dir / "metrics.jsonl", run_dir / FOLDER / f"{name}.json", takes_back=kind.takes_back)
        while True:
            last = learner.ended.is_set()  # before the look: what is written before the end is told
            some = False
            for step in follower.news():
                tracker.log(step)
                some = True
            if some:
                follower.keep()
            if last:
                break
            learner.ended.wait(POLL_S)
        tracker.finish(good=learner.good)


def main(argv: list[str]) -> None:
    """Feed the service NAME from RUN_DIR, and end this process: with status 1, and a line that says why, where that fails."""
    name, run_dir = argv
    (known,) = (one for one in TRACKERS if one == name)
    learner = _Learner()
    try:
        follow(known, Path(run_dir), learner)
    except BaseException as error:  # of anybody's package: one line, which the learner tells
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", flush=True)
        os._exit(1)  # whatever threads the package left
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
