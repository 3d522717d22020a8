"""The transfers at one peer, each from its offer or its header on, and the neighbours: an exchange without its tasks.

Nodes and the head run it as `exchange.Exchange`; the simulator runs it on simulated links. Must not know reinforcement learning,
engines or how peers were admitted: peers are added and removed by the owner. `inbox` adds to this what they say; what leaves is
the pump's business.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping

from p2p.allowance.shares import DownShares
from p2p.broadcast.draws import ReplyBudget
from p2p.broadcast.peer_groups import PeerPlaces
from p2p.broadcast.policies.port import Remembered
from p2p.broadcast.policies.registry import DEFAULT
from p2p.broadcast.pump_core import PumpCore
from p2p.broadcast.session import Session
from p2p.broadcast.transfer import ASK_PARTS_MAX_S, Chunks, Neighbour, Traffic, Transfer, bitmap, haves
from p2p.channel.port import Channel
from p2p.errors import Refusal
from p2p.forgetting import forget_oldest
from p2p.protocol.reach import PassOn
from p2p.protocol.versions import Allowance, Follow, GetParts, Parts, Subscribe, Want
from p2p.version import Version
from p2p.weights.manifest import Manifest, open_header

log = logging.getLogger("shoal.broadcast")

TICK_S = 0.05
"""How often a session's timers are looked at, and whether there is news to announce."""

STRANGERS_LATER_S = 0.5
"""Seconds after the others that strangers are told of a new version and of its end, where somebody proven is there: to tell sixty
takes a third of what a version of 80 KiB does. Who is handed a chunk of it hears beside the chunk."""

RefusedBy = Callable[[str, Refusal], Awaitable[None]]


