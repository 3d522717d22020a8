"""Who gives way to quicker nodes, for how long, and what it may hold meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from learner.dispatch.dispatcher import Assignment, Dispatcher, WaitingSequence
from learner.dispatch.giving_way import LAG_S, SILENT_S, SLOWER, STANDSTILL_S, TRY_S, GivingWay
from learner.dispatch.node_table import NodeView, oversubscribed
from learner.standing.shares import MadeOfLate, NodeHolding, limits
from learner.standing.standing import FIRST, Standing
from p2p.version import Version

V = Version(1, 1)
STEP_S = 0.05
TOKENS = 10
"""of a sequence"""


@dataclass
class Fleet:
    """Nodes of four places; a sequence takes each node its own time, and its tokens come at its end."""

    took_s: dict[str, float]
    credible: set[str] | None = None
    proven: bool = True
    outstanding: int = 12
    step: int = 0
    now: float = 0.0
    giving: GivingWay = field(default_factory=GivingWay)
    held: dict[str, list[float]] = field(default_factory=dict)
    """node -> when each of its sequences ends"""
    made: dict[str, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    """sequences that each was given"""
    views: list[NodeView] = field(default_factory=list)

    def run(self, seconds: float, most: int = 4) -> dict[str, NodeView]:
        """Each gets as many as it may have; what they are by the end."""
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            for node in self.took_s:
                held = self.held.setdefault(node, [])
                over = [end for end in held if end <= self.now]
                self.held[node] = [end for end in held if end > self.now]
                for _ in over:
                    self.made[node] = self.made.get(node, 0) + TOKENS
                    self.giving.ended(node, self.made[node], self.now)
                self.giving.count(node, len(self.held[node]), self.made.get(node, 0), self.now)
            self.views = self.giving.look(self._nodes(), self.outstanding, self.now, proven=self.proven, step=self.step)
            for view in self.views:
                while len(self.held[view.peer]) < min(most, oversubscribed(view)):
                    self.held[view.peer].append(self.now + self.took_s[view.peer])
                    self.given[view.peer] = self.given.get(view.peer, 0) + 1
                    self.giving.gave(view.peer, self.now)
        return {view.peer: view for view in self.views}

    def _nodes(self) -> list[NodeView]:
        credible = set(self.took_s) if self.credible is None else self.credible
        return [NodeView(node, V, len(self.held.get(node, ())), 0, 4, credible=node in credible) for node in self.took_s]


def gives_way(views: dict[str, NodeView]) -> set[str]:
    return {peer for peer, view in views.items() if view.gives_way}


def test_who_is_late_gives_way_and_gets_hardly_anything() -> None:
    fleet = Fleet({"a": 0.2, "b": 0.2, "late": 3.0})
    assert gives_way(fleet.run(5.0)) == {"late"}
    before = fleet.given["late"]
    fleet.run(60.0)
    assert fleet.given["late"] - before <= 60.0 / TRY_S + 1 and fleet.given["a"] > 1000


def test_who_is_a_little_slower_does_not() -> None:
    assert not gives_way(Fleet({"a": 0.2, "b": 0.2 * (SLOWER - 1)}).run(10.0))


def test_a_quick_node_is_no_slower_while_all_its_places_are_at_work() -> None:
    """It looked half as quick in the midst of a batch, and who is five times slower was given all that waited just then."""
    fleet = Fleet({"q1": 0.3, "q2": 0.3, "s": 1.1})
    fleet.run(20.0)
    assert all("s" in fleet.giving.speeds.slow for _ in range(40) if fleet.run(STEP_S))
    before = fleet.given["s"]
    fleet.run(60.0)
    assert fleet.given["s"] <= before + 60.0 / TRY_S + 1


def test_it_is_seen_while_it_holds_them_and_not_only_when_they_come() -> None:
    fleet = Fleet({"a": 0.2, "turns": 0.2})
    assert not gives_way(fleet.run(5.0))
    fleet.took_s["turns"] = 1e9
    assert gives_way(fleet.run(2.0)) == {"turns"}


def test_what_the_quick_would_not_have_made_by_then_is_its_own() -> None:
    """While the late one makes one, each of the five places of the quick one makes some fourteen."""
    fleet = Fleet({"a": 0.2, "late": 3.0}, outstanding=1000)
    late = fleet.run(20.0)["late"]
    assert late.gives_way and late.limit == oversubscribed(replace(late, limit=None))
    fleet.outstanding = 10
    assert fleet.run(5.0)["late"].limit == 0


def test_who_is_quick_again_is_believed_after_some_tries() -> None:
    fleet = Fleet({"a": 0.2, "b": 0.2})
    fleet.run(5.0)
    fleet.took_s["b"] = 5.0
    fleet.run(10.0)
    fleet.took_s["b"] = 0.2
    assert gives_way(fleet.run(5.0)) == {"b"}
    assert not gives_way(fleet.run(20 * TRY_S))


def test_those_that_give_way_are_tried_in_turn() -> None:
    fleet = Fleet({"a": 0.2} | {f"late{i}": 3.0 for i in range(5)})
    fleet.run(10.0)
    before = dict(fleet.given)
    fleet.run(5 * TRY_S + 1.0)
    assert all(1 <= fleet.given[f"late{i}"] - before[f"late{i}"] <= 2 for i in range(5))


def test_nobody_waits_for_quick_nodes_that_take_nothing() -> None:
    """They lack the version, say."""
    fleet = Fleet({"a": 0.2, "late": 3.0})
    assert gives_way(fleet.run(10.0))
    fleet.took_s["a"] = 0.05
    fleet.run(1.0, most=0)  # all it has ends
    fleet.run(STANDSTILL_S + 4.0, most=0)
    assert not gives_way({view.peer: view for view in fleet.views}) and not fleet.giving.speeds.slow


def test_who_lacks_the_newest_version_for_long_makes_nobody_wait_for_it() -> None:
    """A quick node that took each version four seconds late, and all the work then, left a third of the steps."""
    fleet = Fleet({"quick": 0.1, "honest": 1.0})
    fleet.run(5.0)
    assert fleet.views[1].gives_way
    views = [NodeView("quick", V, 0, 0, 4), NodeView("honest", Version(1, 2), 0, 0, 4)]
    assert fleet.giving.look(views, 12, fleet.now)[1].gives_way, "it may have it at once"
    assert not fleet.giving.look(views, 12, fleet.now + LAG_S + 0.1)[1].gives_way
    both = [replace(view, version=Version(1, 2)) for view in views]
    assert fleet.giving.look(both, 12, fleet.now + 4.0)[1].gives_way
    again = [views[0], replace(views[1], version=Version(1, 3))]
    assert not fleet.giving.look(again, 12, fleet.now + 4.1)[1].gives_way, "it took long the last time"


def test_long_completions_make_nobody_quick() -> None:
    giving, made = GivingWay(), {"honest": 0, "long": 0}
    for second in range(1, 60):
        for node, tokens in (("honest", 2), ("long", 1000)):
            made[node] += tokens
            giving.ended(node, made[node], float(second))
            giving.count(node, 1, made[node], float(second))
        found = giving.look([NodeView(node, V, 1, 0, 4) for node in made], 4, float(second))
        assert not any(view.gives_way for view in found)


def test_tiny_completions_hide_nobody() -> None:
    """What came of them was forgotten by their tokens, so that who was late with them was as quick as the others for long."""
    giving, made, now = GivingWay(), {"honest": 0, "tiny": 0}, 0.0
    nodes = [NodeView(node, V, 4, 0, 4) for node in made]
    held = dict.fromkeys(made, 0)
    for step in range(200):  # the honest one ends its four each 0.2 s, the other each second
        now += 0.1
        for node, each, tokens in ("honest", 2, 20), ("tiny", 10 if step > 100 else 2, 1):
            if step % each == 0:
                for left in reversed(range(held[node])):
                    made[node] += tokens
                    giving.ended(node, made[node], now)
                    giving.count(node, left, made[node], now)
                giving.count(node, 4, made[node], now)
                held[node] = 4
        views = giving.look(nodes, 12, now)
        assert not views[0].gives_way and (step <= 120 or views[1].gives_way), step


def test_a_quick_stranger_makes_nobody_slow_while_somebody_is_proven() -> None:
    fleet = Fleet({"proven": 1.0, "rubbish": 0.05}, credible={"proven"})
    assert not gives_way(fleet.run(10.0))


def test_while_nobody_is_proven_only_who_is_silent_gives_way() -> None:
    fleet = Fleet({"honest": 1.0, "rubbish": 0.05, "late": 20.0}, proven=False)
    assert gives_way(fleet.run(SILENT_S + 1.0)) == {"late"} == fleet.giving.speeds.slow
    for node in ("rubbish", "honest"):  # all that were quick turn
        fleet.took_s[node] = 20.0
    fleet.took_s["new"] = 1.0
    fleet.run(SILENT_S + 2.0)
    assert fleet.giving.speeds.slow >= {"rubbish", "honest"} and "new" not in fleet.giving.speeds.slow


def test_who_was_given_nothing_is_untried() -> None:
    fleet = Fleet({"a": 0.2})
    fleet.run(1.0)
    fleet.took_s["b"] = 0.2
    fleet.run(STEP_S, most=0)
    assert fleet.giving.speeds.untried == {"b"}
    fleet.run(1.0)
    assert not fleet.giving.speeds.untried


@given(
    st.lists(st.floats(0.05, 5.0), min_size=1, max_size=6), st.integers(0, 200), st.booleans(),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0.05, 50.0), st.integers(0, 9)), max_size=4), st.integers(0, 99),
)  # fmt: skip
def test_somebody_always_works_and_nobody_gets_more_than_it_had(
    took_s: list[float], outstanding: int, proven: bool, turns: list[tuple[int, float, int]], step: int
) -> None:
    fleet = Fleet({f"n{i}": s for i, s in enumerate(took_s)}, proven=proven, outstanding=outstanding, step=step)
    for which, s, moved in [(0, took_s[0], 0), *turns]:
        node = f"n{which % len(took_s)}"
        fleet.took_s[node] = s
        for _ in range(moved):
            fleet.giving.late(node, s, fleet.now)
        views = fleet.run(4.0)
        assert not proven or len(gives_way(views)) < len(took_s)
        assert all(oversubscribed(view) <= 5 and (view.gives_way or view.limit is None) for view in views.values())
        assert all(view.limit is None or view.limit >= view.load for view in views.values())
    before = sum(fleet.given.values())
    fleet.run(120.0)
    assert sum(fleet.given.values()) > before, "nobody worked for two minutes"


def waiting(name: str, attempt: int = 0) -> WaitingSequence:
    return WaitingSequence(name, int(name.partition(".")[0]), V, V, attempt=attempt)


def test_who_gives_way_gets_what_others_have_no_places_for() -> None:
    quick, slow = NodeView("q", V, 4, 0, 4), NodeView("s", V, 0, 0, 4, limit=3, gives_way=True)
    choose = Dispatcher(4).choose
    assert choose([quick, slow], [waiting("1.0"), waiting("2.0")]).assign == (Assignment("1.0", "q"), Assignment("2.0", "s"))


def test_who_is_tried_gets_one_that_is_fresh_though_others_have_places() -> None:
    quick, slow = NodeView("q", V, 0, 0, 4), NodeView("s", V, 0, 0, 4, limit=1, gives_way=True, tries=True)
    found = Dispatcher(4).choose([quick, slow], [waiting("1.0", attempt=1), waiting("2.0"), waiting("3.0")]).assign
    assert found == (Assignment("1.0", "q"), Assignment("2.0", "s"), Assignment("3.0", "q"))


def test_who_is_to_be_tried_is_until_it_was_given_something() -> None:
    fleet = Fleet({"a": 0.2, "late": 3.0})
    fleet.run(10.0)
    tried_at, nodes = fleet.now + TRY_S, [NodeView("a", V, 4, 0, 4), NodeView("late", V, 0, 0, 4)]
    for later in range(3):
        assert fleet.giving.look(nodes, 12, tried_at + later)[1].tries
    fleet.giving.gave("late", tried_at + 3)
    for later in range(4, int(TRY_S)):
        found = fleet.giving.look(nodes, 12, tried_at + later)[1]
        assert found.gives_way and not found.tries and not found.limit
    assert fleet.giving.look(nodes, 12, tried_at + 3.5 + TRY_S)[1].tries


def test_while_nobody_is_proven_slow_nodes_take_no_places_of_those_that_were_given_nothing() -> None:
    standing = Standing()
    standing.ended("slow", 10)
    nodes = [NodeHolding("slow", 64, 3, slow=True), *(NodeHolding(f"new{i}", 64, 0) for i in range(9))]
    found = limits(standing, nodes, MadeOfLate())
    assert found == {"slow": 3} | {f"new{i}": FIRST for i in range(9)}
    crowd = [node._replace(slow=False) for node in nodes]
    assert sum(limits(standing, crowd, MadeOfLate()).values()) == 3 + FIRST


def with_one_often_late(outstanding: int, step: int, usual_s: float = 0.2) -> Fleet:
    """Two quick nodes, and one that is as quick but for eight sequences, which were moved from it half a second late."""
    fleet = Fleet({"a": usual_s, "b": usual_s, "often": usual_s}, outstanding=outstanding, step=step)
    fleet.run(20 * usual_s)
    for i in range(8):
        fleet.giving.late("often", 0.5, fleet.now - 1.5 * (8 - i))
    return fleet


def test_who_is_often_late_gives_way_where_the_others_make_a_step_sooner() -> None:
    fleet = with_one_often_late(outstanding=64, step=16)
    assert gives_way(fleet.run(STEP_S)) == {"often"}
    fleet.run(1.0)
    before, honest = fleet.given["often"], fleet.given["a"]
    fleet.run(5.0)
    assert fleet.given["often"] - before < (fleet.given["a"] - honest) / 2, "it has one at a time"
    assert not gives_way(fleet.run(4 * TRY_S)), "it has shown, one after the other, that it is no longer late"
    assert not gives_way(with_one_often_late(outstanding=64, step=64).run(STEP_S)), "they have not places enough"
    assert not gives_way(with_one_often_late(outstanding=64, step=0).run(STEP_S)), "what a step takes is not known"
    long = with_one_often_late(outstanding=16, step=16, usual_s=8.0)
    assert not gives_way(long.run(STEP_S)), "half a second of eight is little"


def beside_those_that_are_late(others: dict[str, NodeView], proven: bool = True) -> tuple[GivingWay, list[NodeView]]:
    """Two nodes that are late now and then, and others that never are."""
    giving, views = GivingWay(), [NodeView("h", V, 0, 0, 4), NodeView("i", V, 0, 0, 4), *others.values()]
    for k in range(1, 61):
        for view in views:
            giving.count(view.peer, 0, TOKENS * (k - 1), 2.0 * k - 0.2)
            giving.gave(view.peer, 2.0 * k - 0.2)
            if view.peer in "hi" and k % 8 == 0:
                giving.late(view.peer, 1.5, 2.0 * k)
            else:
                giving.ended(view.peer, TOKENS * k, 2.0 * k)
            giving.count(view.peer, 0, TOKENS * k, 2.0 * k)
    return giving, giving.look(views, 16, 120.5, proven=proven, step=16)


def test_only_who_can_take_the_work_counts_among_the_others() -> None:
    able = {name: NodeView(name, V, 1, 0, 4) for name in "ab"}
    assert {v.peer for v in beside_those_that_are_late(able)[1] if v.gives_way} == {"h", "i"}
    for wrong in (
        {name: replace(view, limit=0, running=0) for name, view in able.items()},
        {name: replace(view, capacity=0) for name, view in able.items()},
        {name: replace(view, credible=False) for name, view in able.items()},
        {"a": able["a"]},
    ):
        assert not any(v.gives_way for v in beside_those_that_are_late(wrong)[1])
    strangers = {name: replace(view, credible=False) for name, view in able.items()}
    assert any(v.gives_way for v in beside_those_that_are_late(strangers, proven=False)[1]), "nobody is proven"


def test_nodes_without_the_newest_version_are_others_for_a_moment() -> None:
    giving, views = beside_those_that_are_late({name: NodeView(name, V, 1, 0, 4) for name in "ab"})
    assert views[0].gives_way
    newer = [NodeView(name, Version(1, 2), 0, 0, 4) for name in "hi"] + [NodeView(name, V, 1, 0, 4) for name in "ab"]
    assert giving.look(newer, 16, 121.0, step=16)[0].gives_way
    assert not giving.look(newer[:3], 16, 121.0, step=16)[0].gives_way, "one of them left"
    assert not giving.look(newer, 16, 121.0 + 2 * LAG_S, step=16)[0].gives_way
