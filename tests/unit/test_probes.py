"""Copies that nobody waits for: who is given one, and what may come of it, whatever a node sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.rollouts.beside import Footprint
from learner.rollouts.probe import MOST_S, PROBE_S, FreeNode, Probe
from learner.rollouts.probes import (
    AT_NODE,
    COPIES,
    FADE_S,
    MOST_AT_ONCE,
    MOST_LOOKS,
    MOST_PROBES,
    MOST_TOKENS,
    PATIENCE,
    WAITS_S,
    ProbeBook,
)
from learner.rollouts.silences import SLOWER, Usual
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
STOP, VOCABULARY = 0, 50


def request(name: str = "7.0.0", **more: Any) -> GenerateRequest:
    values: dict[str, Any] = {"max_new_tokens": 6, "stop_ids": (STOP,), "seed": 3, "min_version": V1} | more
    return GenerateRequest.of(Generate(name, (1, 2), **values))


def node(peer: str, free: int = 4, found_wrong: bool = False, version: Version = V1, **more: Any) -> FreeNode:
    return FreeNode(peer, version, free, found_wrong, **more)


def event(name: str, start: int, ids: list[int], version: Version = V1, finish: str = "") -> TokenEvent:
    return TokenEvent.of(name, start, ids, np.full(len(ids), -1.0, np.float32), version, finish)


def opened(*versions: Version, draw: Callable[[], float] = lambda: 0.0, behind: bool = True) -> ProbeBook:
    book = ProbeBook(VOCABULARY, None, draw, behind=behind)
    for version in versions or (V1, V2):
        book.published(version)
    return book


def unknown(peer: str, request_id: str) -> Usual:
    return Usual()


def held(book: ProbeBook, peer: str) -> Probe:
    (probe,) = book.working(peer).values()
    return probe


def test_copies_go_to_others_that_have_a_place() -> None:
    book, original = opened(), request()
    nodes = [node("a"), node("b"), node("full", 0), node("one place", 1), node("old", version=Version(0, 9))]
    out = book.give([("a", original)], nodes, 0.0)
    assert out == [("b", original), ("one place", original)], "not to its own node, nor to one that cannot make it"
    more = [node(f"n{i}") for i in range(9)]
    assert len(book.give([("a", request("7.1.0"))], more, 0.0)) == COPIES
    assert book.give([("a", request("7.2.0", prefix_ids=(5,))), ("a", request("7.3.0", exact_version=V1))], more, 0.0) == []


def test_nodes_that_serve_the_version_before_are_given_what_is_left_of_their_own_version() -> None:
    newer = ("a", request("6.0.0", min_version=V3))
    nodes = [node("two behind", version=V1), node("one behind", version=V2), node("newest", version=V3)]
    out = opened(V1, V2, V3).give([newer], nodes, 0.0)
    assert out == [("newest", newer[1]), ("one behind", request("6.0.0", min_version=V2))], "after those that serve it"
    assert [peer for peer, _ in opened(V1, V3).give([newer], nodes, 0.0)] == ["newest", "two behind"], "2 was not published"
    assert [peer for peer, _ in opened(V1, V2, V3, behind=False).give([newer], nodes, 0.0)] == ["newest"]
    older = ("a", request("5.0.0", min_version=V2))
    assert not opened(V1, V2, V3).give([older], [node("one behind it", version=V1)], 0.0), "its version is not looked at for long"
    life = opened(V1, Version(2, 0))
    assert not life.give([("a", request("4.0.0", min_version=Version(2, 0)))], [node("before the restart", version=V1)], 0.0)


def test_what_a_node_that_is_behind_is_given_takes_nothing_from_what_else_it_is_given() -> None:
    """It can tell that it is a copy: such ones were 98 of 100, came first after each publication and were all of its sixteen, so
    who was wrong in one of ten and as drawn in these was found in 4 of 100 cases, where it was 12 without them."""
    for wrong in (False, True):
        book, given = opened(V1, V2), 0
        for i in range(3 * MOST_PROBES):
            for peer, g in book.give([("other", request(f"{i}.0.0", min_version=V2))], [node("a", found_wrong=wrong)], 0.0):
                given += 1
                assert held(book, peer).behind
                book.tokens(peer, event(g.request_id, 0, [STOP], finish="stop"), 0.0)
        assert given == MOST_PROBES, "no more of these either, whoever it is"
        given = 0
        for i in range(MOST_PROBES):
            for peer, g in book.give([("other", request(f"9{i}.0.0"))], [node("a", found_wrong=wrong)], 0.0):
                given += 1
                assert not held(book, peer).behind
                book.tokens(peer, event(g.request_id, 0, [STOP], finish="stop"), 0.0)
        assert given == MOST_PROBES


@pytest.mark.parametrize("first", ["free", "other"])
def test_a_request_that_only_its_own_node_could_copy_keeps_back_no_other(first: str) -> None:
    """All others of its group went without."""
    asked = [("free", request("7.0.0")), ("other", request("7.1.0"))]
    assert opened().give(asked if first == "free" else asked[::-1], [node("free")], 0.0) == [("free", request("7.1.0"))]


def test_half_of_the_places_are_those_that_could_take_one() -> None:
    """One node with 64 places that served an old version gave all others' places to copies."""
    asked = [("other", request(f"{i}.0.0", min_version=V3)) for i in range(9)]
    new, old = [node(f"n{i}", 1, version=V3) for i in range(8)], [node("old", 64, version=V1)]
    assert len(opened(V1, V2, V3).give(asked, new, 0.0)) == len(opened(V1, V2, V3).give(asked, new + old, 0.0)) == 4


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
    assert book.give([("a", request("900.3.0"))], [node("b"), node("c")], FADE_S) == [("c", request("900.3.0"))], "one more"
    assert not book.give([("a", request("900.4.0"))], [node("b"), node("c")], FADE_S)
    book.rest()
    assert len(book.give([("other", request("901.0.0"))], [node(p) for p in peers], FADE_S)) == COPIES, "another alert"


