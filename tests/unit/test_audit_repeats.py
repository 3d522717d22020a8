"""The same token in the same context is off by the same amount: it counts once, however often it comes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from learner.audit.calibration import ENOUGH, Calibration, NodeArithmetic, measure
from learner.audit.plan import AuditPlan, Check, Deviations, MadePart, ToldKind
from learner.audit.repeats import MOST_KEPT, OF_ONE, SAME, SeenByNode, SeenTokens
from learner.audit.sequential import HonestMeans, NodeTest
from learner.standing.standing import Standing, StandingRules
from p2p.version import Version

ROUNDS = NodeArithmetic("transformers", "bfloat16", "cpu")
NOISE, P = 0.02, 0.5
"""Standard deviation of a logit's rounding in nats, and the probability of each token."""

Lies = Callable[[tuple[int, ...], int], float]


def rounding(context: tuple[int, ...]) -> float:
    """Of a token in its context, in nats of its log probability: as bfloat16's, the same whenever it comes."""
    rng = np.random.default_rng(xxhash.xxh3_64_intdigest(repr(context).encode()))
    return float((1 - P) * NOISE * rng.standard_normal())


def group_of_answers(seed: int, members: int = 16, length: int = 7, apart: float = 0.04) -> list[tuple[int, ...]]:
    """Answers to one prompt: each token is another one than most members' in a share `apart` of them."""
    rng = np.random.default_rng(seed)
    usual = rng.integers(0, 10, length)
    answers = [np.where(rng.random(length) < apart, rng.integers(0, 10, length), usual) for _ in range(members)]
    return [tuple(map(int, answer)) for answer in answers]


def deviations(prompt: tuple[int, ...], answer: tuple[int, ...], lie: float = 0.0) -> Deviations:
    n = len(answer)
    recomputed = np.full(n, np.log(P))
    off = np.array([rounding((*prompt, *answer[: i + 1])) for i in range(n)])
    return Deviations(np.zeros(n), recomputed + off + lie, recomputed, np.zeros(n))


def plan_of(means: HonestMeans) -> AuditPlan:
    standing, calibration = Standing(StandingRules(checks=True)), Calibration({ROUNDS: means}, given=frozenset({ROUNDS}))
    return AuditPlan(b"s" * 32, 1, standing, calibration, kind_of=lambda peer: ToldKind(ROUNDS))


def judge(
    plan: AuditPlan, groups: int, lies: Lies = lambda answer, member: 0.0, node: str = "n", first: int = 0
) -> int:  # fmt: skip
    """Tokens after which the node is caught that answers so many prompts; 0: it is not."""
    for g in range(first, first + groups):
        prompt = (1000 + g, 3)
        for member, answer in enumerate(group_of_answers(g)):
            part = MadePart(Version(1, 0), 0, len(answer), node)
            check = Check(g, prompt, answer, (0.0,) * len(answer), seed=member, parts=(part,), kinds=(ROUNDS,))
            plan.found(check, [deviations(prompt, answer, lies(answer, member))])
        if (at := plan.tests(node)[0].caught_at) > 0:
            return at
    return 0


