"""Dispatch by table: who gets what, what is held and why, how many groups are opened."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.dispatch.dispatcher import Dispatcher, Opening, Strategies, WaitingSequence
from learner.dispatch.node_table import FILL, NodeTable, NodeView, oversubscribed, peak, speeds
from learner.dispatch.throughput import Throughput
from p2p.version import Version


def at(step: int) -> Version:
    return Version(1, step)


def node(
    peer: str,
    step: int = 5,
    running: int = 0,
    waiting: int = 0,
    capacity: int = 4,
    rate: float = 0.0,
    live: bool = True,
    draining: bool = False,
) -> NodeView:
    return NodeView(peer, at(step), running, waiting, capacity, rate, live, draining)


def ask(
    name: str,
    group: int = 0,
    reserved: int = 5,
    minimum: int | None = None,
    attempt: int = 0,
    expected: int = 0,
    avoid: str = "",
    prefer: str = "",
) -> WaitingSequence:
    least = at(reserved if minimum is None else minimum)
    return WaitingSequence(name, group, at(reserved), least, 0, expected, attempt, frozenset(avoid), prefer=prefer)


DELIVERERS = [replace(node("x"), delivers=4.0), replace(node("y", running=3), delivers=9.0), node("z")]

TABLE = [
    ("nobody there", [], [ask("a")], []),
    ("the emptier node", [node("x", running=2), node("y", running=1)], [ask("a")], [("a", "y")]),
    ("by capacity", [node("x", running=2, capacity=8), node("y", running=1, capacity=2)], [ask("a")], [("a", "x")]),
    ("spread", [node("x"), node("y")], [ask("a"), ask("b", 1)], [("a", "x"), ("b", "y")]),
    ("too old a node", [node("x", step=4)], [ask("a", reserved=5)], []),
    ("a newer node will do", [node("x", step=9)], [ask("a", reserved=5)], [("a", "x")]),
    ("last span's version", [node("x", step=5), node("y", step=6, running=3)], [ask("a", minimum=6)], [("a", "y")]),
    ("dead", [node("x", live=False)], [ask("a")], []),
    ("draining", [node("x", draining=True), node("y", running=4)], [ask("a")], [("a", "y")]),
    ("no capacity", [node("x", capacity=0)], [ask("a")], []),
    ("full, with the over-subscription", [node("x", running=4, waiting=1)], [ask("a")], []),
    ("one place beyond capacity", [node("x", running=4)], [ask("a"), ask("b")], [("a", "x")]),
    ("stalest first", [node("x", running=4)], [ask("a", reserved=5), ask("b", reserved=3)], [("b", "x")]),
    ("re-dispatched first", [node("x", running=4)], [ask("a", reserved=3), ask("b", attempt=1)], [("b", "x")]),
    ("longest first", [node("x", running=4)], [ask("a", expected=10), ask("b", expected=90)], [("b", "x")]),
    ("faster", [node("x", running=2, rate=20), node("y", running=2, rate=80)], [ask("a")], [("a", "y")]),
    ("idle is not slow", [node("x", running=2, rate=80), node("y", rate=0)], [ask("a")], [("a", "y")]),
    ("not again where it failed", [node("x"), node("y", running=3)], [ask("a", avoid="x")], [("a", "y")]),
    ("better wait than fail again", [node("x"), node("y", running=5)], [ask("a", avoid="x")], []),
    ("unless there is no other", [node("x"), node("y", step=4)], [ask("a", avoid="x")], [("a", "x")]),
    ("nor while the other may hold nothing", [node("x"), replace(node("y"), limit=0)], [ask("a", avoid="x")], []),
    ("whose word counts first", [replace(node("x"), credible=False), replace(node("y", running=3), limit=4), node("z")],
     [ask("a", avoid="z")], [("a", "y")]),
    ("what one failed, by load", DELIVERERS, [ask("a", attempt=1, avoid="z")], [("a", "x")]),
    ("what two failed, to who delivers", DELIVERERS, [ask("a", attempt=2, avoid="z")], [("a", "y")]),
    ("and can decode it at once", [*DELIVERERS[:1], *(replace(n, running=4) for n in DELIVERERS[1:])],
     [ask("a", attempt=2, avoid="z")], [("a", "x")]),
    ("where that is gone by", [replace(n, delivers=0.0) for n in DELIVERERS], [ask("a", attempt=2, avoid="z")], [("a", "x")]),
    ("back to its prefix", [node("x"), node("y", running=3)], [ask("a", prefer="y")], [("a", "y")]),
    ("no place there", [node("x"), node("y", running=5)], [ask("a", prefer="y")], [("a", "x")]),
    ("its prefix's node is too old", [node("x"), node("y", step=4)], [ask("a", prefer="y")], [("a", "x")]),
    ("its prefix's node is gone", [node("x")], [ask("a", prefer="y")], [("a", "x")]),
    ("not back where it failed", [node("x", running=3), node("y")], [ask("a", prefer="y", avoid="y")], [("a", "x")]),
    (
        "held ones do not block others",
        [node("x", step=4)],
        [ask("a", reserved=5, attempt=2), ask("b", 1, reserved=4)],
        [("b", "x")],
    ),
]


@pytest.mark.parametrize(("nodes", "pending", "assigned"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_assignment(nodes: list[NodeView], pending: list[WaitingSequence], assigned: list[tuple[str, str]]) -> None:
    plan = Dispatcher(samples=2).choose(nodes, pending)
    assert list(plan.assign) == assigned
    assert plan.open == ()


def test_what_no_node_may_take_waits() -> None:
    plan = Dispatcher(2).choose([node("x", step=4), node("y", step=5, running=5)], [ask("a"), ask("b", reserved=6)])
    assert plan.assign == ()


OPENINGS = [
    # capacity 4 and one place more: 5 places, groups of 2 -> 3 groups
    ("one idle node", [node("x")], [], {5: 9}, [(5, 3)]),
    ("no room in the ledger", [node("x")], [], {5: 0}, []),
    ("as much as there is room", [node("x")], [], {5: 2}, [(5, 2)]),
    ("places are for pending ones first", [node("x", running=2)], [ask("a"), ask("b")], {5: 9}, [(5, 1)]),
    ("all full", [node("x", running=5)], [], {5: 9}, []),
    ("freshest first, then the older", [node("x", step=4), node("y", step=5)], [], {4: 4, 5: 9}, [(5, 3), (4, 1)]),
    ("a fresh node that is full opens nothing", [node("x", step=4), node("y", running=5)], [], {4: 9, 5: 9}, [(4, 3)]),
    ("dead and draining", [node("x", live=False), node("y", draining=True)], [], {5: 9}, []),
    ("smaller than a group", [node("x", capacity=1, running=1)], [], {5: 9}, [(5, 1)]),
]


@pytest.mark.parametrize(
    ("nodes", "pending", "room", "opened"), [row[1:] for row in OPENINGS], ids=[row[0] for row in OPENINGS]
)
def test_opening(
    nodes: list[NodeView], pending: list[WaitingSequence], room: dict[int, int], opened: list[tuple[int, int]]
) -> None:
    plan = Dispatcher(samples=2).choose(nodes, pending, lambda version: room[version.step])
    assert list(plan.open) == [Opening(at(step), groups) for step, groups in opened]


def test_speeds_are_relative_and_bounded() -> None:
    nodes = [node("a", running=1, rate=10), node("b", running=1, rate=1000), node("c", running=4, rate=40), node("d")]
    assert speeds(nodes) == {"a": 1.0, "b": 4.0, "c": 1.0, "d": 1.0}
    assert speeds([node("d")]) == {"d": 1.0}


def test_two_nodes_with_one_name() -> None:
    with pytest.raises(ValueError, match="one peer id"):
        Dispatcher(2).choose([node("x"), node("x")], [])


H100, L40S = Throughput(6e-8, 7e-3, 3e-5, 4e-3), Throughput(2.4e-7, 2.7e-2, 9e-5, 4e-3)
"""A step of 11 ms and of 31 ms for one sequence; some 35 ms and 75 ms with as much context as they hold."""


def engine(peer: str, model: Throughput, running: int, context: float, need: float = 0.0) -> NodeView:
    return NodeView(peer, at(5), running, 0, 256, model=model, context=context, room=400_000, need=need)


PACE = Strategies(pace=True)


def test_a_sequence_goes_where_it_is_fastest() -> None:
    nodes = [engine("fast", H100, 60, 200_000), engine("slow", L40S, 1, 3000)]
    long = replace(ask("a"), prompt_tokens=4000)
    plan = Dispatcher(2, PACE).choose(nodes, [long])
    assert plan.assign == (("a", "fast"),)  # 24 ms a token there, although it would add more tokens a second on the other
    plan = Dispatcher(2, Strategies()).choose(nodes, [long])
    assert plan.assign == (("a", "slow"),)


def test_what_is_in_a_hurry_is_not_slowed_by_what_is_not() -> None:
    pressed = engine("fast", H100, 20, 280_000, need=45.0)
    hurried, idle = replace(ask("a"), need=40.0), ask("b", 1)
    slow = engine("slow", L40S, 1, 3000)
    assert Dispatcher(2, PACE).choose([pressed, slow], [idle]).assign == (("b", "slow"),)
    assert Dispatcher(2, PACE).choose([pressed, slow], [hurried]).assign == (("a", "fast"),)
    assert Dispatcher(2, PACE).choose([pressed], [idle]).assign == ()  # it would slow what is there down too far
    assert Dispatcher(2, Strategies()).choose([pressed], [idle]).assign == (("b", "fast"),)


def test_memory_is_kept_for_what_sequences_will_still_make() -> None:
    full = replace(engine("x", H100, 10, 100_000), growth=680_000)
    assert Dispatcher(2).choose([full], [ask("a")]).assign == ()
    assert Dispatcher(2).choose([replace(full, growth=640_000)], [ask("a")]).assign == (("a", "x"),)
    idle = replace(full, running=0, context=0.0, growth=0.0, room=10)
    assert Dispatcher(2).choose([idle], [ask("a", expected=10_000)]).assign == (("a", "x"),)  # nobody else might


tokens_st = st.floats(0, 1e6)


@settings(max_examples=300, deadline=None)
@given(tokens_st, tokens_st, tokens_st, tokens_st, st.integers(2, 300))
def test_the_peak_of_what_sequences_will_hold(a: float, b: float, c: float, d: float, n: int) -> None:
    one, other, both = float(peak(a, b)), float(peak(c, d)), float(peak(a + c, b + d))
    close = 1e-9 * (both + 1)
    assert a - close <= one <= a + b / 2 + close
    assert both >= max(one, other) - close, "more never takes less"
    assert both <= one + other + close, "together they do not peak higher than each by itself"
    assert float(peak(n * a, n * b)) == pytest.approx(n * one)


@pytest.mark.parametrize("held", [0.0, 300.0, 2000.0, 5000.0])
def test_the_peak_is_that_of_sequences_that_end_one_by_one(held: float) -> None:
    left = [4000.0 * (i + 0.5) / 500 for i in range(500)]  # spread evenly, 2,000 in the mean
    most = max(sum(held + end for other in left if other >= end) for end in [0.0, *left])
    assert float(peak(500 * held, sum(left))) == pytest.approx(most, rel=0.01)


@settings(max_examples=100, deadline=None)
@given(tokens_st, tokens_st, st.floats(1, 5000), st.floats(0, 20_000), st.floats(1, 1e6), st.integers(0, 300))
def test_as_many_are_counted_as_fit(held: float, growth: float, context: float, more: float, room: float, limit: int) -> None:
    node = NodeView("x", at(5), 1, 0, limit, context=held, growth=growth, room=room)
    count = int(NodeTable([node]).count(context, more, False)[0])
    fits = lambda n: float(peak(held + n * context, growth + n * more)) <= FILL * room
    most = oversubscribed(node) - 1
    assert 0 <= count <= max(0, most)
    assert not count or fits(count)
    assert count == most or not fits(count + 1)


nodes_st = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 3), st.integers(0, 5), st.booleans(), st.booleans()),
    max_size=6,
)
pending_st = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=20)


@settings(max_examples=150, deadline=None)
@given(nodes_st, pending_st, st.integers(0, 9))
def test_plans_are_legal_and_leave_no_place_unused(
    raw: list[tuple[int, int, int, int, bool, bool]], asks: list[tuple[int, int]], room: int
) -> None:
    nodes = [node(f"n{i}", s, r, w, c, 0.0, live, drain) for i, (s, r, w, c, live, drain) in enumerate(raw)]
    pending = [ask(f"r{i}", i, s, attempt=a) for i, (s, a) in enumerate(asks)]
    plan = Dispatcher(3).choose(nodes, pending, lambda version: room)
    by_peer = {n.peer: n for n in nodes}
    by_id = {r.request_id: r for r in pending}
    given_to: dict[str, int] = {}
    for request, peer in plan.assign:
        assert by_peer[peer].live and not by_peer[peer].draining
        assert by_peer[peer].version >= by_id[request].min_version
        given_to[peer] = given_to.get(peer, 0) + 1
    held = set(by_id) - {request for request, _ in plan.assign}
    assert len(held) + len(plan.assign) == len(by_id)
    usable = [n for n in nodes if n.live and not n.draining and n.capacity > 0]
    left = {n.peer: oversubscribed(n) - n.load - given_to.get(n.peer, 0) for n in usable}
    for peer in given_to:
        assert left[peer] >= 0
    for request in held:
        assert not [n for n in usable if left[n.peer] > 0 and n.version >= by_id[request].min_version]
    opened = sum(o.groups for o in plan.open)
    assert opened <= room
    if opened < room:
        for version in {n.version for n in usable}:
            free = sum(max(0, left[n.peer]) for n in usable if n.version == version)
            assert sum(o.groups for o in plan.open if o.version == version) * 3 >= free
