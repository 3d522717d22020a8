"""The default policy at the source when some peers are strangers and the proven ones know each other: `Seeding` among the proven.

Pure; see `port`. To `Seeding` there are no strangers: nothing that they say or do changes what the proven get, or when. They get
most chunks from whoever distributes them among the proven, as one copy together (`tree`), and the others from the source, once
the proven need nothing from it (`feeding`).
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p.broadcast.peer_groups import EVERYWHERE, PeerPlaces, duty_of
from p2p.broadcast.policies.feeding import StrangerFeed
from p2p.broadcast.policies.port import Policy, Push, Relieved, SessionView
from p2p.broadcast.policies.seeding import Seeding


class ProvenSeeding(Policy):
    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._seeding = Seeding(session)
        self._proven: set[str] = set()
        self._placed_by = session.places
        self._feed = StrangerFeed(session)
        self._held: list[int] = []
        """chunks that strangers do not wait for yet"""

    def joined(self, peer: str, now: float) -> None:
        """Seed through `peer`, unless it is a stranger."""
        places = self._session.places
        if places is None or not places.strange(peer):
            self._proven.add(peer)
            self._seeding.joined(peer, now)

    def left(self, peer: str, now: float) -> None:
        """Hand out anew what the proven and strangers were to get through `peer`; one stranger less changes nothing."""
        if peer in self._proven:
            self._proven.discard(peer)
            self._seeding.left(peer, now)
            self._feed.left(peer)

    def has(self, peer: str, chunk: int, now: float) -> None:
        if peer in self._proven:
            self._seeding.has(peer, chunk, now)
        else:
            self._feed.arrived(chunk, now)

    def held(self, chunk: int, *, duty: int, now: float) -> None:
        self._seeding.held(chunk, duty=duty, now=now)
        self._held.append(chunk)

    def tick(self, now: float) -> None:
        """Count those among the proven who are no strangers any more."""
        places = self._session.places
        if places is not self._placed_by:
            self._placed_by = places
            for peer in self._session.peers():
                if places is not None and places.strange(peer):
                    self.left(peer, now)
                elif peer not in self._proven:
                    self.joined(peer, now)
        self._seeding.tick(now)
        self._feed.tick(now)
        if not self._proven:  # none takes part: they may be asleep, or about to leave
            for chunk in self._held:
                self._feed.wait(chunk)
            self._held.clear()

    def grants(self, chunk: int, now: float) -> bool:
        """As among the proven alone."""
        return self._seeding.grants(chunk, now)

    def claim(self, peer: str, chunk: int, now: float) -> int:
        """As among the proven alone; a stranger distributes nothing."""
        places = self._session.places
        duty = self._seeding.claim(peer, chunk, now) if peer in self._proven else 0
        return self._duty(peer, chunk, places, now) if duty and places is not None else duty

    def relieved(self) -> list[Relieved]:
        return self._seeding.relieved()

    def _duty(self, peer: str, chunk: int, places: PeerPlaces, now: float) -> int:
        """Of who distributes a chunk."""
        through = self._feed.through(peer, chunk, now)
        return EVERYWHERE if through else duty_of(g for g in range(len(places.sites)) if g not in places.strangers)

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        """As among the proven alone; to strangers what they do not get through them."""
        places = self._session.places
        proven = [p for p in ready if p in self._proven]
        # Not to be asked when only strangers are ready: it would hand out itself what distributors have room for.
        found = self._seeding.push(proven, now) if proven else None
        if found is None and places is not None:
            return self._feed.push([p for p in ready if p not in self._proven], places, now)
        if found is None or places is None:
            return found
        if found.duty:
            return Push(found.peer, found.chunk, self._duty(found.peer, found.chunk, places, now))
        through = self._feed.through(found.peer, found.chunk, now)
        return Push(found.peer, found.chunk, duty_of(places.strangers) if through else 0)
