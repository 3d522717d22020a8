"""Long completions, and those that the trainer waits for, are checked out of turn; what follows from a grossly wrong token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from learner.audit.calibration import Calibration
from learner.audit.long_ones import FEW_LENGTHS, LONG, LONG_PART, RECENT_LENGTHS, LongCompletions
from learner.audit.plan import AuditPlan, Check, Deviations
from learner.head.trust import Trust
from learner.rollouts.taking_back import TakenBack
from learner.standing.standing import STRANGER_DOUBTS, Standing, StandingRules
from learner.standing.wave import WAVE_COMPLETIONS, WAVE_LEAST, WAVE_S, WaveWatch
from learner.trajectory import Maker
from p2p.protocol.rollout import Span
from tests.unit.test_audit_plan import V, group, make_plan, prove, sound, trajectory


def long_plan(share: float = 1e-9) -> AuditPlan:
    """"a" and "b" are proven, and completions have 10 tokens."""
    plan = make_plan(audit_share=share)
    for node in ("a", "b"):
        prove(plan, node)
    for i in range(FEW_LENGTHS):
        plan.whole(group(i, trajectory("a")))
    assert plan.long_from == LONG * 10 and not plan.waiting
    return plan


def batches(plan: AuditPlan) -> Iterator[Check]:
    while batch := plan.next(10**6):
        yield from batch


def test_what_is_long_goes_by_a_quarter_of_the_last_ones() -> None:
    long = LongCompletions(lambda node: True)
    assert not any(long.ended(1000) for _ in range(FEW_LENGTHS))
    lengths = [10, 20, 1000, 1000] * (RECENT_LENGTHS // 4)
    for tokens in lengths:
        long.ended(tokens)
    assert long.least == LONG * 20 and long.ended(60) and not long.ended(59)
    for _ in range(RECENT_LENGTHS // 4):
        long.ended(10**6)
    assert long.least == LONG * 20, "it takes thousands to hide"


def test_each_nodes_first_long_one_is_checked_and_then_as_much_as_its_other_tokens_earned() -> None:
    long = LongCompletions(lambda node: True)
    assert long.takes("a", 100) and not long.takes("a", 100) and long.takes("b", 100)
    long.made("a", int(100 / (LONG_PART * 0.02)) - 1, 0.02)
    assert not long.takes("a", 100)
    long.made("a", 2, 0.02)
    assert long.takes("a", 100)


def test_a_long_completion_is_checked_and_soon() -> None:
    plan = long_plan()
    plan.whole(group(100, trajectory("a", 29), trajectory("a", 30), trajectory("a", 50), trajectory("b", 40)))
    assert plan.urgent
    found = list(batches(plan))
    assert sorted((check.parts[0].node, len(check.completion_ids)) for check in found) == [("a", 30), ("b", 40)]
    assert all(check.whole for check in found)


def test_what_is_waited_for_is_checked_while_it_goes_on_and_no_token_twice() -> None:
    plan = long_plan()
    plan.running(100, trajectory("a", 29))
    assert not plan.waiting, "not long yet"
    plan.running(100, trajectory("a", 35))
    plan.running(100, trajectory("a", 60))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(0, 35)] and not check.whole
    plan.standing.doubt("a", "slow", 0.0)  # all of its tokens are checked now
    plan.running(100, trajectory("a", 69))
    assert not plan.waiting, "again when as much was made as before"
    plan.running(100, trajectory("a", 70))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(35, 70)]
    plan.whole(group(100, trajectory("a", 75)))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(70, 75)] and not check.whole
    plan.whole(group(101, trajectory("a", 75)))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(0, 75)] and check.whole, "another group's"


def test_what_another_node_made_in_its_place_is_looked_at_anew() -> None:
    plan = long_plan()
    plan.running(100, trajectory("a", 35))
    assert len(list(batches(plan))) == 1
    plan.running(100, trajectory("b", 80))  # it was cut back, and begun again elsewhere
    [check] = batches(plan)
    assert [(p.first, p.stop, p.node) for p in check.parts] == [(0, 80, "b")]


def test_a_strangers_part_of_what_is_waited_for_is_checked_however_short() -> None:
    plan = long_plan()
    made = trajectory("a", 12, spans=(Span(V(1, 0), 0, 12),), makers=(Maker(0, "stranger"), Maker(5, "a")))
    plan.running(100, made)
    [check] = batches(plan)
    assert [(p.first, p.stop, p.node) for p in check.parts] == [(0, 5, "stranger")]


def gross(check: Check, at: int = 0) -> list[Deviations]:
    found = [sound(part) for part in check.parts]
    found[0].distance[at], found[0].shift[at] = 0.5, 1.5
    return found


def test_one_grossly_wrong_token_is_told_where_honest_nodes_have_none() -> None:
    plan = long_plan()
    plan.whole(group(100, trajectory("a", 40)))
    [check] = batches(plan)
    [judged] = plan.found(check, gross(check))
    assert judged.verdict.gross == 1 and not judged.verdict.caught
    plan.calibration.nucleus = True  # which tokens are in it is rounding as well
    plan.whole(group(101, trajectory("b", 40)))
    [check] = batches(plan)
    [judged] = plan.found(check, gross(check))
    assert judged.verdict.gross == 0
    assert Calibration(nucleus=True).honest(check.kinds[0]).gross == 1.0 > Calibration().honest(check.kinds[0]).gross


def test_a_wave_is_three_nodes_or_a_twentieth_within_a_minute() -> None:
    watch = WaveWatch()
    assert [watch.found(peer, 10, at) for peer, at in (("a", 0.0), ("a", 1.0), ("b", 2.0), ("c", WAVE_S + 1.5))] == [False] * 4
    assert watch.found("d", 10, WAVE_S + 1.8) and not watch.found("e", 10, WAVE_S + 2.0), "one at a time"
    many = WaveWatch()
    assert [many.found(f"n{i}", 100, float(i)) for i in range(5)] == [False] * 4 + [True]
    assert WAVE_LEAST == 3


def test_who_is_in_question_shows_two_whole_completions_or_waits() -> None:
    standing = Standing(StandingRules(checks=True, proven_tokens=10))
    for node in ("a", "b", "c"):
        standing.ended(node, 100)
        standing.checked(node, 100)
    standing.question(["a", "b"], 60.0)
    assert standing.doubted("a", 1.0) and standing.audit_share("a") == 1.0 and not standing.doubted("c", 1.0)
    standing.checked("a", 1000)
    assert standing.doubted("a", 1.0), "parts of others' completions show nothing"
    for _ in range(WAVE_COMPLETIONS):
        standing.checked("a", 10, whole=True)
    assert not standing.doubted("a", 1.0) and standing.audit_share("a") < 1.0
    assert standing.doubted("b", 59.0) and not standing.doubted("b", 61.0) and standing.audit_share("b") == 1.0
    standing.question(["b"], math.inf)
    assert standing.found_wrong("b") and standing.doubted("b", 1e9)
    standing.question(["b"], 100.0)
    assert standing.found_wrong("b"), "a wave is no way out"
    assert not standing.doubt("b", "late", 1.0) and not standing.doubt("b", "late", 2.0) and standing.doubt("b", "late", 3.0)
    assert STRANGER_DOUBTS == 3


def test_what_an_odd_node_made_is_made_again_and_it_rests() -> None:
    nodes: dict[str, Any] = dict.fromkeys("abcd")
    rules = StandingRules(checks=True, proven_tokens=10)
    trust = Trust(rules, nodes, wall=lambda: 1000.0, expel=lambda peer, why: None)
    taken = list[str]()
    trust.take_back = lambda peer: taken.append(peer) or TakenBack(2, 1, 7)  # type: ignore[func-returns-value]
    for node in nodes:
        trust.standing.ended(node, 100)
        trust.standing.checked(node, 100)
    trust.odd("a", "audits: 1 of its tokens", 5.0)
    assert taken == ["a"] and trust.taken == (2, 1, 7) and trust.back_offs.of("a").until == 65.0
    assert trust.found_wrong("a") and not trust.doubted("d")
    trust.odd("b", "audits", 6.0)
    trust.odd("c", "audits", 7.0)
    assert trust.doubted("d") and not trust.found_wrong("d"), "three of four turned: the fourth shows that it did not"
    trust.answer_for("d")
    trust.odd("d", "audits", 8.0)
    assert taken == ["a", "b", "c"] and not trust.doubted("d")
    assert np.isclose(trust.standing.doubted_s("a", 1000.0), 60.0)
