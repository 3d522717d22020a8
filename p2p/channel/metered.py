"""Looks at the connections of a host for its meter: what the kernel counted, and how much peers may have under way.

Costs nothing while nobody limits or counts. Must not know channels or messages.
"""

from __future__ import annotations

from typing import Any

import trio

from p2p.allowance.meter import NOTHING_YET, HostMeter, WireCount
from p2p.channel.yamux import load_stack

SETTLE_S = 0.1
"""Seconds between two looks at the connections, at the least: a hundredth of the ten seconds over which a limit is kept."""

EACH_S = 0.001
"""Seconds more between two looks for each connection: a look is a system call, and a head has thousands."""


IDLE_S = 0.5
"""Seconds after which it is seen that somebody limits or counts from now on: a twentieth of those over which a limit is kept."""


class MeteredConnections:
    """The connections of `swarm`, libp2p's."""

    def __init__(self, swarm: Any, meter: HostMeter) -> None:
        self._swarm, self._meter = swarm, meter
        self._counts: dict[int, tuple[Any, WireCount]] = {}
        """by id of the connection, which is held so that the id is not another's"""
        self._clamped: dict[int, int] = {}
        self._looked = False
        """at the last look somebody limited or counted: what a connection did before that is nobody's business"""

    async def run(self) -> None:
        """For ever."""
        while True:
            connections = self._swarm.get_connections() if self._meter.looks or self._looked else []
            self.look(connections)
            await trio.sleep(max(SETTLE_S, EACH_S * len(connections)) if self._meter.looks else IDLE_S)

    def look(self, connections: list[Any]) -> None:
        """Count, and bound what is under way."""
        stack, meter = load_stack(), self._meter
        window = meter.window(len(connections))
        here = {id(connection): connection for connection in connections}
        self._counts = {key: value for key, value in self._counts.items() if key in here}
        self._clamped = {key: value for key, value in self._clamped.items() if key in here}
        looked, self._looked = self._looked, meter.looks
        for key, connection in here.items():
            count = stack.count_of(connection)
            if count is not None:
                _, before = self._counts.get(key, (None, NOTHING_YET if looked else count))
                meter.settle(before, count)
                self._counts[key] = connection, count
            held = self._clamped.get(key, 0)
            if window != held and (not held or not window or not 0.8 < window / held < 1.25):
                stack.clamp(connection, window)
                self._clamped[key] = window
                if not window:
                    del self._clamped[key]
