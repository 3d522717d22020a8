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
    tokens: float = BURST
    at: float = 0.0
    """when `tokens` was counted"""


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

    def put(self, peer: str, place: MeetingPlace, now: float) -> None:
        """Where `peer` is from now on; what it may ask for stays what it was."""
        before = self.places.get(peer)
        place.tokens, place.at = (before.tokens, before.at) if before is not None else (BURST, now)
        self.places[peer] = place

    def forget(self, peer: str) -> None:
        """`peer` is gone."""
        self.places.pop(peer, None)
        for pair in [pair for pair in self._last if peer in pair]:
            del self._last[pair]

    def arrange(self, asker: str, other: str, now: float, *, ways: tuple[float, float] = (0.0, 0.0)) -> Arrangement | str | None:
        """The meeting of two members; a text says why there is none, None that one is under way. `ways`: seconds from the head to
        each. Refusal when `asker` asks for too many."""
        one = self.places.get(asker)
        if one is None:
            return "this node did not say where it is"
        self._take(asker, one, now)
        pair = frozenset((asker, other))
        if now - self._last.get(pair, float("-inf")) < PAIR_S:
            return None
        two = self.places.get(other)
        if two is None:
            return "it did not say where it is: it may listen to nobody"
        if "symmetric" in (one.nat, two.nat):
            both = one.nat == two.nat
            whose = "both are" if both else f"{'this node' if one.nat == 'symmetric' else 'it'} is"
            return f"{whose} behind a NAT that takes another port for each connection (symmetric)"
        # Each is told of the other's.
        addresses = _told(one, two), _told(two, one)
        if not all(addresses):
            return "no address is known at which it could be met" if not addresses[1] else "no address of this node is known"
        self._last[pair] = now
        first = asker < other
        lead = LEAD_S + max(ways)
        return Arrangement(
            Meeting(other, addresses[1], first, lead - ways[0]), Meeting(asker, addresses[0], not first, lead - ways[1])
        )

    @staticmethod
    def _take(peer: str, place: MeetingPlace, now: float) -> None:
        place.tokens, place.at = min(float(BURST), place.tokens + (now - place.at) * RATE), now
        if place.tokens < 1:
            raise Refusal("asks for too many meetings", peer=peer)
        place.tokens -= 1


def _told(one: MeetingPlace, to: MeetingPlace) -> tuple[str, ...]:
    """The addresses of `one` that `to` is told for a meeting: where others see it first."""
    found = dict.fromkeys((*one.meets.told_to(to.meets), *one.reach.told_to(to.reach)))
    return tuple(found)[:MAX_TOLD]
