"""Whether a version fits into what the owner of a node allows: disk, and bytes a day; and how long it takes at the owner's rate.

Must not know how versions travel. A node's folder holds two states (the one that serves and the one that is made), the model's
small files, and chunks: what the states leave of the disk is the chunks'.
"""

from __future__ import annotations

import logging

from p2p.allowance.limits import GB, MBIT, NO_LIMITS, HostLimits
from p2p.errors import Refusal
from p2p.limits import MIB
from p2p.quantities import human_bytes, human_seconds
from p2p.version import Version
from p2p.weights.store import ChunkStore

log = logging.getLogger("shoal.install")

STATES = 2
"""States on a node's disk at once."""

SMALL_FILES = 64 * MIB
"""Bytes of a node's folder that are neither state nor chunk: tokenizer and config (at most 64 MiB), keys, logs."""

LEAST_CHUNKS = 16 * MIB
"""Bytes of chunks that a node may hold whatever its disk: the model's description comes in chunks, too."""

LONG_S = 600.0
"""Seconds of a download above which a person is told beforehand how long it takes."""


class NoRoom(Refusal):
    """A version that the owner's limits have no room for. Nobody's fault: nobody is told but this node's owner."""


class InstallRoom:
    """`store`: the node's chunks, at most `store_limit` bytes of them whatever the limits say."""

    def __init__(self, store: ChunkStore, store_limit: int) -> None:
        self._store, self._store_limit = store, store_limit
        self._limits, self._state_bytes = NO_LIMITS, 0
        self._warned: set[Version] = set()

    def allow(self, limits: HostLimits) -> None:
        """These hold from now on. What the chunks have beyond them goes, the oldest first."""
        self._limits = limits
        self._fit()

    def _fit(self) -> None:
        disk = self._limits.disk
        rest = max(LEAST_CHUNKS, disk - STATES * self._state_bytes - SMALL_FILES)
        self._store.set_limit(min(self._store_limit, rest) if disk else self._store_limit)

    def check(self, version: Version, state_bytes: int, payload: int) -> None:
        """NoRoom when a version of `payload` bytes on the wire (0 where that is not known yet), whose state has `state_bytes`,
        cannot be held here. Warns, once, of one that takes long."""
        limits = self._limits
        self._state_bytes = max(self._state_bytes, state_bytes)
        need = STATES * state_bytes + payload + SMALL_FILES
        if limits.disk and need > limits.disk:
            raise NoRoom(
                f"it needs {human_bytes(need)} of disk (two states of {human_bytes(state_bytes)}, chunks of "
                f"{human_bytes(payload)}), --max-disk allows {limits.disk / GB:g} GB", version=version,
            )  # fmt: skip
        if limits.daily and payload > limits.daily:
            raise NoRoom(
                f"it is {human_bytes(payload)} on the wire, --quota-gb-per-day allows {limits.daily / GB:g} GB a day",
                version=version,
            )
        self._fit()
        if limits.down and payload / limits.down > LONG_S and version not in self._warned:
            self._warned.add(version)
            takes = human_seconds(payload / limits.down)
            log.warning("version %s takes %s at --max-down-mbit %g", version, takes, limits.down / MBIT)