def test_all_are_given_some_for_as_long_as_an_alert_lasts() -> None:
    """All of a node's came in the first seconds of ten minutes, so who waited for these to be over was never probed again."""
    book, per = opened(), [0] * 20
    for i in range(2400):
        now = i / 4
        for peer, g in book.give([("other", request(f"{i}.0.0"))], [node(f"n{i}") for i in range(10)], now):
            per[int(now / 30)] += 1
            book.tokens(peer, event(g.request_id, 0, [STOP], finish="stop"), now)
    assert per[0] >= 10 * MOST_PROBES and all(9 <= n <= 11 for n in per[1:]), per


def test_who_gives_back_waits_and_leaves_copies_to_others() -> None:
    """Three nodes found wrong that gave each back at once had all of them, and paid nothing for it."""
    book, given, ended = opened(), {"back": 0, "n": 0}, 0.0
    nodes = [node(f"back{i}", found_wrong=True) for i in range(8)] + [node(f"n{i}") for i in range(6)]
    for i in range(300):
        now = i / 10
        for peer, g in book.give([("other", request(f"{i}.0.0"))], nodes, now):
            given[peer.rstrip("0123456789")] += 1
            if peer.startswith("n"):
                book.tokens(peer, event(g.request_id, 0, [STOP], finish="stop"), now)
            else:
                assert book.tokens(peer, event(g.request_id, 0, [], finish="interrupt"), now).taken.refusal is None
    assert given["n"] >= 6 * MOST_PROBES and given["back"] <= 8 * 6, given
    for wait in (WAITS_S[0], 2 * WAITS_S[0]):
        book = opened() if wait == WAITS_S[0] else book
        assert book.give([("other", request(f"{wait}.0.0"))], [node("a")], ended)
        book.lost("a", ended)
        assert not book.give([("other", request("900.0.0"))], [node("a")], ended + 0.99 * wait)
        ended += wait
    assert book.give([("other", request("901.0.0"))], [node("a")], ended)


