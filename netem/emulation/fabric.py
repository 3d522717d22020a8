"""Packets through a profile's network: whether and when each one arrives. Pure: times are passed in, randomness is seeded.

Every back end that moves packets itself, and every test of one, runs on this; the simulator uses its pipes. Must not know
sockets, namespaces or what is in a packet.

A packet goes through its sender's uplink, the core, and its receiver's downlink. Each is a `Pipe`: a queue that drains at a
rate, then a delay. Between hosts of one site it goes through their LAN pipes instead.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from netem.networks.profile import Access, Profile, Step


class RateOverTime:
    """A rate in bit/s, 0 being an outage: its own at first, then that of each of `steps` (from when, rate), or what was set."""

    def __init__(self, rate: float, steps: Iterable[tuple[float, float]] = ()) -> None:
        self._rate, self.steps = rate, tuple(steps)

    def at(self, now: float) -> float:
        return next((rate for since, rate in reversed(self.steps) if since <= now), self._rate)

    def set(self, now: float, rate: float, until: float | None = None) -> None:
        """Set the rate from `now` on, in place of the steps; with `until` only until then, and then to what would have been."""
        after: list[tuple[float, float]] = []
        if until is not None:
            after = [(until, self.at(until)), *(step for step in self.steps if step[0] > until)]
        self.steps = ((now, rate), *after)


class Pipe:
    """One direction of a link. `offer` must be called with rising times.

    A packet waits until those before it are serialised, takes size / rate itself, and then `delay` plus jitter; packets
    stay in order. It is lost with probability `loss`, and dropped when more than `queue` seconds are waiting already.
    """

    def __init__(
        self,
        rate: float,
        delay: float = 0.0,
        *,
        jitter: float = 0.0,
        loss: float = 0.0,
        queue: float = float("inf"),
        steps: Iterable[tuple[float, float]] = (),
        seed: int | str = 0,
    ) -> None:
        """`rate` and `steps`: see `RateOverTime`."""
        self.rate, self._delay, self._jitter, self._loss, self._queue = RateOverTime(rate, steps), delay, jitter, loss, queue
        self._random = random.Random(seed)
        self._busy_until = self._last_arrival = float("-inf")
        self.lost = self.overflowed = 0
        """packets"""

    def offer(self, now: float, size: int) -> float | None:
        """When a packet of `size` bytes that comes now arrives at the far end; None when it does not."""
        if self._loss and self._random.random() < self._loss:
            self.lost += 1
            return None
        start = max(now, self._busy_until)
        if start - now > self._queue:
            self.overflowed += 1
            return None
        done = self._serialised(start, 8.0 * size)
        if done is None:
            self.overflowed += 1  # an outage that does not end
            return None
        self._busy_until = done
        wobble = self._random.gauss(0.0, self._jitter) if self._jitter else 0.0
        self._last_arrival = max(self._last_arrival, done + max(0.0, self._delay + wobble))
        return self._last_arrival

    def _serialised(self, at: float, bits: float) -> float | None:
        """The time at which `bits` that start at `at` have left, over all changes of the rate; None in an outage that does not
        end."""
        if not self.rate.steps:
            return at + bits / self.rate.at(at)
        while True:
            rate = self.rate.at(at)
            change = next((since for since, _ in self.rate.steps if since > at), None)
            if change is None:
                return at + bits / rate if rate > 0 else None
            room = (change - at) * rate
            if bits <= room:
                return at + bits / rate
            bits, at = bits - room, change


@dataclass(frozen=True, slots=True)
class Delivery:
    at: float
    host: str
    """who gets it"""
    packet: object


class Fabric:
    """All pipes of a profile. `push` takes a packet at its sender; `due` hands out what has arrived by a time.

    Both are called with times that never fall (one clock). The same profile, seed and calls give the same deliveries.
    """

    def __init__(self, profile: Profile, seed: int = 0) -> None:
        self.profile = profile
        self._hosts = {h.name: h for h in profile.hosts}
        self.up = {h.name: _pipe(h.access, "up", f"{seed}/{h.name}/up", h.trace) for h in profile.hosts}
        self.down = {h.name: _pipe(h.access, "down", f"{seed}/{h.name}/down", h.trace) for h in profile.hosts}
        self._lan = {
            (h.name, way): _pipe(profile.sites[h.site], way, f"{seed}/{h.name}/lan-{way}")
            for h in profile.hosts
            if h.site
            for way in ("up", "down")
        }
        self._events: list[tuple[float, int, bool, str, str, int, object]] = []
        self._count = 0

    def push(self, now: float, source: str, target: str, size: int, packet: object) -> bool:
        """Send a packet of `size` bytes. False when it was lost or dropped on the uplink."""
        pipe = self._lan[source, "up"] if self._local(source, target) else self.up[source]
        at = pipe.offer(now, size)
        if at is None:
            return False
        self._schedule(at, False, source, target=target, size=size, packet=packet)
        return True

    def due(self, now: float) -> list[Delivery]:
        """What has arrived by `now`, in order."""
        out: list[Delivery] = []
        while self._events and self._events[0][0] <= now:
            at, _, arrived, source, target, size, packet = heapq.heappop(self._events)
            if arrived:
                out.append(Delivery(at, target, packet))
                continue
            pipe = self._lan[target, "down"] if self._local(source, target) else self.down[target]
            then = pipe.offer(at, size)
            if then is not None:
                self._schedule(then, True, source, target=target, size=size, packet=packet)
        return out

    def set_rates(self, now: float, host: str, up: float, down: float, seconds: float | None = None) -> None:
        """Set the rates of `host`'s access link (not of its site's LAN), in bit/s, from now on or for `seconds`. Packets that
        were pushed before, at most a full queue, leave as they would have. KeyError for an unknown host."""
        until = None if seconds is None else now + seconds
        self.up[host].rate.set(now, up, until)
        self.down[host].rate.set(now, down, until)

    @property
    def next_at(self) -> float | None:
        """When `due` has something to do again; None when nothing is under way."""
        return self._events[0][0] if self._events else None

    def _local(self, source: str, target: str) -> bool:
        site = self._hosts[source].site
        return bool(site) and site == self._hosts[target].site

    def _schedule(self, at: float, arrived: bool, source: str, target: str, size: int, packet: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, arrived, source, target, size, packet))


def _pipe(a: Access, way: str, seed: str, trace: Iterable[Step] = ()) -> Pipe:
    """`way`: "up" or "down"."""
    rate = attrgetter(way)
    steps = [(step.at, rate(step)) for step in trace]
    return Pipe(rate(a), a.delay, jitter=a.jitter, loss=a.loss, queue=a.queue, steps=steps, seed=seed)
