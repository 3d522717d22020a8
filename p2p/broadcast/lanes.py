"""The default policy at the source when peers are in groups: `Seeding`, with a lane of the grid in place of each peer.

Pure; see `policy`. Who is handed a chunk brings it to every group through its own lane: so a lane has the pace of its slowest
members, and is what a window belongs to. To `Seeding` a lane is a peer that holds a chunk once its witnesses say that they
do; of the lane's members each becomes a distributor in its turn. What the source distributes itself goes to one peer of each
group, with the duty to relay it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from p2p.broadcast.chunkset import ChunkSet
from p2p.broadcast.groups import EVERYWHERE, Places, duty_of
from p2p.broadcast.policy import Policy, Push
from p2p.broadcast.seeding import OVERDUE_S, Seeding

if TYPE_CHECKING:
    from p2p.broadcast.session import Session


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

    def peer_holds(self, lane: str, chunk: int) -> bool:
        return chunk in self._lanes[lane].holds

    def anyone_holds(self, chunk: int) -> bool:
        return self._session.anyone_holds(chunk)

    def lacks(self, lane: str, chunk: int) -> bool:
        return lane in self._lanes and chunk not in self._lanes[lane].holds

    def lowest_of(self, chunks: ChunkSet, lane: str) -> int | None:
        return chunks.lowest_not_in(self._lanes[lane].holds)


class Lanes(Policy):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        assert session.places is not None
        self._places: Places = session.places
        """as they were when the session began: a peer stays in its lane"""
        self._lanes: dict[str, _Lane] = {}
        self._lane_of: dict[str, _Lane] = {}
        self._view = _View(session, self._lanes)
        self._seeding = Seeding(cast("Session", self._view))
        self._given: dict[int, str] = {}
        """chunk -> who distributes it"""
        self._own: dict[str, deque[tuple[int, int]]] = {}
        """peer -> chunks and duties that the source hands it itself"""
        self._own_at: dict[int, float] = {}

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
        for chunk, _ in self._own.pop(peer, ()):
            self._own_at.pop(chunk, None)  # overdue soon, and sent another way then
        for chunk in [c for c, to in self._given.items() if to == peer]:
            del self._given[chunk]
            if not self.session.anyone_holds(chunk):
                self._seeding.unseed(chunk)
        if not lane.peers:
            del self._lanes[lane.name]
            self._seeding.left(lane.name, now)
        elif peer in lane.witnesses:
            lane.witnesses.discard(peer)
            if not lane.witnesses:
                lane.witnesses.add(next(iter(lane.peers)))
            self._recount(lane, now)

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

    def held(self, chunk: int, *, seed: int, now: float) -> None:
        self._seeding.held(chunk, seed=seed, now=now)

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
        told = []
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
                return self._next_own(ready)
            name, chunk, seed = found
            if seed:
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

    def _next_own(self, ready: Sequence[str]) -> Push | None:
        for peer in ready if self._own else ():
            queue = self._own.get(peer)
            while queue:
                chunk, duty = queue.popleft()
                if not queue:
                    del self._own[peer]
                if self.session.lacks(peer, chunk):
                    return peer, chunk, duty
        return None