def test_those_that_were_found_wrong_take_no_more_turns_than_others_where_one_fits() -> None:
    """In a fleet with two free places they had all of 120."""
    book, given = opened(), {True: 0, False: 0}
    for i in range(120):
        wrong, other = f"wrong{i % 6}", f"n{i % 60}"
        out = book.give([("full", request(f"{i}.0.0"))], [node(wrong, 1, found_wrong=True), node(other, 1)], float(i))
        for peer, g in out:
            given[peer == wrong] += 1
            book.tokens(peer, event(g.request_id, 0, [STOP], finish="stop"), float(i))
    assert given == {True: 60, False: 60}


def test_who_has_not_begun_has_more_patience_and_who_waits_carries_nothing_into_the_next_alert() -> None:
    """An honest node with a long prompt's prefill, found wrong, lost each copy before its first token."""
    book, usual = opened(), Usual(at_once_s=0.7, begins_s=3.1, tokens_per_s=100.0)
    book.give([("other", request())], [node("a"), node("b", 0)], 0.0)
    assert not book.expire(0.99 * 3.1 * PATIENCE[0], lambda *one: usual)
    assert book.expire(3.1 * PATIENCE[0], lambda *one: usual)
    assert not book.give([("other", request("8.0.0"))], [node("a"), node("b", 0)], 3.1 * PATIENCE[0])
    book.rest()
    assert book.give([("other", request("8.0.0"))], [node("a"), node("b", 0)], 3.1 * PATIENCE[0])


def test_one_that_suits_nobody_keeps_no_other_back() -> None:
    """Three long prompts in front, or three of the newest version, stopped all copies."""
    nodes = [node(f"n{i}", room=5_000.0, holds=Footprint(100.0, 0.0)) for i in range(20)]
    for hard in (request("1.0.0", min_version=V3), GenerateRequest.of(Generate("1.0.0", (1,) * 6_000, 6, (STOP,), 3, V1))):
        front = [("other", hard)] * 5
        out = opened().give([*front, *[("other", request(f"{i}.0.0")) for i in range(2, 9)]], nodes, 0.0)
        assert {r.request_id for _, r in out} == {f"{i}.0.0" for i in range(2, 9)}


def test_who_keeps_one_is_given_another() -> None:
    """Else all that a node gets beside one that it keeps is no copy, and it knows."""
    book = opened()
    for i in range(AT_NODE):
        assert book.give([("other", request(f"{i}.0.0"))], [node("a"), node("b", 0)], 0.0)
    assert not book.give([("other", request("8.0.0"))], [node("a"), node("b", 0)], 0.0)


def test_no_more_tokens_are_under_way_than_can_be_read_and_none_beyond_a_nodes_memory() -> None:
    long: dict[str, Any] = {"max_new_tokens": 4_000}
    book, names = opened(), [f"n{i}" for i in range(40)]
    for i in range(40):
        book.give([("other", request(f"{i}.0.0", **long))], [node(name) for name in names], 0.0)
    assert len(book.working("n0")) and book.under_way == MOST_AT_ONCE
    for name in names:
        for name_of in list(book.working(name)):
            book.tokens(name, event(name_of, 0, [5] * 3_000), 0.0)
    assert sum(sum(p.footprint) for name in names for p in book.working(name).values()) > MOST_TOKENS
    for name in names[:10]:
        book.lost(name, 0.0)
    assert book.under_way < MOST_AT_ONCE and not book.give([("other", request("99.0.0"))], [node("free"), node("b")], 0.0)
    for name in names[10:]:
        book.lost(name, 0.0)
    assert book.give([("other", request("99.0.0"))], [node("free"), node("b")], 0.0)
    full, roomy = (node("a", holds=Footprint(context, 400.0), room=10_000.0) for context in (9_600.0, 9_000.0))
    assert not opened().give([("other", request(**long))], [full, node("b", 0)], 0.0)
    assert opened().give([("other", request(**long))], [roomy, node("b", 0)], 0.0)


