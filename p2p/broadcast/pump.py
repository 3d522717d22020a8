"""What leaves this peer: the shell that carries out what `pump_core` chooses, over real channels, a store and a clock.

Must not know what is received or announced, nor who gets the next chunk.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

import trio

from p2p.broadcast.pump_core import PumpCore
from p2p.broadcast.transfer import MEASURED_S, Job, Neighbour, Transfer
from p2p.errors import ChannelClosed
from p2p.limits import MIB
from p2p.protocol.versions import Chunk
from p2p.protocol.wire import encode
from p2p.weights.store import ChunkStore

log = logging.getLogger("shoal.broadcast")

SHORTAGE_S = 1.0
"""Seconds between attempts to read a chunk while the process is short of file handles or memory."""

RECENT_BYTES = 16 * MIB
"""Bytes of chunks kept in memory: one that is relayed is sent to each neighbour within about a second of its arrival."""

SMOOTHED = 0.8
"""A neighbour's connection is told of a new pace when the pace is below this share of the one it knows, or as far above it."""

BURST = 1.25
"""One connection alone may go so many times over the pace of all: it is told of a new one late."""


@dataclass
class _Task:
    """What serves one neighbour, and what was last read off its connection."""

    scope: trio.CancelScope
    given: trio.Event = field(default_factory=trio.Event)
    """set when the neighbour has a job"""
    left: list[bytes] = field(default_factory=list)
    """messages of its job that the channel had no room for"""
    acked: int | None = None
    """bytes that its system had acknowledged; None before the first look"""
    resent: int = 0
    """bytes that had been sent once more"""


class Pump(PumpCore):
    """`lose(transfer, chunk)` is called for a chunk that counted as held and is not in the store."""

    def __init__(
        self,
        transfers: Mapping[bytes, Transfer],
        store: ChunkStore,
        now: Callable[[], float],
        lose: Callable[[Transfer, int], None],
    ) -> None:
        super().__init__(transfers)
        self._store, self._now, self._lose = store, now, lose
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._wake = trio.Event()
        self._tasks: dict[Neighbour, _Task] = {}
        self._measured = False
        """some connection has been looked at: there is something to pace by"""
        self._delivered = self._resent = 0

    def wake(self) -> None:
        self._wake.set()

    def keep(self, digest: bytes, data: bytes) -> None:
        """Remember `data`, the newest RECENT_BYTES of it, so that relaying needs no disk."""
        if digest not in self._recent:
            self._recent[digest] = data
            self._recent_bytes += len(data)
            while self._recent_bytes > RECENT_BYTES:
                self._recent_bytes -= len(self._recent.popitem(last=False)[1])

    async def run(self) -> None:
        """Hands out chunks, oldest version first (later deltas build on it), for ever."""
        while True:
            self._wake = trio.Event()
            pause = self.pause(self._now()) if self._measured or self.closed or self.uplink.cap < inf else 0.0
            if pause:
                await trio.sleep(pause)
                continue
            peer = self.next(self._now())
            if peer is None:
                await self._wake.wait()
                continue
            if not self._send_at_once(peer):
                self._tasks[peer].given.set()
            await trio.lowlevel.checkpoint()

    def _send_at_once(self, peer: Neighbour) -> bool:
        """Hand the neighbour's job to its channel, if its chunk is in memory and there is room: the task that serves it costs a
        turn of the scheduler a chunk. What finds no room is left to that task."""
        job, task = peer.job, self._tasks[peer]
        digest = job.transfer.manifest.chunk_digest(job.chunk) if job is not None else None
        data = self._recent.get(digest) if digest is not None else None
        if job is None or data is None:
            return False
        task.left = self._messages(peer, job, data)
        try:
            while task.left and peer.bulk.try_send(task.left[0], more=len(task.left) > 1):
                del task.left[0]
        except ChannelClosed:  # the task finds that out, and ends
            return False
        if task.left:
            return False
        self.count_sent(job)
        peer.job = None
        return True

    async def serve(self, peer: Neighbour) -> None:
        """Send the jobs of one neighbour, until its bulk channel closes or it is dropped."""
        if peer.gone:
            return
        with trio.CancelScope() as scope:
            task = self._tasks[peer] = _Task(scope)
            self.enter(peer)
            try:
                while True:
                    if peer.job is None:
                        task.given = trio.Event()
                        await task.given.wait()
                        continue
                    messages = task.left or await self._read_job(peer, peer.job)
                    for message in messages:
                        await peer.bulk.send(message)
                    if messages:
                        self.count_sent(peer.job)
                    task.left, peer.job = [], None
                    self.wake()
            except ChannelClosed as closed:
                log.info("bulk channel to %s ended: %s", peer.name, closed)
            finally:
                del self._tasks[peer]
                super().drop(peer)

    def drop(self, peer: Neighbour) -> None:
        super().drop(peer)
        if peer in self._tasks:
            self._tasks[peer].scope.cancel()

    async def _read_job(self, peer: Neighbour, job: Job) -> list[bytes]:
        """As `_messages`; nothing when the chunk is not in the store any more."""
        digest = job.transfer.manifest.chunk_digest(job.chunk)
        data = await self.read(digest) if digest is not None else None
        if data is None:
            self._lose(job.transfer, job.chunk)
            return []
        return self._messages(peer, job, data)

    def _messages(self, peer: Neighbour, job: Job, data: bytes) -> list[bytes]:
        """What is sent for a job: what leaves ahead of the chunk, which counts as sent, and the chunk."""
        job.transfer.traffic.first_at = job.transfer.traffic.first_at or self._now()
        return [*map(encode, self.ahead(peer, job)), encode(Chunk(job.transfer.manifest.mid, job.chunk, job.duty, data))]

    async def read(self, digest: bytes) -> bytes | None:
        """As `store.get`, past the disk where it is still in memory. A want of file handles or memory, which says nothing about
        the chunk, is waited out."""
        data = self._recent.get(digest)
        while data is None:
            try:
                data = self._store.get(digest)
            except OSError as error:
                log.error("cannot read a chunk now: %s; trying again in %.0f s", error, SHORTAGE_S)
                await trio.sleep(SHORTAGE_S)
            else:
                if data is None:
                    return None
                self.keep(digest, data)
        return data

    def measure(self) -> None:
        """Sum up what all connections delivered, pace the uplink by it, and tell each connection of the pace."""
        queueing: float | None = None
        now = self._now()
        for peer, task in self._tasks.items():
            path = peer.bulk.path() if now < peer.measured_until else None
            if path is None:
                continue
            if path.unacked or peer.job is not None:
                peer.measured_until = now + MEASURED_S
            if task.acked is None:  # a new connection counts from its first look
                task.acked, task.resent, self._measured = path.delivered, path.resent, True
            # What was guessed of pieces out of order may be corrected down.
            gained = max(0, path.delivered - task.acked)
            task.acked += gained
            self._delivered += gained
            self._resent += max(0, path.resent - task.resent)
            task.resent = path.resent
            if gained or path.unacked:
                waits = max(0.0, path.rtt_s - path.min_rtt_s)
                queueing = waits if queueing is None else min(queueing, waits)
        if self._measured:
            self.uplink.observe(now, self._delivered, queueing, self._resent)
            pace = self.uplink.pace
            for peer in self.order.values():
                if not SMOOTHED < pace / peer.smoothed < 1 / SMOOTHED:
                    peer.smoothed = pace
                    peer.bulk.smooth(pace * BURST)
