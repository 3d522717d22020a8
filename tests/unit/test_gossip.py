"""What a peer tells of its chunks: at intervals, and beside the chunks that it sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2p.broadcast.gossip import ANSWER_AFTER, BESIDE, GOSSIP_S, Gossip


class Places:
    """One group of `near` peers; who is no witness does not tell the source at once."""

    def __init__(self, *near: str, witness: bool = True) -> None:
        self.near_peers, self.witness = near, witness

    def near(self, peer: str) -> bool:
        return peer in self.near_peers


def session(*peers: str, source: str | None = "s", places: Any = None) -> Any:
    fresh: list[int] = []

    def news() -> list[int]:
        taken = list(fresh)
        fresh.clear()
        return taken

    return SimpleNamespace(source=source, places=places, complete=False, fresh=fresh, news=news, peers=lambda: ["s", *peers])


def told(gossip: Gossip, s: Any, now: float, linked: str = "sabc") -> dict[str, list[int]]:
    """What is told now, by peer."""
    return {peer: news.chunks for news in gossip.due(s, now, linked) for peer in news.peers}


def test_who_is_sent_a_chunk_hears_beside_it_and_not_again() -> None:
    gossip, s = Gossip(), session("a", "b")
    assert told(gossip, s, 0.0) == {} and gossip.beside_chunk("a", s) == []
    s.fresh += [4, 5]
    assert told(gossip, s, 0.0) == {"s": [4, 5], "a": [4, 5], "b": [4, 5]}
    s.fresh += [6, 7]
    assert gossip.beside_chunk("a", s) == [6, 7]
    assert gossip.beside_chunk("a", s) == []
    s.fresh += [8]
    assert gossip.beside_chunk("b", s) == [6, 7, 8]
    assert told(gossip, s, 0.1) == {"s": [6, 7, 8]}
    assert told(gossip, s, GOSSIP_S) == {"a": [8]}
    assert not gossip.pending
    s.fresh += [9]
    assert gossip.beside_chunk("a", s) == [9], "the next batch is heard of from its beginning"


def test_so_many_go_beside_a_chunk_and_the_rest_beside_the_next() -> None:
    gossip, s = Gossip(), session("a")
    s.fresh += range(2 * BESIDE + 1)
    beside = [gossip.beside_chunk("a", s) for _ in range(4)]
    assert beside == [list(range(BESIDE)), list(range(BESIDE, 2 * BESIDE)), [2 * BESIDE], []]
    s.fresh += [100]
    assert told(gossip, s, 0.0) == {"s": [*range(2 * BESIDE + 1), 100], "a": [100]}


def test_the_source_and_other_groups_hear_at_their_own_times() -> None:
    gossip, s = Gossip(), session("a", "b", places=Places("a"))
    s.fresh += [1]
    assert gossip.beside_chunk("s", s) == gossip.beside_chunk("b", s) == []
    assert gossip.beside_chunk("a", s) == [1]
    assert told(gossip, s, 0.0) == {"s": [1], "b": [1]}


def test_what_went_beside_a_chunk_answers_those_that_came_from_there() -> None:
    gossip, s = Gossip(), session("a")
    for chunk in range(ANSWER_AFTER - 1):
        s.fresh.append(chunk)
        assert gossip.came_from("a", chunk) == []
    gossip.beside_chunk("a", s)
    s.fresh.append(50)
    assert gossip.came_from("a", 50) == [], "one of eight waits now"
    for chunk in range(51, 50 + ANSWER_AFTER - 1):
        assert gossip.came_from("a", chunk) == []
    assert gossip.came_from("a", 99) == [*range(50, 50 + ANSWER_AFTER - 1), 99]


def test_the_source_tells_nobody_of_itself_and_one_that_is_not_linked_is_not_told() -> None:
    gossip, s = Gossip(), session("a")
    s.fresh += [1]
    assert told(gossip, s, 0.0, linked="a") == {"a": [1]}
    s.fresh += [2]
    assert told(gossip, s, GOSSIP_S, linked="s") == {"s": [2]}
