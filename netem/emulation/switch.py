"""The user-space switch: reads packets from every host's TUN device and hands each one on when it is due by the fabric.

One thread, one loop. Must not know how devices came to be, or what is in a packet beyond its destination.
"""

from __future__ import annotations

import ipaddress
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping

from netem.emulation.fabric import Fabric

BATCH = 64
"""Packets read from one device before the next device's turn, so that one busy host cannot starve the others."""

IDLE_S = 0.05
"""Seconds between two looks at `stop` while nothing happens; a network ends within that."""


class Switch:
    """`tuns`: host -> descriptor; `addresses`: IPv4 or IPv6 address -> host. Packets to anything else are dropped."""

    def __init__(
        self,
        fabric: Fabric,
        tuns: Mapping[str, int],
        addresses: Mapping[str, str],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fabric, self._tuns, self._now = fabric, dict(tuns), now
        self._host_of = {ipaddress.ip_address(address).packed: host for address, host in addresses.items()}
        self._by_fd = {fd: host for host, fd in self._tuns.items()}
        self._calls: deque[Callable[[Fabric, float], None]] = deque()
        self.late = 0.0
        """seconds that the latest hand-over was late, at most, since this was last set to 0: what the emulation adds to a
        delay"""

    def call(self, change: Callable[[Fabric, float], None]) -> None:
        """Have the switch's thread call `change(fabric, now)` within IDLE_S. May be called from any thread."""
        self._calls.append(change)

    def run(self, stop: Callable[[], bool]) -> None:
        """Move packets until `stop()` is true. OSError when a device is gone."""
        poll = select.epoll()
        try:
            for fd in self._by_fd:
                poll.register(fd, select.EPOLLIN)
            began = self._now()
            while not stop():
                now = self._now() - began
                while self._calls:
                    self._calls.popleft()(self._fabric, now)
                due = self._fabric.next_at
                wait = IDLE_S if due is None else min(max(due - now, 0.0), IDLE_S)
                for fd, _ in poll.poll(wait):
                    self._read(fd, self._now() - began)
                self._deliver(self._now() - began)
        finally:
            poll.close()

    def _read(self, fd: int, now: float) -> None:
        source = self._by_fd[fd]
        for _ in range(BATCH):
            try:
                packet = os.read(fd, 65_536)
            except BlockingIOError:
                return
            target = self._host_of.get(packet[16:20] if packet[0] >> 4 == 4 else packet[24:40])
            # Not neighbour discovery, multicast, addresses of nobody.
            if target is not None and target != source:
                self._fabric.push(now, source, target, len(packet), packet)

    def _deliver(self, now: float) -> None:
        for delivery in self._fabric.due(now):
            self.late = max(self.late, now - delivery.at)
            packet = delivery.packet
            assert isinstance(packet, bytes)
            try:
                os.write(self._tuns[delivery.host], packet)
            except BlockingIOError:
                pass  # the receiver's device is full: a real one drops, too
