"""One manifest's spreading, seen from one peer: who gets which chunk from me next, and what do I ask of whom.

Pure: no clock, socket or randomness; `now` (seconds, any origin) is passed in. Must not know bytes, digests or
channels: chunks are numbers, peers are names. The same object runs in nodes, in the head, in tests and in the simulator.

The scheme is Mutualcast's (Li, Chou, Zhang 2005), made to survive loss: the source hands each chunk to exactly one
peer, its distributor, whichever has room next, so strong uplinks take more with no rate configured; a distributor
relays a chunk, once it has verified it, to everyone who lacks it. What does not arrive that way is pulled under leases
from whoever announced it, and from the source only when no other peer has it. Late joiners only pull.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p.limits import LEASE_S, REPAIR_AFTER_S

MAX_INFLIGHT = 8
"""Chunks handed to one peer and not yet acknowledged by it. Small, so that the source's choice of distributor follows
the peers' real pace; large enough to cover a round trip at 256 KiB a chunk."""

MAX_WANTS_PER_PEER = 8
MAX_WANTS = 32
"""Outstanding pulls. A joiner fills its downlink from several peers without burying one of them."""

MAX_QUEUED_WANTS = 4 * MAX_WANTS_PER_PEER
"""Wants of one peer that wait here. An honest peer has MAX_WANTS_PER_PEER out; what a flood adds is dropped."""

MAX_SENDS = 16
"""Times one chunk is handed to one peer: a peer that loses it so often is only using up our uplink."""

UNRELIABLE_AFTER = 3
DISTRUST_S = 10 * LEASE_S
"""After so many leases broken in a row a peer is not asked for so long, or until a chunk comes from it: one that only
withholds would otherwise cost LEASE_S for every MAX_WANTS_PER_PEER chunks that it claims to have."""

MAX_SCAN = 2048
"""Missing chunks looked at in vain before the rest waits for the next look: a version may have 10^5 of them."""

SOURCE_AFTER_S = 0.6
"""Pull from the source itself only after so long without a pushed chunk: relays may just be slow to start."""


@dataclass(slots=True)
class _Peer:
    name: str
    has: set[int] = field(default_factory=set)
    push: deque[int] = field(default_factory=deque)
    """chunks I distribute and this peer may lack, in order of arrival"""
    wanted: deque[int] = field(default_factory=deque)
    sent: dict[int, float] = field(default_factory=dict)
    """chunk -> when I handed it to this peer; removed when the peer says that it has it"""
    sends: dict[int, int] = field(default_factory=dict)
    """chunk -> how often I handed it over, for those handed over more than once"""
    broke: set[int] = field(default_factory=set)
    """chunks that it did not send under a lease"""
    wants_out: int = 0
    failures: int = 0
    """leases broken in a row"""
    distrusted_until: float = -1e18


