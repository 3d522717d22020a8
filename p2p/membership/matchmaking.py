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
from p2p.membership.pairs import PairLink, pairs_of
from p2p.membership.reachability import KINDS
from p2p.protocol.reach import Introduce, Linked, LinkKinds, NoMeeting, PassingOn, PassOn, Whereabouts

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
        self.said: dict[str, tuple[Linked, ...]] = {}
        """how each member says that it is linked with others"""
        self._passing: dict[str, tuple[Link, tuple[PassOn, ...]]] = {}
        self._stale = False
        self._members: Collection[str] = ()
        self.apart: frozenset[str] = frozenset()
        """members that have no link with most of the others"""

    def handle(self, link: Link, message: object) -> bool:
        """Take a message; False when it is none of these. Refusal of one that is not acceptable."""
        match message:
            case Whereabouts():
                place = place_of(link.peer, message, link.control.remote(), self._network.addresses)
                self.introductions.put(link.peer, place, trio.current_time())
                if link.reach != place.reach:
                    link.reach = place.reach
                    self._moved()
            case Introduce():
                self._introduce(link, message)
            case LinkKinds():
                if any(one.kind not in KINDS for one in message.links):
                    raise Refusal("an unknown kind of link", peer=link.peer)
                self.said[link.peer] = tuple(one for one in message.links if one.peer in self._links)
                self._stale = True
            case _:
                return False
        return True

    def pairs(self) -> list[PairLink]:
        """How members are linked with each other, at most MAX_PAIRS of them, by their names; those without a link first."""
        found = [pair for pair in pairs_of(self.said) if pair.one in self._links and pair.other in self._links]
        names = {peer: link.name for peer, link in self._links.items()}
        return [pair._replace(one=names[pair.one], other=names[pair.other]) for pair in found[:MAX_PAIRS]]

    def forget(self, peer: str) -> None:
        """`peer` is gone."""
        self.introductions.forget(peer)
        self.said.pop(peer, None)
        self._stale = True

    def flush(self, members: Collection[str]) -> None:
        """Tell members what they pass on, where that changed; to be called by a timer. `members`: those that are all to be
        linked with each other."""
        if not self._stale and members == self._members:
            return
        self._stale, self._members = False, members
        linked = {frozenset((one, row.peer)) for one, rows in self.said.items() for row in rows if row.kind != "relayed"}
        gaps = [(one, row.peer) for one, rows in self.said.items() for row in rows if row.kind == "relayed"]
        gaps = [gap for gap in gaps if frozenset(gap) not in linked]
        found, self.apart = deputies_of(members, gaps), mostly_apart(members, gaps)
        for peer, link in self._links.items():
            rows = found.get(peer, ())
            before = self._passing.get(peer)
            if rows != (before[1] if before is not None and before[0] is link else ()):
                link.post(PassingOn(rows))
            self._passing[peer] = link, rows
        self._passing = {peer: told for peer, told in self._passing.items() if peer in self._links}

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
