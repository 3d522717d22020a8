"""Long completions, and those that the trainer waits for, are checked out of turn; what follows from a grossly wrong token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from learner.audit.calibration import Calibration, DrawnAt
from learner.audit.deviations import Deviations
from learner.audit.long_ones import FEW_LENGTHS, LONG_PART, MOST_SPARE, RECENT_LENGTHS, LongCompletions
from learner.audit.looks import FIRST_LOOK, LIVE_GROUPS, LookKey, Looks
from learner.audit.parts import MadePart
from learner.audit.plan import AuditPlan, Check, ToldKind
from learner.head.trust import Trust
from learner.rollouts.taking_back import TakenBack
from learner.standing.rests import MOST_S, Rests
from learner.standing.standing import RECHECK, Standing, StandingRules
from learner.standing.wave import ALERT_S, WAVE_COMPLETIONS, WAVE_LEAST, WAVE_S, WaveWatch
from learner.trajectory import Maker
from p2p.protocol.rollout import Span
from tests.unit.test_audit_plan import FLOAT32, V, group, make_plan, prove, sound, trajectory


def long_plan(share: float = 1e-9) -> AuditPlan:
    """"a" and "b" are proven, and completions have 10 tokens."""
    plan = make_plan(audit_share=share)
    for node in ("a", "b"):
        prove(plan, node)
    for i in range(FEW_LENGTHS):
        plan.whole(group(i, trajectory("a")))
    assert not plan.waiting
    return plan


def look(plan: AuditPlan, group_id: int, made: Any) -> None:
    """As the head does while the trainer waits for it."""
    makers = [maker.node for maker in made.makers] or [made.node]
    if plan.looks_at(group_id, made.seed, len(made.completion_ids), makers):
        plan.running(group_id, made)


def batches(plan: AuditPlan) -> Iterator[Check]:
    while batch := plan.next(10**6):
        yield from batch


def test_what_is_long_goes_by_a_part_of_all_tokens() -> None:
    long = LongCompletions(lambda: 0.02, lambda node: True)
    assert not any(long.ended(1000) for _ in range(FEW_LENGTHS)), "not known yet"
    assert long.least == 1001 and long.ended(1001) and not long.ended(1000)
    lengths = np.round(20 * np.exp(np.random.default_rng(1).normal(size=2 * RECENT_LENGTHS))).astype(int)
    found = [int(length) for length in lengths if long.ended(int(length))]
    assert 0 < len(found) < 30 and min(found[-5:]) > 100
    alike = LongCompletions(lambda: 0.02, lambda node: True)
    for i in range(RECENT_LENGTHS):
        alike.ended(10**4 if i in (500, 900) else 20)
    assert alike.least == 21, "two that are far longer hide no others"


def test_each_nodes_first_long_one_is_checked_and_then_as_much_as_its_other_tokens_earned() -> None:
    long = LongCompletions(lambda: 0.02, lambda node: True)
    assert long.takes("a", 100) and long.takes("b", 100)
    assert long.takes("a", MOST_SPARE) and not long.takes("a", 100), "what nobody used is used up"
    earned = LONG_PART * 0.02
    long.made("a", int(100 / earned) - 1)
    assert long.takes("b", 99) and not long.takes("a", 100), "b's is of what all earned"
    long.made("a", 2)
    assert long.takes("a", 100)


def test_a_long_completion_is_checked_and_soon() -> None:
    plan = long_plan()
    plan.whole(group(100, trajectory("a", 10), trajectory("a", 11), trajectory("a", 50), trajectory("b", 40)))
    assert plan.urgent
    found = list(batches(plan))
    assert sorted((check.parts[0].node, len(check.completion_ids)) for check in found) == [("a", 11), ("a", 50), ("b", 40)]
    assert all(check.whole for check in found)


def test_what_is_waited_for_is_checked_while_it_goes_on_and_no_token_twice() -> None:
    plan = long_plan()
    look(plan, 100, trajectory("a", 10))
    assert not plan.waiting, "not long yet"
    look(plan, 100, trajectory("a", 11))
    look(plan, 100, trajectory("a", 21))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(0, 11)] and not check.whole
    plan.standing.doubt("a", "slow", 0.0)  # all of its tokens are checked now
    look(plan, 100, trajectory("a", 21))
    assert not plan.waiting, "again when as much was made as before"
    look(plan, 100, trajectory("a", 22))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(11, 22)]
    plan.whole(group(100, trajectory("a", 30)))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(22, 30)] and check.whole, "all of it was looked at"
    plan.whole(group(101, trajectory("a", 30)))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(0, 30)], "another group's"


def test_what_is_made_again_is_looked_at_anew() -> None:
    plan = long_plan()
    look(plan, 100, trajectory("a", 35))
    assert len(list(batches(plan))) == 1
    look(plan, 100, trajectory("b", 80))  # it was cut back, and begun again elsewhere
    [check] = batches(plan)
    assert [(p.first, p.stop, p.node) for p in check.parts] == [(0, 80, "b")]
    plan.standing.doubt("b", "odd", 0.0)
    again = trajectory("b", 12)
    plan.whole(group(100, replace(again, completion_ids=(9, *again.completion_ids[1:]))))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(0, 12)], "other tokens stand there"


def test_what_found_no_place_is_checked_when_it_has_ended() -> None:
    plan = long_plan()
    look(plan, 100, trajectory("a", 20))
    plan.drop("a")
    plan.standing.doubt("a", "slow", 0.0)
    plan.whole(group(100, trajectory("a", 25)))
    [check] = batches(plan)
    assert [(p.first, p.stop) for p in check.parts] == [(0, 25)]


def test_what_a_node_that_keeps_states_makes_behind_a_look_is_checked() -> None:
    plan = make_plan({"keeps": ToldKind(FLOAT32, keeps=True)})
    look(plan, 100, trajectory("keeps", 50))
    plan.whole(group(100, trajectory("keeps", 200)))
    assert [(p.first, p.stop) for check in batches(plan) for p in check.parts] == [(0, 50), (50, 200)]
    assert not plan.counts["unknown"]


def test_looks_go_by_what_stands_there() -> None:
    looks, key, ids = Looks(), LookKey(1, 5), list(range(100))
    part = MadePart(V(1, 0), 0, 10, "a")
    assert looks.due(key, FIRST_LOOK, 99.0) and not looks.due(key, FIRST_LOOK - 1, 99.0)
    for stop in (10, 20, 40):
        assert looks.due(key, stop, 99.0)
        looks.looked(key, ids[:stop], looks.behind(key, ids, [part._replace(stop=stop)]))
        assert not looks.due(key, 2 * stop - 1, 99.0)
    assert looks.behind(key, ids, [part._replace(stop=50)]) == [part._replace(first=40, stop=50)]
    assert looks.behind(key, ids, [part._replace(stop=50, version=V(1, 1))]) == [MadePart(V(1, 1), 0, 50, "a")]
    looks.not_checked(key, [MadePart(V(1, 0), 10, 20, "a")])
    assert [(p.first, p.stop) for p in looks.behind(key, ids, [part._replace(stop=50)])] == [(10, 20), (40, 50)]
    looks.looked(key, ids[:60], ())
    assert not looks.due(key, 60, 60.5) and looks.due(key, 61, 60.5), "it became long since"
    looks.remade("a")
    assert looks.due(key, 8, 99.0)
    other = [*ids[:5], -1, *ids[6:]]
    assert looks.behind(key, other, [part._replace(stop=50)]) == [MadePart(V(1, 0), 0, 20, "a"), MadePart(V(1, 0), 40, 50, "a")]
    looks.ended(1)
    assert not len(looks) and looks.behind(key, ids, [part]) == [part]


def test_looks_are_bounded_and_forget_nothing_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.audit.looks.MOST_LOOKS", 2)
    looks = Looks()
    for seed in (5, 6):
        looks.looked(LookKey(1, seed), range(10), [MadePart(V(1, 0), 0, 10, "a")])
    assert len(looks) == 2 and not looks.due(LookKey(2, 6), 10, 99.0), "no room, and the others may go on"
    assert looks.due(LookKey(2 * LIVE_GROUPS, 5), 10, 99.0) and not len(looks), "groups so far behind were given up"


def test_a_strangers_part_of_what_is_waited_for_is_checked_however_short() -> None:
    plan = long_plan()
    made = trajectory("a", 12, spans=(Span(V(1, 0), 0, 12),), makers=(Maker(0, "stranger"), Maker(5, "a")))
    look(plan, 100, made)
    [check] = batches(plan)
    assert [(p.first, p.stop, p.node) for p in check.parts] == [(0, 5, "stranger"), (5, 12, "a")], "and it is long"
    look(plan, 101, trajectory("a", FIRST_LOOK, makers=(Maker(0, "stranger"), Maker(5, "a"))))
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
    plan.calibration.drawn = nucleus = DrawnAt(top_p=0.9)  # which tokens are in it is rounding as well
    plan.whole(group(101, trajectory("b", 40)))
    [check] = batches(plan)
    [judged] = plan.found(check, gross(check))
    assert judged.verdict.gross == 0
    assert Calibration(drawn=nucleus).honest(check.kinds[0]).gross == 1.0 > Calibration().honest(check.kinds[0]).gross


def test_a_wave_is_three_nodes_or_a_twentieth_within_a_minute() -> None:
    watch = WaveWatch()
    assert [watch.found(peer, 10, at) for peer, at in (("a", 0.0), ("a", 1.0), ("b", 2.0), ("c", WAVE_S + 1.5))] == [False] * 4
    assert watch.found("d", 10, WAVE_S + 1.8) and not watch.found("e", 10, WAVE_S + 2.0), "one at a time"
    many = WaveWatch()
    assert [many.found(f"n{i}", 100, float(i)) for i in range(5)] == [False] * 4 + [True]
    assert WAVE_LEAST == 3


def test_an_alert_begins_with_a_wave_and_lasts_from_the_last_that_was_found() -> None:
    watch = WaveWatch()
    watch.found("a", 10, 0.0)
    watch.found("b", 10, 1.0)
    assert not watch.alert(1.0), "two are no wave"
    watch.found("c", 10, 2.0)
    assert watch.alert(2.0) and watch.alert(1.0 + ALERT_S)
    watch.found("d", 10, 500.0)
    assert watch.alert(499.0 + ALERT_S) and not watch.alert(500.0 + ALERT_S)
    watch.found("e", 10, 500.0 + ALERT_S)
    assert not watch.alert(500.0 + ALERT_S), "one that is found when it is over begins none"
    watch.found("f", 10, 500.0 + ALERT_S)
    watch.found("g", 10, 500.0 + ALERT_S)
    assert watch.alert(500.0 + ALERT_S)
    assert watch.alert(100.0) and not watch.alert(100.0 + ALERT_S), "the clock was set back"


def test_on_alert_all_that_is_waited_for_is_checked_while_it_is_made() -> None:
    plan = long_plan()
    look(plan, 100, trajectory("a", FIRST_LOOK))
    assert not plan.waiting and not plan.first_tokens, "not long"
    plan.on_alert = lambda: True
    plan.standing.rules = replace(plan.standing.rules, audit_share=1e-12)  # nothing is long
    for i in range(200, 200 + FEW_LENGTHS):
        plan.whole(group(i, *[trajectory("a", n) for n in (10, 10, 10, 100)]))
    list(batches(plan))
    for length in (FIRST_LOOK, 10, 11, 16, 17, 25, 26):
        look(plan, 300, trajectory("a", length))
    looked = [(p.first, p.stop) for check in batches(plan) for p in check.parts]
    assert looked == [(0, 11), (11, 17), (17, 26)], "longer than three quarters are, and when half as much again was made"
    plan.whole(group(301, trajectory("b", 99)))
    assert not plan.waiting, "nobody waits for it"
    plan.standing.rules = replace(plan.standing.rules, trusted=frozenset("b"))
    look(plan, 302, trajectory("b", 200))
    assert not plan.waiting, "the operator answers for it"


def test_who_is_in_question_shows_two_whole_completions_or_waits() -> None:
    standing = Standing(StandingRules(checks=True, proven_tokens=10))
    for node in ("a", "b", "c"):
        standing.ended(node, 100)
        standing.checked(node, 100)
    standing.question(["a", "b"], 60.0)
    assert standing.doubted("a", 1.0) and standing.audit_share("a") == 1.0 and not standing.doubted("c", 1.0)
    standing.checked("a", 1000)
    assert standing.doubted("a", 1.0), "parts of others' completions show little"
    for _ in range(WAVE_COMPLETIONS):
        standing.checked("a", 10, whole=True)
    assert not standing.doubted("a", 1.0) and standing.audit_share("a") < 1.0
    assert standing.doubted("b", 59.0) and standing.audit_share("b") == 1.0
    assert not standing.doubted("b", 61.0) and standing.audit_share("b") < 1.0
    standing.question(["b"], math.inf)
    assert standing.found_wrong("b") and standing.doubted("b", 1e9)
    standing.question(["b"], 100.0)
    assert standing.found_wrong("b"), "a wave is no way out"
    standing.question(["c"], math.inf)
    standing.checked("c", RECHECK)
    assert not standing.found_wrong("c"), "so many tokens in completions that others had a part in"
    for way_out in (lambda: standing.expel("c", "caught", 1.0), lambda: standing.forgive(["c"]), standing.no_questions):
        standing.question(["c"], math.inf)
        way_out()
        assert not standing.found_wrong("c")


def test_what_an_odd_node_made_is_made_again_and_it_rests() -> None:
    nodes: dict[str, Any] = {peer: SimpleNamespace(capacity=1, draining=False) for peer in "abcd"}
    rules = StandingRules(checks=True, proven_tokens=10)
    trust = Trust(rules, nodes, wall=lambda: 1000.0, expel=lambda peer, why: None)
    taken = list[str]()
    trust.take_back = lambda peer: taken.append(peer) or TakenBack(2, 1, 7)  # type: ignore[func-returns-value]
    for node in nodes:
        trust.standing.ended(node, 100)
        trust.standing.checked(node, 100)
    trust.odd("a", "audits: 1 of its tokens", 5.0)
    assert taken == ["a"] and trust.taken == (2, 1, 7) and trust.back_offs.of("a").until == 65.0
    assert trust.standing.found_wrong("a") and not trust.doubted("d") and trust.standing.of("a").doubted == 1
    trust.odd("a", "audits: 1 of its tokens", 6.0)
    assert taken == ["a", "a"] and trust.standing.of("a").doubted == 1, "while it rests it is made again, and no more"
    trust.held_up("a", 64.0)
    assert trust.back_offs.of("a").until == 65.0, "of what it was given before"
    trust.held_up("a", 70.0)
    trust.held_up("d", 70.0)
    assert trust.back_offs.of("a").until == 70.0 + 120.0 and trust.back_offs.of("d").until == 0.0
    trust.odd("b", "audits", 6.0)
    trust.limits(lambda peer: 0, lambda node: True)
    assert trust.credible("d") and not trust.credible("a")
    trust.odd("c", "audits", 7.0)
    assert trust.doubted("d") and not trust.standing.found_wrong("d"), "three of four turned: the fourth shows that it did not"
    trust.limits(lambda peer: 0, lambda node: True)
    assert trust.credible("d") and trust.anybody_proven() and not any(map(trust.credible, "abc")), "the best that there is"
    trust.checks(False)
    assert not trust.doubted("d") and not trust.standing.found_wrong("a"), "nobody could show anything any more"
    trust.checks(True)
    assert np.isclose(trust.standing.doubted_s("a", 1000.0), 60.0)


def test_where_all_are_found_wrong_they_do_not_rest() -> None:
    nodes: dict[str, Any] = {"a": SimpleNamespace(capacity=1, draining=False)}
    trust = Trust(StandingRules(checks=True), nodes, wall=lambda: 1000.0, expel=lambda peer, why: None)
    trust.odd("a", "audits", 5.0)
    assert trust.standing.found_wrong("a") and trust.back_offs.of("a").until == 0.0


def test_a_rest_doubles_once_it_is_over_and_ends_growing_at_an_hour() -> None:
    rests = Rests()
    assert rests.again("a", 0.0) is None and not rests.resting("a", 0.0)
    assert rests.begin("a", 60.0, 0.0) == (60.0, 60.0) and rests.resting("a", 59.0)
    assert rests.again("a", 59.0) is None and rests.again("a", 60.0) == (180.0, 120.0)
    now = 180.0
    for _ in range(10):
        rest = rests.again("a", now)
        assert rest is not None
        now = rest.until
    assert rest.lasts_s == MOST_S


def test_the_same_nodes_do_not_keep_an_alert_up() -> None:
    watch = WaveWatch()
    for peer in "abc":
        watch.found(peer, 3, 0.0)
    for i in range(1, 30):
        watch.found("abc"[i % 3], 3, i * WAVE_S / 4)
    assert watch.alert(ALERT_S - 1) and not watch.alert(ALERT_S)
    assert [watch.found(peer, 3, ALERT_S + 1) for peer in "abc"] == [False, False, True], "they make another one"
    watch.found("d", 3, ALERT_S + 100)
    assert watch.alert(2 * ALERT_S + 99), "who is new prolongs it"
