"""The exchange of a node or the head: the tasks, events and real channels around `exchange_core`.

Must not know what a message means, or which chunk leaves next.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import trio

from p2p.broadcast.exchange_core import TICK_S
from p2p.broadcast.inbox import Inbox
from p2p.broadcast.pump import Pump
from p2p.broadcast.transfer import Neighbour, Transfer
from p2p.errors import ShoalError
from p2p.weights.manifest import Manifest
from p2p.weights.store import ChunkStore

LATE_S = 0.02
"""Seconds that a tick waits for a message to come along, before a timer is used up for it."""


class Exchange(Inbox):
    """Sessions, manifests and store of one peer. Peers and manifests may be added before `run` and while it runs."""

    store: ChunkStore
    _pump: Pump
    _nursery: trio.Nursery | None = None
    _timer: trio.CancelScope | None = None
    """ends when a tick is overdue"""
    _ticked_at = -inf

    def _make_pump(self) -> Pump:
        return Pump(self.transfers, self.store, self._now, self._lose)

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Owns every task of the exchange."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for peer in self.peers.values():
                nursery.start_soon(self._pump.serve, peer)
            nursery.start_soon(self._pump.run)
            task_status.started()
            while True:
                with trio.CancelScope(deadline=trio.current_time() + TICK_S + LATE_S) as self._timer:
                    await trio.sleep_forever()
                self._tick_now()

    async def handle(self, name: str, message: object) -> bool:
        """See `Inbox.handle`."""
        self._tick_if_due()
        return await super().handle(name, message)

    def hear_at_once(self, name: str, message: object) -> bool:
        """As `handle`, without waiting; the Refusal of a message that is refused."""
        self._tick_if_due()
        return self.hear(name, message)

    def _tick_if_due(self) -> None:
        """Where messages come all the time, timers are looked at between them: to be woken for it costs more than to do it."""
        if self._timer is not None and self._now() >= self._ticked_at + TICK_S:
            self._timer.deadline = trio.current_time() + TICK_S + LATE_S
            self._tick_now()

    def _tick_now(self) -> None:
        self._ticked_at = self._now()
        self.tick()

    def _serve(self, peer: Neighbour) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._pump.serve, peer)

    async def manifest(self, mid: bytes) -> Manifest:
        """The manifest once its header is here. No deadline: the caller sets one on progress."""
        while mid not in self.transfers:
            called = trio.Event()
            self._opened.append(called.set)
            await called.wait()
        return self.transfers[mid].manifest

    async def segment(self, mid: bytes, index: int) -> bytes:
        """The encoded payload of one segment, once its record and all its chunks are here. ShoalError when the manifest
        is forgotten meanwhile. No deadline: the caller watches `progress`."""
        lacking = 0

        def whole(transfer: Transfer) -> bool:
            nonlocal lacking
            chunks = transfer.manifest.chunks_of(index)
            while chunks is not None and lacking < len(chunks) and chunks[lacking] in transfer.session.held:
                lacking += 1
            return chunks is not None and lacking == len(chunks)

        while True:
            transfer = await self._once(mid, whole)
            chunks = transfer.manifest.records[index].chunks
            pieces = [await self._pump.read(d) for d in transfer.manifest.records[index].digests]
            if all(piece is not None for piece in pieces):
                return b"".join(piece for piece in pieces if piece is not None)
            # The disk lost a chunk that was whole when it came: fetch it again.
            for chunk, piece in zip(chunks, pieces, strict=True):
                if piece is None:
                    self._lose(transfer, chunk)
            lacking = 0

    async def sealed(self, mid: bytes) -> Manifest:
        """The manifest once seal and all records are here."""
        return (await self._once(mid, lambda transfer: transfer.manifest.whole)).manifest

    async def _once(self, mid: bytes, is_so: Callable[[Transfer], bool]) -> Transfer:
        """The transfer once that is so. It is asked at each chunk and part; who waits is woken once."""
        while (transfer := self._transfer(mid)) and not is_so(transfer):
            called = trio.Event()

            def settled(of: Transfer = transfer) -> bool:
                return self.transfers.get(mid) is not of or is_so(of)

            entry = settled, called.set
            transfer.waiting.append(entry)
            try:
                await called.wait()
            finally:
                if entry in transfer.waiting:  # cancelled: nobody is to be asked for it at every chunk from now on
                    transfer.waiting.remove(entry)
        return transfer

    def _transfer(self, mid: bytes) -> Transfer:
        transfer = self.transfers.get(mid)
        if transfer is None:
            raise ShoalError(f"manifest {mid.hex()[:12]} is not held any more")
        return transfer
