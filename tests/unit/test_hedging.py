"""What is done with sequences that hold the trainer up."""

from __future__ import annotations

from dataclasses import replace

from learner.dispatch.node_table import NodeView
from learner.rollouts.hedging import HEARD_S, HEDGE_ANSWER_S, STANDSTILL_S, Fleet, Hedge, HedgeMove, Way, moves

NOW = 1000.0


def node(peer: str, *, free: int = 0, load: int = 4, unheard_s: float = 0.0) -> NodeView:
    """It has so many sequences, and so many free places."""
    return NodeView(peer, "v1", load, 0, load + free, unheard_s=unheard_s)


def fleet_of(*nodes: NodeView, strangers: tuple[str, ...] = (), **known: object) -> Fleet:
    """All have ended something, none was doubted, all that they hold has begun, and something came from all just now."""
    fleet = Fleet(
        nodes, credible=lambda peer: peer not in strangers, doubted=lambda peer: False, ended={n.peer: 3 for n in nodes},
        last_came=lambda peer: NOW, delivers=lambda peer: 0.0, begun=lambda peer, request_id: True, asked={}, spared=(),
        fault_s=2.0,
    )  # fmt: skip
    return replace(fleet, **known)  # type: ignore[arg-type]


def ways(found: list[HedgeMove]) -> list[Way]:
    return [move.way for move in found]


def test_nothing_is_taken_for_which_no_other_node_has_a_place() -> None:
    held = [Hedge("n", f"{number}.0.0", NOW - 9) for number in range(3)]
    assert moves(held, fleet_of(node("n", free=9), node("m")), NOW) == []
    assert len(moves(held, fleet_of(node("n"), node("m", free=2)), NOW)) == 2
    assert moves(held, fleet_of(node("n"), node("m", free=2), strangers=("m",)), NOW) == [], "a stranger's place is none"


def test_who_answers_is_asked_first_and_has_a_second() -> None:
    hedge, nodes = Hedge("n", "7.0.0", NOW - 9), (node("n"), node("m", free=2))
    assert moves([hedge], fleet_of(*nodes, strangers=("n",)), NOW) == [HedgeMove(hedge, Way.ASK)]
    for since, expected in (HEDGE_ANSWER_S, []), (HEDGE_ANSWER_S + 0.1, [Way.TAKE]):
        asked = {("n", "7.0.0"): NOW - since}
        assert ways(moves([hedge], fleet_of(*nodes, strangers=("n",), asked=asked), NOW)) == expected
    never, doubted = {"ended": {"m": 3}}, {"doubted": lambda peer: peer == "n"}
    for known in never, doubted:
        assert ways(moves([hedge], fleet_of(*nodes, strangers=("n",), **known), NOW)) == [Way.TAKE]


def test_who_has_it_for_as_long_as_it_takes_is_to_blame_and_who_got_it_just_now_is_not() -> None:
    nodes = node("n"), node("m", free=2)
    for since, blamed in (1.9, False), (2.1, True):
        hedge = Hedge("n", "7.0.0", NOW - since)
        (move,) = moves([hedge], fleet_of(*nodes, strangers=("n",), ended={}), NOW)
        assert move.way is Way.TAKE and bool(move.doubt) == blamed
        assert not blamed or "7.0.0 held the trainer up, after 2.1 s" in move.doubt


def test_what_waits_at_a_full_node_for_a_slot_is_nobodys_fault() -> None:
    full = NodeView("n", "v1", 4, 2, 4)
    hedges = [Hedge("n", f"{number}.0.0", NOW - 9, behind_s=8.0) for number in range(4)]
    known = {"begun": lambda peer, request_id: request_id == "0.0.0"}
    found = moves(hedges, fleet_of(full, node("m", free=9), **known), NOW)
    assert ways(found) == [Way.TAKE, Way.QUEUED, Way.QUEUED, Way.TAKE], "two wait there: the fourth is not one of them"
    assert found[0].doubt == "0.0.0 held the trainer up: no progress for 8.0 s" and not found[1].doubt


def test_a_silent_sequence_of_a_node_that_delivers_is_taken_once_without_a_doubt() -> None:
    nodes, hedge = (node("n"), node("m", free=2)), Hedge("n", "7.1.0", NOW - 9, behind_s=8.0)
    for tokens, spared, expected in (
        (50.0, (), Way.PAUSED),
        (50.0, (("n", "7.1"),), Way.TAKE),
        (49.0, (), Way.TAKE),  # less than half of what the best delivers
    ):
        delivers = {"n": tokens, "m": 100.0}
        (move,) = moves([hedge], fleet_of(*nodes, delivers=lambda peer, of=delivers: of[peer], spared=spared), NOW)
        assert move.way is expected and bool(move.doubt) == (expected is Way.TAKE)


def test_what_is_early_behind_is_nobodys_fault_yet_and_goes_to_who_is_awake() -> None:
    hedge = Hedge("n", "7.1.0", NOW - 2, early=True)
    assert moves([hedge], fleet_of(node("n"), node("m", free=2)), NOW) == [HedgeMove(hedge, Way.EARLY)]
    asleep = {"last_came": lambda peer: NOW - 60}
    assert moves([hedge], fleet_of(node("n"), node("m", free=2), **asleep), NOW) == []
    assert ways(moves([hedge], fleet_of(node("n"), node("m", free=2, load=0), **asleep), NOW)) == [Way.EARLY]
    full, waits = NodeView("n", "v1", 4, 2, 4), {"begun": lambda peer, request_id: False}
    assert ways(moves([hedge], fleet_of(full, node("m", free=2), **waits), NOW)) == [Way.QUEUED]


def test_what_keeps_all_silent_at_once_is_the_fault_of_none() -> None:
    hedge = Hedge("n", "7.0.0", NOW - 9, behind_s=8.0)
    silent = {"last_came": lambda peer: NOW - 8}
    assert moves([hedge], fleet_of(node("n"), node("m", free=2), **silent), NOW) == []
    idle = node("m", load=0, free=4)
    assert ways(moves([hedge], fleet_of(node("n"), idle, **silent), NOW)) == [Way.TAKE]


def test_at_a_standstill_idle_strangers_that_are_heard_show_that_it_is_not_the_network() -> None:
    """Each as long as it could be the network, and then."""
    idle, silent = node("m", load=0, free=4), {"last_came": lambda peer: NOW - 60}
    at_last = Hedge("n", "7.0.0", NOW - 60, behind_s=STANDSTILL_S + 0.1)
    others = {"strangers": ("m",), **silent}
    assert ways(moves([at_last], fleet_of(node("n"), idle, **others), NOW)) == [Way.TAKE]
    assert moves([at_last._replace(behind_s=STANDSTILL_S)], fleet_of(node("n"), idle, **others), NOW) == []
    unheard = replace(idle, unheard_s=HEARD_S)
    assert moves([at_last], fleet_of(node("n"), unheard, **others), NOW) == [], "the link may be cut for all"
    assert moves([at_last], fleet_of(node("n"), idle, ended={"n": 3}, **others), NOW) == [], "who made nothing is no witness"
    busy = replace(idle, running=1)
    assert moves([at_last], fleet_of(node("n"), busy, **others), NOW) == []
