"""What leaves this peer: one chunk after another, at the pace of its own uplink, to whom the sessions choose.

Must not know what is received or announced: it asks the sessions of `spreads` for the next chunk, and reads the store. The
choice is made when a chunk can leave, never before: what waits in a queue was chosen on older news.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping

import trio

from p2p.broadcast.transfer import MEASURED_S, Neighbour, Transfer, batches
from p2p.broadcast.uplink import Uplink
from p2p.errors import ChannelClosed
from p2p.limits import MIB
from p2p.protocol.versions import Chunk, Parts, Relieve
from p2p.protocol.wire import encode
from p2p.weights.store import ChunkStore

log = logging.getLogger("shoal.broadcast")

SHORTAGE_S = 1.0
"""Between attempts to read a chunk while the process is short of file handles or memory."""

RECENT_BYTES = 16 * MIB
"""Chunks kept in memory: one that is relayed is sent to each neighbour within about a second of its arrival."""

LONGEST_PAUSE_S = 0.05
"""The pace is looked at again so often: it may rise meanwhile."""

SHORTEST_PAUSE_S = 0.001

SMOOTHED = 0.8
"""A neighbour's connection is told of a new pace when it is so far from the one it knows."""

BURST = 1.25
"""One connection alone may go so much over the pace of all: it is told of a new one late."""