class Session:
    """State machine of one manifest at one peer.

    `is_source`: this peer made the manifest. `source`: the peer that did, if this one did not.
    `catching`: pull at once from whoever has chunks (a joiner fetching an old manifest) instead of awaiting pushes.
    """

    def __init__(self, *, is_source: bool, source: str | None, now: float, catching: bool = False) -> None:
        self.is_source, self.source, self.catching = is_source, source, catching
        self.held: set[int] = set()
        self.total: int | None = None
        self.duplicates = 0
        self._known: dict[int, float] = {}
        self._missing: dict[int, None] = {}
        self._peers: dict[str, _Peer] = {}
        self._unseeded: deque[int] = deque()
        self._seeded: dict[int, str] = {}
        self._duty: list[int] = []
        self._leases: dict[int, tuple[str, float]] = {}
        self._first_have: dict[int, tuple[str, float]] = {}
        self._last_push = now
        self._news: list[int] = []

    # --- what is known of the manifest -------------------------------------------------------------------------------

    def learn(self, chunks: Iterable[int], now: float) -> None:
        """These chunks are provable from now on."""
        for chunk in chunks:
            if chunk not in self._known:
                self._known[chunk] = now
                if chunk not in self.held:
                    self._missing[chunk] = None

    def close(self, total: int) -> None:
        """The manifest is sealed with `total` chunks."""
        self.total = total

    @property
    def complete(self) -> bool:
        return self.total is not None and len(self.held) == self.total

    @property
    def missing(self) -> int:
        """Provable chunks not held."""
        return len(self._missing)

    # --- peers -------------------------------------------------------------------------------------------------------

    def join(self, peer: str, have: Iterable[int], now: float) -> None:
        """`peer` takes part from now on and holds `have`."""
        entry = self._peers.get(peer)
        if entry is None:
            entry = self._peers[peer] = _Peer(peer)
            if not self.complete:  # a late joiner pulls, from everybody: pushing as well would send much twice
                entry.push.extend(self._duty)
        self.peer_has(peer, have, now)

    def leave(self, peer: str) -> None:
        """`peer` is gone: what it alone distributed is seeded again, what was asked of it is free to ask elsewhere."""
        if self._peers.pop(peer, None) is None:
            return
        for chunk, (holder, _) in list(self._leases.items()):
            if holder == peer:
                del self._leases[chunk]
        if self.is_source:
            lost = [c for c, to in self._seeded.items() if to == peer and not self._elsewhere(c)]
            for chunk in reversed(lost):
                del self._seeded[chunk]
                self._unseeded.appendleft(chunk)

    def _elsewhere(self, chunk: int) -> bool:
        return any(chunk in p.has for p in self._peers.values())

    def peers(self) -> list[str]:
        return list(self._peers)

    def peer_complete(self, peer: str) -> bool:
        entry = self._peers.get(peer)
        return entry is not None and self.total is not None and len(entry.has) >= self.total

    def peer_has(self, peer: str, chunks: Iterable[int], now: float) -> None:
        """`peer` announced that it holds these."""
        entry = self._peers.get(peer)
        if entry is None:
            return
        for chunk in chunks:
            entry.has.add(chunk)
            entry.sent.pop(chunk, None)
            entry.broke.discard(chunk)
            if chunk not in self.held and peer != self.source:
                self._first_have.setdefault(chunk, (peer, now))

    def peer_wants(self, peer: str, chunks: Iterable[int], now: float) -> None:
        """`peer` asks for these; what is already on its way to it is not queued twice. A peer that asks for more than
        it can use (MAX_QUEUED_WANTS, MAX_SENDS) is not served the rest."""
        entry = self._peers.get(peer)
        if entry is None:
            return
        # Who asks is not waiting for what was handed over long ago: it was dropped there, and must not fill the window.
        entry.sent = {chunk: at for chunk, at in entry.sent.items() if now - at < LEASE_S}
        for chunk in chunks:
            if len(entry.wanted) >= MAX_QUEUED_WANTS:
                return
            if chunk not in self.held or entry.sends.get(chunk, 0) >= MAX_SENDS or chunk in entry.wanted:
                continue
            if chunk not in entry.sent:
                entry.has.discard(chunk)
                entry.wanted.append(chunk)

    # --- chunks ------------------------------------------------------------------------------------------------------

    def hold(self, chunk: int, sender: str | None, *, seed: bool, now: float) -> bool:
        """A verified chunk is held now. False when it was held before (a duplicate).

        `seed`: the source made this peer its distributor. At the source itself `sender` is None.
        """
        if chunk in self.held:
            self.duplicates += 1
            return False
        self.held.add(chunk)
        self._missing.pop(chunk, None)
        lease = self._leases.pop(chunk, None)
        if lease is not None and lease[0] in self._peers:
            self._peers[lease[0]].wants_out -= 1
        self._first_have.pop(chunk, None)
        if sender is not None:
            if lease is None:
                self._last_push = now
            self._news.append(chunk)
        if sender is not None and sender in self._peers:
            self._peers[sender].has.add(chunk)
            self._peers[sender].failures, self._peers[sender].distrusted_until = 0, now
        if self.is_source:
            self._unseeded.append(chunk)
        elif seed:
            self._duty.append(chunk)
            for peer in self._peers.values():
                if peer.name != self.source:
                    peer.push.append(chunk)
        return True

    def lose(self, chunk: int, now: float) -> None:
        """The store no longer has this chunk: it is missing again, and not ours to relay."""
        if chunk in self.held:
            self.held.discard(chunk)
            self._known[chunk] = now
            self._missing[chunk] = None
            for peer in self._peers.values():
                peer.sent.pop(chunk, None)  # it was never handed over after all

    def news(self) -> list[int]:
        """Chunks held since the last call, to announce to the others."""
        news, self._news = self._news, []
        return news

    # --- decisions ---------------------------------------------------------------------------------------------------

    def next_for(self, peer: str, now: float) -> tuple[int, bool] | None:
        """The chunk to hand to `peer` next, and whether it becomes the chunk's distributor; None for now.
        The chunk counts as sent."""
        entry = self._peers.get(peer)
        if entry is None or len(entry.sent) >= MAX_INFLIGHT:
            return None
        while entry.wanted:
            chunk = entry.wanted.popleft()
            if chunk in self.held and chunk not in entry.has:
                entry.sends[chunk] = entry.sends.get(chunk, 0) + 1
                entry.sent[chunk] = now
                return chunk, False
        if self.is_source:
            for i, chunk in enumerate(self._unseeded):
                if chunk not in entry.has:
                    del self._unseeded[i]
                    self._seeded[chunk] = peer
                    entry.sent[chunk] = now
                    return chunk, True
            return None
        while entry.push:
            chunk = entry.push.popleft()
            if chunk in self.held and chunk not in entry.has and chunk not in entry.sent:
                entry.sent[chunk] = now
                return chunk, False
        return None

    def wants(self, now: float) -> dict[str, list[int]]:
        """Chunks to ask for now, by peer; each is leased to that peer for LEASE_S."""
        self._expire(now)
        asked: dict[str, list[int]] = {}
        if self.is_source or not self._missing:
            return asked
        if not self.catching and now - self._last_push < REPAIR_AFTER_S:
            return asked  # pushes are coming in: what is missing may be among the next
        room = min(MAX_WANTS - len(self._leases), sum(MAX_WANTS_PER_PEER - p.wants_out for p in self._peers.values()))
        fruitless = 0
        for chunk in self._missing:
            if room <= 0 or fruitless >= MAX_SCAN:
                break
            if chunk in self._leases:
                continue
            holder = self._whom(chunk, now)
            if holder is None:
                fruitless += 1
                continue
            self._leases[chunk] = (holder.name, now + LEASE_S)
            holder.wants_out += 1
            asked.setdefault(holder.name, []).append(chunk)
            room -= 1
        return asked

    def _whom(self, chunk: int, now: float) -> _Peer | None:
        """Another peer that has it, before the source. One that broke its lease on this chunk is asked again only when
        all the others did too: wants can get lost, and nobody may be given up for good."""
        holders = [
            p for p in self._peers.values()
            if chunk in p.has and p.name != self.source and chunk not in p.broke and p.distrusted_until <= now
        ]  # fmt: skip
        if holders:
            first, since = self._first_have.get(chunk, ("", self._known[chunk]))
            if not self.catching and now - max(since, self._last_push) < REPAIR_AFTER_S:
                return None
            free = [p for p in holders if p.wants_out < MAX_WANTS_PER_PEER]
            # Whoever announced it first is its likely distributor: asking it moves the chunk up and duplicates nothing.
            key = lambda p: (p.failures, p.wants_out if self.catching else 0, p.name != first)
            return min(free, key=key) if free else None
        source = None if self.source is None else self._peers.get(self.source)
        if source is not None and chunk not in source.broke:
            quiet = now - max(self._last_push, self._known[chunk]) >= SOURCE_AFTER_S
            return source if quiet and source.wants_out < MAX_WANTS_PER_PEER else None
        for peer in self._peers.values():
            peer.broke.discard(chunk)
        return None

    def _expire(self, now: float) -> None:
        for chunk, (holder, until) in list(self._leases.items()):
            if until <= now:
                del self._leases[chunk]
                entry = self._peers.get(holder)
                if entry is not None:
                    entry.wants_out -= 1
                    entry.broke.add(chunk)
                    entry.failures += 1
                    if entry.failures >= UNRELIABLE_AFTER and holder != self.source:
                        entry.failures, entry.distrusted_until = 0, now + DISTRUST_S
