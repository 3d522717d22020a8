"""The machine that a simulated broadcast runs on: how long its peers' work takes, and how many of them can work at once.

Real swarms have a core or more a node: their simulation needs none of this. An emulation of nine nodes on two cores does, and
then a broadcast that is short against its work waits for cores, not for links. Must not know what the work is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CHUNK_S = 0.001
"""Core seconds for a chunk, at its sender and its receiver in all, where nothing better is known."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` that all peers share; None when every peer has one to itself. `chunk_s` core seconds for a chunk that is sent,
    received, verified, stored and relayed, whichever its size."""

    cores: int | None = None
    chunk_s: float = CHUNK_S


class Cores:
    """When work is done that is asked for in the order of time. A peer works on one thing at a time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._free = [-math.inf] * (machine.cores or 0)
        """per core: when it has done what it was given"""
        self._peer: dict[str, float] = {}
        """per peer: when it has done what it was given"""

    def done(self, now: float, peer: str) -> float:
        """When `peer` will have done one chunk's work, which was given to it now."""
        begin = max(now, self._peer.get(peer, -math.inf))
        if self._free:
            begin = max(begin, min(self._free))
        end = self._peer[peer] = begin + self._machine.chunk_s
        if self._free:
            # The core that became free last: one that has been idle for longer may still be idle for somebody earlier.
            core = max((i for i, at in enumerate(self._free) if at <= begin), key=self._free.__getitem__)
            self._free[core] = end
        return end
