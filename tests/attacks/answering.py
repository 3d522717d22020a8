"""How long a head at work is silent, by the wall clock: to its own timers, and to who asks its status page five times a second.
Less what its threads waited for a core meanwhile, as the kernel counts it: other programs may share the machine.

`python -m tests.attacks.answering PORT FILE` is who asks, until killed; it ends when an answer is none.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import trio

from learner.status.server import serve_status

LOOK_S = 0.05
"""Seconds between two looks of a timer at how late it is."""

ASK_S = 0.2
"""Seconds from one question to the next; a late answer puts it off."""

GIVE_UP_S = 60.0
"""Seconds after which an answer is taken never to come."""


def waited_for_core(thread: int | str) -> float:
    """Seconds that a thread of this process was ready to run and had no core."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9


class Asked(NamedTuple):
    """One question: when it was put, until when it was answered, and how long who asked waited for a core. Seconds of the
    monotonic clock, which all processes share."""

    begun: float
    took: float
    waited: float


class Look(NamedTuple):
    """What the loop's thread, and the one that takes connections, had waited for a core until `at`."""

    at: float
    loop: float
    door: float

    def when(self) -> float:
        return self.at


class Answering:
    """`late_s`: the latest that a timer of the loop woke; `unexcused_s`: the same less what its thread waited for a core."""

    def __init__(self, file: Path) -> None:
        self._file, self._loop = file, threading.get_native_id()
        self._door = self._loop
        self._looks: list[Look] = []
        self._answers: list[tuple[float, float]] = []
        """of each: when its thread had the state, and for how long that thread had waited for a core"""
        self.reset()

    def reset(self) -> None:
        self.late_s = self.unexcused_s = 0.0

    @contextmanager
    def page(self, status: Callable[[], dict[str, Any]]) -> Iterator[int]:
        """The port at which a head's state is asked for, as a learner serves it."""
        token = trio.lowlevel.current_trio_token()

        def snapshot() -> dict[str, Any]:
            values = trio.from_thread.run_sync(status, trio_token=token)
            self._answers.append((time.monotonic(), waited_for_core(threading.get_native_id())))
            return values

        with serve_status(0, snapshot) as port:
            self._door = next(t.native_id or 0 for t in threading.enumerate() if t.name == "status")
            yield port

    async def look(self) -> None:
        """For ever."""
        while True:
            before, due = waited_for_core(self._loop), time.monotonic() + LOOK_S
            await trio.sleep(LOOK_S)
            now, waited = time.monotonic(), waited_for_core(self._loop)
            self.late_s = max(self.late_s, now - due)
            self.unexcused_s = max(self.unexcused_s, now - due - (waited - before))
            self._looks.append(Look(now, waited, waited_for_core(self._door)))

    async def asked(self, begun: float, ended: float) -> tuple[float, float]:
        """The longest that an answer took to a question put in between, and the same less what all who had a part in it waited
        for a core. Returns when all those are answered."""
        with trio.fail_after(GIVE_UP_S):
            while not (rows := self._rows()) or rows[-1].begun < ended:
                await trio.sleep(LOOK_S)
        rows = [row for row in rows if begun <= row.begun < ended]
        return max(row.took for row in rows), max(row.took - self._excused(row) for row in rows)

    def begun(self) -> bool:
        """Whether anything was answered yet."""
        return bool(self._rows())

    def _rows(self) -> list[Asked]:
        return [Asked(*json.loads(line)) for line in self._file.read_text().splitlines()] if self._file.exists() else []

    def _excused(self, row: Asked) -> float:
        """One of them waits after the other: who asks, who takes the connection, the loop, who writes the answer. From the last
        look before the question to the first after its answer: on a busy machine, where looks are far apart, it is too much."""
        ended = row.begun + row.took
        before = self._looks[max(0, bisect_right(self._looks, row.begun, key=Look.when) - 1)]
        after = self._looks[min(len(self._looks) - 1, bisect_left(self._looks, ended, key=Look.when))]
        wrote = sum(waited for at, waited in self._answers if row.begun <= at <= ended)
        return row.waited + after.loop - before.loop + after.door - before.door + wrote


def ask(port: int, file: Path) -> None:
    """For ever."""
    me = threading.get_native_id()
    with file.open("a", buffering=1) as out:
        while True:
            before, begun = waited_for_core(me), time.monotonic()
            with urlopen(f"http://127.0.0.1:{port}/status", timeout=GIVE_UP_S) as answer:
                json.load(answer)
            took = time.monotonic() - begun
            out.write(json.dumps(Asked(begun, took, waited_for_core(me) - before)) + "\n")
            time.sleep(max(0.0, ASK_S - took))


if __name__ == "__main__":
    ask(int(sys.argv[1]), Path(sys.argv[2]))
