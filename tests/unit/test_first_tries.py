"""What goes elsewhere while nobody is known."""

from __future__ import annotations

import itertools

from learner.dispatch.giving_way import Speeds
from learner.dispatch.node_table import NodeView
from learner.rollouts.first_tries import BEGIN_S, BEGIN_TOKENS, LONG, QUICK_TRIES, FirstTries


def idle(*peers: str, capacity: int = 4, limit: int | None = 2) -> list[NodeView]:
    return [NodeView(peer, "v1", 0, 0, capacity, limit=limit) for peer in peers]


def test_what_hardly_begins_goes_where_nothing_is_done_and_no_more_than_has_a_place() -> None:
    tries, held = FirstTries(), {"a": {"1.0.0": 0, "1.1.0": 0}, "b": {"2.0.0": 0}}
    assert tries.look(held, idle("c"), 0.0) == {}
    assert tries.look(held, idle("c"), BEGIN_S - 0.1) == {}
    assert tries.look(held, idle("c"), BEGIN_S) == {"a": ("1.0.0", "1.1.0")}, "two places"
    assert tries.look(held, idle("c", limit=None), BEGIN_S) == {"a": ("1.0.0", "1.1.0"), "b": ("2.0.0",)}
    busy = NodeView("c", "v1", 1, 0, 4)
    gone = NodeView("d", "v1", 0, 0, 4, live=False)
    leaves = NodeView("e", "v1", 0, 0, 4, draining=True)
    assert tries.look(held, [busy, gone, leaves], BEGIN_S) == {}


def test_who_was_given_it_last_is_the_last() -> None:
    tries = FirstTries()
    tries.look({"a": {"1.0.0": 0}}, [], 0.0)
    tries.look({"a": {"1.0.0": 0}, "b": {"2.0.0": 0}}, [], 2.0)
    both = {"a": {"1.0.0": 0}, "b": {"2.0.0": 0}}
    assert tries.look(both, idle("c", limit=1), 2.0 + BEGIN_S) == {"a": ("1.0.0",)}


def test_who_makes_tokens_keeps_it_for_longer_and_who_trickles_does_not() -> None:
    tries, taken = FirstTries(), set()
    for second in range(int(LONG * BEGIN_S)):
        taken |= tries.look({"a": {"1.0.0": second}, "b": {"2.0.0": second // 4}}, idle("c"), float(second)).keys()
    assert taken == {"b"} and BEGIN_TOKENS > 1


def test_who_makes_just_as_many_as_it_must_does_not_keep_it_for_good_and_the_next_has_twice_as_long() -> None:
    tries, at, since, node = FirstTries(), 0.0, 0.0, 0
    stays: list[float] = []
    while node < 4:
        made = int((at - since) / BEGIN_S) * BEGIN_TOKENS
        if tries.look({f"n{node}": {f"1.0.{node}": made}}, idle("free"), at):
            stays.append(at - since)
            node, since = node + 1, at
        at += 1.0
    assert stays[0] == LONG * BEGIN_S and all(b > 1.9 * a for a, b in itertools.pairwise(stays))


def test_where_all_are_slow_to_begin_moves_end() -> None:
    tries, moves, at, since, attempt = FirstTries(), 0, 0.0, 0.0, 0
    slow_s = 40.0
    while at - since < slow_s:  # the try that lasts so long would end
        if tries.look({f"n{attempt}": {f"1.0.{attempt}": 0}}, idle("free"), at):
            moves, attempt, since = moves + 1, attempt + 1, at
        at += 1.0
    assert QUICK_TRIES <= moves <= QUICK_TRIES + 3 and at < 10 * slow_s


def test_another_try_begins_anew() -> None:
    tries = FirstTries()
    tries.look({"a": {"1.0.0": 0}}, [], 0.0)
    assert tries.look({"b": {"1.0.1": 0}}, idle("c"), BEGIN_S) == {}
    assert tries.look({"b": {"1.0.1": 0}}, idle("c"), 2 * BEGIN_S) == {"b": ("1.0.1",)}


def test_who_was_given_nothing_yet_gets_what_slow_ones_hold_at_once() -> None:
    tries, held = FirstTries(), {"slow": {"1.0.0": 0}, "new": {"2.0.0": 0}}
    assert tries.look(held, idle("c"), 0.0, Speeds(frozenset({"slow"}))) == {}
    assert tries.look(held, idle("c"), 0.1, Speeds(frozenset({"slow"}), frozenset({"c"}))) == {"slow": ("1.0.0",)}


def test_as_long_as_some_were_given_nothing_patience_does_not_grow() -> None:
    tries, at = FirstTries(), 0.0
    for attempt in range(2 * QUICK_TRIES):
        held, untried = {f"n{attempt}": {f"1.0.{attempt}": 0}}, Speeds(untried=frozenset({"c"}))
        assert tries.look(held, idle("c"), at, untried) == {}
        at += BEGIN_S
        assert tries.look(held, idle("c"), at, untried)
