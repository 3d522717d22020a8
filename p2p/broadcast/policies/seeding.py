"""The default policy at the source: each chunk goes to one distributor, and what uplink is left helps them.

Pure; see `port`. The scheme is Mutualcast's (Li, Chou, Zhang 2005): a peer is handed as many chunks as it has room for, so strong
uplinks take more with no rate configured. How much room a peer has follows from how long its chunks take to reach everybody
(Little's law), which its receivers tell, not the peer itself. When no distributor has room, the source distributes the next chunk
itself; when all chunks are handed out, it takes over those that their distributors would be through with last. Towards the end of
a version, and from the start of one that will be everywhere at once, a distributor has room for no more than it can bring to
everybody by the time the source could be done with the rest: Mutualcast's shares, for a transfer that ends (`_ahead_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from p2p.broadcast.chunkset import ChunkSet, bits_of
from p2p.broadcast.peer_groups import EVERYWHERE
from p2p.broadcast.policies.distributor import Distributor, Out, slow_receivers
from p2p.broadcast.policies.port import Policy, Push, ReceiverView, Relieved, Remembered
from p2p.broadcast.policies.queues import Queues

BACKLOG_S = 1.2
"""Seconds of work that a distributor is given ahead. With less, uplinks are idle while news travels. With more, the slow ones are
at work alone in the end."""

FIRST_WINDOW, MIN_WINDOW = 4.0, 2.0
"""Chunks out at once at a distributor of which nothing is known yet, and at the least at any."""

TAKE_OVER_S = 0.05
"""Seconds. The source takes over only what its distributor would begin at least this long after it can be told: anything sooner
may be on its way."""

BEGUN_S, AHEAD = 0.3, 2.0
"""A chunk that its distributor has begun is taken over only if the rest would take the distributor longer than the first
(seconds), and longer than the second times what it would take the source."""

GIVEN = 0.8
"""A distributor that was handed less than this part of its window is not judged slow by it."""

MAX_TRANSIT_S = 2.0
"""The longest way to a distributor, in seconds, that its window makes up for."""

HELP_AFTER_S = 0.3
"""Seconds from the first chunk on in which the source takes nothing over, and sends no copies but its own share of a version that
ends soon. A version that is everywhere by then is not worth more of the learner's egress, which costs money."""

LEAST_AHEAD_S = 0.1
"""Seconds of work that a distributor is given ahead however soon the version will be everywhere: what is gained by less is not
worth the learner's egress."""

STRAGGLERS = 4
"""A chunk counts as spread when all but one in so many peers have it: the last word may come over a full uplink."""

OUTSTANDING = 1.5
"""Chunks that some peer still lacks, spread ones included, for each chunk of the window. With more, it is a slow connection that
holds them up, not a late word."""

OWN_WAITING = 4
"""The source takes no further chunk to distribute itself while this many wait for one peer. That peer, often one that is seeded
much, would get them last of all."""

OVERDUE_S = 3.0
"""Seconds. The source itself sends a chunk that has not reached everybody after this time and after three times what is usual."""

LATE_S, LATE = 0.5, 2.0
"""Who asks the source for a chunk that is out at a distributor gets it once it has been there for the first (seconds) and the
second times what is usual."""

SPARED_S = 2.0
"""Seconds for which a distributor with an overdue chunk is given no other. Doubled each time."""


@dataclass(frozen=True, slots=True)
class SwarmPace:
    """How fast the whole swarm is, as far as the source can tell."""

    through: float
    """chunks a second that reach everybody"""
    transit_s: float
    """seconds from handing a chunk to a distributor to hearing that it is there, for the one where that takes longest"""


