"""The pulling half of one manifest's transfer at one peer: which missing chunk is asked of whom, when, for how long.

Pure, as the session that owns it. Nothing about rates is configured: how many chunks are out at once, and how long a
lease lasts, follow what really arrives, so a slow downlink is not asked to carry a chunk twice.

When is a chunk pulled that a distributor should push? Each distributor is judged alone, by what comes from it: when it
is silent, everything that it announced is asked for, of itself first; when it only trickles, what it has not sent is taken from
others as soon as the downlink is not busy with theirs. What nobody has announced is asked of the source once the source itself
has stopped sending here: a peer cannot keep others from repairing by anything it says or sends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from p2p.broadcast.arrival_pace import MAX_CHUNK_S, ArrivalPace
from p2p.broadcast.chunkset import BitView, ChunkSet, bits_of, chunks_of
from p2p.broadcast.peer_groups import MESH, PeerPlaces
from p2p.limits import LEASE_S, REPAIR_AFTER_S

MAX_AHEAD = 8
"""Chunks of one peer that may lie in its channel before what is asked of it."""

FIRST_WANTS = 2
"""Outstanding pulls before anything came: at 2 Mbit/s they still arrive within a lease. On a fast link it doubles with
every round trip."""

MAX_WANTS_PER_PEER = 8
"""Outstanding pulls from one peer: few enough not to bury it."""
MAX_WANTS = 32
"""Outstanding pulls from all peers together: a joiner fills its downlink from several of them."""

UNRELIABLE_AFTER = 3
"""Leases broken in a row after which a peer is distrusted."""
DISTRUST_S = 10 * LEASE_S
"""Seconds for which such a peer is not asked, unless a chunk comes from it before. One that only withholds would otherwise cost a
lease for every few chunks that it claims to have."""

MAX_SCAN = 2048
"""Missing chunks that are looked at in vain before the rest waits for the next look: a version may have 10^5 of them."""

LOOK_S = 0.25
"""Seconds between two looks for what may be overdue, where there are more than MESH suppliers and nothing is asked of any."""

SOURCE_AFTER_S = 0.6
"""Seconds without a pushed chunk from the source before the source itself is asked: relays may just be slow to start."""

SILENT_GAPS = 3.0
"""A distributor is silent when nothing has come from it for the patience and this many times its usual pause."""

BUSY_TIMES = 3.0
"""The same, so many times as long, while the downlink is busy with what others push: a slow one that many share goes without a
chunk of one of them for long, and what is pulled then comes no sooner in all and, mostly, twice."""

MAX_SLACK_S = 2 * LEASE_S
"""The most seconds that a slow link may add to the patience with a distributor and with the source."""

BURSTS = 2.0
"""The downlink is not idle before so many times as long as a chunk of each neighbour takes at its best pace: those that share a
slow downlink evenly are done with theirs at once, and then nothing comes for a while."""

MAX_WAIT_S = 5 * LEASE_S
"""The longest wait for one chunk that counts, in seconds: that of 32 chunks at 7 Mbit/s, or of 5 at 1 Mbit/s."""

MAX_BACKOFF = 4
"""Leases double, up to this many times LEASE_S, while not a single chunk has come since the last ones ran out: the link may be
slower than anything that was measured yet."""


@dataclass(slots=True)
class _Lease:
    asked_at: float
    until: float
    ahead: int
    """chunks from this peer that may still come before this one and renew the lease: those already in its channel and those
    asked before. Without an end to it a peer could sit on a chunk for ever by sending others"""


@dataclass(slots=True)
class _Supplier:
    """A neighbour as one who may send us chunks."""

    name: str
    has: ChunkSet
    near: bool
    """in our own group, or at our site: from others nothing is pushed but what they were asked to bring here"""
    strange: bool = False
    """a stranger, where we are none: nothing comes through it, and it is asked when nobody else can be"""
    due: dict[int, float] = field(default_factory=dict)
    """missing chunk -> when it announced it, for those that it was the first to announce: it is their likely
    distributor, and will push them in this order"""
    asked: dict[int, _Lease] = field(default_factory=dict)
    broke: dict[int, float] = field(default_factory=dict)
    """chunk that it did not send under a lease -> when it was asked"""
    window: int = FIRST_WANTS
    chunk_at: float = -1e18
    gap_s: float = 0.0
    """seconds from one chunk that it pushed to the next, averaged over the last few"""
    failures: int = 0
    """leases broken in a row"""
    distrusted_until: float = -1e18

    @property
    def room(self) -> int:
        return self.window - len(self.asked)


@dataclass(slots=True)
class _Look:
    """What holds for all chunks while `wants` looks through them."""

    now: float
    catching: bool
    patience: float
    """seconds of silence before a distributor is doubted"""
    source_quiet: bool
    idle: bool
    """far less arrives than has arrived before: taking chunks from elsewhere costs nothing"""
    busy: bool
    """something came, and it is not idle"""


class Pulls:
    """What is missing here, who may have it, and the leases that are out.

    `source`: name of the peer that made the manifest; None at that peer itself.
    """

    def __init__(self, source: str | None, now: float, places: PeerPlaces | None = None) -> None:
        self.source, self._places = source, places
        self._outside: Collection[str] = () if places is None else places.outside
        self.missing: dict[int, float] = {}
        """provable chunk that is not held -> since when"""
        self._lacking = 0
        """the same as bits of a number"""
        self._somewhere = 0
        """chunks that some neighbour announced (or took back since), as bits of a number; strangers aside"""
        self._strange_bits = 0
        """the same of strangers"""
        self._inside = 0
        """suppliers who are no strangers"""
        self.leases: dict[int, str] = {}
        self._suppliers: dict[str, _Supplier] = {}
        self._first: dict[int, _Supplier] = {}
        self._far: dict[int, float] = {}
        """chunk -> when a peer of another group announced it, before any of our own did"""
        self._source_at = now
        self._pace = ArrivalPace()
        self._peak = 0.0
        self._window = FIRST_WANTS
        self._wait_s = 0.0
        """from asking to arrival, averaged over the last few chunks of all peers: one slow peer has little say in it"""
        self._backoff = 1
        self._look_at = -1e18

    def place(self, places: PeerPlaces | None, outside: Collection[str]) -> None:
        """Which groups the peers are in, from now on, and who is served after the others."""
        self._places, self._outside = places, outside
        for supplier in self._suppliers.values():
            supplier.near = places is None or places.near(supplier.name)
            supplier.strange = supplier.name in outside
        self._count()

    def join(self, peer: str, has: ChunkSet) -> None:
        """`has` is shared with the session, which keeps it up to date."""
        near = self._places is None or self._places.near(peer)
        supplier = _Supplier(peer, has, near, peer in self._outside)
        self._suppliers[peer] = supplier
        self._add(supplier)

    def _add(self, supplier: _Supplier) -> None:
        if supplier.strange:
            self._strange_bits |= supplier.has.bits
        else:
            self._inside += 1
            self._somewhere |= supplier.has.bits

    def _count(self) -> None:
        self._inside = self._somewhere = self._strange_bits = 0
        for supplier in self._suppliers.values():
            self._add(supplier)

    def leave(self, peer: str) -> None:
        """`peer` is gone: its leases end, and what it announced first is awaited from nobody."""
        supplier = self._suppliers.pop(peer)
        for chunk in supplier.asked:
            del self.leases[chunk]
        for chunk in supplier.due:
            del self._first[chunk]
        self._count()

    def need(self, chunks: Iterable[int], now: float) -> None:
        """Chunks that are provable and not held."""
        for chunk in chunks:
            self.missing.setdefault(chunk, now)
        self._lacking |= bits_of(chunks)

    def announced(self, peer: str, chunks: Iterable[int], bits: int, now: float, *, awaited: int) -> None:
        """`peer` holds `chunks` (`bits`, as bits of a number). `awaited`: those that are lacking here, and may be pushed."""
        supplier = self._suppliers[peer]
        if supplier.strange:
            self._strange_bits |= bits
        else:
            self._somewhere |= bits
        if supplier.broke:
            for chunk in chunks:
                supplier.broke.pop(chunk, None)
        if peer == self.source or supplier.strange:
            return
        lacking = BitView(awaited)
        if awaited and not supplier.near:
            for chunk in chunks:
                if chunk in lacking:
                    self._far.setdefault(chunk, now)
        elif awaited:
            for chunk in chunks:
                if chunk in lacking and chunk not in self._first:
                    self._first[chunk] = supplier
                    supplier.due[chunk] = now

    def came(self, chunk: int, sender: str | None, now: float, *, held: bool) -> None:
        """A chunk arrived from `sender`; `held`: it was here already. What is neither new nor was ever asked of its sender
        tells nothing: anybody can send one chunk over and over."""
        supplier = None if sender is None else self._suppliers.get(sender)
        asked_at = None if supplier is None else supplier.broke.pop(chunk, None)
        if held and asked_at is None:
            return
        first = self._first.pop(chunk, None)
        if first is not None:
            del first.due[chunk]
        self._far.pop(chunk, None)
        if self.missing.pop(chunk, None) is not None:
            self._lacking ^= 1 << chunk
        holder = self.leases.pop(chunk, None)
        if holder is not None:
            lease = self._suppliers[holder].asked.pop(chunk)
            asked_at = lease.asked_at if holder == sender else asked_at
        if sender is None:
            return
        pushed = holder is None and asked_at is None
        self._pace.add(now, pushed=pushed)
        self._peak = max(self._peak, self._pace.per_lease(now))
        self._backoff = 1
        # In a swarm of groups the source pushes to each peer but rarely: while anything comes, it may still be at work. What
        # strangers send says nothing of it.
        strange = supplier is not None and supplier.strange
        if pushed and (sender == self.source or not (strange or self._places is None or self._places.one_group)):
            self._source_at = now
        if supplier is not None:
            if pushed and supplier.chunk_at > 0:
                supplier.gap_s += (min(now - supplier.chunk_at, MAX_CHUNK_S) - supplier.gap_s) / 4
            supplier.chunk_at = now
            supplier.failures, supplier.distrusted_until = 0, now
            if asked_at is not None:
                self._pace_wants(supplier, now - asked_at)
            for lease in supplier.asked.values():
                if lease.ahead > 0:
                    lease.ahead -= 1
                    lease.until = now + self._lease_s

    def _pace_wants(self, supplier: _Supplier, wait_s: float) -> None:
        """Outstanding chunks = rate x wait (Little): holding the wait between half a lease and a lease keeps every link
        busy, and has no more out than comes in a lease."""
        self._wait_s += (min(wait_s, MAX_WAIT_S) - self._wait_s) / 4
        step = 1 if wait_s < LEASE_S / 2 else -1 if wait_s > LEASE_S else 0
        supplier.window = min(max(supplier.window + step, 1), MAX_WANTS_PER_PEER)
        self._window = min(max(self._window + step, FIRST_WANTS), MAX_WANTS)

    @property
    def _lease_s(self) -> float:
        """Beyond LEASE_S, the time in which chunks have come lately, twice for safety."""
        return self._backoff * LEASE_S + 2 * self._wait_s

    # --- decisions ---------------------------------------------------------------------------------------------------

    def wants(self, now: float, *, catching: bool) -> dict[str, list[int]]:
        """Chunks to ask for now, by peer; each is leased to that peer."""
        self._expire(now)
        asked: dict[str, list[int]] = {}
        room = self._window - len(self.leases)
        if not self.missing or room <= 0:
            return asked
        if self._inside > MESH and not (catching or self.leases) and now < self._look_at:
            return asked
        self._look_at = now + LOOK_S
        # So long it takes until each neighbour got one chunk through, when they share the downlink.
        slack = min(self._inside * self._pace.chunk_s, MAX_SLACK_S)
        quiet = now - self._source_at >= SOURCE_AFTER_S + slack
        idle = self._idle(now)
        look = _Look(now, catching, REPAIR_AFTER_S + slack, quiet, idle=idle, busy=self._peak > 0 and not idle)
        room = min(room, sum(max(s.room, 0) for s in self._suppliers.values()))
        fruitless = 0
        for chunk, since in self._candidates(quiet):
            if room <= 0 or fruitless >= MAX_SCAN or (not catching and now - since < look.patience):
                break  # later ones are missing for less time still
            if chunk in self.leases:
                continue
            holder = self._whom(chunk, since, look)
            if holder is None:
                fruitless += 1
                continue
            self.leases[chunk] = holder.name
            holder.asked[chunk] = _Lease(now, now + self._lease_s, len(holder.asked) + MAX_AHEAD)
            asked.setdefault(holder.name, []).append(chunk)
            room -= 1
        return asked

    def _idle(self, now: float) -> bool:
        """Far less arrives than has arrived before, and not only because chunks of several neighbours came at once."""
        if self._pace.per_lease(now) >= self._peak / 2:
            return False
        round_s = self._inside * LEASE_S / self._peak if self._peak else 0.0
        return now - self._pace.at >= min(BURSTS * round_s, MAX_SLACK_S)

    def _candidates(self, source_quiet: bool) -> Iterable[tuple[int, float]]:
        """Missing chunks that somebody could be asked for, the one missing longest first, and since when."""
        if source_quiet and self.source is not None and self.source in self._suppliers:
            return self.missing.items()
        # Strangers are asked where the source is not here.
        found = self._lacking & (self._somewhere if self.source in self._suppliers else self._somewhere | self._strange_bits)
        if not found:
            return ()
        if 2 * found.bit_count() > len(self.missing):
            return ((c, at) for c, at in self.missing.items() if found >> c & 1)
        missing = self.missing
        return sorted(((c, missing[c]) for c in chunks_of(found)), key=itemgetter(1))

    def _whom(self, chunk: int, since: float, look: _Look) -> _Supplier | None:
        """Another peer that has it, before the source. One that broke its lease on this chunk is asked again only when
        all the others did too: wants can get lost, and nobody may be given up for good."""
        first, spared = self._first.get(chunk), None
        if not look.catching:
            silent = first is None or self._silent(chunk, first, look)
            if not self._overdue(chunk, max(since, self._far.get(chunk, since)), first, silent, look):
                return None
            # While it pushes, others bring the chunk without a duplicate; while the downlink is idle, sooner too.
            spared = first if look.idle or not silent else None
        able = [s for s in self._suppliers.values() if chunk in s.has and chunk not in s.broke]
        trusted = [s for s in able if s.name != self.source and not s.strange and s.distrusted_until <= look.now]
        free = [s for s in trusted if s.room > 0 and s is not spared]
        if free:
            # Whoever announced it first is its likely distributor: asking it moves the chunk up and duplicates nothing.
            load = 1 if look.catching else 0
            return min(free, key=lambda s: (not s.near, s.failures, load * len(s.asked), s is not first))
        if look.catching and trusted:
            return None
        source = None if self.source is None else self._suppliers.get(self.source)
        if source is not None and chunk in source.broke:
            source = None
        if source is not None and source.room > 0 and look.source_quiet and look.now - since >= SOURCE_AFTER_S:
            return source
        if spared is not None and silent and spared in trusted and spared.room > 0:
            return spared
        if source is None and not trusted:
            for supplier in self._suppliers.values():
                supplier.broke.pop(chunk, None)
            return next((s for s in able if s.strange and s.room > 0 and s.distrusted_until <= look.now), None)
        return None

    @staticmethod
    def _silent(chunk: int, first: _Supplier, look: _Look) -> bool:
        """Whether nothing has come for long from whoever announced this chunk first."""
        usual = look.patience + SILENT_GAPS * first.gap_s
        return look.now - max(first.due[chunk], first.chunk_at) >= usual * (BUSY_TIMES if look.busy else 1.0)

    @staticmethod
    def _overdue(chunk: int, since: float, first: _Supplier | None, silent: bool, look: _Look) -> bool:
        """Whether a chunk is no longer awaited from whoever announced it first."""
        if first is None:  # its distributor may not have it yet, or the news of it is on the way
            return look.now - since >= look.patience + (0 if look.idle else LEASE_S)
        if silent:
            return look.now - since >= look.patience
        waited = look.now - max(since, first.due[chunk])
        # A busy downlink is left to those who push: another copy would take its share of it and come no sooner.
        return look.idle and waited >= look.patience

    def _expire(self, now: float) -> None:
        if not self.leases:
            return
        expired = [(s, c, lease) for s in self._suppliers.values() for c, lease in s.asked.items() if lease.until <= now]
        if expired:
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)
        for supplier, chunk, lease in expired:
            del supplier.asked[chunk], self.leases[chunk]
            supplier.broke[chunk] = lease.asked_at
            supplier.window = max(supplier.window // 2, 1)
            supplier.failures += 1
            if supplier.failures >= UNRELIABLE_AFTER and supplier.name != self.source:
                supplier.failures, supplier.distrusted_until = 0, now + DISTRUST_S
