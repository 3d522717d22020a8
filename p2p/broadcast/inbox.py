"""What neighbours say: messages of the versions family are checked here and told to the sessions; chunks are kept first.

Every byte taken from a neighbour is proven first: manifest parts by the head's signature, chunks by their digest. A bitmap of a
large version is heard in pieces: others have their turn in between. Must not know when manifests are dropped, nor what leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

import trio

from p2p.broadcast.arrivals import accept_header
from p2p.broadcast.exchange_core import ExchangeCore
from p2p.broadcast.peer_groups import EVERYWHERE
from p2p.broadcast.transfer import ASK_PARTS_S, Neighbour, Transfer, batches, members
from p2p.complaints import complain
from p2p.errors import Refusal, ShoalError
from p2p.limits import MIB
from p2p.protocol.versions import Allowance, Chunk, Follow, GetParts, Have, Parts, Relieve, Subscribe, Want
from p2p.protocol.wire import MANY

log = logging.getLogger("shoal.broadcast")

ANSWER_PARTS_S = 0.5
"""A neighbour that asks for one manifest's parts more often than this, for every MiB of them, is not answered."""

LEAST_TAKES = 1.0
"""Bytes/s that a neighbour is sent at the least, however little it says that it takes: a rate of 0 is none to wait for."""


