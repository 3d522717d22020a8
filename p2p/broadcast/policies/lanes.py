"""The default policy at the source when peers are in groups: `Seeding`, with a lane of the grid in place of each peer.

Pure; see `policy`. Who is handed a chunk brings it to every group through its own lane: so a lane has the pace of its slowest
members, and is what a window belongs to. To `Seeding` a lane is a peer that holds a chunk once its witnesses say that they
do; of the lane's members each becomes a distributor in its turn. A chunk that the source distributes itself goes to one peer of
each group, with the duty to relay it there. Once all are handed out it helps single groups (`helping`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from p2p.broadcast.chunkset import ChunkSet, bits_of
from p2p.broadcast.peer_groups import EVERYWHERE, PeerPlaces, duty_of, groups_of
from p2p.broadcast.policies.port import Policy, Push
from p2p.broadcast.policies.seeding import FIRST_WINDOW, HELP_AFTER_S, OVERDUE_S, Seeding, _Distributor
from p2p.broadcast.policies.takeover import SwarmPace, TakeOvers

if TYPE_CHECKING:
    from p2p.broadcast.session import Session


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


class _View:
    """What `Seeding` asks of a session, about lanes."""

    def __init__(self, session: Session, lanes: dict[str, _Lane]) -> None:
        self._session, self._lanes = session, lanes
        self.lagging: set[str] = set()

    @property
    def total(self) -> int | None:
        return self._session.total

    @property
    def memory(self) -> dict[str, float]:
        return self._session.memory

    @property
    def pace(self) -> float:
        return self._session.pace

    @property
    def chunk_bytes(self) -> int:
        return self._session.chunk_bytes

    def at_sites(self, lane: str) -> int:
        """Members that share a LAN with their group."""
        places = self._session.places
        return 0 if places is None else sum(places.groups.get(p, -1) in places.lans for p in self._lanes[lane].peers)

    def peer_holds(self, lane: str, chunk: int) -> bool:
        return chunk in self._lanes[lane].holds

    def anyone_holds(self, chunk: int) -> bool:
        return self._session.anyone_holds(chunk)

    def lacks(self, lane: str, chunk: int) -> bool:
        return lane in self._lanes and chunk not in self._lanes[lane].holds

    def lowest_of(self, chunks: ChunkSet, lane: str) -> int | None:
        return chunks.lowest_not_in(self._lanes[lane].holds)


class _Seeding(Seeding):
    """With what `TakeOvers` has to know of it. Takes nothing over from a lane: some groups have it from there already."""

    def __init__(self, view: _View) -> None:
        super().__init__(cast("Session", view))
        self._view = view

    def all_handed_out(self, now: float) -> bool:
        """And for so long under way that the source may help with it."""
        began = self._began is not None and now - self._began >= HELP_AFTER_S
        return began and not len(self._unseeded) and self.session.total is not None

    def through(self) -> float:
        """Chunks a second that all lanes together bring to everybody."""
        return sum(self._rate(lane, d) for lane, d in self._peers.items() if d.out) / self._copies()

    def transit_s(self) -> float:
        """The longest that a chunk takes to a distributor, of any lane."""
        return max((d.transit_s for d in self._peers.values()), default=0.0)

    def out(self) -> int:
        """The chunks that are not everywhere, as far as is known, in one bit each."""
        return bits_of(self._out)

    def _window(self, peer: str, d: _Distributor) -> float:
        if not d.window and peer not in self._view.memory:
            d.window = max(FIRST_WINDOW, FIRST_EACH * self._view.at_sites(peer))
        return super()._window(peer, d)

    def _take_over(self) -> int | None:
        return None


class Lanes(Policy):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        assert session.places is not None
        self._places: PeerPlaces = session.places
        """as they were when the session began: a peer stays in its lane"""
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[str, _Lane] = {}
        self._view = _View(session, self._lanes)
        self._seeding = _Seeding(self._view)
        self._given: dict[int, str] = {}
        """chunk -> who distributes it"""
        self._own: dict[str, deque[tuple[int, int]]] = {}
        """peer -> chunks and duties that the source hands it itself"""
        self._own_at: dict[int, float] = {}
        self._entered: dict[str, list[tuple[int, int]]] = {}
        """peer -> chunks and duties that the source handed it itself"""
        self._helping = TakeOvers(session)
        self._relieved: list[tuple[str, int]] = []

    # --- facts -------------------------------------------------------------------------------------------------------

    def joined(self, peer: str, now: float) -> None:
        places = self.session.places or self._places
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
        lane = self._lane_of.pop(peer, None)
        if lane is None:
            return
        del lane.peers[peer]
        entered = [*self._entered.pop(peer, ()), *self._own.pop(peer, ())]
        for chunk in [c for c, to in self._given.items() if to == peer]:
            del self._given[chunk]
            if not self.session.anyone_holds(chunk):
                self._seeding.unseed(chunk)
            else:  # other groups were served first
                self._bring_home(chunk, (self.session.places or self._places).groups.get(peer, -1))
        for chunk, duty in entered:
            for group in groups_of(duty, len(self._places.sites)):
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
        places, session = self.session.places or self._places, self.session
        members = [p for p in self._lane_of if places.groups.get(p) == group]
        if members and all(session.lacks(p, chunk) for p in members):
            entry = min(members, key=lambda p: (p in session.lagging, len(self._own.get(p, ()))))
            self._own.setdefault(entry, deque()).append((chunk, duty_of([group])))

    def _counted(self, lane: _Lane) -> list[str]:
        return [p for p in lane.witnesses if p not in self.session.lagging] or list(lane.witnesses)

    def _recount(self, lane: _Lane, now: float) -> None:
        """The witnesses of a lane, or those of them that count, are others now."""
        witnesses = self._counted(lane)
        for chunk in list(lane.lacking):
            lacking = sum(not self.session.peer_holds(p, chunk) for p in witnesses)
            lane.lacking[chunk] = lacking
            if not lacking:
                self._complete(lane, chunk, now)

    def has(self, peer: str, chunk: int, now: float) -> None:
        lane = self._lane_of.get(peer)
        if lane is None or peer not in lane.witnesses or chunk in lane.holds:
            return
        lacking = sum(not self.session.peer_holds(p, chunk) for p in self._counted(lane))
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
        lagging = {lane.name for lane in self._lanes.values() if lane.peers.keys() <= self.session.lagging}
        if self.session.lagging:
            for lane in self._lanes.values():
                if lane.lacking and lane.witnesses & self.session.lagging:
                    self._recount(lane, now)
        self._view.lagging = lagging
        self._seeding.tick(now)

    def claim(self, peer: str, chunk: int, now: float) -> int:
        lane = self._lane_of.get(peer)
        if lane is not None and self._seeding.claim(lane.name, chunk, now):
            self._given[chunk] = peer
            return EVERYWHERE
        return 0

    def relieved(self) -> list[tuple[str, int]]:
        told, self._relieved = self._relieved, []
        for _, chunk in self._seeding.relieved():
            peer = self._given.pop(chunk, None)
            if peer is not None:
                told.append((peer, chunk))
        return told

    # --- decisions ---------------------------------------------------------------------------------------------------

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        members: dict[str, list[str]] = {}
        for peer in ready:
            lane = self._lane_of.get(peer)
            if lane is not None and peer not in self.session.lagging:
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
                return self._distributor(self._lanes[name], members[name], chunk), chunk, EVERYWHERE
            if now - self._own_at.get(chunk, float("-inf")) >= OVERDUE_S:
                self._own_at[chunk] = now
                self._distribute(chunk, self._lanes[name])

    def _distributor(self, lane: _Lane, able: Sequence[str], chunk: int) -> str:
        """The member whose turn it is."""
        ready = set(able)
        lacking = [p for p in lane.peers if p in ready and self.session.lacks(p, chunk)]
        peer = lacking[0] if lacking else able[0]
        lane.peers[peer] = lane.peers.pop(peer)  # type: ignore[func-returns-value]
        self._given[chunk] = peer
        return peer

    def _distribute(self, chunk: int, lane: _Lane) -> None:
        """The source hands this chunk to one peer of each group in which somebody lacks it, of that lane if it can."""
        places = self.session.places or self._places
        best: dict[int, tuple[tuple[bool, bool], str]] = {}
        for peer in self._lane_of:
            group = places.groups.get(peer)
            if group is not None and self.session.lacks(peer, chunk):
                rank = peer in self.session.lagging, peer not in lane.peers
                if group not in best or rank < best[group][0]:
                    best[group] = rank, peer
        for site in {places.sites[g] for g in best}:
            groups = [g for g in best if places.sites[g] == site]
            self._own.setdefault(best[groups[0]][1], deque()).append((chunk, duty_of(groups)))

    def _help(self, now: float) -> None:
        """Hand a whole group the chunk that somebody in it comes to last."""
        if not self._seeding.all_handed_out(now):
            return
        pace = SwarmPace(self._seeding.through(), self._seeding.transit_s())
        found = self._helping.next(self._seeding.out(), pace, self.session.places or self._places, now)
        if found is not None:
            self._relieved.append((found.holder, found.chunk))
            for peer in found.lacking:
                self._own.setdefault(peer, deque()).append((found.chunk, 0))

    def _next_own(self, ready: Sequence[str]) -> Push | None:
        for peer in ready if self._own else ():
            queue = self._own.get(peer)
            while queue:
                chunk, duty = queue.popleft()
                if not queue:
                    del self._own[peer]
                if self.session.lacks(peer, chunk):
                    if duty:
                        self._entered.setdefault(peer, []).append((chunk, duty))
                    return peer, chunk, duty
        return None
