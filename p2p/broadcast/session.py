"""One manifest's transfer, seen from one peer: who holds what, who asked for what, and what to hand to whom next.

Pure: no clock, socket or randomness; `now` (seconds, any origin) is passed in. Must not know bytes, digests or
channels: chunks are numbers, peers are names. The same object runs in nodes, in the head, in tests and in the simulator.

What is pushed is decided by a `Policy`; here is what holds under any: what a peer asks for takes turns with it, and so does what
is passed on to it from one that it has no link with; nothing is handed to a peer twice while it may still arrive, and what does
not come by push is pulled under leases (`leases`) from whoever announced it, from the source only when no other peer has it.
Late joiners only pull.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from p2p.broadcast.chunkset import BitView, ChunkSet, bits_of
from p2p.broadcast.laggards import Laggards
from p2p.broadcast.leases import MAX_WANTS_PER_PEER, Pulls
from p2p.broadcast.peer_groups import PeerPlaces
from p2p.broadcast.policies.port import Policy, Push, Relieved, Remembered
from p2p.broadcast.policies.registry import DEFAULT, make_policy
from p2p.limits import LEASE_S, MAX_CHUNK, MIB
from p2p.protocol.reach import PassOn

MAX_INFLIGHT, INFLIGHT_BYTES = 32, 8 * MIB
"""Chunks handed to one peer and not yet acknowledged by it, or bytes of them if that is more chunks: small chunks on a long, fast
way are many. Its channel holds fewer."""

MAX_QUEUED_WANTS = 4 * MAX_WANTS_PER_PEER
"""Wants of one peer that wait here. An honest peer has MAX_WANTS_PER_PEER out; what a flood adds is dropped."""

MAX_ANSWER_S = 5 * LEASE_S
"""The longest time from handing over a chunk to its answer that counts: a later answer is a second one, the first was lost."""

RESEND_AFTER_S, RESEND_MAX_S = 2 * LEASE_S, 16 * LEASE_S
"""From one time that a chunk is handed again to a peer that had it from us already, to the next: doubled each time up to
the second. A peer that loses a chunk so often uses up our uplink, but its disk may have room again some day."""

@dataclass(slots=True)
class _Peer:
    name: str
    has: ChunkSet = field(default_factory=ChunkSet)
    wanted: list[int] = field(default_factory=list)  # a few: MAX_QUEUED_WANTS
    passed: deque[int] | tuple[()] = ()  # no deque before it is needed: an empty one takes 600 bytes, at each neighbour
    """chunks that we pass on to it from a peer that it has no link with"""
    sent: dict[int, float] = field(default_factory=dict)
    """chunk -> when I handed it to this peer; removed when the peer says that it has it"""
    answered_at: float = -1e18
    answer_s: float = 0.0
    """when it last said that it has what I handed it, and how long that took: full queues on the way take seconds"""
    again: dict[int, tuple[int, float]] = field(default_factory=dict)
    """chunk -> how often it was handed over without staying there, and before when it is not handed over again"""

    def not_kept(self, chunk: int, at: float) -> None:
        """What I handed over `at` that time is asked for once more."""
        times = self.again.get(chunk, (0, 0.0))[0]
        self.again[chunk] = times + 1, at + min(RESEND_AFTER_S * 2**times, RESEND_MAX_S)


class Session:
    """State machine of one manifest at one peer.

    `me`: this peer's name. `source`: the peer that made the manifest; None at that peer itself.
    `catching`: pull at once from whoever has chunks (a joiner fetching an old manifest) instead of awaiting pushes.
    `places`: which groups the peers are in; None while all are one. `arrange` replaces it when that changes.
    `bounds`: bytes/s that leave a peer at most, of those whose owners bound it; changes under the session.
    `memory`: what the policy remembers of peers from one manifest to the next; shared by a peer's sessions.
    `entrusts`: whether chunks are handed to a peer to pass on; asked at the source.
    """

    def __init__(
        self,
        *,
        me: str,
        source: str | None,
        now: float,
        catching: bool = False,
        policy: str = DEFAULT,
        chunk_bytes: int = MAX_CHUNK,
        memory: dict[str, Remembered] | None = None,
        places: PeerPlaces | None = None,
        entrusts: Callable[[str], bool] | None = None,
        bounds: Mapping[str, float] | None = None,
    ) -> None:
        self._bounds = {} if bounds is None else bounds
        self.me, self.source, self.catching, self.chunk_bytes = me, source, catching, chunk_bytes
        self.is_source = source is None
        self._most_sent = max(MAX_INFLIGHT, INFLIGHT_BYTES // chunk_bytes)
        """chunks that may be on their way to one peer"""
        self.memory = {} if memory is None else memory
        self.places = places
        self.held: set[int] = set()
        self._holds = ChunkSet()
        self.total: int | None = None
        self.duplicates = 0
        self.pace = 0.0
        """bytes/s that leave this peer at most, as its owner measures; 0 for unknown"""
        self.uplink = 0.0
        """bytes/s that this peer's uplink was seen to carry; 0 for unknown"""
        self.apart: frozenset[str] = frozenset()
        """peers that have no link with most of the others"""
        self.passing: Mapping[str, tuple[PassOn, ...]] = {}
        """what comes from a peer and is passed on to others, who have no link with it"""
        self.lagging: set[str] = set()
        """peers that fell behind the others, or that nothing is entrusted to: leaves, for as long as that lasts"""
        self._entrusts = entrusts
        self._strangers = set[str]()
        """at the source, those to whom nothing is entrusted"""
        self.outside: Collection[str] = self._strangers if entrusts is not None or places is None else places.outside
        """strangers, who are served after the others"""
        self._laggards = Laggards()
        self._pulls = Pulls(source, now, places)
        self._peers: dict[str, _Peer] = {}
        self._news: list[int] = []
        self._asked_next = True
        self._askers: set[str] = set()
        """peers with wants that wait here, or with chunks to be passed on"""
        self._full: set[str] = set()
        """peers that were handed as much as may be before they answer"""
        self._policy = make_policy(policy, self)
        self._hears = type(self._policy).has is not Policy.has

    # --- what is known of the manifest -------------------------------------------------------------------------------

    def learn(self, chunks: Iterable[int], now: float) -> None:
        """These chunks are provable from now on."""
        self._pulls.need([c for c in chunks if c not in self.held], now)

    def close(self, total: int) -> None:
        """The manifest is sealed with `total` chunks."""
        self.total = total
        for peer in self._peers.values():
            peer.has.compact(total)

    @property
    def complete(self) -> bool:
        return self.total is not None and len(self.held) == self.total

    @property
    def missing(self) -> int:
        """Provable chunks not held."""
        return len(self._pulls.missing)

    def arrange(self, places: PeerPlaces | None, unlisted: frozenset[str] = frozenset()) -> None:
        """Which groups the peers are in from now on, None while all are one; and who came that the head tells nothing of."""
        self.places = places
        if self._entrusts is None:
            self.outside = unlisted if places is None else places.outside | unlisted
        self._pulls.place(places, self.outside)

    # --- peers -------------------------------------------------------------------------------------------------------

    def join(self, peer: str, have: Collection[int], now: float) -> bool:
        """`peer` takes part from now on and holds `have`. Whether it did not take part before."""
        new = peer not in self._peers
        if new:
            entry = self._peers[peer] = _Peer(peer)
            self._pulls.join(peer, entry.has)
            if self._entrusts is not None and not self._entrusts(peer):
                self.lagging.add(peer)
                self._strangers.add(peer)
            self._policy.joined(peer, now)
        if have:
            self.peer_has(peer, have, now)
        return new

    def leave(self, peer: str, now: float) -> None:
        """`peer` is gone: what it alone distributed is handed out again, what was asked of it is free to ask elsewhere."""
        if self._peers.pop(peer, None) is None:
            return
        self.lagging.discard(peer)
        self._askers.discard(peer)
        self._full.discard(peer)
        self._pulls.leave(peer)
        self._policy.left(peer, now)

    def peers(self) -> list[str]:
        return list(self._peers)

    def peer_has(self, peer: str, chunks: Collection[int], now: float) -> bool:
        """`peer` announced that it holds these, in the order in which they came there. Whether `next` may know more now: at the
        source, and where `peer` was handed as much as may be before it answers."""
        entry = self._peers.get(peer)
        bits = bits_of(chunks) if entry is not None else 0
        if entry is None or not bits:
            return False
        more = self.is_source or peer in self._full
        new, sent = entry.has.add_bits(bits), entry.sent
        if sent:
            for chunk in chunks:
                handed_at = sent.pop(chunk, None)
                if handed_at is not None:
                    entry.answered_at, entry.answer_s = now, min(now - handed_at, MAX_ANSWER_S)
            if peer in self._full and len(sent) < self._most_sent:
                self._full.discard(peer)
        awaited = 0 if self.is_source or self.catching else bits & ~self._holds.bits
        self._pulls.announced(peer, chunks, bits, now, awaited=awaited)
        if new and self._hears:
            fresh = BitView(new)
            for chunk in dict.fromkeys(chunks):
                if chunk in fresh:
                    self._policy.has(peer, chunk, now)
        if self.total is not None:
            entry.has.compact(self.total)
        return more

    def peer_wants(self, peer: str, chunks: Iterable[int], now: float) -> None:
        """`peer` asks for these; what is already on its way to it is not queued twice. A peer that asks for more than
        it can use (MAX_QUEUED_WANTS, RESEND_AFTER_S) is not served the rest."""
        entry = self._peers.get(peer)
        if entry is None:
            return
        self._drop_lost(entry, now)
        for chunk in chunks:
            if len(entry.wanted) >= MAX_QUEUED_WANTS:
                return
            if chunk not in self.held or chunk in entry.sent or chunk in entry.wanted:
                continue
            if entry.again.get(chunk, (0, now))[1] > now or not self._policy.grants(chunk, now):
                continue
            if chunk in entry.has:
                entry.has.discard(chunk)
                entry.not_kept(chunk, now)
            entry.wanted.append(chunk)
            self._askers.add(peer)

    def _drop_lost(self, entry: _Peer, now: float) -> None:
        """Who asks is not waiting for what was handed over long ago: it was dropped there, and must not fill the window.
        Nothing is long ago while answers come, however slowly."""
        patience = LEASE_S + entry.answer_s
        for chunk in [c for c, at in entry.sent.items() if now - max(at, entry.answered_at) >= patience]:
            entry.not_kept(chunk, entry.sent.pop(chunk))
            self._full.discard(entry.name)

    # --- what a policy asks ------------------------------------------------------------------------------------------

    def peer_holds(self, peer: str, chunk: int) -> bool:
        """Whether `peer` announced that it holds `chunk`."""
        return chunk in self._peers[peer].has

    def holds_of(self, peer: str) -> int:
        """The chunks that `peer` announced that it holds, in one bit each."""
        return self._peers[peer].has.bits

    def lacks(self, peer: str, chunk: int) -> bool:
        """Whether `chunk` can be handed to `peer` and is neither there nor on its way from here."""
        entry = self._peers.get(peer)
        return entry is not None and chunk in self.held and chunk not in entry.has and chunk not in entry.sent

    def relays(self, peer: str) -> float:
        """Bytes/s that leave `peer` at most, as its owner bounds them; infinite where nobody does, 0: it relays nothing."""
        return self._bounds.get(peer, inf)

    def takes_part(self, peer: str) -> bool:
        return peer in self._peers

    def anyone_holds(self, chunk: int) -> bool:
        return any(chunk in peer.has for name, peer in self._peers.items() if name not in self.outside)

    def lowest_of(self, chunks: ChunkSet, peer: str) -> int | None:
        """The lowest of `chunks` that `peer` does not hold."""
        return chunks.lowest_not_in(self._peers[peer].has)

    def lowest_lacking(self, peer: str) -> int | None:
        """The lowest chunk held here that `peer` lacks and that is not on its way to it."""
        entry = self._peers[peer]
        return self._holds.lowest_not_in(entry.has, entry.sent)

    # --- chunks ------------------------------------------------------------------------------------------------------

    def hold(self, chunk: int, sender: str | None, *, duty: int, now: float) -> bool:
        """A verified chunk is held now. False when it was held before (a duplicate).

        `duty`: EVERYWHERE when the source made this peer its distributor, else the set of groups to bring it to (see
        `peer_groups`), 0 for none. At the source itself `sender` is None.
        """
        self._pulls.came(chunk, sender, now, held=chunk in self.held)
        if chunk in self.held:
            self.duplicates += 1
            if duty and self.places is not None:
                self._policy.entrusted(chunk, duty, now)
            return False
        self.held.add(chunk)
        self._holds.add(chunk)
        if sender is not None:
            self._news.append(chunk)
        if sender is not None and sender in self._peers:
            self._peers[sender].has.add(chunk)
        self._policy.held(chunk, duty=duty, now=now)
        for row in self.passing.get(sender or "", ()):
            if chunk % row.of == row.share and row.target in self._peers:
                target = self._peers[row.target]
                target.passed = target.passed or deque()
                target.passed.append(chunk)
                self._askers.add(row.target)
        return True

    def lose(self, chunk: int, now: float) -> None:
        """The store no longer has this chunk: it is missing again, and not ours to relay."""
        if chunk in self.held:
            self.held.discard(chunk)
            self._holds.discard(chunk)
            self._pulls.need((chunk,), now)
            for peer in self._peers.values():
                peer.sent.pop(chunk, None)  # it was never handed over after all
            self._full = {peer.name for peer in self._peers.values() if len(peer.sent) >= self._most_sent}

    def news(self) -> list[int]:
        """Chunks held since the last call, to announce to the others."""
        news, self._news = self._news, []
        return news

    # --- decisions ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Some 20 times a second: who lags, and the policy's own timers."""
        if self._laggards.due(len(self._peers), now):
            self._see_who_lags(now)
        self._policy.tick(now)

    def _see_who_lags(self, now: float) -> None:
        held = {p.name: len(p.has) for p in self._peers.values() if p.name != self.source}
        if self._entrusts is not None:
            self.outside = self._strangers = {peer for peer in held if not self._entrusts(peer)}
        inside = {peer: count for peer, count in held.items() if peer not in self.outside}
        self.lagging = self._laggards.among(inside, now).union(self.outside)

    def next(self, ready: Sequence[str], now: float) -> Push | None:
        """What to hand to one of `ready` (peers whose channel has room, the one served longest ago first) now;
        None for nothing. The chunk counts as sent."""
        peers, full = self._peers, self._full
        ready = [p for p in ready if p in peers and p not in full] if full else [p for p in ready if p in peers]
        if not ready:
            return None
        # Wants and pushes take turns: who asks for much must not stop what everybody waits for.
        found = self._asked(ready, now) if self._asked_next else self._pushed(ready, now)
        if found is None:
            found = self._pushed(ready, now) if self._asked_next else self._asked(ready, now)
        else:
            self._asked_next = not self._asked_next
        return found

    def _hand(self, peer: str, chunk: int, now: float) -> None:
        sent = self._peers[peer].sent
        sent[chunk] = now
        if len(sent) >= self._most_sent:
            self._full.add(peer)

    def _asked(self, ready: Sequence[str], now: float) -> Push | None:
        if not self._askers:
            return None
        for peer in ready:
            if peer not in self._askers:
                continue
            entry = self._peers[peer]
            while entry.wanted or entry.passed:
                chunk = entry.wanted.pop(0) if entry.wanted else entry.passed.popleft()  # type: ignore[union-attr]  # it has some
                if chunk in self.held and chunk not in entry.has and chunk not in entry.sent:
                    self._hand(peer, chunk, now)
                    return Push(peer, chunk, self._policy.claim(peer, chunk, now))
            self._askers.discard(peer)
        return None

    def _pushed(self, ready: Sequence[str], now: float) -> Push | None:
        found = self._policy.push(ready, now)
        if found is not None:
            self._hand(found[0], found[1], now)
        return found

    def relieve(self, chunks: Sequence[int]) -> None:
        """The source says that it hands these to the others itself."""
        self._policy.relieve(chunks)

    def relieved(self) -> list[Relieved]:
        """Distributors that the source has to tell so, and the chunks, since the last call."""
        return self._policy.relieved()

    def wants(self, now: float) -> dict[str, list[int]]:
        """Chunks to ask for now, by peer; each is leased to that peer for as long as chunks come from it at a fair pace."""
        if self.is_source or not (self._policy.pulls or self.catching):
            return {}
        return self._pulls.wants(now, catching=self.catching)
