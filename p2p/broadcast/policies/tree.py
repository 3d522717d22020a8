"""A chunk's way from group to group: which copies one peer sends for it, and what each receiver is to do with its own. Pure.

A chunk's distributor brings it to all groups; whoever it hands it to in another group brings it on to half of those that
are left, and so on (a binomial tree over the groups), and relays it to its own group. Copies from which most follows leave
first. Each group gets one copy from outside. Where groups share a LAN, the tree is over sites first, then within each: a
chunk crosses into a site once.

Strangers get one copy together, as the last of all, and have a tree of their own: nobody else gets anything through them.

Must not know why a chunk is here, nor what its own group gets: see `relaying`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from p2p.broadcast.peer_groups import PeerPlaces, duty_of
from p2p.broadcast.policies.port import Push, SessionView

Errand = tuple[int, tuple[int, ...]]
"""A chunk, and the groups that the receiver brings it to."""

RECENT_S = 2.0
"""What a peer was handed so shortly before it left is handed to another: it may not have brought it on."""


class SpanningTree:
    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._queues: dict[str, deque[Errand]] = {}
        self._given: deque[tuple[float, str, Errand]] = deque()
        self._strays: list[Errand] = []
        """for groups in which nobody is known, until we are told of somebody"""
        self._strayed_in: PeerPlaces | None = None
        """the places by which they are strays"""

    def bring(self, chunk: int, groups: Sequence[int], places: PeerPlaces) -> None:
        """This peer is to see to it that `groups` get `chunk`, its own aside."""
        sites: dict[int, list[int]] = {}
        # Since the errand was given groups may have become fewer.
        groups = [group for group in groups if group < len(places.sites)]
        strange = frozenset[int]() if places.group in places.strangers else places.strangers
        for group in groups:
            if group != places.group and group not in strange:
                sites.setdefault(places.sites[group], []).append(group)
        own = sites.pop(places.sites[places.group], []) if places.group >= 0 else []
        # Each peer starts behind its own site, so that none is always served last.
        mine = places.sites[places.group] if places.group >= 0 else 0
        self._bring(chunk, [sites[s] for s in sorted(sites, key=lambda s: (s <= mine, s))], places)
        self._bring(chunk, [[group] for group in own], places)
        together = [group for group in groups if group in strange]
        if together:
            self._give(chunk, self._split(chunk, [together], places))

    def _bring(self, chunk: int, units: list[list[int]], places: PeerPlaces) -> None:
        """`units`: groups that get one copy from here."""
        # Whoever stands in for our lane would bring the chunk on in its own, which has enough to relay: so it gets it as a leaf,
        # from one of ours each.
        leaves = [unit for unit in units if places.stand_ins.issuperset(unit)]
        errands = self._split(chunk, [unit for unit in units if not places.stand_ins.issuperset(unit)], places)
        takers = [groups for _, groups in errands for _ in groups]
        for nth, groups in enumerate(takers, 1):
            groups += [group for leaf in leaves[nth :: len(takers) + 1] for group in leaf]
        for leaf in leaves[:: len(takers) + 1]:
            errands += self._split(chunk, [leaf], places)
        self._give(chunk, errands)

    def _give(self, chunk: int, errands: Iterable[tuple[str, list[int]]]) -> None:
        for peer, groups in errands:
            self._queues.setdefault(peer, deque()).append((chunk, tuple(groups)))

    def _split(self, chunk: int, rest: list[list[int]], places: PeerPlaces) -> list[tuple[str, list[int]]]:
        """A binomial tree over `rest`: whom to hand the chunk, and the groups that each brings it to."""
        errands: list[tuple[str, list[int]]] = []
        strays: list[int] = []
        while rest:
            half = len(rest) // 2
            part, rest = rest[half:], rest[:half]
            while part:
                linked = [p for group in part[0] for p in places.members.get(group, ()) if self._session.takes_part(p)]
                if not linked:
                    strays += part.pop(0)
                    continue
                turn = chunk % len(linked)  # whoever brings it there, each chunk comes in at another
                entry = self._best(linked[turn:] + linked[:turn], chunk)
                if entry is not None:
                    errands.append((entry, [group for unit in part for group in unit]))
                    break
                del part[0]  # whom we know there has it
        # We know nobody there; somebody else of our own group may.
        if strays:
            neighbour = self._best(places.members.get(places.group, ()), chunk)
            if neighbour is not None:
                errands.append((neighbour, strays))
            else:
                self._strays.append((chunk, tuple(strays)))
                self._strayed_in = places
        return errands

    def _best(self, peers: Sequence[str], chunk: int) -> str | None:
        """Of those that lack `chunk`, the one with least to do for us; one that lags only if there is no other."""
        session, queues = self._session, self._queues
        able = [p for p in peers if session.lacks(p, chunk)]
        return min(able, key=lambda p: (p in session.lagging or not session.relays(p), len(queues.get(p, ()))), default=None)

    def left(self, peer: str, now: float, places: PeerPlaces) -> None:
        """What waits for `peer`, and what it may not have brought on, goes another way."""
        again = list(self._queues.pop(peer, ()))
        again += [errand for at, to, errand in self._given if to == peer and now - at <= RECENT_S]
        for chunk, groups in again:
            self.bring(chunk, groups, places)

    def next(self, ready: Sequence[str], now: float, places: PeerPlaces) -> Push | None:
        """The errand that goes to most groups, of those that can leave now."""
        if self._strays and places is not self._strayed_in:
            strays, self._strays = self._strays, []
            for chunk, groups in strays:
                self.bring(chunk, groups, places)
        if not self._queues:
            return None
        session = self._session
        while True:
            best, most = None, 0
            for peer in ready:
                queue = self._queues.get(peer)
                if queue and len(queue[0][1]) > most:
                    best, most = peer, len(queue[0][1])
            if best is None:
                return None
            queue = self._queues[best]
            chunk, groups = queue.popleft()
            if not queue:
                del self._queues[best]
            if session.lacks(best, chunk):
                while self._given and now - self._given[0][0] > RECENT_S:
                    self._given.popleft()
                self._given.append((now, best, (chunk, groups)))
                return Push(best, chunk, duty_of(groups))
            # It got it from elsewhere; the other groups still wait.
            self.bring(chunk, [g for g in groups if g != places.groups.get(best)], places)
