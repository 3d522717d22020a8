"""The head's part in links between members that cannot dial each other: which two it brings together, and when. Pure.

It tells a member no address of a third party: only what that member may be told by the roster's rules, and ports of the very host
that the head sees the other one at. What one member can make others do is bounded. Must not know channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2p.channel.opening import endpoint_of
from p2p.errors import Refusal
from p2p.membership.addresses import MAX_TOLD, Reach, reach_of
from p2p.membership.reachability import NATS
from p2p.protocol.reach import Meeting, Whereabouts

PAIR_S = 3.0
"""Seconds between two meetings of the same two: either of them may ask, and one meeting is under way."""

BURST, RATE = 64, 0.5
"""Meetings that a member may ask for at once, and the number a second that it gains back: a new node of a full mesh asks for one
with each of up to 31 others, twice."""

MOVES, MOVE_S = 4, 10.0
"""Times at once that a member's new addresses are passed on to the others, and seconds until it has one more time: each costs a
roster to everybody. A node changes them once or twice when it comes (its router mapped a port), and with a new lease."""

LEAD_S = 0.3
"""Seconds from the head's word to the meeting, beyond the slower of the two ways: time to wake up and to bind."""


@dataclass(slots=True)
class MeetingPlace:
    """Where one member can be met."""

    reach: Reach
    """what it may be dialled by"""
    meets: Reach
    """its listening port as others see it"""
    nat: str = "unknown"


@dataclass(slots=True)
class _Turns:
    """How often one member may still have something done, and as of when that was counted."""

    left: float
    at: float

    def take(self, now: float, most: float, per_s: float) -> bool:
        self.left, self.at = min(most, self.left + (now - self.at) * per_s), now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Arrangement(NamedTuple):
    """A meeting as each of two members is told of it."""

    one: Meeting
    other: Meeting


def place_of(peer: str, said: Whereabouts, seen: str, own: Sequence[str] = ()) -> MeetingPlace:
    """What becomes of whereabouts. `seen`: the member's end of its link, `own`: the head's addresses. Addresses where it is met
    are believed of the host that it is seen at, and of no other."""
    host = endpoint_of(seen)
    met = [a for a in said.met if host is not None and (end := endpoint_of(a)) is not None and end.host == host.host]
    nat = said.nat if said.nat in NATS else "unknown"
    return MeetingPlace(reach_of(peer, said.addresses, seen, own), reach_of(peer, met, seen, own), nat)


class Introductions:
    """Where members are, and the meetings that were arranged."""

    def __init__(self) -> None:
        self.places: dict[str, MeetingPlace] = {}
        """by peer"""
        self._last: dict[frozenset[str], float] = {}
        self._asks: dict[str, _Turns] = {}
        self._moves: dict[str, _Turns] = {}

    def put(self, peer: str, place: MeetingPlace) -> None:
        """Where `peer` is from now on; what it may ask for stays what it was."""
        self.places[peer] = place

    def may_move(self, peer: str, now: float) -> bool:
        """Whether others are told now of new addresses of `peer`; that then counts."""
        return self._moves.setdefault(peer, _Turns(MOVES, now)).take(now, MOVES, 1 / MOVE_S)

    def forget(self, peer: str) -> None:
        """`peer` is gone."""
        for kept in (self.places, self._asks, self._moves):
            kept.pop(peer, None)
        for pair in [pair for pair in self._last if peer in pair]:
            del self._last[pair]

    def arrange(self, asker: str, other: str, now: float, *, ways: tuple[float, float] = (0.0, 0.0)) -> Arrangement | str | None:
        """The meeting of two members; a text says why there is none, None that one is under way. `ways`: seconds from the head to
        each. Refusal when `asker` asks for too many."""
        if not self._asks.setdefault(asker, _Turns(BURST, now)).take(now, BURST, RATE):
            raise Refusal("asks for too many meetings", peer=asker)
        one = self.places.get(asker)
        if one is None:
            return "this node did not say where it is"
        pair = frozenset((asker, other))
        if now - self._last.get(pair, float("-inf")) < PAIR_S:
            return None
        two = self.places.get(other)
        if two is None:
            return "it did not say where it is: it may listen to nobody"
        translated = "symmetric" in (one.nat, two.nat)
        # Each is told of the other's.
        addresses = _told(one, two, ipv6=translated), _told(two, one, ipv6=translated)
        if translated and not all(addresses):
            both = one.nat == two.nat
            whose = "both are" if both else f"{'this node' if one.nat == 'symmetric' else 'it'} is"
            return f"{whose} behind a NAT that takes another port for each connection (symmetric)"
        if not all(addresses):
            return "no address is known at which it could be met" if not addresses[1] else "no address of this node is known"
        self._last[pair] = now
        first = asker < other
        lead = LEAD_S + max(ways)
        return Arrangement(
            Meeting(other, addresses[1], first, lead - ways[0]), Meeting(asker, addresses[0], not first, lead - ways[1])
        )


def _told(one: MeetingPlace, to: MeetingPlace, *, ipv6: bool) -> tuple[str, ...]:
    """The addresses of `one` that `to` is told for a meeting: where others see it first. `ipv6`: those alone, which no NAT gives
    another port."""
    found = dict.fromkeys((*one.meets.told_to(to.meets), *one.reach.told_to(to.reach)))
    return tuple(address for address in found if not ipv6 or address.startswith("/ip6/"))[:MAX_TOLD]