class Pump:
    """`lose(spread, chunk)` is called for a chunk that counted as held and is not in the store."""

    def __init__(
        self,
        spreads: Mapping[bytes, Transfer],
        store: ChunkStore,
        now: Callable[[], float],
        lose: Callable[[Transfer, int], None],
    ) -> None:
        self._spreads, self._store, self._now, self._lose = spreads, store, now, lose
        self.uplink = Uplink()
        self.sent = 0
        """payload bytes of chunks, over all manifests"""
        self._order: OrderedDict[str, Neighbour] = OrderedDict()
        """neighbours, the one served longest ago first"""
        self._recent: OrderedDict[bytes, bytes] = OrderedDict()
        self._recent_bytes = 0
        self._wake = trio.Event()
        self._acked: dict[str, int] = {}
        self._delivered = self._resent = 0
        self._resent_by: dict[str, int] = {}

    def wake(self) -> None:
        """Something may have become possible: a chunk, a want, room at a neighbour."""
        self._wake.set()

    def keep(self, digest: bytes, data: bytes) -> None:
        """`data` was verified just now and may be relayed soon."""
        if digest not in self._recent:
            self._recent[digest] = data
            self._recent_bytes += len(data)
            while self._recent_bytes > RECENT_BYTES:
                self._recent_bytes -= len(self._recent.popitem(last=False)[1])

    async def run(self) -> None:
        """Hands out chunks, oldest version first (later deltas build on it), for ever."""
        while True:
            self._wake = trio.Event()
            pause = self.uplink.wait(self._now()) if self._acked else 0.0  # without a word of the path, nothing to pace by
            if pause > SHORTEST_PAUSE_S:
                await trio.sleep(min(pause, LONGEST_PAUSE_S))
                continue
            if not self._hand_out():
                await self._wake.wait()
            else:
                await trio.lowlevel.checkpoint()

    def _hand_out(self) -> bool:
        ready = [name for name, peer in self._order.items() if peer.job is None]
        now = self._now()
        for spread in sorted(self._spreads.values(), key=lambda s: s.manifest.version):
            found = spread.session.next(ready, now) if ready else None
            if found is None:
                continue
            name, chunk, duty = found
            peer = self._order[name]
            peer.job = spread, chunk, duty
            peer.measured_until = now + MEASURED_S
            peer.wake.set()
            self._order.move_to_end(name)
            self.uplink.spent(now, spread.manifest.chunk_size(chunk))
            for whom, taken in spread.session.relieved():
                if whom in self._order:
                    self._order[whom].post(Relieve(spread.manifest.mid, (taken,)))
            return True
        # When more than half of the channels have no room our uplink is full; a few may be slow at their other end.
        if 2 * len(ready) >= len(self._order):
            self.uplink.idle(now)
        return False

    async def serve(self, peer: Neighbour) -> None:
        """The bulk channel of one neighbour, until it closes or its scope is cancelled."""
        self._order[peer.name] = peer
        self._acked.pop(peer.name, None)
        self._resent_by.pop(peer.name, None)
        self.wake()
        with peer.scope:
            try:
                while True:
                    if peer.job is None:
                        peer.wake = trio.Event()
                        await peer.wake.wait()
                        continue
                    await self._send(peer, *peer.job)
                    peer.job = None
                    self.wake()
            except ChannelClosed as closed:
                log.info("bulk channel to %s ended: %s", peer.name, closed)
        if self._order.get(peer.name) is peer:
            del self._order[peer.name]

    async def _send(self, peer: Neighbour, spread: Transfer, chunk: int, duty: int) -> None:
        digest = spread.manifest.chunk_digest(chunk)
        data = await self.read(digest) if digest is not None else None
        if data is None:
            self._lose(spread, chunk)
            return
        mid, segment = spread.manifest.mid, spread.manifest.segment_of(chunk)
        if segment is not None and (mid, segment) not in peer.parts_sent:
            # Ahead of the chunk and on the same channel, so the neighbour can always prove what it gets.
            peer.parts_sent.add((mid, segment))
            parts = [p for p in (_header_once(peer, spread), spread.manifest.part_of(chunk)) if p]
            for batch in batches(parts):
                await peer.bulk.send(encode(Parts(mid, batch)))
        spread.traffic.first_at = spread.traffic.first_at or self._now()
        await peer.bulk.send(encode(Chunk(mid, chunk, int(duty), data)))
        spread.traffic.sent += len(data)
        self.sent += len(data)

    async def read(self, digest: bytes) -> bytes | None:
        """As `read_chunk`, past the disk where it is still in memory."""
        data = self._recent.get(digest)
        if data is None:
            data = await read_chunk(self._store, digest)
            if data is not None:
                self.keep(digest, data)
        return data

    def measure(self) -> None:
        """Look at what the channels delivered; some 20 times a second."""
        queueing: float | None = None
        now = self._now()
        for name, peer in self._order.items():
            path = peer.bulk.path() if now < peer.measured_until else None
            if path is None:
                continue
            if path.unacked or peer.job is not None:
                peer.measured_until = now + MEASURED_S
            before = self._acked.get(name, path.delivered)
            # A new connection counts from its first look; what was guessed of pieces out of order may be corrected down.
            gained = max(0, path.delivered - before)
            self._acked[name] = max(before, path.delivered)
            self._delivered += gained
            self._resent += max(0, path.resent - self._resent_by.get(name, path.resent))
            self._resent_by[name] = path.resent
            if gained or path.unacked:
                waits = max(0.0, path.rtt_s - path.min_rtt_s)
                queueing = waits if queueing is None else min(queueing, waits)
        if self._acked:
            self.uplink.observe(now, self._delivered, queueing, self._resent)
            pace = self.uplink.pace
            for peer in self._order.values():
                if not SMOOTHED < pace / peer.smoothed < 1 / SMOOTHED:
                    peer.smoothed = pace
                    peer.bulk.smooth(pace * BURST)


async def read_chunk(store: ChunkStore, digest: bytes) -> bytes | None:
    """As `store.get`, but a want of file handles or memory, which says nothing about the chunk, is waited out."""
    while True:
        try:
            return store.get(digest)
        except OSError as error:
            log.error("cannot read a chunk now: %s; trying again in %.0f s", error, SHORTAGE_S)
            await trio.sleep(SHORTAGE_S)


def _header_once(peer: Neighbour, spread: Transfer) -> bytes | None:
    key = (spread.manifest.mid, -1)
    if key in peer.parts_sent:
        return None
    peer.parts_sent.add(key)
    return spread.manifest.parts()[0]
