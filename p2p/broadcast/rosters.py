"""Whom the head tells each node to link with: everybody or, in a large swarm and in one with sites, its neighbours in the grid.

The head's half of `broadcast.peer_groups`. Must not know manifests, nor who dials whom (`membership.peering`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from p2p.broadcast.exchange import Exchange
from p2p.broadcast.peer_groups import MAX_GROUPS, MESH, Grid, PeerPlaces
from p2p.errors import Refusal
from p2p.membership.links import Link
from p2p.protocol.join import Grouping, Placed, RosterEntry, make_roster


class Rosters:
    """`links`: the nodes that are here, by peer; the owner changes it. `mesh`: as in `Grid`. `passes_on`: as in `PeerConduct`.

    Up to `mesh` nodes without sites are all told of each other at once, with every node that comes or goes. In a larger swarm a
    node is told only when its own neighbours change, and not before the owner's next `flush`: a thousand nodes that come one by
    one must not cost a million messages.
    """

    def __init__(
        self,
        exchange: Exchange,
        links: Mapping[str, Link],
        *,
        epoch: int,
        mesh: int = MESH,
        passes_on: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        self._exchange, self._links, self._epoch = exchange, links, epoch
        self.grid, self.passes_on = Grid(mesh=mesh), passes_on
        self.apart: set[str] = set()
        """peers that are nobody's neighbours but the head's: they are not listed, and are told of nobody"""
        self._told: dict[str, tuple[Link, tuple[RosterEntry, ...], Grouping]] = {}
        self._listed: dict[str, frozenset[str]] = {}
        """peer -> the peers of the roster that it was told last"""
        self._stale = False

    def changed(self) -> None:
        """To be called when a node came or went. Tells everybody at once while the swarm is a full mesh."""
        for peer in [p for p in self.grid if p not in self._links]:
            self.grid.remove(peer)
            self._told.pop(peer, None)
            self._listed.pop(peer, None)
        for peer, link in self._links.items():
            if peer not in self.apart:
                self.grid.add(peer, link.site, stranger=not self.passes_on(peer))
        self._stale = True
        if len(self.grid) <= self.grid.mesh:
            self.flush()

    def review(self) -> None:
        """Place those anew who are strangers no more, or again; to be called by a timer, before `flush`."""
        for peer in [p for p in self.grid if p in self._links]:
            stranger = not self.passes_on(peer)
            if stranger != self.grid.strange(peer):
                self.grid.add(peer, self._links[peer].site, stranger=stranger)
                self._stale = True

    def entrusts(self, peer: str) -> bool:
        """Whether `peer` is handed chunks to pass on: strangers are not, unless nobody else is there, those apart aside."""
        return not self.grid.split if self.grid.strange(peer) else peer in self.grid or self.passes_on(peer)

    @property
    def meshed(self) -> Collection[str]:
        """The nodes that are all to be linked with each other, strangers aside while anybody is proven; none where they stand in
        groups."""
        places = self.grid.source_places()
        if places is None:
            return set(self.grid)
        return {p for p, g in places.groups.items() if g not in places.strangers} if places.proven_mesh else ()

    def lists(self, one: str, other: str) -> bool:
        """Whether `one` was told to link with `other`."""
        return other in self._listed.get(one, ())

    def flush(self) -> None:
        """Tell the nodes whose neighbours changed since the last time; to be called by a timer."""
        if not self._stale:
            return
        self._stale = False
        self._exchange.arrange(self.grid.source_places())
        # One whose link is just coming up has no place yet: its own `changed` follows.
        here = [link for link in self._links.values() if link.peer in self.grid]
        members = {link.peer: _Entries(link) for link in here}
        for link in here:
            self._tell(link, members)

    def _tell(self, link: Link, members: Mapping[str, _Entries]) -> None:
        places = self.grid.places(link.peer)
        listed: Collection[str] = members if places is None else places.groups
        roster, grouping = tuple(members[p].told_to(link) for p in listed if p in members), grouping_of(places)
        before = self._told.get(link.peer)
        if places is not None and before is not None and before[0] is link and before[1:] == (roster, grouping):
            return
        if places is not None or (before is not None and before[2] != grouping):
            # Of those who are here: one that only lost us may need every link it has.
            apart = [m.peer for m in before[1] if m.peer in self.grid and m.peer not in listed] if before is not None else []
            link.post(replace(grouping, apart=tuple(apart)))
        link.post(make_roster(self._epoch, roster))
        self._told[link.peer] = link, roster, grouping
        self._listed[link.peer] = frozenset(member.peer for member in roster)


class _Entries:
    """What others are told of one node: the same to most of them, so that a thousand nodes do not cost a million entries."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._made: dict[tuple[str, ...], RosterEntry] = {}

    def told_to(self, other: Link) -> RosterEntry:
        """The entry with the addresses that `other` may be told."""
        addresses = self._link.reach.told_to(other.reach)
        entry = self._made.get(addresses)
        if entry is None:
            entry = self._made[addresses] = RosterEntry(self._link.peer, addresses, self._link.name)
        return entry


def grouping_of(places: PeerPlaces | None) -> Grouping:
    """The message that tells a node of its place; of None, that all nodes are one group."""
    if places is None:
        return Grouping(0, (), True, ())
    peers = tuple(Placed(p, g) for p, g in places.groups.items())
    stand_ins, strangers = tuple(sorted(places.stand_ins)), tuple(sorted(places.strangers))
    return Grouping(places.group, places.sites, places.witness, peers, stand_ins=stand_ins, strangers=strangers)


def places_of(message: Grouping) -> PeerPlaces | None:
    """The inverse of `grouping_of`, checked. Fatal Refusal when the message names a group that it does not list, or more than
    MAX_GROUPS."""
    if not message.sites:
        return None
    count, named = len(message.sites), [message.group, *(p.group for p in message.peers), *message.stand_ins, *message.strangers]
    if count > MAX_GROUPS or max(named) >= count:
        raise Refusal(f"{count} groups, the receiver in group {message.group}", fatal=True)
    groups = {p.peer: p.group for p in message.peers}
    return PeerPlaces(
        message.group, groups, message.sites, message.witness,
        stand_ins=frozenset(message.stand_ins), strangers=frozenset(message.strangers),
    )  # fmt: skip
