"""The head's side of `dialling`: takes members' whereabouts, arranges meetings, keeps how members say they are linked. A thin
shell over `introductions`. Must not know rosters beyond who is listed to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import trio

from p2p.channel.port import Network
from p2p.errors import Refusal
from p2p.membership.deputies import deputies_of, mostly_apart
from p2p.membership.introductions import Introductions, place_of
from p2p.membership.links import Link
from p2p.membership.pairs import LinkBook, PairLink
from p2p.membership.reachability import KINDS
from p2p.protocol.reach import Introduce, LinkKinds, NoMeeting, PassingOn, PassOn, Whereabouts

MAX_PAIRS = 500
"""Pairs of members that a status lists: a full mesh of 32 has 496."""


class Matchmaker:
    """`links`: the members that are here. `listed(one, other)`: whether the head told `one` to link with `other`. `moved`: called
    when a member can be dialled at other addresses than before."""

    def __init__(
        self, network: Network, links: Mapping[str, Link], listed: Callable[[str, str], bool], moved: Callable[[], None]
    ) -> None:
        self._network, self._links, self._listed, self._moved = network, links, listed, moved
        self.introductions = Introductions()
        self._book = LinkBook()
        """how members say that they are linked with those that they were told to link with"""
        self._passing: dict[str, tuple[Link, tuple[PassOn, ...]]] = {}
        self._moving: set[str] = set()
        """members whose new addresses wait, since they change too often"""
        self._stale = False
        self._members: Collection[str] = ()
        self._gaps: frozenset[tuple[str, str]] = frozenset()
        self._duties: dict[str, tuple[PassOn, ...]] = {}
        """what follows from both, by member"""
        self.apart: frozenset[str] = frozenset()
        """members that have no link with most of the others"""

    def handle(self, link: Link, message: object) -> bool:
        """Take a message; False when it is none of these. Refusal of one that is not acceptable."""
        match message:
            case Whereabouts():
                place = place_of(link.peer, message, link.control.remote(), self._network.addresses)
                self.introductions.put(link.peer, place)
                self._move(link)
            case Introduce():
                self._introduce(link, message)
            case LinkKinds():
                if any(one.kind not in KINDS for one in message.links):
                    raise Refusal("an unknown kind of link", peer=link.peer)
                self._hear(link.peer, message)
            case _:
                return False
        return True

    def pairs(self) -> list[PairLink]:
        """How members are linked with each other, at most MAX_PAIRS of them, by their names; those without a link first."""
        found, links = self._book.pairs(self._links, MAX_PAIRS), self._links
        return [pair._replace(one=links[pair.one].name, other=links[pair.other].name) for pair in found]

    def forget(self, peer: str) -> None:
        """`peer` is gone."""
        self.introductions.forget(peer)
        self._moving.discard(peer)
        self._book.forget(peer)
        self._stale = True

    def flush(self, members: Collection[str]) -> None:
        """Tell members what they pass on, where that changed; to be called by a timer. `members`: those that are all to be
        linked with each other."""
        for peer in self._moving & self._links.keys():
            self._move(self._links[peer])
        if not self._stale and members == self._members:
            return
        gaps = self._book.gaps(members)
        if gaps != self._gaps or members != self._members:
            self._duties, self.apart = deputies_of(members, gaps), mostly_apart(members, gaps)
        self._stale, self._members, self._gaps = False, members, gaps
        for peer, link in self._links.items():
            rows = self._duties.get(peer, ())
            before = self._passing.get(peer)
            if rows != (before[1] if before is not None and before[0] is link else ()):
                link.post(PassingOn(rows))
            self._passing[peer] = link, rows
        self._passing = {peer: told for peer, told in self._passing.items() if peer in self._links}

    def _hear(self, peer: str, message: LinkKinds) -> None:
        if self._book.put(peer, message.links, lambda other: other in self._links and self._listed(peer, other)):
            self._stale = True

    def _move(self, link: Link) -> None:
        """Let others hear of a member's new addresses, now or, if it changes them too often, when `flush` comes here again."""
        place = self.introductions.places[link.peer]
        self._moving.discard(link.peer)
        if link.reach == place.reach:
            return
        if self.introductions.may_move(link.peer, trio.current_time()):
            link.reach = place.reach
            self._moved()
        else:
            self._moving.add(link.peer)

    def _introduce(self, link: Link, message: Introduce) -> None:
        other = self._links.get(message.peer)
        if other is None or not self._listed(link.peer, message.peer):
            return  # it left just now: the next roster says so
        ways = _way_s(link), _way_s(other)
        found = self.introductions.arrange(link.peer, message.peer, trio.current_time(), ways=ways)
        if isinstance(found, str):
            link.post(NoMeeting(message.peer, found))
        elif found is not None:
            link.post(found.one)
            other.post(found.other)


def _way_s(link: Link) -> float:
    """Seconds from here to the peer, half a round trip; 0 where the transport cannot say."""
    path = link.control.path()
    return path.rtt_s / 2 if path is not None else 0.0
