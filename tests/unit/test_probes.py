"""Copies that nobody waits for: who is given one, and what may come of it, whatever a node sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rollouts.probes import COPIES, MOST_AT_ONCE, MOST_PROBES, MOST_S, PROBE_S, FreeNode, Probe, ProbeBook
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
STOP, VOCABULARY = 0, 50


def request(name: str = "7.0.0", **more: Any) -> GenerateRequest:
    values: dict[str, Any] = {"max_new_tokens": 6, "stop_ids": (STOP,), "seed": 3, "min_version": V1} | more
    return GenerateRequest.of(Generate(name, (1, 2), **values))


def node(peer: str, free: int = 4, found_wrong: bool = False, version: Version = V1) -> FreeNode:
    return FreeNode(peer, version, free, found_wrong)


def event(name: str, start: int, ids: list[int], version: Version = V1, finish: str = "") -> TokenEvent:
    return TokenEvent.of(name, start, ids, np.full(len(ids), -1.0, np.float32), version, finish)


def opened() -> ProbeBook:
    return ProbeBook(VOCABULARY, None, {V1, V2})


def held(book: ProbeBook, peer: str) -> Probe:
    (probe,) = book.working(peer).values()
    return probe


def test_copies_go_to_others_that_have_a_place() -> None:
    book, original = opened(), request()
    nodes = [node("a"), node("b"), node("full", 0), node("one place", 1), node("old", version=Version(1, 0))]
    out = book.give([("a", original)], nodes, 0.0)
    assert out == [("b", original), ("one place", original)], "not to its own node, nor to one that cannot make it"
    more = [node(f"n{i}") for i in range(9)]
    assert len(book.give([("a", request("7.1.0"))], more, 0.0)) == COPIES
    assert book.give([("a", request("7.2.0", prefix_ids=(5,))), ("a", request("7.3.0", exact_version=V1))], more, 0.0) == []


def test_those_that_were_probed_least_come_first_and_none_beyond_its_number() -> None:
    book, peers = opened(), ["a", "b", "c", "d"]
    given = {peer: 0 for peer in peers}
    for i in range(MOST_PROBES * len(peers)):
        for peer, g in book.give([("other", request(f"{i}.0.0"))], [node(p) for p in peers], 0.0):
            given[peer] += 1
            book.tokens(peer, event(g.request_id, 0, [STOP], finish="stop"), 0.0)
        assert max(given.values()) - min(given.values()) <= 1
    assert set(given.values()) == {MOST_PROBES}
    book.anew("a")
    assert [peer for peer, _ in book.give([("other", request("900.0.0"))], [node(p) for p in peers], 0.0)] == ["a"]
    assert not book.give([("a", request("900.1.0"))], [node("b"), node("c")], 0.0)
    assert book.give([("a", request("900.2.0"))], [node("b", found_wrong=True), node("c")], 0.0), "it has more to show"
    book.lost("b")
    book.rest()
    assert len(book.give([("other", request("901.0.0"))], [node(p) for p in peers], 0.0)) == COPIES, "another alert"


def test_no_more_are_under_way_than_can_be_read() -> None:
    book = opened()
    peers = [node(f"n{i}") for i in range(2 * MOST_AT_ONCE)]
    out = book.give([("other", request(f"{i}.0.0")) for i in range(MOST_AT_ONCE)], peers, 0.0)
    assert len(out) == MOST_AT_ONCE == len({peer for peer, _ in out})


def test_half_of_the_free_places_stay_free() -> None:
    book = opened()
    many = [("other", request(f"{i}.0.0")) for i in range(9)]
    assert len(book.give(many, [node(f"n{i}", 1) for i in range(8)], 0.0)) == 4
    left = [node(f"n{i}", 1) for i in range(4, 8)] + [node(f"n{i}", 0) for i in range(4)]
    assert not book.give(many[1:], left, 0.0) and not opened().give(many, [node("only", 1)], 0.0)


def test_one_ends_by_its_tokens_and_what_comes_late_is_nobodys_fault() -> None:
    book = opened()
    book.give([("other", request())], [node("a")], 0.0)
    probe = held(book, "a")
    assert book.tokens("a", event("7.0.0", 0, [5, 6], V1), 1.0).taken.tokens == 2 and not probe.over
    heard = book.tokens("a", event("7.0.0", 2, [7, STOP], V2, "stop"), 2.0)
    assert heard.probe is probe and probe.ended and probe.over and heard.taken.made == 4
    made = probe.so_far()
    assert (made.completion_ids, made.node, made.seed, [s.version for s in made.spans]) == ((5, 6, 7, STOP), "a", 3, [V1, V2])
    late = book.tokens("a", event("7.0.0", 4, [1]), 3.0)
    assert late.taken.late and late.probe is None and book.owns("a", "7.0.0") and not book.owns("b", "7.0.0")


@pytest.mark.parametrize(
    "wrong",
    [
        event("7.0.0", 1, [5]), event("7.0.0", 0, [5], V3), event("7.0.0", 0, [VOCABULARY]), event("7.0.0", 0, [STOP, 5]),
        event("7.0.0", 0, [5] * 7), event("7.0.0", 0, [5], finish="stop"), event("7.0.0", 0, [], finish="error"),
        event("7.0.0", 0, [5], Version(1, 0)),
    ],
)  # fmt: skip
def test_what_no_honest_node_sends_is_refused_as_training_refuses_it(wrong: TokenEvent) -> None:
    book = opened()
    book.give([("other", request())], [node("a")], 0.0)
    heard = book.tokens("a", wrong, 1.0)
    assert heard.taken.refusal is not None and heard.taken.cancel == (("a", "7.0.0"),) and not heard.taken.tokens
    assert not book.working("a") and heard.probe is not None and heard.probe.over and not heard.probe.ended


def test_what_brings_nothing_is_given_up() -> None:
    book = opened()
    book.give([("other", request())], [node("a"), node("b")], 0.0)
    book.tokens("a", event("7.0.0", 0, [5]), PROBE_S - 1)
    assert [probe.node for probe in book.expire(PROBE_S)] == ["b"]
    assert book.tokens("b", event("7.0.0", 0, [5]), PROBE_S).taken.late
    assert held(book, "a").since == PROBE_S - 1 and [p.node for p in book.expire(MOST_S)] == ["a"], "however it trickles"
    book.give([("other", request("8.0.0"))], [node("a")], 0.0)
    assert [probe.node for probe in book.lost("a")] == ["a"] and not book.working("a") and book.owns("a", "8.0.0")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["give", "tokens", "lost", "expire"]), st.integers(0, 3), st.integers(0, 4), st.integers(-1, 3),
        st.lists(st.integers(0, VOCABULARY), max_size=4), st.sampled_from(["", "stop", "length", "interrupt", "abort"]),
    ),
    max_size=60,
)  # fmt: skip


@given(EVENTS)
def test_whatever_nodes_send_each_holds_one_and_tokens_follow_each_other(steps: list[tuple[Any, ...]]) -> None:
    book, now, over = opened(), 0.0, set[tuple[str, str]]()
    for what, who, which, shift, ids, finish in steps:
        peer, name, now = f"n{who}", f"{which}.0.0", now + 7.0
        before = {(p, r) for p in map("n{}".format, range(4)) for r in book.working(p)}
        if what == "give":
            for other, g in book.give([(peer, request(name))], [node(f"n{i}") for i in range(4)], now):
                assert other != peer and (other, g.request_id) not in before | over, "the same one never twice"
        elif what == "tokens" and book.owns(peer, name):
            probe = book.working(peer).get(name)
            had = probe.tokens if probe is not None else 0
            heard = book.tokens(peer, event(name, had + shift * (shift < 0), ids, finish=finish), now)
            if probe is None:
                assert heard.taken.late
            else:
                assert probe.tokens == had + heard.taken.tokens <= 6
                assert STOP not in probe.completion.ids[:-1] and probe.over == (name not in book.working(peer))
        elif what == "lost":
            book.lost(peer)
        else:
            book.expire(now)
        there = {(p, r) for p in map("n{}".format, range(4)) for r in book.working(p)}
        assert len({p for p, _ in there}) == len(there), "one at a node"
        over |= before - there
        assert all(book.owns(*pair) for pair in over | there)