@pytest.fixture(scope="module")
def measured() -> HonestMeans:
    """By tokens in as many contexts as there are tokens."""
    answers = [tuple(map(int, np.random.default_rng(10_000 + i).integers(0, 10, 7))) for i in range(ENOUGH // 7)]
    columns = [deviations((10_000 + i, 3), answer) for i, answer in enumerate(answers)]
    return measure(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def test_an_honest_node_is_not_called_wrong_for_one_rounding_that_comes_sixteen_times(measured: HonestMeans) -> None:
    loud = []
    for g in range(1_000):  # as it was: each of a group's answers as tokens of their own
        test = NodeTest(measured)
        found = [deviations((1000 + g, 3), answer) for answer in group_of_answers(g)]
        test.look(*(np.concatenate(column) for column in zip(*found, strict=True)))
        if test.caught_at:
            loud.append(g)
    assert len(loud) >= 3, "what this test is for does not happen"
    plan, groups = plan_of(measured), {*loud, *range(100)}
    for g in groups:
        assert judge(plan, 1, node=str(g), first=g) == 0
    assert max(plan.tests(str(g))[0].most_evidence for g in groups) < np.log(100)
    assert judge(plan, 100, node="all") == 0


def test_a_calibration_takes_no_group_for_so_many_tokens(measured: HonestMeans) -> None:
    seen, columns, again = SeenTokens(), [], []
    for g in range(60):
        for answer in group_of_answers(g):
            columns.append(found := deviations((1000 + g, 3), answer))
            again.append(seen.new_of((1000 + g, 3), answer, range(7), found.claimed, found.recomputed).repeated)
    all_of_it = [np.concatenate(column) for column in zip(*columns, strict=True)]
    repeated = np.concatenate(again)
    assert repeated.mean() > 0.5
    once = measure(*all_of_it, repeated=repeated)
    assert measured.quiet[0] < once.quiet[0] and 0.8 < once.level / measured.level < 1.25
    calibration = Calibration()
    calibration.add(ROUNDS, *all_of_it, repeated=repeated)
    assert calibration.means[ROUNDS] == once
    assert measure(*all_of_it, repeated=np.ones_like(repeated)) == measure(*all_of_it), "better than nothing"


@pytest.mark.parametrize("lies", [
    lambda answer, member: 0.1, lambda answer, member: 0.1 * (member > 0), lambda answer, member: -0.3 * (member % 4 == 3),
])  # fmt: skip
def test_who_lies_is_found_also_where_only_what_came_before_is_lied_of(measured: HonestMeans, lies: Lies) -> None:
    assert 0 < judge(plan_of(measured), 20, lies) < 2_000


def test_a_token_is_known_again_by_all_that_stands_before_it() -> None:
    seen, said, right = SeenTokens(), np.array([-1.2, -0.9, -1.5]), np.array([-1.0, -1.0, -1.0])
    first = seen.new_of((1, 2), (7, 8, 9), range(3), said, right)
    assert not first.repeated.any() and first.claimed.tolist() == said.tolist()
    again = seen.new_of((1, 2), (7, 8, 9), range(3), said, right)
    assert again.repeated.all() and again.claimed.tolist() == right.tolist()
    assert seen.new_of((1, 2), (7, 5, 9), range(3), said, right).repeated.tolist() == [True, False, False]
    assert not seen.new_of((1, 3), (7, 8, 9), range(3), said, right).repeated.any()
    assert seen.new_of((1, 2), (7, 8, 9), [2], said[2:], right[2:]).repeated.tolist() == [True]
    assert seen.new_of((1, 2, 7), (8,), [0], said[1:2], right[1:2]).repeated.tolist() == [True], "wherever a completion begins"


def test_what_is_further_off_than_before_counts_by_the_rest_alone() -> None:
    seen, right = SeenTokens(), np.array([-1.0])
    for claimed, counts in ((-1.1, -1.1), (-1.1 - SAME / 2, -1.0), (-1.05, -1.0), (-1.3, -1.2), (-0.6, -0.9), (-1.4, -1.0),
                            (-1.4 - SAME / 2, -1.0), (np.nan, -0.4), (np.nan, -1.0), (-3.0, -1.0)):  # fmt: skip
        assert seen.new_of((1,), (2,), [0], np.array([claimed]), right).claimed[0] == pytest.approx(counts, abs=1e-6), claimed


def test_tokens_that_say_nothing_of_rounding_are_not_kept() -> None:
    seen, sure = SeenTokens(), np.full(50, -0.01)
    for _ in range(2):
        assert not seen.new_of((1,), tuple(range(50)), range(50), sure, sure).repeated.any()
    unsure = np.full(50, -1.0)
    seen.new_of((1,), tuple(range(50)), range(50), unsure, unsure)
    assert seen.new_of((1,), tuple(range(50)), range(50), unsure, unsure).repeated.sum() == OF_ONE
    assert not seen.new_of((1,), (), [], np.empty(0), np.empty(0)).repeated.any()


def test_the_last_ones_are_kept() -> None:
    seen, right = SeenTokens(), np.array([-1.0])
    for i in range(MOST_KEPT + 1):
        assert not seen.new_of((i,), (2,), [0], right, right).repeated.any()
    assert seen.new_of((MOST_KEPT,), (2,), [0], right, right).repeated.all()
    assert seen.new_of((1,), (2,), [0], right, right).repeated.all()
    assert not seen.new_of((0,), (2,), [0], right, right).repeated.any(), "the first one is forgotten"


def test_each_node_has_its_own_and_gone_ones_are_forgotten() -> None:
    here = {"a"}
    nodes, right = SeenByNode(2, here.__contains__), np.array([-1.0])
    for name in ("a", "b", "c"):
        assert not nodes.of(name).new_of((1,), (2,), [0], right, right).repeated.any()
    assert nodes.of("a").new_of((1,), (2,), [0], right, right).repeated.all()
    assert not nodes.of("b").new_of((1,), (2,), [0], right, right).repeated.any()
