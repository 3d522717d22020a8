"""Moves by table, and what every plan must keep to."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.dispatch.migration import MIN_SPEEDUP, Running, migrate
from learner.dispatch.node_table import NodeView
from netem.rollout_sim.fleet import KINDS, QWEN3_8B
from p2p.version import Version

V = Version(1, 5)


def node(peer: str, kind: str, load: int, context: float, **more: object) -> NodeView:
    view = NodeView(
        peer, V, load, 0, 256, model=KINDS[kind].throughput(QWEN3_8B), context=context, room=KINDS[kind].context(QWEN3_8B)
    )
    return replace(view, **more)  # type: ignore[arg-type]


def runs(name: str, peer: str, context: float = 3000, left: float = 8000, need: float = 0.0, waiting: bool = False) -> Running:
    return Running(name, peer, V, context, left, need, waiting)


def test_the_long_one_of_a_slow_node_follows_when_a_fast_one_has_room() -> None:
    nodes = [node("slow", "L40S", 2, 12_000), node("fast", "H100-SXM", 4, 20_000)]
    moves = migrate(nodes, [runs("a", "slow", 9000, 8000), runs("b", "slow", left=20)], 9)
    assert [(m.request_id, m.target, m.reason) for m in moves] == [("a", "fast", "slow")]  # b has ended before it is there


def test_nothing_moves_between_equals_or_to_who_takes_nothing() -> None:
    held = [runs("a", "x"), runs("b", "x")]
    assert not migrate([node("x", "L40S", 2, 6000), node("y", "L40S", 2, 6000)], held, 9)
    for more in ({"draining": True}, {"live": False}, {"version": Version(1, 4)}, {"room": 100.0, "load": 1}):
        more = {("running" if k == "load" else k): v for k, v in more.items()}
        assert not migrate([node("x", "L40S", 2, 6000), replace(node("y", "H100-SXM", 1, 90.0), **more)], held, 9), more  # type: ignore[arg-type]


def test_what_waits_for_memory_goes_anywhere() -> None:
    nodes = [node("full", "L40S", 30, 180_000), node("other", "L40S", 30, 90_000)]
    moves = migrate(nodes, [runs("w", "full", waiting=True)], 9)
    assert [(m.request_id, m.target, m.reason) for m in moves] == [("w", "other", "waits")]


def test_the_most_pressed_go_first_and_what_they_need_is_left_to_them() -> None:
    nodes = [node("slow", "L40S", 10, 60_000), node("fast", "H100-SXM", 20, 150_000, need=39.0)]
    held = [runs("calm", "slow", need=3.0), runs("late", "slow", need=38.0)]
    assert [m.request_id for m in migrate(nodes, held, 1)] == ["late"]
    crowded = replace(nodes[1], running=30, context=240_000.0)  # 40 tokens a second: one more calm one is too many
    assert [m.request_id for m in migrate([nodes[0], crowded], held, 9)] == ["late"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.booleans()), min_size=1, max_size=5),
    st.lists(
        st.tuples(st.integers(0, 4), st.floats(300, 20_000), st.floats(0, 15_000), st.floats(0, 200), st.booleans()), max_size=40
    ),
    st.integers(0, 8),
)
def test_every_plan(kinds: list[tuple[str, bool]], held: list[tuple[int, float, float, float, bool]], most: int) -> None:
    those = [runs(f"r{i}", f"n{n % len(kinds)}", c, left, need, w) for i, (n, c, left, need, w) in enumerate(held)]
    nodes = []
    for i, (kind, draining) in enumerate(kinds):
        own = [r for r in those if r.peer == f"n{i}"]
        need = max((r.need for r in own), default=0.0)
        nodes.append(node(f"n{i}", kind, len(own), sum(r.context for r in own), draining=draining, need=need))
    moves = migrate(nodes, those, most)
    assert len(moves) <= most and len({m.request_id for m in moves}) == len(moves)
    by_name, views = {r.request_id: r for r in those}, {n.peer: n for n in nodes}
    for m in moves:
        assert by_name[m.request_id].peer == m.source != m.target and not views[m.target].draining
    if len(moves) == 1 and moves[0].reason == "slow":
        source, target, r = views[moves[0].source], views[moves[0].target], by_name[moves[0].request_id]
        assert source.model is not None and target.model is not None
        after = target.model.pace(target.load + 1, target.context + r.context)
        assert after >= MIN_SPEEDUP * source.model.pace(source.load, source.context) * 0.999