class Inbox(ExchangeCore):
    """An exchange that hears its neighbours."""

    async def handle(self, name: str, message: object) -> bool:
        """One message of the versions family from a neighbour, control or bulk. False when it is not ours to handle."""
        peer = self.peers.get(name)
        try:
            if not isinstance(message, Subscribe):
                return self.hear(name, message)
            for _ in self._on_subscribe(peer, message) if peer is not None else ():
                await trio.lowlevel.checkpoint()
                if self.peers.get(name) is not peer:
                    break  # it went meanwhile
        except Refusal as refusal:
            await self._refuse(name, refusal)
        return True

    def hear(self, name: str, message: object) -> bool:
        """As `handle`, but raises the Refusal of a message that is refused, and does all of it at once."""
        handler, peer = self._HANDLERS.get(type(message)), self.peers.get(name)
        if handler is not None and peer is not None:
            for _ in handler(self, peer, message) or ():
                pass
        return handler is not None

    async def _refuse(self, name: str, refusal: Refusal) -> None:
        refusal = refusal.at(peer=name)
        complain(log, name, refusal)
        await self.report(name, refusal)

    def _on_chunk(self, peer: Neighbour, message: Chunk) -> None:
        transfer = self.transfers.get(message.mid)
        peer.received += len(message.data)
        if transfer is None or not transfer.wanted:
            return  # a manifest we dropped meanwhile: the sender could not know
        version = transfer.manifest.version
        digest = transfer.manifest.chunk_digest(message.index)
        if digest is None:
            raise Refusal("chunk came before the record that proves it", version=version, chunk=message.index)
        now = self._now()
        # Only the source makes a peer the distributor of a chunk; others may ask it to bring one to some groups.
        duty = message.duty if peer.name == self.head or message.duty != EVERYWHERE else 0
        if message.index in transfer.session.held:
            transfer.session.hold(message.index, peer.name, duty=duty, now=now)
            transfer.traffic.duplicates += len(message.data)
            peer.post(Have(message.mid, (message.index,)))
            return
        try:
            self._keep(digest, message.data)
        except Refusal as refusal:
            raise refusal.at(version=version, chunk=message.index) from None
        except (ShoalError, OSError) as error:
            # Nobody's fault but ours: the chunk is not held, the version is not installed, the node goes on.
            log.error("%s", Refusal(f"cannot keep it: {error}", peer=peer.name, version=version, chunk=message.index))
            return
        self.store.pin([digest])
        self._pump.keep(digest, message.data)
        traffic = transfer.traffic
        traffic.first_at = traffic.first_at or now
        if peer.name == self.head:
            traffic.from_head += len(message.data)
        else:
            traffic.from_peers += len(message.data)
        transfer.session.hold(message.index, peer.name, duty=duty, now=now)
        answered = transfer.news.came_from(peer.name, message.index)
        if answered:
            peer.post(Have(message.mid, tuple(dict.fromkeys(answered))))
        if transfer.session.complete:
            traffic.done_at = now
        transfer.wake()
        self._pump.wake()

    def _keep(self, digest: bytes, data: bytes) -> None:
        try:
            self.store.put(digest, data)
        except Refusal:
            raise
        except ShoalError:
            if not self.on_full():
                raise
            self.store.put(digest, data)

    def _on_have(self, peer: Neighbour, message: Have) -> None:
        transfer = self.transfers.get(message.mid)
        if transfer is not None:
            self._check_range(transfer, message.chunks)
            # Its answer to our Subscribe may be the first we hear of it here: who holds chunks takes part.
            joined = transfer.session.join(peer.name, (), self._now())
            if transfer.session.peer_has(peer.name, message.chunks, self._now()) or joined:
                self._pump.wake()

    def _on_follow(self, peer: Neighbour, message: Follow) -> None:
        peer.following = message.on

    def _on_allowance(self, peer: Neighbour, message: Allowance) -> None:
        peer.takes.set_rate(self._now(), 0.0 if message.takes is None else max(message.takes, LEAST_TAKES))
        if message.relays is None:
            self.bounds.pop(peer.name, None)
        else:
            self.bounds[peer.name] = message.relays
        self._pump.wake()

    def _on_want(self, peer: Neighbour, message: Want) -> None:
        transfer = self.transfers.get(message.mid)
        if transfer is not None:
            self._check_range(transfer, message.chunks)
            transfer.session.join(peer.name, (), self._now())
            transfer.session.peer_wants(peer.name, message.chunks, self._now())
            self._pump.wake()

    def _on_relieve(self, peer: Neighbour, message: Relieve) -> None:
        transfer = self.transfers.get(message.mid)
        if transfer is None:
            return
        if peer.name != self.head:
            raise Refusal("Relieve from a peer that is not the source", version=transfer.manifest.version, fatal=True)
        self._check_range(transfer, message.chunks)
        transfer.session.relieve(message.chunks)

    def _on_parts(self, peer: Neighbour, message: Parts) -> None:
        self.prove(message.mid, message.parts)

    def prove(self, mid: bytes, parts: Sequence[bytes]) -> None:
        """Signed parts of a manifest are here, from whomever. Refusal when one is not the head's, or not of this manifest."""
        for part in parts:
            transfer = self.transfers.get(mid)
            if transfer is None:
                if not self._announced(part, mid):
                    return  # what follows is part of it: no signature is worth checking without the header
                continue
            chunks = transfer.manifest.add(part, self.head_key)
            transfer.session.learn(chunks, self._now())
            if chunks:
                transfer.ask_parts_after = ASK_PARTS_S
            if transfer.manifest.whole and transfer.manifest.seal is not None:
                transfer.session.close(transfer.manifest.seal.chunks)
            transfer.wake()

    def _announced(self, part: bytes, mid: bytes) -> bool:
        """The first part of a manifest that is not known here: True when it is its header, which is remembered from now on."""
        manifest = accept_header(
            part, mid, [transfer.manifest for transfer in self.transfers.values()], head_key=self.head_key, run=self.run_id,
            min_epoch=self.min_epoch, floor=self.floor, now=self._wall(),
        )  # fmt: skip
        if manifest is None:
            return False  # its header did not reach us: GetParts or another neighbour will bring it
        self._open(manifest, wanted=False)
        if self.on_header(manifest):
            self.take(manifest.mid, catching=False)
        return True

    def _on_get_parts(self, peer: Neighbour, message: GetParts) -> None:
        transfer = self.transfers.get(message.mid)
        now = self._now()
        if transfer is None or now < peer.answered.get(message.mid, -1e9):
            return
        if not peer.listed:
            return
        parts = transfer.manifest.parts()
        if not self.answers.take(peer.name, sum(map(len, parts)), now):
            return
        peer.answered[message.mid] = now + ANSWER_PARTS_S * max(1.0, sum(map(len, parts)) / MIB)
        for batch in batches(parts):
            peer.post(Parts(message.mid, batch))

    def _on_subscribe(self, peer: Neighbour, message: Subscribe) -> Iterator[None]:
        transfer = self.transfers.get(message.mid)
        if transfer is None:
            return
        if len(message.have) > transfer.manifest.max_chunks // 8 + 1:
            raise Refusal(f"a bitmap of {len(message.have)} bytes", version=transfer.manifest.version, fatal=True)
        have = members(message.have)
        peer.forget_sent(message.mid)  # it may have dropped the manifest and taken it up again
        transfer.session.join(peer.name, (), self._now())
        while some := list(islice(have, MANY)):
            self._check_range(transfer, some)
            transfer.session.peer_has(peer.name, some, self._now())
            if len(some) == MANY:
                yield
        if not self.is_source and transfer.wanted and message.mid not in peer.greeted:
            peer.greeted.add(message.mid)
            peer.post_have(message.mid, sorted(transfer.session.held))
        self._pump.wake()

    def _check_range(self, transfer: Transfer, chunks: Sequence[int]) -> None:
        """Refusal for a number that no chunk of the manifest has, and for one that is named twice: each costs us work."""
        limit, chunk, version = transfer.manifest.max_chunks, max(chunks, default=-1), transfer.manifest.version
        if chunk >= limit:
            raise Refusal(f"chunk {chunk} of {limit}", version=version, chunk=chunk, fatal=True)
        if len(set(chunks)) != len(chunks):
            raise Refusal(f"{len(chunks)} chunk numbers, {len(set(chunks))} different ones", version=version, fatal=True)

    _HANDLERS: ClassVar[dict[type, Callable[[Inbox, Neighbour, Any], Iterator[None] | None]]] = {
        Chunk: _on_chunk, Have: _on_have, Want: _on_want, Relieve: _on_relieve, Parts: _on_parts,
        GetParts: _on_get_parts, Subscribe: _on_subscribe, Follow: _on_follow, Allowance: _on_allowance,
    }  # fmt: skip
