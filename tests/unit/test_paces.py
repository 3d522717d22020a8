"""Sequences that fall behind what others achieve."""

from __future__ import annotations

from learner.rollouts.paces import SLOW, STAYS, PaceWatch
from learner.standing.shares import MadeOfLate, NodeHolding, limits
from learner.standing.standing import DOUBTED_S, FIRST, Standing, StandingRules


class World:
    """Nodes that hold one sequence at a time of `length` tokens, at their own paces."""

    def __init__(self, length: int, **paces: float) -> None:
        self.length, self.paces = length, paces
        self.watch, self.now = PaceWatch(), 0.0
        self.made = {n: 0 for n in paces}
        self.exact = {n: 0.0 for n in paces}
        self.ended = {n: 0 for n in paces}

    def run(self, seconds: float, patience: float = 5.0, credible=lambda node: node != "odd") -> set[str]:
        late: set[str] = set()
        until = self.now + seconds
        while self.now < until:
            self.now += 2.0
            for node, pace in self.paces.items():
                self.exact[node] += 2.0 * pace
                self.made[node], self.ended[node] = int(self.exact[node]), int(self.exact[node] // self.length)
            held = {n: {f"{n}.{self.ended[n]}": self.made[n] % self.length} for n in self.paces}
            stalls = self.watch.look(
                held, self.made, self.ended, self.now, credible=credible, patience=lambda node: patience
            )
            late |= {stall.node for stall in stalls}
        return late


def test_who_trickles_is_late_and_who_is_merely_slow_is_not() -> None:
    world = World(100, a=50.0, b=40.0, odd=1.0)
    assert world.run(60) == {"odd"}
    assert World(100, a=50.0, b=40.0, odd=50.0 / SLOW * 1.2).run(600) == set()


def test_nobody_is_compared_with_strangers() -> None:
    assert World(100, odd=1e4, slow=1.0).run(300) == set()
    assert World(100, odd=1e6, slow=1.0, slower=0.5).run(300) == set()


def test_a_long_stay_at_the_others_is_allowed_to_all() -> None:
    """Sequences of 100 s: one that has made nothing yet may be queued behind others for as long."""
    world = World(1000, a=10.0, b=10.0, odd=0.0)
    assert world.run(STAYS * 100.0) == set()
    assert world.run(200) == {"odd"}


def share_of(standing: Standing, *nodes: NodeHolding, made: MadeOfLate | None = None) -> dict[str, int]:
    return limits(standing, nodes, made or MadeOfLate())


def test_strangers_together_hold_a_share_and_the_least_doubted_come_first() -> None:
    standing = Standing(StandingRules(proven_tokens=10, unproven_share=0.25))
    for _ in range(30):
        standing.ended("good", 10)
    standing.doubt("bad", "withheld", 0.0)
    sybils = [NodeHolding(f"s{i:02}", 64, 0) for i in range(60)]
    found = share_of(standing, NodeHolding("good", 30, 20), NodeHolding("bad", 64, 0), *sybils)
    assert "good" not in found
    assert sum(found.values()) == 10 and found["bad"] == 0  # a quarter of 40
    assert all(n <= FIRST for n in found.values())


def test_who_has_delivered_something_is_held_by_its_own_limit_alone() -> None:
    """A thousand honest nodes that come at once are not proven one by one."""
    standing = Standing(StandingRules(proven_tokens=1000))
    for peer in ("good", *(f"n{i}" for i in range(50))):
        standing.ended(peer, 1000 if peer == "good" else 10)
    found = share_of(standing, NodeHolding("good", 30, 20), *(NodeHolding(f"n{i}", 64, 3) for i in range(50)))
    assert found == {"good": 3} | {f"n{i}": 3 for i in range(50)}


def test_without_a_proven_node_each_has_its_own_limit() -> None:
    assert share_of(Standing(), NodeHolding("a", 64, 0), NodeHolding("b", 1, 0)) == {"a": FIRST}


def test_who_made_too_much_of_late_gets_nothing_for_a_while() -> None:
    standing = Standing(StandingRules(proven_tokens=10, unproven_share=0.25))
    for _ in range(30):
        standing.ended("good", 10)
    made = MadeOfLate()
    for i in range(100):
        made.ended(proven=i % 2 == 0)
    standing.ended("quick", 5)
    assert share_of(standing, NodeHolding("good", 30, 30), NodeHolding("quick", 64, 1), made=made)["quick"] == 1
    assert share_of(standing, NodeHolding("good", 30, 30), NodeHolding("quick", 64, 1))["quick"] == FIRST + 1


def test_who_ends_nothing_says_nothing_of_what_is_usual() -> None:
    """Proven nodes that began to withhold were most of those that others are compared with, so nobody was late."""
    world = World(10, a=10.0, b=10.0, **{f"w{i}": 0.0 for i in range(8)})
    late = world.run(60, credible=lambda node: True)
    assert late == {f"w{i}" for i in range(8)}


def test_a_doubted_node_shares_with_strangers_what_they_may_hold() -> None:
    standing = Standing(StandingRules(proven_tokens=10, unproven_share=0.25))
    for peer in ("good", "bad", "trusted"):
        for _ in range(62):
            standing.ended(peer, 10)
    standing.doubt("bad", "withheld", 100.0)
    nodes = NodeHolding("good", 40, 20), NodeHolding("bad", 64, 0), NodeHolding("new", 64, 0)
    assert limits(standing, nodes, MadeOfLate(), now=101.0) == {"bad": FIRST, "new": FIRST}, "until it ends something"
    standing.ended("bad", 10)
    assert limits(standing, nodes, MadeOfLate(), now=101.0) == {"bad": 13, "new": 0}, "a quarter of 53 together"
    assert limits(standing, nodes, MadeOfLate(), now=100.0 + DOUBTED_S[0])["bad"] == standing.may_hold("bad", 64) > 30


def test_where_most_of_a_run_is_doubted_no_newcomer_is_all_of_it() -> None:
    """What keeps all nodes silent at once, such as the learner's own line, is the fault of none."""
    standing = Standing(StandingRules(proven_tokens=10))
    nodes = [NodeHolding(f"n{i}", 64, 2) for i in range(8)]
    for node in nodes:
        standing.ended(node.peer, 100_000)
        standing.doubt(node.peer, "silent", 100.0)
    standing.ended("new", 20)
    found = limits(standing, [*nodes, NodeHolding("new", 64, 0)], MadeOfLate(), now=101.0)
    assert [found[n.peer] for n in nodes] == [FIRST] * 8, "until each has ended something"
    for node in nodes:
        standing.ended(node.peer, 20)
    assert limits(standing, [*nodes, NodeHolding("new", 64, 0)], MadeOfLate(), now=101.0) == {"new": FIRST + 1}


def test_what_a_stranger_holds_for_requests_raises_nothing() -> None:
    """Its limit was what it holds and some more, so each look at the waiting requests gave it more."""
    standing = Standing(StandingRules(proven_tokens=10, unproven_share=0.5))
    for _ in range(100):
        standing.ended("good", 10)
    for load in range(20):
        assert limits(standing, [NodeHolding("good", 64, 20), NodeHolding("new", 4096, load)], MadeOfLate())["new"] <= FIRST


def test_a_doubt_puts_a_node_on_trial_for_a_while_that_doubles_and_until_it_ends_something() -> None:
    standing = Standing(StandingRules(trusted=frozenset({"trusted"})))
    first, most = DOUBTED_S
    assert not standing.doubted("n", 0.0)
    for peer in "n", "trusted":
        standing.ended(peer, 5000)
        standing.doubt(peer, "withheld", 0.0)
    assert standing.doubted("n", most), "it has ended nothing since"
    standing.ended("n", 1)
    assert standing.doubted("n", first - 1) and not standing.doubted("n", first)
    now = first
    standing.doubt("n", "withheld", now)
    standing.ended("n", 1)
    assert standing.doubted("n", now + 1.9 * first) and not standing.doubted("n", now + 2 * first)
    assert not standing.doubted("trusted", 1.0)
    for _ in range(20):
        standing.ended("n", 1)
        standing.doubt("n", "withheld", now)
    standing.ended("n", 1)
    assert standing.doubted("n", now + most - 1) and not standing.doubted("n", now + most)
    later = now + 30 * most  # all is forgotten
    standing.doubt("n", "withheld", later)
    standing.ended("n", 1)
    assert not standing.doubted("n", later + first)
