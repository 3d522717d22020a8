"""Which completions are checked, whose tokens they are, in what order, and what follows from what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from learner.audit.bets import HonestMeans
from learner.audit.calibration import (
    ENOUGH,
    PLENTY,
    SHIPPED,
    WHOLE,
    Calibration,
    NodeArithmetic,
    from_json,
    read_arithmetic,
    to_json,
    widest,
)
from learner.audit.deviations import Deviations
from learner.audit.measuring import PROMPT_MARGIN
from learner.audit.node_tests import LATELY, MAX_KINDS
from learner.audit.plan import AuditPlan, Check, MadePart, ToldKind, parts_of
from learner.audit.sequential import Verdict
from learner.audit.waiting import WaitingLines
from learner.standing.standing import Standing, StandingRules
from learner.trajectory import Gap, Group, Maker, Trajectory
from p2p.errors import UsageError
from p2p.protocol.rollout import Span
from p2p.version import Version

FLOAT32 = NodeArithmetic("transformers", "float32", "cpu")
BFLOAT16 = NodeArithmetic("transformers", "bfloat16", "cpu")
V = Version


def trajectory(node: str = "a", tokens: int = 10, *, spans=None, makers=(), given=(), prompt: int = 3) -> Trajectory:
    return Trajectory(
        prompt_ids=tuple(range(1, prompt + 1)), completion_ids=tuple(range(tokens)), logprobs=(-0.5,) * tokens,
        spans=spans or (Span(V(1, 0), 0, tokens),), finish="stop", node=node, seed=5, makers=makers, given=given,
    )  # fmt: skip


def group(group_id: int, *trajectories: Trajectory) -> Group:
    return Group(group_id, group_id, trajectories)


def make_plan(kinds=None, *, calibrates: bool = False, epoch: int = 1, **rules) -> AuditPlan:
    standing = Standing(StandingRules(checks=True, **rules))
    kinds = kinds or {}
    return AuditPlan(
        b"s" * 32, epoch, standing, Calibration(), lambda peer: kinds.get(peer, ToldKind(FLOAT32)), calibrates=lambda: calibrates
    )


def sound(part: MadePart) -> Deviations:
    n = part.stop - part.first
    return Deviations(np.zeros(n), np.full(n, -0.5), np.full(n, -0.5), np.zeros(n))


def wrong(part: MadePart) -> Deviations:
    n = part.stop - part.first
    return Deviations(np.full(n, 0.4), np.full(n, -0.5), np.full(n, -2.0), np.full(n, 0.1))


def prove(plan: AuditPlan, node: str) -> None:
    plan.standing.ended(node, 10_000)
    plan.standing.checked(node, 10_000)


def test_each_run_of_tokens_is_of_its_maker_and_its_version() -> None:
    """Migrated from a to b in the midst of version 2, which both served; an environment gave what is in no span."""
    made = trajectory(
        "b", 20, spans=(Span(V(1, 1), 0, 4), Span(V(1, 2), 4, 10), Span(V(1, 3), 13, 20)), makers=(Maker(0, "a"), Maker(7, "b")),
        given=(Gap(10, 13),),
    )  # fmt: skip
    assert list(parts_of(made)) == [
        MadePart(V(1, 1), 0, 4, "a"), MadePart(V(1, 2), 4, 7, "a"), MadePart(V(1, 2), 7, 10, "b"), MadePart(V(1, 3), 13, 20, "b"),
    ]  # fmt: skip
    plan = make_plan()
    prove(plan, "a")
    plan.standing.rules = StandingRules(checks=True, audit_share=0.0)
    plan.whole(group(0, made))
    [check] = plan.next(1)
    assert [part.node for part in check.parts] == ["b", "b"], "a is proven, and its share is nothing"
    assert check.given == ((10, 13),) and check.length == 23
    [judged] = plan.found(check, [sound(part) for part in check.parts])
    assert (judged.node, judged.tokens, judged.verdict.caught) == ("b", 10, False)


def test_all_of_a_strangers_are_checked_a_share_of_a_proven_nodes_and_all_after_a_doubt() -> None:
    plan = make_plan(audit_share=0.05)
    prove(plan, "proven")

    def taken(node: str, first: int) -> int:
        count = 0
        for i in range(first, first + 1000):
            plan.whole(group(i, trajectory(node)))
            count += len(plan.next(10_000))
        return count

    assert taken("stranger", 0) == 1000
    assert 25 <= taken("proven", 1000) <= 80
    plan.standing.doubt("proven", "slow", 0.0)
    plan.standing.ended("proven", 10)  # as what a node ends is told before its group is whole
    assert taken("proven", 2000) == 1000
    assert plan.counts["dropped"] == 0


def test_tokens_of_another_life_or_of_mixed_versions_are_not_checked() -> None:
    plan = make_plan({"keeps": ToldKind(FLOAT32, keeps=True)}, epoch=2)
    spans = (Span(V(1, 4), 0, 4), Span(V(2, 4), 4, 10))
    plan.whole(group(0, trajectory("a", spans=spans)))
    [check] = plan.next(1)
    assert check.parts == (MadePart(V(2, 4), 4, 10, "a"),) and plan.counts["unknown"] == 4
    late = (Span(V(2, 4), 0, 4), Span(V(2, 5), 4, 10))
    plan.whole(group(1, trajectory("keeps", spans=late)))
    [check] = plan.next(1)
    assert check.parts == (MadePart(V(2, 4), 0, 4, "keeps"),) and plan.counts["unknown"] == 10
    plan.whole(group(2, trajectory("keeps", spans=late, makers=(Maker(0, "a"), Maker(4, "keeps")))))
    [check] = plan.next(1)
    assert len(check.parts) == 2, "it took the sequence over under the newer version: it computed all keys with it"


def test_who_is_proven_wrong_is_told_each_time_until_it_is_forgiven() -> None:
    plan = make_plan()
    for i in range(3):
        plan.whole(group(i, trajectory("cheat", 40)))
        [check] = plan.next(1)
        [judged] = plan.found(check, [wrong(part) for part in check.parts])
        assert judged.verdict.caught and "honest node has" in judged.verdict.why
        plan.standing.expel("cheat", "audits", float(i))
    assert plan.counts["caught"] == 1
    plan.standing.forgive(["cheat"])
    plan.whole(group(9, trajectory("cheat", 40)))
    [check] = plan.next(1)
    [judged] = plan.found(check, [sound(part) for part in check.parts])
    assert not judged.verdict.caught


def test_who_was_proven_wrong_by_other_bounds_is_judged_anew_and_has_no_better_chance() -> None:
    plan, kinds = make_plan(), (FLOAT32, NodeArithmetic("transformers", "bfloat16", "cuda"))

    def look(i: int, kind: NodeArithmetic, made: Callable[[MadePart], Deviations]) -> Verdict:
        plan.kind_of = lambda node: ToldKind(kind)
        plan.whole(group(i, trajectory("n", 40)))
        [check] = plan.next(1)
        return plan.found(check, [made(part) for part in check.parts])[0].verdict

    assert not look(0, kinds[0], sound).caught and look(1, kinds[1], wrong).caught
    chances = [test.false_alarm for test in plan.tests("n")]
    plan.standing.expel("n", "audits", 0.0)
    plan.calibration.means[FLOAT32] = replace(SHIPPED[FLOAT32], far=1e-4)
    assert look(2, kinds[1], sound).caught, "another kind's"
    plan.calibration.means[kinds[1]] = HonestMeans(far=0.2)
    assert not look(3, kinds[1], sound).caught
    assert [test.false_alarm for test in plan.tests("n")] == chances and chances[1] < chances[0]
    assert [test.tokens for test in plan.tests("n")] == [40, 40]
    assert look(4, kinds[1], wrong).caught and look(5, kinds[1], sound).caught


def test_parts_of_one_check_are_of_one_test() -> None:
    """The first part proves it wrong; nobody is told before the second one is looked at, and it is no new test."""
    plan = make_plan()
    plan.whole(group(0, trajectory("cheat", 40, spans=(Span(V(1, 1), 0, 30), Span(V(1, 2), 30, 40)))))
    [check] = plan.next(100)
    [(node, tokens, verdict, whole)] = plan.found(check, [wrong(part) for part in check.parts])
    assert whole and len(check.parts) == 2 and node == "cheat" and tokens == 40 and verdict.caught
    assert plan.counts["caught"] == 1 and [test.tokens for test in plan.tests("cheat")] == [40]


def test_what_is_notable_of_one_part_is_notable_of_the_whole() -> None:
    """Two odd tokens, then many that are sound; the second part begins a new window of its last tokens."""
    plan = make_plan()
    spans = (Span(V(1, 1), 0, LATELY), Span(V(1, 2), LATELY, LATELY + 10))
    for odd in (0, 2):
        plan.whole(group(odd, trajectory("a", LATELY + 10, spans=spans)))
        [check] = plan.next(10_000)
        first, second = (sound(part) for part in check.parts)
        first.distance[:odd] = 0.4
        [judged] = plan.found(check, [first, second])
        assert judged.verdict.notable == bool(odd) and not judged.verdict.caught


def test_a_nodes_word_of_its_kind_gives_it_no_more_than_the_widest_and_its_tests_share_the_chance() -> None:
    said = {"liar": ToldKind(read_arithmetic("my/own/words"))}
    plan = make_plan(said)
    assert plan.calibration.honest(read_arithmetic("my/own/words")) == widest(plan.calibration.means)
    assert plan.calibration.honest(FLOAT32) == SHIPPED[FLOAT32]
    chances = []
    for i in range(MAX_KINDS + 3):
        said["liar"] = ToldKind(NodeArithmetic(f"engine{i}", "x", "y"))
        plan.whole(group(i, trajectory("liar")))
        [check] = plan.next(1)
        plan.found(check, [sound(part) for part in check.parts])
    tests = plan.tests("liar")
    chances = [test.false_alarm for test in tests]
    assert len(tests) == MAX_KINDS and sum(chances) <= plan.false_alarm * 1.0001
    assert sum(test.tokens for test in tests) == 10 * (MAX_KINDS + 3)


def test_trusted_nodes_are_looked_at_only_to_measure_and_only_while_an_auditor_runs() -> None:
    rng = np.random.default_rng(0)
    plan = make_plan(trusted=frozenset({"mine"}))
    plan.whole(group(0, trajectory("mine", 2000)))
    assert not plan.waiting
    plan = make_plan({"mine": ToldKind(BFLOAT16)}, trusted=frozenset({"mine"}), calibrates=True)
    told: list[str] = []
    plan.calibration.changed = told.append
    looked, i = 0, 0
    while i < 400:
        i += 1
        plan.whole(group(i, trajectory("mine", 100, prompt=i)))
        for check in plan.next(1):
            looked += 100
            recomputed = -rng.exponential(0.5, 100)
            noise = 0.01 * rng.standard_normal(100)
            assert plan.found(check, [Deviations(np.zeros(100), recomputed + noise, recomputed, np.zeros(100))]) == []
    assert PLENTY <= looked < PLENTY + 100 and plan.counts["calibrated"] == looked and plan.counts["checked"] == 0
    measured = plan.calibration.means[BFLOAT16]
    mean = 0.01 * (2 / np.pi) ** 0.5  # of |noise|
    assert PROMPT_MARGIN * mean < measured.off < 1.1 * PROMPT_MARGIN * mean
    assert len(told) == 4 and from_json(told[-1], WHOLE)[BFLOAT16] == measured
    assert set(from_json(told[-1], WHOLE)) == {BFLOAT16}, "what is only shipped was not measured"
    again = Calibration.of(told[-1], told.append)
    assert again.honest(BFLOAT16) == measured and not again.wants(BFLOAT16)
    assert again.wants(FLOAT32) and again.honest(FLOAT32) == SHIPPED[FLOAT32]
    assert ENOUGH < PLENTY


def test_what_no_state_was_held_for_is_counted_and_proves_nobody() -> None:
    plan = make_plan()
    plan.whole(group(0, trajectory("a", spans=(Span(V(1, 0), 0, 4), Span(V(1, 1), 4, 10)))))
    [check] = plan.next(1)
    [judged] = plan.found(check, [None, sound(check.parts[1])])
    assert judged.tokens == 6 and plan.counts["unknown"] == 4
    plan.whole(group(1, trajectory("a")))
    plan.lost(plan.next(1))
    assert plan.counts["dropped"] == 10
    assert plan.found(check, [None, None]) == []


def lines(**bounds) -> tuple[WaitingLines[Check], list[Check]]:
    lost: list[Check] = []
    return WaitingLines(lost.append, **bounds), lost


def check_of(node: str, length: int, group_id: int = 0) -> Check:
    part = MadePart(V(1, 0), 0, length, node)
    return Check(group_id, (), (1,) * length, (-0.5,) * length, seed=0, parts=(part,), kinds=(FLOAT32,))


def test_a_crowd_of_strangers_keeps_nobody_waiting() -> None:
    waiting, lost = lines(peer_tokens=100, most_tokens=1000)
    for i in range(200):
        waiting.add(f"stranger{i % 50}", check_of("s", 10, i), soon=True)
    for i in range(5):
        waiting.add("proven", check_of("proven", 10, 1000 + i), soon=False)
    waiting.add("newcomer", check_of("newcomer", 10, 2000), soon=True)
    assert waiting.tokens <= 1000 and len(lost) == 200 + 6 - len(waiting)
    first = waiting.next(100)
    assert sum(check.group_id >= 1000 for check in first) == 5, "each second turn is a proven node's"
    rest = []
    while batch := waiting.next(100):
        rest += batch
    assert any(check.group_id == 2000 for check in rest), "who comes last has a place of its own"
    assert waiting.tokens == 0 and len(waiting) == 0


def test_one_nodes_line_is_bounded_and_a_long_completion_has_its_turn() -> None:
    waiting, lost = lines(peer_tokens=100, most_tokens=1000)
    for i in range(30):
        waiting.add("a", check_of("a", 10, i), soon=True)
    assert len(waiting) == 10 and [check.group_id for check in lost] == list(range(10, 30))
    waiting.add("b", check_of("b", 900, 50), soon=True)
    assert [check.group_id for check in waiting.next(50)] == [0], "the next in turn is longer than what is left"
    assert [check.group_id for check in waiting.next(50)] == [50]
    waiting.drop("a")
    assert waiting.next(50) == [] and len(lost) == 29


def test_what_is_given_is_not_measured_and_what_was_measured_is_measured_anew() -> None:
    given, told = {FLOAT32: HonestMeans(far=0.1)}, list[str]()
    before = {BFLOAT16: HonestMeans(far=0.2), FLOAT32: HonestMeans(far=0.3)}
    calibration = Calibration.of(to_json(given, WHOLE), told.append, before)
    assert calibration.honest(FLOAT32).far == 0.1 and not calibration.wants(FLOAT32)
    assert calibration.honest(BFLOAT16).far == 0.2 and calibration.wants(BFLOAT16)
    other = NodeArithmetic("vllm", "float32", "cuda")
    nothing, right, prompts = np.zeros(ENOUGH), np.full(ENOUGH, -1.0), np.arange(ENOUGH)
    calibration.add(other, nothing, right, right, nothing, prompts=prompts)
    assert set(from_json(told[-1], WHOLE)) == {FLOAT32, BFLOAT16, other}
    old = to_json({**SHIPPED, other: HonestMeans()}, WHOLE)
    assert Calibration.of(old, print).given == {other}, "earlier releases kept what was shipped, too"


@pytest.mark.parametrize("far", [0.0, -1.0, float("nan"), float("inf")])
def test_means_that_cannot_be_are_no_calibration(far: float) -> None:
    with pytest.raises(UsageError, match="no calibration"):
        from_json(to_json({FLOAT32: HonestMeans(far=far)}, WHOLE), WHOLE)


def test_honest_means_are_kept_as_json() -> None:
    with pytest.raises(Exception, match="no calibration"):
        Calibration.of("[1]", print)
    assert Calibration.of("", print).honest(BFLOAT16) == SHIPPED[BFLOAT16]


def test_what_comes_first_keeps_nobody_from_its_turn() -> None:
    """Each completion is a batch of its own; turns that changed with those that come first left one kind out for ever."""
    waiting, _ = lines(peer_tokens=10**6, most_tokens=10**6)
    for _ in range(6):
        for kind, more in enumerate(({"soon": False}, {"soon": True}, {"soon": True, "first": True})):
            waiting.add(f"n{kind}", check_of(f"n{kind}", 5_000, kind), **more)
    turns = [waiting.next(4_096)[0].group_id for _ in range(12)]
    assert turns[::2] == [2] * 6 and sorted(turns[1::2]) == [0, 0, 0, 1, 1, 1] and turns[1] != turns[3]


def test_a_nodes_lines_together_are_bounded() -> None:
    waiting, lost = lines(peer_tokens=100, most_tokens=1000)
    for more in ({"soon": False}, {"soon": True}, {"soon": True, "first": True}):
        for i in range(10):
            waiting.add("a", check_of("a", 10, i), **more)
    assert waiting.tokens == waiting.first_tokens == 100 and len(lost) == 20, "what comes first takes the place of what does not"
    waiting.add("a", check_of("a", 10, 10), soon=True)
    assert waiting.first_tokens == 100 and len(lost) == 21 and not waiting.takes_first("a", 10) and waiting.takes_first("b", 500)
    other, lost = lines(peer_tokens=100, most_tokens=1000)
    other.add("a", check_of("a", 60, 0), soon=True, first=True)
    other.add("a", check_of("a", 30, 1), soon=True)
    other.add("a", check_of("a", 60, 2), soon=True, first=True)
    assert other.tokens == 90 and len(lost) == 1, "what finds no place beside its own takes none of others"
