"""How strangers get chunks when the proven peers know each other: through whom each chunk comes to them. Pure.

Whoever distributes a chunk among the proven hands strangers one copy, together. Where few are proven, that may be most of what
their uplinks have to carry: so only so many chunks are on their way to strangers through one distributor as arrive there in time.
The source hands them the others itself, when the proven need nothing. How soon chunks arrive strangers tell, who may lie: what
they say decides nothing but who sends to them. Must not know who distributes what among the proven: see `proven`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from p2p.broadcast.peer_groups import PeerPlaces, duty_of
from p2p.broadcast.policies.port import Push, SessionView

IN_TIME_S, LATE_S = 1.2, 3.0
"""Seconds from handing out a chunk until a stranger has it: with less than the first its distributor is given more at once;
after the second the source hands it to another stranger itself, if it did not before."""

LOOK = 4
"""Of what waits for the source, so many chunks are tried: what no stranger lacks is on its way to all."""

FIRST_ON_WAY = 4.0
"""Chunks on their way to strangers through one distributor, of which nothing is known yet."""


@dataclass(slots=True)
class _Way:
    """Through one distributor."""

    window: float = FIRST_ON_WAY
    out: int = 0


class StrangerFeed:
    """What strangers have, what is on its way to them, and what waits for the source."""

    def __init__(self, session: SessionView) -> None:
        self._session = session
        self._ways: dict[str, _Way] = {}
        self._out: dict[int, tuple[str, float]] = {}
        """chunk -> through whom it is on its way, and since when; the one out longest first"""
        self._seen: set[int] = set()
        """chunks that are on their way, or waiting here, or were"""
        self._waiting: dict[int, None] = {}
        self._turn = 0

    def through(self, peer: str, chunk: int, now: float) -> bool:
        """`peer` is handed the chunk for others. Whether it is to bring it to strangers too."""
        if chunk in self._seen:
            return False
        self._seen.add(chunk)
        way = self._ways.setdefault(peer, _Way())
        if way.out >= way.window:
            self._waiting[chunk] = None
            return False
        way.out += 1
        self._out[chunk] = peer, now
        return True

    def wait(self, chunk: int) -> None:
        """Nobody else brings it to strangers."""
        if chunk not in self._seen:
            self._seen.add(chunk)
            self._waiting[chunk] = None

    def arrived(self, chunk: int, now: float) -> None:
        """A stranger says that it has it."""
        self._waiting.pop(chunk, None)
        peer, at = self._out.pop(chunk, ("", now))
        way = self._ways.get(peer)
        if way is not None:
            way.out -= 1
            way.window = way.window + 1 if now - at <= IN_TIME_S else max(1.0, way.window * 0.7)

    def left(self, peer: str) -> None:
        """`peer` is gone: the source hands strangers what was to come through it."""
        for chunk in [c for c, (through, _) in self._out.items() if through == peer]:
            del self._out[chunk]
            self._waiting[chunk] = None
        self._ways.pop(peer, None)

    def tick(self, now: float) -> None:
        """What did not arrive in time waits for the source."""
        for chunk, (peer, at) in list(self._out.items()):
            if now - at < LATE_S:
                break
            del self._out[chunk]
            way = self._ways.get(peer)
            if way is not None:
                way.out -= 1
                way.window = max(1.0, way.window / 2)
                self._waiting[chunk] = None

    def push(self, ready: Sequence[str], places: PeerPlaces, now: float) -> Push | None:
        """What the source hands to one of these strangers, which brings it to the others; each in its turn."""
        for chunk in list(islice(self._waiting, LOOK)) if ready else ():
            lacking = [peer for peer in ready if self._session.lacks(peer, chunk)]
            if lacking:
                del self._waiting[chunk]
                self._out[chunk] = "", now
                self._turn += 1
                return Push(lacking[self._turn % len(lacking)], chunk, duty_of(places.strangers))
        return None
