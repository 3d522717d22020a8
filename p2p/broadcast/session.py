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

from p2p.broadcast.chunkset import ChunkSet
from p2p.broadcast.leases import MAX_INFLIGHT, MAX_WANTS_PER_PEER, Pulls
from p2p.limits import LEASE_S

MAX_QUEUED_WANTS = 4 * MAX_WANTS_PER_PEER
"""Wants of one peer that wait here. An honest peer has MAX_WANTS_PER_PEER out; what a flood adds is dropped."""

RESEND_AFTER_S, RESEND_MAX_S = 2 * LEASE_S, 16 * LEASE_S
"""From one time that a chunk is handed again to a peer that had it from us already, to the next: doubled each time up to
the second. A peer that loses a chunk so often uses up our uplink, but its disk may have room again some day."""


@dataclass(slots=True)
class _Peer:
    name: str
    has: ChunkSet = field(default_factory=ChunkSet)
    push: deque[int] = field(default_factory=deque)
    """chunks I distribute and this peer may lack, in order of arrival"""
    wanted: deque[int] = field(default_factory=deque)
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

    `is_source`: this peer made the manifest. `source`: the peer that did, if this one did not.
    `catching`: pull at once from whoever has chunks (a joiner fetching an old manifest) instead of awaiting pushes.
    """

    def __init__(self, *, is_source: bool, source: str | None, now: float, catching: bool = False) -> None:
        self.is_source, self.source, self.catching = is_source, source, catching
        self.held: set[int] = set()
        self.total: int | None = None
        self.duplicates = 0
        self._pulls = Pulls(source, now)
        self._peers: dict[str, _Peer] = {}
        self._unseeded = ChunkSet()
        self._seeded: dict[int, str] = {}
        self._duty: list[int] = []
        self._news: list[int] = []

    # --- what is known of the manifest -------------------------------------------------------------------------------

    def learn(self, chunks: Iterable[int], now: float) -> None:
        """These chunks are provable from now on."""
        for chunk in chunks:
            if chunk not in self.held:
                self._pulls.need(chunk, now)

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

    # --- peers -------------------------------------------------------------------------------------------------------

    def join(self, peer: str, have: Iterable[int], now: float) -> None:
        """`peer` takes part from now on and holds `have`."""
        entry = self._peers.get(peer)
        if entry is None:
            entry = self._peers[peer] = _Peer(peer)
            self._pulls.join(peer, entry.has)
            if not self.complete:  # a late joiner pulls, from everybody: pushing as well would send much twice
                entry.push.extend(self._duty)
        self.peer_has(peer, have, now)

    def leave(self, peer: str) -> None:
        """`peer` is gone: what it alone distributed is seeded again, what was asked of it is free to ask elsewhere."""
        if self._peers.pop(peer, None) is None:
            return
        self._pulls.leave(peer)
        if self.is_source:
            for chunk in [c for c, to in self._seeded.items() if to == peer and not self._elsewhere(c)]:
                del self._seeded[chunk]
                self._unseeded.add(chunk)

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
        awaits_pushes = not self.is_source and not self.catching
        for chunk in chunks:
            entry.has.add(chunk)
            handed_at = entry.sent.pop(chunk, None)
            if handed_at is not None:
                entry.answered_at, entry.answer_s = now, now - handed_at
            self._pulls.announced(peer, chunk, now, awaited=awaits_pushes and chunk not in self.held)
        if self.total is not None:
            entry.has.compact(self.total)

    def peer_wants(self, peer: str, chunks: Iterable[int], now: float) -> None:
        """`peer` asks for these; what is already on its way to it is not queued twice. A peer that asks for more than
        it can use (MAX_QUEUED_WANTS, RESEND_AFTER_S) is not served the rest."""
        entry = self._peers.get(peer)
        if entry is None:
            return
        # Who asks is not waiting for what was handed over long ago: it was dropped there, and must not fill the window.
        # Nothing is long ago while answers come, however slowly.
        patience = LEASE_S + entry.answer_s
        for chunk in [c for c, at in entry.sent.items() if now - max(at, entry.answered_at) >= patience]:
            entry.not_kept(chunk, entry.sent.pop(chunk))
        for chunk in chunks:
            if len(entry.wanted) >= MAX_QUEUED_WANTS:
                return
            if chunk not in self.held or chunk in entry.sent or chunk in entry.wanted:
                continue
            if entry.again.get(chunk, (0, now))[1] > now:
                continue
            if chunk in entry.has:
                entry.has.discard(chunk)
                entry.not_kept(chunk, now)
            entry.wanted.append(chunk)

    # --- chunks ------------------------------------------------------------------------------------------------------

    def hold(self, chunk: int, sender: str | None, *, seed: bool, now: float) -> bool:
        """A verified chunk is held now. False when it was held before (a duplicate).

        `seed`: the source made this peer its distributor. At the source itself `sender` is None.
        """
        self._pulls.came(chunk, sender, now, held=chunk in self.held)
        if chunk in self.held:
            self.duplicates += 1
            return False
        self.held.add(chunk)
        if sender is not None:
            self._news.append(chunk)
        if sender is not None and sender in self._peers:
            self._peers[sender].has.add(chunk)
        if self.is_source:
            self._unseeded.add(chunk)
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
            self._pulls.need(chunk, now)
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
                return self._hand(entry, chunk, now)
        if self.is_source:
            unseeded = self._unseeded.lowest_not_in(entry.has)
            return None if unseeded is None else self._hand(entry, unseeded, now)
        while entry.push:
            chunk = entry.push.popleft()
            if chunk in self.held and chunk not in entry.has and chunk not in entry.sent:
                return self._hand(entry, chunk, now)
        return None

    def _hand(self, entry: _Peer, chunk: int, now: float) -> tuple[int, bool]:
        """A chunk that nobody has from the source yet makes its first receiver the distributor, asked for or not."""
        entry.sent[chunk] = now
        seed = chunk in self._unseeded
        if seed:
            self._unseeded.discard(chunk)
            self._seeded[chunk] = entry.name
        return chunk, seed

    def wants(self, now: float) -> dict[str, list[int]]:
        """Chunks to ask for now, by peer; each is leased to that peer for as long as chunks come from it at a fair pace."""
        return {} if self.is_source else self._pulls.wants(now, catching=self.catching)