class ExchangeCore:
    """Sessions, manifests and store of one peer.

    `on_header(manifest)`, which the owner sets, decides whether to take part in a newly announced manifest. It is called once
    for each.
    `on_refusal(peer, refusal)` hears every refusal; it drops the peer when `refusal.fatal`.
    `on_full()`, which the owner sets, is asked to free store space when a chunk finds none; it says whether it freed any.
    """

    def __init__(
        self,
        *,
        me: str,
        run: str,
        head: str,
        head_key: bytes,
        store: Chunks,
        now: Callable[[], float],
        wall: Callable[[], float],
        on_refusal: RefusedBy | None = None,
        policy: str = DEFAULT,
    ) -> None:
        self.me, self.run_id, self.head, self.head_key = me, run, head, head_key
        self.store, self.is_source, self._now, self._wall = store, me == head, now, wall
        self.min_epoch = 0
        self.floor: Version | None = None
        """headers of versions below this are refused as rolled back (set by the node to what it serves)"""
        self.on_header: Callable[[Manifest], bool] = lambda manifest: False
        self.on_full: Callable[[], bool] = lambda: False
        self._on_refusal = on_refusal
        self.transfers: dict[bytes, Transfer] = {}
        self.peers: dict[str, Neighbour] = {}
        self.answers = ReplyBudget()
        """what peers may still ask for; it outlives their links"""
        self.policy = policy
        self.entrusts: Callable[[str], bool] = lambda peer: True
        """whether a peer is handed chunks to pass on; asked at the source alone"""
        self._memory: dict[str, Remembered] = {}
        self._places: PeerPlaces | None = None
        self._unlisted: frozenset[str] = frozenset()
        self.bounds: dict[str, float] = {}
        """bytes/s that leave a peer at most, of those who say so; see `Allowance`"""
        self._down, self._shares = 0.0, DownShares()
        self._relays: float | None = None
        self._passing: Mapping[str, tuple[PassOn, ...]] = {}
        self._apart_peers: frozenset[str] = frozenset()
        self._pump = self._make_pump()
        self._following = False
        self._told_later: deque[tuple[float, bytes, Parts, list[str]]] = deque()
        """what strangers are told, of which manifest, from when on"""
        self._opened: list[Callable[[], object]] = []
        """called once each when the next manifest's header comes"""

    def _make_pump(self) -> PumpCore:
        """What carries out what leaves here."""
        raise NotImplementedError

    # --- neighbours --------------------------------------------------------------------------------------------------

    def add_peer(self, name: str, post: Callable[[object], None], bulk: Channel) -> None:
        """A neighbour is reachable. Tells it what we hold of every manifest we take part in."""
        self.remove_peer(name)
        peer = self.peers[name] = Neighbour(name, post, bulk, self._now())
        peer.listed = name not in self._unlisted
        if self._following:
            post(Follow(True))
        self._shares.forget((name,))
        if self._relays is not None:
            post(Allowance(None, self._relays))
        for mid, transfer in self.transfers.items():
            if transfer.wanted:
                post(Subscribe(mid, bitmap(transfer.session.held)))
        self._serve(peer)

    def _serve(self, peer: Neighbour) -> None:
        self._pump.enter(peer)

    def remove_peer(self, name: str) -> None:
        """`name` is no neighbour any more; what was asked of it is asked of others."""
        peer = self.peers.pop(name, None)
        if peer is None:
            return
        self._pump.drop(peer)
        self.bounds.pop(name, None)
        forget_oldest(self._memory, stays=self.peers.__contains__)
        for transfer in self.transfers.values():
            transfer.session.leave(name, self._now())
        self._pump.wake()

    def arrange(self, places: PeerPlaces | None, unlisted: frozenset[str] = frozenset()) -> None:
        """Which groups the peers are in from now on, None while all are one; and who came that the head tells nothing of. Such a
        peer is given nothing: identities are free, and who was just let in is in the next roster, half a second later."""
        self._places, self._unlisted = places, unlisted
        for peer in self.peers.values():
            peer.listed = peer.name not in unlisted
        for transfer in self.transfers.values():
            transfer.session.arrange(places, unlisted)

    def set_apart(self, peers: frozenset[str]) -> None:
        """The source's: peers that have no link with most of the others, from now on."""
        self._apart_peers = peers
        for transfer in self.transfers.values():
            transfer.session.apart = peers

    def pass_on(self, passing: Mapping[str, tuple[PassOn, ...]]) -> None:
        """What comes from a peer and is passed on to others from now on; by that peer."""
        self._passing = passing
        for transfer in self.transfers.values():
            transfer.session.passing = passing

    def follow(self, on: bool) -> None:
        """Ask every neighbour, now and later ones, to push new deltas as they are made; or no more."""
        self._following = on
        self._post_all(Follow(on))

    def allow(self, relays: float | None, chunks: float | None, down: float) -> None:
        """What this host's owner allows from now on: `relays` bytes/s that leave it, which others plan by (None: no bound, 0: no
        chunk leaves); `chunks`, the part of that which chunks may have; `down` bytes/s that come to it, 0 for no limit."""
        self._pump.bound(0.0 if relays == 0 else chunks)
        lifted = self._down and not down
        self._down = down
        if lifted:
            self._shares = DownShares()
        if lifted or relays != self._relays:
            self._relays = relays
            for name, peer in self.peers.items():
                peer.post(Allowance(self._shares.told.get(name), relays))

    def expect_uplink(self, rate: float, *, told: bool) -> None:
        """What this host's uplink carries, in bytes/s; before anything is sent. `told`: by its owner, else remembered."""
        self._pump.expect(rate, told=told)

    def _tell_shares(self, now: float) -> None:
        """Each neighbour hears how fast it may send, when that changed."""
        received = {name: peer.received for name, peer in self.peers.items()}
        for name, share in self._shares.divide(now, self._down, received).items():
            self.peers[name].post(Allowance(share, self._relays))

    @property
    def uplink_rate(self) -> float:
        """Bytes/s that the uplink is known to carry; 0 while that is not known."""
        return self._pump.uplink.proven

    @property
    def found_uplink(self) -> float:
        """Bytes/s that the uplink was seen to carry and that are worth remembering; 0 for none."""
        return self._pump.uplink.found

    @property
    def sent_bytes(self) -> int:
        """Payload of all chunks that left here."""
        return self._pump.sent

    # --- the source --------------------------------------------------------------------------------------------------

    def offer(self, header_part: bytes, *, announce: bool) -> None:
        """Start a manifest of our own. With `announce` its header goes to every neighbour and its chunks are pushed
        to those who follow; without, it is there for who asks."""
        manifest = open_header(header_part, head_key=self.head_key, run=self.run_id, min_epoch=0, now=self._wall())
        transfer = self._open(manifest, wanted=True)
        if announce:
            self._announce(self.peers, Parts(manifest.mid, (header_part,)))
            for peer in self.peers.values():
                if peer.following:
                    transfer.session.join(peer.name, (), self._now())

    def extend(self, mid: bytes, part: bytes, *, announce: bool) -> None:
        """A further part of our own manifest; its chunks must be in the store already, and are pinned there until `forget`."""
        transfer = self.transfers[mid]
        now = self._now()
        chunks = transfer.manifest.add(part, self.head_key)
        self.store.pin(d for d in map(transfer.manifest.chunk_digest, chunks) if d is not None)
        transfer.session.learn(chunks, now)
        if chunks and len(transfer.manifest.records) == len(transfer.manifest.segments):
            # No more follow: what is to be sent is known before the seal, and of a small version all may have left by then.
            transfer.session.close(sum(len(record.chunks) for record in transfer.manifest.records.values()))
        for chunk in chunks:
            transfer.session.hold(chunk, None, duty=0, now=now)
        if transfer.manifest.whole and transfer.manifest.seal is not None:
            transfer.session.close(transfer.manifest.seal.chunks)
            transfer.traffic.done_at = now
            self._announce(self.peers if announce else transfer.session.peers(), Parts(mid, (part,)))
        transfer.wake()
        self._pump.wake()

    def _announce(self, names: Iterable[str], parts: Parts) -> None:
        """Tell neighbours of our own manifest: strangers later."""
        outside = () if self._places is None else self._places.outside
        later = [name for name in names if name in outside]
        if later:
            self._told_later.append((self._now() + STRANGERS_LATER_S, parts.mid, parts, later))
        for name in names:
            if name not in outside:
                self.peers[name].post(parts)

    def _tell_strangers(self, now: float) -> None:
        while self._told_later and self._told_later[0][0] <= now:
            _, mid, parts, names = self._told_later.popleft()
            for name in names if mid in self.transfers else ():
                if name in self.peers:
                    self.peers[name].post(parts)

    def forget(self, mid: bytes) -> list[bytes]:
        """Drop a manifest; returns the digests of its chunks (for the store)."""
        transfer = self.transfers.pop(mid, None)
        if transfer is None:
            return []
        transfer.wake()
        for peer in self.peers.values():
            peer.forget(mid)
        # Only what this manifest pinned: another one may hold the same bytes.
        held = [transfer.manifest.chunk_digest(chunk) for chunk in transfer.session.held]
        self.store.unpin(d for d in held if d is not None)
        return [d for record in transfer.manifest.records.values() for d in record.digests]

    # --- a receiver --------------------------------------------------------------------------------------------------

    def take(self, mid: bytes, *, catching: bool) -> None:
        """Take part in a known manifest from now on: tell the neighbours, receive, relay."""
        transfer = self.transfers[mid]
        transfer.session.catching = transfer.session.catching or catching
        if not transfer.wanted:
            transfer.wanted = True
            self._post_all(Subscribe(mid, bitmap(transfer.session.held)))

    def ask_manifest(self, mid: bytes, peer: str) -> None:
        entry = self.peers.get(peer)
        if entry is not None:
            entry.post(GetParts(mid))

    def progress(self, mid: bytes) -> int:
        """Grows with every record and chunk: a watchdog compares two readings."""
        transfer = self.transfers.get(mid)
        return 0 if transfer is None else len(transfer.session.held) + len(transfer.manifest.records) + transfer.manifest.whole

    async def report(self, peer: str, refusal: Refusal) -> None:
        """Tell the owner of a refusal."""
        if self._on_refusal is not None:
            await self._on_refusal(peer, refusal)

    # --- for the pump ------------------------------------------------------------------------------------------------

    def _lose(self, transfer: Transfer, chunk: int) -> None:
        """The store turned out not to have a chunk that we counted as held."""
        if chunk in transfer.session.held:
            digest = transfer.manifest.chunk_digest(chunk)
            log.error("chunk %d of version %s is gone from the store", chunk, transfer.manifest.version)
            if digest is not None:
                self.store.unpin([digest])
            transfer.session.lose(chunk, self._now())

    # --- timers ------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """What is to be called every TICK_S."""
        now = self._now()
        self._pump.measure()
        if self._down:
            self._tell_shares(now)
        self._tell_strangers(now)
        for mid, transfer in self.transfers.items():
            session = transfer.session
            session.pace, session.uplink = self._pump.uplink.pace, self._pump.uplink.proven
            session.tick(now)
            for names, chunks in transfer.news.due(session, now, self.peers):
                for message in haves(mid, chunks):
                    for name in names:
                        self.peers[name].post(message)
            if not transfer.wanted or self.is_source:
                continue
            for name, chunks in session.wants(now).items():
                self.peers[name].post(Want(mid, tuple(chunks)))
            if not transfer.manifest.whole and session.missing == 0 and now - transfer.asked_parts_at > transfer.ask_parts_after:
                self._ask_for_parts(transfer, now)
        self._pump.wake()

    def _ask_for_parts(self, transfer: Transfer, now: float) -> None:
        """Records come with the chunks; when nothing is on its way and the manifest is not whole, ask for the rest."""
        if transfer.asked_parts_at > 0:
            holders = [n for n in transfer.session.peers() if n in self.peers and n != self.head]
            target = self.head if self.head in self.peers else (holders[0] if holders else None)
            if target is not None:
                self.peers[target].post(GetParts(transfer.manifest.mid))
                transfer.ask_parts_after = min(2 * transfer.ask_parts_after, ASK_PARTS_MAX_S)
        transfer.asked_parts_at = now

    def _open(self, manifest: Manifest, *, wanted: bool) -> Transfer:
        now = self._now()
        session = Session(
            me=self.me, source=None if self.is_source else self.head, now=now, policy=self.policy,
            chunk_bytes=manifest.header.chunk_bytes, memory=self._memory, places=self._places,
            entrusts=self.entrusts if self.is_source else None,
            bounds=self.bounds,
        )  # fmt: skip
        session.passing, session.apart = self._passing, self._apart_peers
        session.arrange(self._places, self._unlisted)
        session.uplink = self._pump.uplink.proven
        transfer = self.transfers[manifest.mid] = Transfer(manifest, session, Traffic(), wanted)
        opened, self._opened = self._opened, []
        for call in opened:
            call()
        for peer in self.peers.values():
            # Those who follow take part in every new delta without saying so each time; the head is always asked last.
            if peer.name == self.head or (peer.following and manifest.header.kind == "delta" and not self.is_source):
                session.join(peer.name, (), now)
        return transfer

    def _post_all(self, message: object) -> None:
        for peer in self.peers.values():
            peer.post(message)
