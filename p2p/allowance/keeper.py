"""Keeps what a host's owner allows while a process runs: looks at the file of limits, the clock, the day's bytes and at others
once a second, and tells the meter and the swarm what holds. Thin shell; what holds is decided in `permission`.

Must not know the swarm: it is told whom to tell. The file is how a command reaches a running process (`change_limits`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import trio

from p2p.allowance.giving_way import GivesWay, OthersUse
from p2p.allowance.hours import LocalTime
from p2p.allowance.limits import NO_LIMITS, HostLimits, read_limits, written_limits
from p2p.allowance.meter import HostMeter
from p2p.allowance.payload import PayloadPart
from p2p.allowance.permission import Permission, permit
from p2p.allowance.quota import DayCount
from p2p.errors import UsageError
from p2p.files import write_whole

log = logging.getLogger("shoal.allowance")

LIMITS_FILE = "limits.json"
"""The file with a process's limits in its folder: written by the process when it starts, and by commands while it runs."""

STATE_FILE = "allowance.json"
"""The file with the day's bytes and what holds now, for the next start and for who looks."""

LOOK_S = 1.0
"""Seconds between two looks: so soon a command, a clock and a busy GPU are noticed."""

WRITE_S = 10.0
"""Seconds between two times that the day's bytes are written down: a crash costs the count so much at the most."""


class OthersLook(Protocol):
    """Sees what others use."""

    def sample(self, now: float) -> OthersUse:
        """Over the last seconds."""


class Allowed(Protocol):
    """Who is told: the swarm."""

    def allow(self, relays: float | None, chunks: float | None, down: float) -> None:
        """As `ExchangeCore.allow`."""

    @property
    def chunk_bytes_sent(self) -> int:
        """Payload of all chunks that left."""

    @property
    def uplink_rate(self) -> float:
        """Bytes/s that the uplink is known to carry."""


def local_time(unix: float) -> LocalTime:
    """What the clock of this machine shows, in its time zone (TZ)."""
    shown = time.localtime(unix)
    return LocalTime(time.strftime("%Y-%m-%d", shown), 60 * shown.tm_hour + shown.tm_min)


class AllowanceKeeper:
    """`folder`: where the files lie. `clock(wall())` is what the host's clock shows, `now` counts seconds. `sampler` makes what
    looks at others, when giving way is first asked for."""

    def __init__(
        self,
        limits: HostLimits,
        folder: Path,
        *,
        meter: HostMeter | None = None,
        now: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
        clock: Callable[[float], LocalTime] = local_time,
        sampler: Callable[[HostMeter], OthersLook] | None = None,
    ) -> None:
        self.limits, self._folder = limits, folder
        self.meter = meter or HostMeter(now)
        self._now, self._wall, self._clock = now, wall, clock
        self._make_sampler = sampler
        self.others = GivesWay()
        self.count = _read_count(folder / STATE_FILE)
        self.permission = Permission()
        self.changed = trio.Event()
        """set, and replaced, when limits or permission are others than before"""
        self._part = PayloadPart()
        self._told: Allowed | None = None
        self._counted, self._written_at = 0, float("-inf")
        self._looker: OthersLook | None = None
        self._stamp: object = None
        write_whole(folder / LIMITS_FILE, written_limits(limits))
        self._stamp = _stamp(folder / LIMITS_FILE)
        if limits != NO_LIMITS:
            log.info("limits: %s", limits)
        self.look()

    def tell(self, told: Allowed | None) -> None:
        """Whom to tell from now on; None for nobody."""
        self._told, self._part = told, PayloadPart()
        self._apply()

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                self.look()
                await trio.sleep(LOOK_S)
        finally:
            self._write()

    def look(self) -> None:
        """Once a second."""
        self._reread()
        now, clock = self._now(), self._clock(self._wall())
        moved = self.meter.sent + self.meter.received
        self.count.add(clock.day, moved - self._counted)
        self._counted = moved
        if self.limits.gives_way and self._make_sampler is not None:
            self._looker = self._looker or self._make_sampler(self.meter)
            self.others.look(now, self._looker.sample(now), self._told.uplink_rate if self._told is not None else 0.0)
        before, self.permission = self.permission, permit(self.limits, clock, self.count, self.others)
        if self.permission != before:
            self._say(before)
        self._apply()
        if now - self._written_at >= WRITE_S or self.permission != before:
            self._write()
        if self.permission != before:
            self.wake()

    def _apply(self) -> None:
        limits, meter, told = self.limits, self.meter, self._told
        meter.counts = bool(limits.daily or limits.gives_way)
        if (meter.up.rate, meter.down.rate) != (limits.up, limits.down):
            meter.limit(limits.up, limits.down)
        if told is not None:
            self._part.look(self._now(), meter.sent, told.chunk_bytes_sent)
            told.allow(self.permission.relays, self._part.of(limits.up) if limits.up else None, limits.down)

    def wake(self) -> None:
        """Have who waits for `changed` look again."""
        self.changed.set()
        self.changed = trio.Event()

    def _say(self, before: Permission) -> None:
        for was, now, what in (
            (before.idles, self.permission.idles, "no work is taken"),
            (before.keeps, self.permission.keeps, "nothing is relayed"),
        ):  # fmt: skip
            if now and now != was:
                log.info("%s: %s", what, now)
            elif was and not now:
                log.info("%s no longer: %s", what, was)

    def _reread(self) -> None:
        path = self._folder / LIMITS_FILE
        stamp = _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            new = read_limits(path.read_text(encoding="utf-8"))
        except (OSError, UsageError) as error:
            log.error("%s is not followed: %s", path, error)
            return
        if new != self.limits:
            self.limits = new
            log.info("limits from here on: %s", new if new != NO_LIMITS else "none")
            self.wake()

    def _write(self) -> None:
        self._written_at = self._now()
        p = self.permission
        state = {"day": self.count.day, "used": self.count.used, "says": p.rests or "; ".join(filter(None, (p.idles, p.keeps)))}
        with suppress(OSError):  # a full disk: the day's count is then as old as its last writing
            write_whole(self._folder / STATE_FILE, json.dumps(state) + "\n")


def change_limits(folder: Path, said: Mapping[str, Any]) -> HostLimits:
    """Change the limits of the process that runs in `folder`, which looks at them once a second; how they are now. UsageError for
    bad limits, and where no process of this version has begun."""
    path = folder / LIMITS_FILE
    try:
        limits = read_limits(path.read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{folder} has no {LIMITS_FILE}: nothing runs there, or it is of another version") from None
    new = limits.changed(said)
    if new != limits:
        write_whole(path, written_limits(new))
    return new


def what_holds(folder: Path) -> str:
    """Why the process in `folder` rests, idles or relays nothing, as it last wrote; "" for no reason."""
    try:
        return str(json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))["says"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _read_count(path: Path) -> DayCount:
    try:
        return DayCount.read(path.read_text(encoding="utf-8"))
    except OSError:
        return DayCount()


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