def test_looking_for_nodes_costs_little_where_none_suits() -> None:
    """A thousand nodes that are a version behind were looked through for each copy."""
    looked = [0]

    class Counted(FreeNode):
        def fits(self, request: GenerateRequest) -> bool:
            looked[0] += 1
            return False

    book = opened()
    assert not book.give(
        [("other", request(f"{i}.0.0")) for i in range(1_000)], [Counted(f"n{i}", V1, 4) for i in range(99)], 0.0
    )
    assert looked[0] <= MOST_LOOKS + 1
    many = [Counted(f"n{i}", V1, 4) for i in range(4_000)]
    hard = [("other", request(f"{i}.0.0", max_new_tokens=i + 1)) for i in range(64)]
    looked[0] = 0
    assert not book.give(hard, many, 0.0) and looked[0] <= MOST_LOOKS


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
    assert [probe.node for probe in book.expire(PROBE_S, unknown)] == ["b"]
    assert book.tokens("b", event("7.0.0", 0, [5]), PROBE_S).taken.late
    assert held(book, "a").since == PROBE_S - 1 and [p.node for p in book.expire(MOST_S, unknown)] == ["a"], "however it trickles"
    book.give([("other", request("8.0.0"))], [node("a")], MOST_S + 1)
    assert [p.node for p in book.lost("a", MOST_S + 1)] == ["a"] and not book.working("a") and book.owns("a", "8.0.0")


def test_it_is_given_up_when_an_original_would_be_or_somewhat_later() -> None:
    """Else who is silent for a second and hears nothing knows that it has a copy, and keeps it for ten minutes."""
    draws = iter([0.0, 0.0, 0.0, 1.0])  # of each: its turn, its patience
    book = opened(draw=draws.__next__)
    for name in ("a", "b"):
        book.give([("other", request(f"{name}.0.0", max_new_tokens=500))], [node(name)], 0.0)
    usual = Usual(at_once_s=2.0, begins_s=2.0, tokens_per_s=100.0)
    assert not book.expire(1.9 * PATIENCE[0], lambda *one: usual)
    assert [p.node for p in book.expire(2.0 * PATIENCE[0], lambda *one: usual)] == ["a"]
    assert not book.expire(1.9 * PATIENCE[1], lambda *one: usual)
    began = now = 1.95 * PATIENCE[1]
    made = 0
    while not (late := book.expire(now, lambda *one: usual)):  # it begins, and comes a little at a time
        book.tokens("b", event("b.0.0", made, [5] * 5), now)
        now, made = now + 1.0, made + 5
    assert 0 < now - began - 2.0 * PATIENCE[1] <= 1.0 and SLOWER * late[0].tokens < 100.0 * (now - began)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["give", "tokens", "lost", "expire"]), st.integers(0, 3), st.integers(0, 4), st.integers(-1, 3),
        st.lists(st.integers(0, VOCABULARY), max_size=4), st.sampled_from(["", "stop", "length", "interrupt", "abort"]),
    ),
    max_size=60,
)  # fmt: skip


@given(EVENTS)
def test_whatever_nodes_send_each_holds_few_and_tokens_follow_each_other(steps: list[tuple[Any, ...]]) -> None:
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
            book.lost(peer, now)
        else:
            book.expire(now, lambda *one: Usual(2.0, 2.0, 1.0))
        there = {(p, r) for p in map("n{}".format, range(4)) for r in book.working(p)}
        assert all(len(book.working(f"n{i}")) <= AT_NODE for i in range(4)) and book.under_way == len(there)
        over |= before - there
        assert all(book.owns(*pair) for pair in over | there)
