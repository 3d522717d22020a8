"""What one peer tells of the chunks that it got, of one manifest: to whom, and when. Pure.

The source hears at once: it feeds those who have room, and hands out again what died with a distributor. The others repair by
it, and repair is patient. Where peers are in groups, the source hears at once from some peers of each lane only (it could not
listen to a thousand), and each peer tells its own group more often than the others. Whoever is sent a chunk hears beside it of
what is new here (`beside_chunk`), which costs no message of its own. Must not know messages or links.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from p2p.broadcast.peer_groups import MESH, PeerPlaces
from p2p.broadcast.session import Session

GOSSIP_S = 0.25
"""Seconds between two announcements of news to everyone but the source. A message costs more than the chunk it names, so to more
than MESH neighbours news goes less often."""

FAR_NEWS = 4
"""Peers of other groups hear this many times less often."""

QUIET_NEWS_S = 2.0
"""Seconds between two times that a peer that is no witness tells the source what it holds."""

ANSWER_AFTER = 8
"""Chunks of one peer that may wait for the next announcement. With more, that peer is told at once, so that its window never
closes."""


BESIDE = 32
"""Chunk numbers that go beside a chunk at most: with them it still fits the encrypted record that it was made to fit."""


class News(NamedTuple):
    """What is to be told now: that these chunks are held here."""

    peers: list[str]
    chunks: list[int]


class Gossip:
    """What one peer has not told the others yet, of one manifest."""

    def __init__(self) -> None:
        self._for_source: list[int] = []
        self._near: list[int] = []
        self._heard: dict[str, int] = {}
        """peer -> so many of `_near`, from the first on, it heard of beside a chunk"""
        self._far: list[int] = []
        self._source_at = self._near_at = self._far_at = float("-inf")
        self._unanswered: dict[str, list[int]] = {}
        """peer -> chunks that came from it and that it was not told of yet"""

    @property
    def pending(self) -> bool:
        return bool(self._for_source or self._near or self._far)

    def came_from(self, sender: str, chunk: int) -> list[int]:
        """`chunk` is held now, and came from `sender`: what to tell `sender` at once, if anything."""
        waiting = self._unanswered.setdefault(sender, [])
        waiting.append(chunk)
        if len(waiting) < ANSWER_AFTER:
            return []
        return self._unanswered.pop(sender)

    def beside_chunk(self, peer: str, session: Session) -> list[int]:
        """What `peer`, to whom a chunk is about to go, is told beside it."""
        places = session.places
        if peer == session.source or not (places is None or places.near(peer)):
            return []
        self._gather(session)
        start = self._heard.get(peer, 0)
        some = self._near[start : start + BESIDE]
        if some:
            self._heard[peer] = start + len(some)
            waiting = self._unanswered.get(peer)
            if waiting:
                told = set(some)
                self._unanswered[peer] = [chunk for chunk in waiting if chunk not in told]
        return some

    def _gather(self, session: Session) -> None:
        news = session.news()
        if session.source is not None:
            self._for_source += news
        self._near += news

    def due(self, session: Session, now: float, linked: Container[str]) -> list[News]:
        """Whom to tell of which chunks; to be called some 20 times a second. `linked`: those that can be told anything."""
        places, source, complete = session.places, session.source, session.complete
        out: list[News] = []
        self._gather(session)
        if source is not None and source not in linked:
            self._for_source = []
        if source is not None and source in linked:
            if self._for_source and (_at_once(places) or complete or now >= self._source_at):
                out.append(News([source], self._for_source))
                self._for_source, self._source_at = [], now + QUIET_NEWS_S
                if not _at_once(places):
                    self._unanswered.pop(source, None)
        if self._near and (complete or now >= self._near_at):
            others = [p for p in session.peers() if p != source and p in linked]
            near = others if places is None else [p for p in others if places.near(p)]
            behind: dict[int, list[str]] = {}
            for peer in near:
                behind.setdefault(self._heard.get(peer, 0), []).append(peer)
            for start, names in behind.items():
                self._tell(names, self._near[start:], out)
            self._heard.clear()
            if places is not None:
                self._far += self._near
            if source is not None and _at_once(places):
                self._unanswered.pop(source, None)
            self._near, self._near_at = [], now + GOSSIP_S * max(1.0, len(others) / MESH)
        if self._far and (complete or now >= self._far_at):
            far = [p for p in session.peers() if p != source and p in linked and not (places is None or places.near(p))]
            self._tell(far, self._far, out)
            self._far, self._far_at = [], now + GOSSIP_S * FAR_NEWS
        return out

    def _tell(self, peers: list[str], chunks: list[int], out: list[News]) -> None:
        if peers and chunks:
            out.append(News(peers, chunks))
        for peer in peers:
            self._unanswered.pop(peer, None)


def _at_once(places: PeerPlaces | None) -> bool:
    return places is None or places.witness
