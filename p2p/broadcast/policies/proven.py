"""The default policy at the source when some peers are strangers and the proven ones know each other: `Seeding` among the proven.

Pure; see `port`. To `Seeding` there are no strangers. They get each chunk from whoever distributes it among the proven, which
hands them one copy together (`tree`). A chunk that the source distributes itself comes to them the same way: with its first copy
goes the duty to bring it to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p.broadcast.peer_groups import PeerPlaces, duty_of
from p2p.broadcast.policies.port import Policy, Push, Relieved, SessionView
from p2p.broadcast.policies.seeding import Seeding


class ProvenSeeding(Policy):
    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._seeding = Seeding(session)
        self._proven: set[str] = set()
        self._placed_by = session.places
        self._brought: set[int] = set()
        """chunks that went out with the duty to bring them to strangers"""

    def _strange(self, peer: str, places: PeerPlaces | None) -> bool:
        return places is not None and places.groups.get(peer) in places.strangers

    def joined(self, peer: str, now: float) -> None:
        if not self._strange(peer, self._session.places):
            self._proven.add(peer)
            self._seeding.joined(peer, now)

    def left(self, peer: str, now: float) -> None:
        if peer in self._proven:
            self._proven.discard(peer)
            self._seeding.left(peer, now)

    def has(self, peer: str, chunk: int, now: float) -> None:
        if peer in self._proven:
            self._seeding.has(peer, chunk, now)

    def held(self, chunk: int, *, duty: int, now: float) -> None:
        self._seeding.held(chunk, duty=duty, now=now)

    def tick(self, now: float) -> None:
        """Count those among the proven who are no strangers any more."""
        places = self._session.places
        if places is not self._placed_by:
            self._placed_by = places
            for peer in self._session.peers():
                if self._strange(peer, places):
                    self.left(peer, now)
                elif peer not in self._proven:
                    self.joined(peer, now)
        self._seeding.tick(now)

    def grants(self, chunk: int, now: float) -> bool:
        """As among the proven alone."""
        return self._seeding.grants(chunk, now)

    def claim(self, peer: str, chunk: int, now: float) -> int:
        """As among the proven alone; a stranger distributes nothing."""
        return self._seeding.claim(peer, chunk, now) if peer in self._proven else 0

    def relieved(self) -> list[Relieved]:
        return self._seeding.relieved()

    def push(self, ready: Sequence[str], now: float) -> Push | None:
        """As among the proven alone. The first copy of what the source distributes itself goes with the duty to bring it to
        strangers."""
        found = self._seeding.push([p for p in ready if p in self._proven], now)
        places = self._session.places
        if found is None or places is None or found.chunk in self._brought:
            return found
        self._brought.add(found.chunk)
        return found if found.duty else Push(found.peer, found.chunk, duty_of(places.strangers))