class Seeding(Policy):
    """`first_window`: chunks out at once at a receiver of which nothing is known. `takes_over`: whether the source takes chunks
    over from their distributors once all are handed out."""

    def __init__(
        self,
        receivers: ReceiverView,
        *,
        first_window: Callable[[str], float] = lambda receiver: FIRST_WINDOW,
        takes_over: bool = True,
    ) -> None:
        self._receivers, self._first_window, self._takes_over = receivers, first_window, takes_over
        self._unseeded = ChunkSet()
        self._out: dict[int, Out] = {}
        self._peers: dict[str, Distributor] = {}
        self._own = Queues(receivers)
        self._began: float | None = None
        self._relieved: list[Relieved] = []
        self._lagging: frozenset[str] = frozenset()
        self._slow, self._counting = frozenset[str](), 0  # slow receivers; peers of whom `Out.lacking` counts some
        self._rates: float | None = None
        """copies a second that all distributors deliver; infinite while not all are known, None to be summed up anew"""

    # --- facts -------------------------------------------------------------------------------------------------------

    def joined(self, peer: str, now: float) -> None:
        """Count it among those who lack what is out."""
        self._peers[peer] = Distributor(self._receivers.chunk_bytes, now, self._receivers.memory.get(peer))
        self._rates = None
        self._counting += peer not in self._lagging
        for chunk, out in self._out.items():
            out.lacking += self._lacks(peer, chunk)

    def _lacks(self, peer: str, chunk: int) -> bool:
        return peer not in self._lagging and not self._receivers.peer_holds(peer, chunk)

    def left(self, peer: str, now: float) -> None:
        """Hand out again what nobody but `peer` has; distribute here what it had begun to distribute."""
        gone, self._rates = self._peers.pop(peer, None), None
        self._slow -= {peer}
        self._own.drop(peer)
        if gone is None:
            return
        for chunk in gone.out:
            del self._out[chunk]
            if not self._receivers.anyone_holds(chunk):
                self._unseeded.add(chunk)
            else:
                self._distribute(chunk)
        self._recount(now)

    def _recount(self, now: float) -> None:
        self._counting = sum(peer not in self._lagging for peer in self._peers)
        for chunk, out in list(self._out.items()):
            out.lacking = sum(self._lacks(p, chunk) for p in self._peers)
            if not out.lacking:
                self._done(chunk, out)

    def has(self, peer: str, chunk: int, now: float) -> None:
        """Count the copy for its distributor, and notice when nearly all or all have the chunk."""
        self._own.settle(peer, chunk)
        out = self._out.get(chunk)
        if out is None or peer in self._lagging:
            return
        owner = self._peers[out.to]
        if peer == out.to:
            took = min(now - out.at, MAX_TRANSIT_S)
            owner.transit_s += (took - owner.transit_s) / 4 if owner.transit_s else took
        elif owner.copied(now):
            self._remember(out.to, owner)
        out.lacking -= 1
        if out.lacking <= self._counting // STRAGGLERS and not out.spread:
            self._spread(out, owner, now)
        if out.lacking <= 0:
            self._done(chunk, out)

    def held(self, chunk: int, *, duty: int, now: float) -> None:
        self._unseeded.add(chunk)

    def unseed(self, chunk: int) -> None:
        """Nobody has this chunk after all."""
        out = self._out.get(chunk)
        if out is not None:
            self._done(chunk, out)
        self._unseeded.add(chunk)

    def _spread(self, out: Out, owner: Distributor, now: float) -> None:
        out.spread = True
        owner.busy -= 1
        took, target = max(now - out.at, 1e-3), BACKLOG_S + owner.transit_s
        owner.took_s += (took - owner.took_s) / 4 if owner.took_s else took
        window = self._window(out.to, owner)
        fits = min(out.ahead * target / took, 2 * window)
        # Where it was handed less than it had room for, what it did says what it was given and not what it can do, unless even
        # that took it too long.
        if fits > window or out.ahead >= GIVEN * window or took > target:
            owner.window = max(MIN_WINDOW, window + (fits - window) / max(2.0, window / 2))
        owner.strikes = 0
        self._remember(out.to, owner)

    def _remember(self, peer: str, d: Distributor) -> None:
        window = self._to_bytes(d.window or self._first_window(peer))
        self._receivers.memory[peer] = Remembered(window, d.pace * self._receivers.chunk_bytes)

    def _done(self, chunk: int, out: Out) -> None:
        del self._out[chunk]
        owner = self._peers[out.to]
        del owner.out[chunk]
        owner.busy -= not out.spread
        if not owner.out and owner.measure_pace():
            self._remember(out.to, owner)

    def _copies(self) -> int:
        return max(1, len(self._peers) - 1)

    def _to_bytes(self, window: float) -> float:
        return window * self._copies() * self._receivers.chunk_bytes

    def _window(self, peer: str, d: Distributor) -> float:
        if not d.window:
            kept = d.remembered
            d.window = max(MIN_WINDOW, kept.window / self._to_bytes(1.0)) if kept is not None else self._first_window(peer)
        bound = self._receivers.relays(peer)
        # No more than its owner lets it relay in that time: it need not be found out again.
        return d.window if bound == inf else min(d.window, bound * BACKLOG_S / self._to_bytes(1.0))

    def _rate(self, peer: str, d: Distributor) -> float:
        return d.rate or self._window(peer, d) * self._copies() / BACKLOG_S

    def tick(self, now: float) -> None:
        """Give up on distributors whose chunk is overdue, and measure the others."""
        if self._lagging != self._receivers.lagging:
            self._lagging = frozenset(self._receivers.lagging)
            self._recount(now)
        for chunk, out in list(self._out.items()):  # oldest first
            owner = self._peers[out.to]
            if now - out.at < max(OVERDUE_S, 3 * (BACKLOG_S + owner.transit_s)):
                break
            self._give_up(chunk, out, owner, now)
        for d in self._peers.values():
            d.look(now)
        self._rates, self._slow = None, slow_receivers(self._out, self._peers, self._lacks)

    def _give_up(self, chunk: int, out: Out, owner: Distributor, now: float) -> None:
        self._done(chunk, out)
        self._relieved.append(Relieved(out.to, chunk))
        self._distribute(chunk)
        if now >= owner.spared_until:
            owner.spared_until = now + SPARED_S * 2**owner.strikes
            owner.strikes = min(owner.strikes + 1, 6)
            owner.window = max(MIN_WINDOW, self._window(out.to, owner) / 2)

    def relieved(self) -> list[Relieved]:
        relieved, self._relieved = self._relieved, []
        return relieved

    def grants(self, chunk: int, now: float) -> bool:
        """What is still to be handed out, and what a distributor is likely to bring soon, is not sent twice: who asks cannot know
        that, a slow one sees little from here."""
        out = self._out.get(chunk)
        if out is None:
            return chunk not in self._unseeded
        return now - out.at >= LATE_S + LATE * (self._peers[out.to].took_s or BACKLOG_S)

    def claim(self, peer: str, chunk: int, now: float) -> int:
        """A chunk that nobody was given yet makes who asked for it its distributor, unless it is a leaf."""
        leaf = peer in self._receivers.lagging or not self._receivers.relays(peer)
        if chunk in self._unseeded and peer in self._peers and not leaf:
            self._seeded(peer, chunk, now)
            return EVERYWHERE
        return 0

    def all_handed_out(self, now: float) -> bool:
        """Whether every chunk is handed out, and so long under way that the source may help with it."""
        began = self._began is not None and now - self._began >= HELP_AFTER_S
        return began and not len(self._unseeded) and self._receivers.total is not None

    def swarm_pace(self) -> SwarmPace:
        """How fast all distributors with work bring chunks to everybody."""
        through = sum(self._rate(peer, d) for peer, d in self._peers.items() if d.out) / self._copies()
        return SwarmPace(through, max((d.transit_s for d in self._peers.values()), default=0.0))

    def out(self) -> int:
        """The chunks that are not everywhere, as far as is known, in one bit each."""
        return bits_of(self._out)

    # --- decisions ---------------------------------------------------------------------------------------------------

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        """A chunk that nobody has for a distributor, else a copy that the source hands out itself."""
        ahead_s = self._ahead_s(now)
        seed = self.seed(ready, now, ahead_s)
        if seed is not None:
            return seed
        found = self._own.next(ready)
        while found is None and self._own.longest() < OWN_WAITING:
            chunk = self._own_chunk(now)
            if chunk is None:
                break
            lacked = self._distribute(chunk)
            found = self._own.next(ready)
            if lacked:
                break
        if found is None and ahead_s < BACKLOG_S:
            # Copies wait for one whose link is stuck. The others, for whom nothing waits, do not wait with it.
            return self.seed(ready, now)
        return found

    def seed(self, ready: Sequence[str], now: float, ahead_s: float = BACKLOG_S) -> Push | None:
        """A chunk that nobody has, for the distributor with most room; each has room for `ahead_s` seconds of work."""
        if not len(self._unseeded):
            return None
        loads = []
        for place, peer in enumerate(ready):
            d = self._peers.get(peer)
            if d is None or self._leaf(peer, now):
                continue
            load = max(d.busy, len(d.out) / OUTSTANDING) / self._window(peer, d)
            if load < 1.0 and (ahead_s >= BACKLOG_S or self._in_time(peer, d, ahead_s)):
                # What one without links distributes takes the uplinks of those that pass it on.
                loads.append((peer in self._receivers.apart, load, place, peer))
        for *_, peer in sorted(loads):
            chunk = self._receivers.lowest_of(self._unseeded, peer)
            if chunk is not None:  # else it has them all, or says so
                self._seeded(peer, chunk, now)
                return Push(peer, chunk, EVERYWHERE)
        return None

    def _leaf(self, peer: str, now: float) -> bool:
        """Whether nothing is handed to `peer` to distribute."""
        out = peer in self._lagging or peer in self._receivers.lagging or not self._receivers.relays(peer)
        return out or now < self._peers[peer].spared_until

    def _most(self, peer: str, d: Distributor) -> float:
        """Copies a second that `peer` delivers, by the better of two accounts: a window that was never full says too little."""
        bound = self._receivers.relays(peer) / self._receivers.chunk_bytes
        return min(max(self._window(peer, d) * self._copies() / BACKLOG_S, d.pace), bound)

    def _in_time(self, peer: str, d: Distributor, ahead_s: float) -> bool:
        """Whether `peer` can bring one chunk more to everybody in `ahead_s`, what is known of it being as old as its way is long;
        or, with nothing to do, sooner than the source alone could bring all that is left."""
        if (d.busy + 0.5) * self._copies() <= (ahead_s + d.transit_s / 2) * self._most(peer, d):
            return True
        left = len(self._unseeded) * len(self._peers) * self._receivers.chunk_bytes
        return not d.busy and self._copies() * self._receivers.uplink <= self._most(peer, d) * left

    def _ahead_s(self, now: float) -> float:
        """Seconds of work that a distributor is given ahead: BACKLOG_S, or until the version would be everywhere if all who bring
        it to others, and the source, were at work to the end. That is known of a version whose size is, with distributors of
        whom all are known from an earlier one."""
        receivers, unseeded = self._receivers, len(self._unseeded)
        source = receivers.uplink / receivers.chunk_bytes
        if receivers.total is None or unseeded >= BACKLOG_S * source:
            return BACKLOG_S
        if self._rates is None:  # looked at once a tick: this is asked for each chunk
            able = [(peer, d) for peer, d in self._peers.items() if not self._leaf(peer, now)]
            known = all(d.remembered is not None for _, d in able)
            self._rates = sum(self._most(peer, d) for peer, d in able) if known else inf
        copies = unseeded * len(self._peers)
        if self._rates == inf or copies >= BACKLOG_S * (source + self._rates):
            return BACKLOG_S
        copies += sum(out.lacking for out in self._out.values()) + self._own.waiting()
        return min(BACKLOG_S, max(unseeded / source, copies / (source + self._rates), LEAST_AHEAD_S))

    def _seeded(self, peer: str, chunk: int, now: float) -> None:
        self._began = now if self._began is None else self._began
        self._unseeded.discard(chunk)
        d = self._peers[peer]
        d.out[chunk] = None
        d.busy += 1
        lacking = sum(self._lacks(p, chunk) for p in self._peers)
        self._out[chunk] = Out(peer, now, d.busy, lacking)

    def _distribute(self, chunk: int) -> int:
        """The source sends this chunk to everyone who lacks it, itself. How many those are."""
        self._unseeded.discard(chunk)
        lacking = [peer for peer in self._peers if self._receivers.lacks(peer, chunk)]
        for peer in lacking:
            self._own.add(peer, chunk)
        return len(lacking)

    def _own_chunk(self, now: float) -> int | None:
        """What the source distributes next itself: the first that no distributor has room for, else the one that its
        distributor would come to last."""
        if self._began is None:
            self._began = now
        early = now - self._began < HELP_AFTER_S
        if len(self._unseeded) and not (early and self._ahead_s(now) >= BACKLOG_S):
            return self._unseeded.lowest_not_in(ChunkSet())
        if early or self._receivers.total is None or not self._takes_over:
            return None  # without a total more is being made, and nobody is overburdened with what there is so far
        return self._take_over()

    def _take_over(self) -> int | None:
        """The chunk that its distributor would be through with last, if that is late enough."""
        latest, chosen = 0.0, None
        pace = self._receivers.pace / self._receivers.chunk_bytes
        for peer, d in self._peers.items():
            # What only slow ones lack lies in their channels, and would come there twice.
            left = [c for c in d.out if self._out[c].lacking > sum(self._lacks(p, c) for p in self._slow)]
            if not left:
                continue
            rate = self._rate(peer, d)
            *before, last = left
            ahead = sum(self._out[c].lacking for c in before)
            lacking = self._out[last].lacking
            start, finish = (((ahead + more) / rate if rate > 0 else 1e9) - d.transit_s for more in (0, lacking))
            begun = start <= TAKE_OVER_S
            if begun and not (pace and finish > max(BEGUN_S, AHEAD * lacking / pace)):
                continue
            if finish > latest:
                latest, chosen = finish, last
        if chosen is None:
            return None
        self._relieved.append(Relieved(self._out[chosen].to, chosen))
        self._done(chosen, self._out[chosen])
        return chosen
