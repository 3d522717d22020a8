"""Who is linked to whom when there are too many peers for a full mesh, or some of them share a fast LAN. Pure.

Peers stand in a grid: a row is a **group**, a column a **lane**. A group is a piece of one site, or of those that belong to
none. A peer is linked to its whole group and, in every other group, to whoever stands in its own lane; the source to all.
So everybody is two links from everybody, with about 2 sqrt(N) links each, and a chunk crosses from group to group once.
Up to MESH peers everybody is linked to everybody; with no sites among them they are one group, and nothing of this applies.

**Strangers**, to whom nothing is entrusted, stand in groups of their own: the others get each chunk without them, and no
stranger can hold one up for anybody but strangers.

The head keeps the `Grid`; each peer is told its own `PeerPlaces`. Must not know chunks, links or who pushes what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, log, sqrt
from typing import NamedTuple

MESH = 32
"""Peers that all know each other: a full mesh of more has too many connections, and announcements grow with their square."""

GROUP, SHAPE = 8, 0.7
"""Peers of one group, where there are more than MESH: at the least, and as a part of sqrt(N). Its entry sends each of them a copy
of its own, while between groups a chunk travels along a tree: so groups are rather more than they are large."""

SITE_GROUP = 24
"""A site with more peers than this is cut into groups of this size or less; from one to the other chunks go over the LAN."""

MAX_GROUPS = 60
"""A set of groups travels as the bits of one 64-bit number; beyond 60 * GROUP peers groups grow instead."""

EVEN = 1.4
"""There may be so many times more groups than that, or fewer, if they come out even."""

GROWTH = 1.5
"""All are placed anew when there are so many times more peers, or fewer, than when they were placed last."""

WITNESSES = 64
"""Peers that tell the source of every chunk at once. What the others tell it, for repair, comes less often."""


@dataclass(frozen=True)
class PeerPlaces:
    """Where one peer stands, and the others as far as it is concerned with them."""

    group: int
    """its own; -1 for the source, which is in none"""
    groups: Mapping[str, int]
    """of every peer that it is linked to, and its own"""
    sites: tuple[int, ...]
    """group -> number of its site; groups of one number share a LAN"""
    witness: bool = True
    """it tells the source of every chunk at once"""
    stand_ins: frozenset[int] = frozenset()
    """groups without its lane: whoever it is linked to there is of another, and stands in"""
    strangers: frozenset[int] = frozenset()
    """groups of those to whom nothing is entrusted"""
    lanes: Mapping[str, int] = field(default_factory=dict)
    """lane of every peer; the source alone knows"""
    witnesses: frozenset[str] = frozenset()
    """the source alone knows"""
    lans: frozenset[int] = frozenset()
    """groups that are at a site; the source alone knows"""

    @cached_property
    def members(self) -> dict[int, list[str]]:
        """Those in `groups`, by group."""
        members: dict[int, list[str]] = {}
        for peer, group in self.groups.items():
            members.setdefault(group, []).append(peer)
        return members

    @cached_property
    def outside(self) -> frozenset[str]:
        """Those in `groups` who are served after the others: strangers, unless the peer itself is one."""
        if not self.strangers or self.group in self.strangers:
            return frozenset()
        return frozenset(p for p, g in self.groups.items() if g in self.strangers)

    def strange(self, peer: str) -> bool:
        """Whether `peer` is a stranger; where there are any, also who has no place yet."""
        return bool(self.strangers) and self.groups.get(peer) in (None, *self.strangers)

    @property
    def one_group(self) -> bool:
        """Whether those who are no strangers are one group."""
        return len(self.sites) == len(self.strangers) + 1

    @property
    def proven_mesh(self) -> bool:
        """Whether those who are no strangers are one group without a site; the source alone knows."""
        return bool(self.strangers) and self.one_group and self.lans <= self.strangers

    def near(self, peer: str) -> bool:
        """Whether `peer` is in the same group, or at the same site."""
        other = self.groups.get(peer, -1)
        return self.group >= 0 <= other and self.sites[other] == self.sites[self.group]


class _Kind(NamedTuple):
    """What the peers of one group have in common."""

    site: str
    strange: bool


class _Counts(NamedTuple):
    """Peers of a grid."""

    proven: int
    strange: int
    alike: bool
    """strangers are alone, and so as good as any: they count as proven here"""


def _changed(now: int, then: int) -> bool:
    return not then / GROWTH <= now <= GROWTH * then


class _PeerGroup:
    __slots__ = ("cells", "kind")

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.cells: list[str | None] = []
        """peers by lane; None where one left and nobody took its place yet"""

    @property
    def peers(self) -> list[str]:
        return [p for p in self.cells if p is not None]

    def add(self, peer: str) -> int:
        for lane, cell in enumerate(self.cells):
            if cell is None:
                self.cells[lane] = peer
                return lane
        self.cells.append(peer)
        return len(self.cells) - 1

    def at(self, lane: int, asking: int) -> str | None:
        """Who stands in that lane, or stands in for who left it; for a lane that is not here, another for each asking group."""
        n = len(self.cells)
        if lane >= n:
            lane += asking
        return next((p for i in range(n) if (p := self.cells[(lane + i) % n]) is not None), None) if n else None


class Grid:
    """The peers of a run, the source aside. Who comes takes an empty cell, who goes leaves one, so that few links change;
    all are placed anew when their number has changed by GROWTH, or groups begin or cease to be of use.

    `mesh`: as MESH; `group`: as GROUP.
    """

    def __init__(self, peers: Mapping[str, str] | Iterable[str] = (), *, mesh: int = MESH, group: int = GROUP) -> None:
        """`peers`: names, or name -> site ("" for none)."""
        self.mesh, self._least = mesh, group
        self._sites: dict[str, str] = dict(peers) if isinstance(peers, Mapping) else dict.fromkeys(peers, "")
        self._strange: set[str] = set()
        self._groups: list[_PeerGroup] = []
        self._where: dict[str, tuple[int, int]] = {}
        self._placed = _Counts(0, 0, alike=False)
        """peers when each of these were placed last"""
        self._strange_groups: frozenset[int] | None = None
        self._place_all()

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __contains__(self, peer: str) -> bool:
        return peer in self._sites

    @property
    def grouped(self) -> bool:
        """False: everybody is linked to everybody, in one group."""
        return bool(self._groups)

    @property
    def groups(self) -> list[list[str]]:
        return [g.peers for g in self._groups]

    def strange(self, peer: str) -> bool:
        """Whether it was added as a stranger."""
        return peer in self._strange

    @property
    def split(self) -> bool:
        """Whether there are strangers, and others too."""
        return 0 < len(self._strange) < len(self._sites)

    def add(self, peer: str, site: str = "", *, stranger: bool = False) -> None:
        """Place a peer that came, or that is at another site now, or a stranger no more."""
        if self._sites.get(peer) == site and (peer in self._strange) == stranger:
            return
        self.remove(peer)
        self._sites[peer] = site
        if stranger:
            self._strange.add(peer)
        self._fit(peer)

    def remove(self, peer: str) -> None:
        """Empty the cell of a peer that left."""
        if self._sites.pop(peer, None) is None:
            return
        self._strange.discard(peer)
        where = self._where.pop(peer, None)
        if where is not None:
            self._groups[where[0]].cells[where[1]] = None
        self._fit()

    # --- placing -----------------------------------------------------------------------------------------------------

    def _counts(self) -> _Counts:
        strange, count = len(self._strange), len(self._sites)
        return _Counts(count, 0, alike=strange > 0) if strange == count else _Counts(count - strange, strange, alike=False)

    def _useful(self) -> bool:
        if len(self._sites) > self.mesh or self._counts().strange:
            return True
        shared = [s for s in self._sites.values() if s]
        return len(shared) > len(set(shared))

    def _fit(self, came: str | None = None) -> None:
        """Place who came. All are placed anew when groups begin or cease to be of use, or those who are no strangers have become
        many more or fewer; strangers alone when they have: whatever strangers do, the others stay where they are."""
        now, then, few = self._counts(), self._placed, 2 * self._least
        self._strange_groups = None
        many = now.strange == 0 or max(now.proven, then.proven) > self.mesh
        others = now.alike != then.alike or (many and _changed(now.proven, then.proven))
        if self._useful() != self.grouped or (self.grouped and others):
            self._place_all()
        elif self.grouped and max(now.strange, then.strange) > few and _changed(now.strange, then.strange):
            self._place_strangers()
        if self.grouped and came is not None and came not in self._where:
            self._place(came)

    def _place_all(self) -> None:
        self._groups, self._where, self._strange_groups = [], {}, None
        self._placed = self._counts()
        if self._useful():
            strange = self._strange if self._placed.strange else set[str]()
            self._place_some([p for p in self._sites if p not in strange], MAX_GROUPS - 1, strange=False)
            self._place_strangers()

    def _place_strangers(self) -> None:
        self._groups, self._strange_groups = [g for g in self._groups if not g.kind.strange], None
        self._where = {p: (n, lane) for n, g in enumerate(self._groups) for lane, p in enumerate(g.cells) if p is not None}
        self._placed = self._placed._replace(strange=self._counts().strange)
        if self._placed.strange:
            self._place_some(list(self._strange), MAX_GROUPS - len(self._groups), strange=True)

    def _place_some(self, peers: list[str], room: int, *, strange: bool) -> None:
        """Place these in so many groups at most. One of all is left to strangers."""
        by_site: dict[str, list[str]] = {}
        for peer in sorted(peers, key=_mixed):
            by_site.setdefault(self._sites[peer], []).append(peer)
        count, last = len(peers), len(self._groups) + room
        rest = by_site.pop("", [])
        for place, site in enumerate(sorted(by_site, key=lambda s: (-len(by_site[s]), s))):
            if len(by_site[site]) > 1 and place < room // 2 and len(self._groups) < last - 1:
                self._cut(by_site[site], _Kind(site, strange), max(SITE_GROUP, ceil(count / room)), last - 1)
            else:
                rest += by_site[site]
        size = max(self._least, round(SHAPE * sqrt(len(rest))), ceil(len(rest) / (last - len(self._groups))))
        self._cut(rest, _Kind("", strange), self.mesh if count <= self.mesh and not strange else size, last)

    def _cut(self, peers: list[str], kind: _Kind, size: int, last: int) -> None:
        """Put these into groups of about this size; the grid has `last` groups at most then."""
        least = 2 if not kind.site and not self._groups and len(peers) > self.mesh else 1
        pieces = max(least, _pieces(len(peers), size, last - len(self._groups))) if peers else 0
        for piece in range(pieces):
            group = _PeerGroup(kind)
            self._groups.append(group)
            for peer in peers[piece::pieces]:
                self._where[peer] = len(self._groups) - 1, group.add(peer)

    def _place(self, peer: str) -> None:
        kind = _Kind(self._sites[peer], peer in self._strange and not self._placed.alike)
        alike = [g for g in self._groups if g.kind.strange == kind.strange]
        own = [g for g in alike if g.kind == kind]
        # The last group there may be is left to strangers.
        room = MAX_GROUPS - (not kind.strange and len(alike) == len(self._groups))
        if not own and len(self._groups) < room and all(g.kind.site for g in alike):
            group = _PeerGroup(_Kind("", kind.strange))
            self._groups.append(group)
        else:
            group = min(own or [g for g in alike if not g.kind.site] or alike, key=lambda g: len(g.peers))
        self._where[peer] = self._groups.index(group), group.add(peer)

    # --- what peers are told -----------------------------------------------------------------------------------------

    def _numbers(self) -> tuple[int, ...]:
        """Number of the site of each group. A group without a site shares nothing with another; nor do strangers with the others
        of their site."""
        first: dict[_Kind, int] = {}
        return tuple(first.setdefault(g.kind, n) if g.kind.site else n for n, g in enumerate(self._groups))

    def _strange_numbers(self) -> frozenset[int]:
        if self._strange_groups is None:
            found = (n for n, group in enumerate(self._groups) if group.kind.strange and self._strange)
            self._strange_groups = frozenset(found)
        return self._strange_groups

    def _meet(self, one: _PeerGroup, other: _PeerGroup, lane: int) -> bool:
        """Whether who stands in that lane is linked across: a few who are no strangers are linked to some MESH strangers each."""
        if one.kind.strange == other.kind.strange:
            return True
        few = other if one.kind.strange else one
        return lane < len(few.cells) * max(1, self.mesh // max(1, len(self._strange_numbers())))

    def places(self, peer: str) -> PeerPlaces | None:
        """None when everybody is linked to everybody, in one group. KeyError for a peer that is not here."""
        if not self._groups:
            return None
        mine, lane = self._where[peer]
        stand_ins: set[int] = set()
        if len(self._sites) <= self.mesh:
            groups = {p: g for p, (g, _) in self._where.items()}
        else:
            groups = dict.fromkeys(self._groups[mine].peers, mine)
            own = self._groups[mine]
            for number, group in enumerate(self._groups):
                if number == mine:
                    continue
                other = group.at(lane, mine) if self._meet(own, group, lane) else None
                if other is not None:
                    groups[other] = number
                if other is None or self._where[other][1] != lane:
                    stand_ins.add(number)
                # Those whose lane nobody else of this group stands in.
                if len(group.cells) > len(own.cells) or None in own.cells:
                    for i, cell in enumerate(group.cells):
                        if cell is not None and own.at(i, number) == peer and self._meet(own, group, i):
                            groups[cell] = number
        return PeerPlaces(
            mine, groups, self._numbers(), self._is_witness(mine, lane),
            stand_ins=frozenset(stand_ins), strangers=self._strange_numbers(),
        )  # fmt: skip

    def links(self, peer: str) -> list[str]:
        """Whom `peer` is to be linked to, beside the source. KeyError for a peer that is not here."""
        places = self.places(peer)
        linked = self._sites if places is None else places.groups
        return [p for p in linked if p != peer]

    def source_places(self) -> PeerPlaces | None:
        """What the source has to know: everybody's place."""
        if not self._groups:
            return None
        witnesses = frozenset(p for p, where in self._where.items() if self._is_witness(*where))
        return PeerPlaces(
            -1, {p: g for p, (g, _) in self._where.items()}, self._numbers(),
            lanes={p: lane for p, (_, lane) in self._where.items()}, witnesses=witnesses,
            lans=frozenset(number for number, group in enumerate(self._groups) if group.kind.site),
            strangers=self._strange_numbers(),
        )  # fmt: skip

    def _is_witness(self, group: int, lane: int) -> bool:
        """Some of each lane, and of each group; all of them where they are few."""
        peers = self._counts()[self._groups[group].kind.strange]
        stride = min(max(1, peers // WITNESSES), len(self._groups))
        return (group + lane) % stride == 0


def _pieces(peers: int, size: int, room: int) -> int:
    """How many groups of about `size`, so that their last lane is nearly full, or there is none: in a lane of few each
    distributes more than its part, and in groups without one the others relay what it brings. `room`: no more than so many."""
    about = min(max(1, round(peers / size)), max(1, room))
    most = max(about, min(round(EVEN * about), room))
    return min(range(max(1, round(about / EVEN)), most + 1), key=lambda n: -peers % n / n + abs(log(n / about)))


def _mixed(peer: str) -> bytes:
    return hashlib.sha256(peer.encode()).digest()


# --- sets of groups as they travel with a chunk ----------------------------------------------------------------------

EVERYWHERE = 1
"""The duty of a chunk's distributor: bring it to every peer. 0 is no duty; else it is a set of groups, as below."""


def duty_of(groups: Iterable[int]) -> int:
    """The duty to bring a chunk to all of these groups: one bit each, above that of EVERYWHERE."""
    duty = 0
    for group in groups:
        duty |= 2 << group
    return duty


def groups_of(duty: int, count: int) -> list[int]:
    """The groups of a duty, of `count` that there are."""
    return [g for g in range(count) if duty == EVERYWHERE or duty >> g + 1 & 1]
