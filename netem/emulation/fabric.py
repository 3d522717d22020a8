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

from netem.networks.profile import Access, Host, Profile, Step


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
        """`rate` in bit/s; `steps` are (from when, rate) and replace it from then on, 0 being an outage."""
        self._rate, self._delay, self._jitter, self._loss, self._queue = rate, delay, jitter, loss, queue
        self._steps = tuple(steps)
        self._random = random.Random(seed)
        self._busy_until = self._last_arrival = float("-inf")
        self.lost = self.overflowed = self.passed = 0
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
        self.passed += 1
        return self._last_arrival

    def set_rate(self, now: float, rate: float, until: float | None = None) -> None:
        """Set the rate from `now` on (0: an outage), in place of the steps; with `until` only until then. Packets that were
        offered before, at most a full queue, leave as they would have."""
        after: list[tuple[float, float]] = []
        if until is not None:
            after = [(until, self._rate_at(until)), *(step for step in self._steps if step[0] > until)]
        self._steps = ((now, rate), *after)

    def _rate_at(self, at: float) -> float:
        return next((rate for since, rate in reversed(self._steps) if since <= at), self._rate)

    def _serialised(self, at: float, bits: float) -> float | None:
        """The time at which `bits` that start at `at` have left, over all changes of the rate; None in an outage that does not
        end."""
        if not self._steps:
            return at + bits / self._rate
        while True:
            rate = self._rate_at(at)
            change = next((since for since, _ in self._steps if since > at), None)
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
        self.up = {h.name: _pipe(h, "up", seed) for h in profile.hosts}
        self.down = {h.name: _pipe(h, "down", seed) for h in profile.hosts}
        self._lan = {
            (h.name, way): _lan_pipe(profile.sites[h.site], h.name, way, seed)
            for h in profile.hosts
            if h.site
            for way in ("up", "down")
        }
        self._events: list[tuple[float, int, bool, str, str, int, object]] = []
        self._count = 0

    def push(self, now: float, source: str, target: str, size: int, packet: object) -> bool:
        """Send a packet of `size` bytes. False when it was lost or dropped on the uplink. KeyError for an unknown host."""
        if target not in self._hosts:
            raise KeyError(f"no host {target!r}")
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
        """Set the rates of `host`'s access link (not of its site's LAN), in bit/s, from now on or for `seconds`. KeyError for an
        unknown host."""
        until = None if seconds is None else now + seconds
        self.up[host].set_rate(now, up, until)
        self.down[host].set_rate(now, down, until)

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


def _pipe(host: Host, way: str, seed: int) -> Pipe:
    a = host.access
    return Pipe(
        a.up if way == "up" else a.down, a.delay, jitter=a.jitter, loss=a.loss, queue=a.queue,
        steps=[(s.at, _rate(s, way)) for s in host.trace], seed=f"{seed}/{host.name}/{way}",
    )  # fmt: skip


def _rate(step: Step, way: str) -> float:
    return step.up if way == "up" else step.down


def _lan_pipe(a: Access, host: str, way: str, seed: int) -> Pipe:
    rate = a.up if way == "up" else a.down
    return Pipe(rate, a.delay, jitter=a.jitter, loss=a.loss, queue=a.queue, seed=f"{seed}/{host}/lan-{way}")
