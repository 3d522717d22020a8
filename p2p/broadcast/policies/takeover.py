"""What the source takes over when peers are in groups: to whom it sends copies itself once all chunks are handed out. Pure.

A chunk comes into a group once, and whoever got it there relays it to the others of the group. Between groups it goes first,
so that taking a chunk over from its distributor would bring it twice to those groups that have it by then. What can be taken
over is one group's part: of all peers the one that has most chunks which nobody else of its group holds is relieved of the last
of them, and the source hands that to each of the others.

Must not know who distributes what, nor how the copies leave: see `lanes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p.broadcast.peer_groups import PeerPlaces
from p2p.broadcast.policies.port import SessionView
from p2p.broadcast.policies.seeding import TAKE_OVER_S, SwarmPace

LOOK_S = 0.05
"""Whom to help is looked at again so long after nobody needed it."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The source hands a chunk to the rest of a group itself."""

    holder: str
    """the peer that is relieved of the chunk"""
    chunk: int
    lacking: tuple[str, ...]
    """the others of its group"""


class TakeOvers:
    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._helped: dict[int, int] = {}
        """group -> chunks that it has or gets from the source, in one bit each"""
        self._look_at = float("-inf")

    def next(self, out: int, pace: SwarmPace, places: PeerPlaces, now: float) -> TakeOver | None:
        """What to take over next, of the chunks `out` (one bit each); None for nothing.

        Each chunk costs each group one relaying, which its members share: so one of them does `through` / members of them a
        second. Only witnesses are looked at: what the others say comes too late. Groups at a site are left alone, one
        copy is all that is to go there.
        """
        if not out or pace.through <= 0 or now < self._look_at:
            return None
        session = self._session
        latest, chosen = TAKE_OVER_S, None
        for group in range(len(places.sites)):
            if group in places.lans or group in places.strangers:
                continue
            members = [p for p in places.members.get(group, ()) if session.takes_part(p)]
            waiting = out & ~self._helped.get(group, 0)
            held = [(p, session.holds_of(p) & waiting) for p in members if p in places.witnesses]
            some = several = 0
            for _, bits in held:
                some, several = some | bits, several | some & bits
            for peer, bits in held:
                alone = bits & ~several
                start = (alone.bit_count() - 1) * len(members) / pace.through - pace.transit_s
                if start > latest:
                    latest, chosen = start, (group, peer, alone.bit_length() - 1)
        if chosen is None:
            self._look_at = now + LOOK_S
            return None
        group, holder, chunk = chosen
        self._helped[group] = self._helped.get(group, 0) | 1 << chunk
        lacking = [p for p in places.members[group] if p != holder and session.lacks(p, chunk)]
        return TakeOver(holder, chunk, tuple(lacking))
