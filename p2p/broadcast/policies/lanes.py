"""The default policy at the source when peers are in groups: `Seeding`, with a lane of the grid in place of each peer.

Pure; see `port`. Who is handed a chunk brings it to every group through its own lane: so a lane has the pace of its slowest
members, and is what a window belongs to. To `Seeding` a lane is a receiver that holds a chunk once its witnesses say that they
do; of the lane's members each becomes a distributor in its turn. A chunk that the source distributes itself goes to one peer of
each group, with the duty to relay it there. Once all are handed out it helps single groups (`takeover`).

Strangers are in no lane, and get nothing from here but what they ask for: whoever distributes a chunk brings it to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf

from p2p.broadcast.chunkset import ChunkSet
from p2p.broadcast.peer_groups import EVERYWHERE, PeerPlaces, duty_of, groups_of
from p2p.broadcast.policies.port import Policy, Push, Relieved, SessionView
from p2p.broadcast.policies.seeding import FIRST_WINDOW, OVERDUE_S, Seeding
from p2p.broadcast.policies.takeover import TakeOvers

FIRST_EACH = FIRST_WINDOW / 2
"""Chunks out at each member at a site, of a lane of which nothing is known yet: relaying over the LAN is little work, so that
each of them can distribute other chunks. Elsewhere all members relay each chunk, and a lane begins as a peer does: with more,
the first version waits in long queues, its last chunks the longest."""


class _Lane:
    __slots__ = ("holds", "lacking", "name", "peers", "witnesses")

    def __init__(self, name: str) -> None:
        self.name = name
        self.peers: dict[str, None] = {}
        """the one that became a distributor longest ago first"""
        self.witnesses: set[str] = set()
        self.holds = ChunkSet()
        self.lacking: dict[int, int] = {}
        """chunk -> witnesses that do not have it, for those that some have"""


class _LaneView:
    """The lanes as the receivers that `Seeding` reads of."""

    def __init__(self, session: SessionView, lanes: dict[str, _Lane]) -> None:
        self._session, self._lanes = session, lanes
        self.memory, self.chunk_bytes = session.memory, session.chunk_bytes
        self.lagging: set[str] = set()
        self.apart: frozenset[str] = frozenset()

    @property
    def total(self) -> int | None:
        return self._session.total

    @property
    def pace(self) -> float:
        return self._session.pace

    @property
    def uplink(self) -> float:
        """Unknown: a copy to a lane is several, so that what the source could bring there itself is not planned."""
        return 0.0

    def peer_holds(self, lane: str, chunk: int) -> bool:
        return chunk in self._lanes[lane].holds

    def anyone_holds(self, chunk: int) -> bool:
        return self._session.anyone_holds(chunk)

    def lacks(self, lane: str, chunk: int) -> bool:
        return lane in self._lanes and chunk not in self._lanes[lane].holds

    def relays(self, lane: str) -> float:
        """What its members may let go together."""
        return sum(map(self._session.relays, self._lanes[lane].peers)) if lane in self._lanes else inf

    def lowest_of(self, chunks: ChunkSet, lane: str) -> int | None:
        return chunks.lowest_not_in(self._lanes[lane].holds)


class Lanes(Policy):
    """`places`: as they were when the session began. A peer stays in its lane."""

    def __init__(self, session: SessionView, places: PeerPlaces) -> None:
        self._session, self._began_with = session, places
        self._placed_by: PeerPlaces | None = places
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[str, _Lane] = {}
        self._view = _LaneView(session, self._lanes)
        # Nothing is taken over from a whole lane: some groups have it from there already.
        self._seeding = Seeding(self._view, first_window=self._first_window, takes_over=False)
        self._given: dict[int, str] = {}
        """chunk -> who distributes it"""
        self._own: dict[str, deque[Push]] = {}
        """peer -> what waits for the source to hand it over itself"""
        self._own_at: dict[int, float] = {}
        """chunk -> when the source last decided to distribute it itself"""
        self._entered: dict[str, list[Push]] = {}
        """peer -> what the source handed it itself, with a duty"""
        self._take_overs = TakeOvers(session)
        self._relieved: list[Relieved] = []

    @property
    def _places(self) -> PeerPlaces:
        return self._session.places or self._began_with

    def _strange(self, peer: str) -> bool:
        return self._session.places is not None and self._session.places.strange(peer)

    def _first_window(self, lane: str) -> float:
        """More chunks at first for a lane with members at sites, whose groups share a LAN."""
        places = self._session.places
        at_sites = 0 if places is None else sum(places.groups.get(p, -1) in places.lans for p in self._lanes[lane].peers)
        return max(FIRST_WINDOW, FIRST_EACH * at_sites)

    # --- facts -------------------------------------------------------------------------------------------------------

    def joined(self, peer: str, now: float) -> None:
        """Put `peer` into its lane, as a witness if it is one or the lane has none; a stranger into none."""
        places = self._places
        if self._strange(peer):
            return
        name = f"lane {places.lanes.get(peer, 0)}"
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(name)
            self._seeding.joined(name, now)
        lane.peers[peer] = None
        self._lane_of[peer] = lane
        if peer in places.witnesses or not lane.witnesses:
            if len(lane.witnesses) == 1 and not lane.witnesses & places.witnesses:
                lane.witnesses.clear()  # it stood in
            lane.witnesses.add(peer)
            self._recount(lane, now)

    def left(self, peer: str, now: float) -> None:
        """Bring on what `peer` still had to distribute or relay."""
        lane = self._lane_of.pop(peer, None)
        if lane is None:
            return
        del lane.peers[peer]
        entered = [*self._entered.pop(peer, ()), *self._own.pop(peer, ())]
        for chunk in [c for c, to in self._given.items() if to == peer]:
            del self._given[chunk]
            if not self._session.anyone_holds(chunk):
                self._seeding.unseed(chunk)
            else:  # other groups were served first
                self._bring_home(chunk, self._places.groups.get(peer, -1))
        for _, chunk, duty in entered:
            for group in groups_of(duty, len(self._began_with.sites)):
                self._bring_home(chunk, group)
        if not lane.peers:
            del self._lanes[lane.name]
            self._seeding.left(lane.name, now)
        elif peer in lane.witnesses:
            lane.witnesses.discard(peer)
            if not lane.witnesses:
                lane.witnesses.add(next(iter(lane.peers)))
            self._recount(lane, now)

    def _bring_home(self, chunk: int, group: int) -> None:
        """Who was to relay this chunk in that group is gone. Unless somebody of it has the chunk by now, another is to."""
        places, session = self._places, self._session
        if group in places.strangers:
            return  # they ask for it
        members = [p for p in self._lane_of if places.groups.get(p) == group]
        if members and all(session.lacks(p, chunk) for p in members):
            entry = min(members, key=lambda p: (p in session.lagging, len(self._own.get(p, ()))))
            self._owe(Push(entry, chunk, duty_of([group])))

    def _counted(self, lane: _Lane) -> list[str]:
        return [p for p in lane.witnesses if p not in self._session.lagging] or list(lane.witnesses)

    def _recount(self, lane: _Lane, now: float) -> None:
        """The witnesses of a lane, or those of them that count, are others now."""
        witnesses = self._counted(lane)
        for chunk in list(lane.lacking):
            lacking = sum(not self._session.peer_holds(p, chunk) for p in witnesses)
            lane.lacking[chunk] = lacking
            if not lacking:
                self._complete(lane, chunk, now)

    def has(self, peer: str, chunk: int, now: float) -> None:
        """A witness has the chunk: its lane does once all witnesses that count do."""
        lane = self._lane_of.get(peer)
        if lane is None or peer not in lane.witnesses or chunk in lane.holds:
            return
        lacking = sum(not self._session.peer_holds(p, chunk) for p in self._counted(lane))
        lane.lacking[chunk] = lacking
        if not lacking:
            self._complete(lane, chunk, now)

    def _complete(self, lane: _Lane, chunk: int, now: float) -> None:
        del lane.lacking[chunk]
        lane.holds.add(chunk)
        self._seeding.has(lane.name, chunk, now)

    def held(self, chunk: int, *, duty: int, now: float) -> None:
        self._seeding.held(chunk, duty=duty, now=now)

    def tick(self, now: float) -> None:
        """Tell the seeding which lanes lag: those all of whose peers do. Who is no stranger any more comes into a lane."""
        if self._session.places is not self._placed_by:
            self._placed_by = self._session.places
            for peer in self._session.peers():
                if (peer in self._lane_of) == self._strange(peer):
                    (self.left if peer in self._lane_of else self.joined)(peer, now)
        lagging = {lane.name for lane in self._lanes.values() if lane.peers.keys() <= self._session.lagging}
        if self._session.lagging:
            for lane in self._lanes.values():
                if lane.lacking and lane.witnesses & self._session.lagging:
                    self._recount(lane, now)
        self._view.lagging = lagging
        self._seeding.tick(now)

    def grants(self, chunk: int, now: float) -> bool:
        """As at a single source."""
        return self._seeding.grants(chunk, now)

    def claim(self, peer: str, chunk: int, now: float) -> int:
        """As at a single source: who asks for a chunk that nobody was given becomes its distributor."""
        lane = self._lane_of.get(peer)
        if lane is not None and self._seeding.claim(lane.name, chunk, now):
            self._given[chunk] = peer
            return EVERYWHERE
        return 0

    def relieved(self) -> list[Relieved]:
        """Those whom the seeding relieved, as peers instead of lanes, and those whom a take-over relieved."""
        told, self._relieved = self._relieved, []
        for _, chunk in self._seeding.relieved():
            peer = self._given.pop(chunk, None)
            if peer is not None:
                told.append(Relieved(peer, chunk))
        return told

    # --- decisions ---------------------------------------------------------------------------------------------------

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        """The next chunk for a lane's distributor, else a copy that the source hands out itself."""
        members: dict[str, list[str]] = {}
        for peer in ready:
            lane = self._lane_of.get(peer)
            if lane is not None and peer not in self._session.lagging:
                members.setdefault(lane.name, []).append(peer)
        lanes = list(members)
        while True:
            found = self._seeding.seed(lanes, now) if self._own else self._seeding.push(lanes, now)
            if found is None:
                if not self._own:
                    self._help(now)
                return self._next_own(ready)
            name, chunk, duty = found
            if duty:
                return Push(self._distributor(self._lanes[name], members[name], chunk), chunk, EVERYWHERE)
            if now - self._own_at.get(chunk, float("-inf")) >= OVERDUE_S:
                self._own_at[chunk] = now
                self._distribute(chunk, self._lanes[name])

    def _distributor(self, lane: _Lane, able: Sequence[str], chunk: int) -> str:
        """The member whose turn it is."""
        ready = set(able)
        lacking = [p for p in lane.peers if p in ready and self._session.lacks(p, chunk)]
        lacking.sort(key=lambda p: not self._session.relays(p))
        peer = lacking[0] if lacking else able[0]
        lane.peers[peer] = lane.peers.pop(peer)  # type: ignore[func-returns-value]
        self._given[chunk] = peer
        return peer

    def _distribute(self, chunk: int, lane: _Lane) -> None:
        """The source hands this chunk to one peer of each group in which somebody lacks it, of that lane if it can."""
        places = self._places
        best: dict[int, tuple[tuple[bool, bool], str]] = {}
        for peer in self._lane_of:
            group = places.groups.get(peer)
            if group is not None and group not in places.strangers and self._session.lacks(peer, chunk):
                rank = peer in self._session.lagging, peer not in lane.peers
                if group not in best or rank < best[group][0]:
                    best[group] = rank, peer
        strangers = places.strangers
        for site in {places.sites[g] for g in best}:
            groups = [g for g in best if places.sites[g] == site]
            self._owe(Push(best[groups[0]][1], chunk, duty_of([*groups, *strangers])))
            strangers = frozenset()

    def _help(self, now: float) -> None:
        """Hand a whole group the chunk that somebody in it comes to last."""
        if not self._seeding.all_handed_out(now):
            return
        found = self._take_overs.next(self._seeding.out(), self._seeding.swarm_pace(), self._places, now)
        if found is not None:
            self._relieved.append(Relieved(found.holder, found.chunk))
            for peer in found.lacking:
                self._owe(Push(peer, found.chunk, 0))

    def _owe(self, push: Push) -> None:
        self._own.setdefault(push.peer, deque()).append(push)

    def _next_own(self, ready: Sequence[str]) -> Push | None:
        for peer in ready if self._own else ():
            queue = self._own.get(peer)
            while queue:
                push = queue.popleft()
                if not queue:
                    del self._own[peer]
                if self._session.lacks(peer, push.chunk):
                    if push.duty:
                        self._entered.setdefault(peer, []).append(push)
                    return push
        return None
