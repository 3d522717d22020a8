"""The bulk channel of one neighbour at a time: sends what the sessions choose for it, each chunk after its proof.

Must not know what is received or announced: it asks the sessions of `spreads` for the next chunk, and reads the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import trio

from p2p.broadcast.spread import Neighbour, Spread, batches
from p2p.errors import ChannelClosed
from p2p.protocol.messages import Chunk, Parts
from p2p.protocol.wire import encode
from p2p.store import ChunkStore

log = logging.getLogger("shoal.broadcast")


SHORTAGE_S = 1.0
"""Between attempts to read a chunk while the process is short of file handles or memory."""


class BulkSender:
    """`lose(spread, chunk)` is called for a chunk that counted as held and is not in the store."""

    def __init__(
        self,
        spreads: Mapping[bytes, Spread],
        store: ChunkStore,
        now: Callable[[], float],
        lose: Callable[[Spread, int], None],
    ) -> None:
        self._spreads, self._store, self._now, self._lose = spreads, store, now, lose

    async def serve(self, peer: Neighbour) -> None:
        """Hands this neighbour one chunk after another, oldest version first (later deltas build on it), until its
        channel closes or its scope is cancelled."""
        with peer.scope:
            try:
                while True:
                    peer.wake = trio.Event()
                    choice = self._next_for(peer)
                    if choice is None:
                        await peer.wake.wait()
                        continue
                    await self._send(peer, *choice)
            except ChannelClosed as closed:
                log.info("bulk channel to %s ended: %s", peer.name, closed)

    async def _send(self, peer: Neighbour, spread: Spread, chunk: int, seed: bool) -> None:
        digest = spread.manifest.chunk_digest(chunk)
        data = await read_chunk(self._store, digest) if digest is not None else None
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
        await peer.bulk.send(encode(Chunk(mid, chunk, seed, data)))
        spread.traffic.sent += len(data)

    def _next_for(self, peer: Neighbour) -> tuple[Spread, int, bool] | None:
        now = self._now()
        for spread in sorted(self._spreads.values(), key=lambda s: s.manifest.version):
            found = spread.session.next_for(peer.name, now)
            if found is not None:
                return spread, found[0], found[1]
        return None


async def read_chunk(store: ChunkStore, digest: bytes) -> bytes | None:
    """As `store.get`, but a want of file handles or memory, which says nothing about the chunk, is waited out."""
    while True:
        try:
            return store.get(digest)
        except OSError as error:
            log.error("cannot read a chunk now: %s; trying again in %.0f s", error, SHORTAGE_S)
            await trio.sleep(SHORTAGE_S)


def _header_once(peer: Neighbour, spread: Spread) -> bytes | None:
    key = (spread.manifest.mid, -1)
    if key in peer.parts_sent:
        return None
    peer.parts_sent.add(key)
    return spread.manifest.parts()[0]
