"""The same token in the same context is off by the same amount: it counts once, however often it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import xxhash

from learner.audit.bets import HonestMeans
from learner.audit.calibration import ENOUGH, Calibration, NodeArithmetic
from learner.audit.deviations import Deviations
from learner.audit.measuring import measure
from learner.audit.plan import AuditPlan, Check, MadePart, ToldKind
from learner.audit.repeats import MOST_KEPT, OF_ONE, SAME, UNASKED, SeenByNode, SeenTokens
from learner.audit.sequential import NodeTest
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
            again.append(~np.isnan(seen.again((1000 + g, 3), answer, range(7), found.claimed, found.recomputed)))
    all_of_it = [np.concatenate(column) for column in zip(*columns, strict=True)]
    repeated = np.concatenate(again)
    assert repeated.mean() > 0.5
    prompts = np.repeat(np.arange(60), 16 * 7)
    once = measure(*all_of_it, repeated=repeated, prompts=prompts)
    assert measured.quiet[0] < once.quiet[0] and 0.8 < once.level / measured.level < 1.25
    calibration = Calibration()
    calibration.add(ROUNDS, *all_of_it, repeated=repeated, prompts=prompts)
    assert calibration.means[ROUNDS] == once
    every = np.ones_like(repeated)
    assert measure(*all_of_it, repeated=every, prompts=prompts) == measure(*all_of_it, prompts=prompts), "better than nothing"


@pytest.mark.parametrize("lies", [
    lambda answer, member: 0.1, lambda answer, member: 0.5 * (member > 0), lambda answer, member: -0.5 * (member % 4 == 3),
])  # fmt: skip
def test_who_lies_is_found_also_where_only_what_came_before_is_lied_of(measured: HonestMeans, lies: Lies) -> None:
    assert 0 < judge(plan_of(measured), 40, lies) < 4_000


def test_rounding_that_hardly_ever_varies_calls_nobody_wrong() -> None:
    """Another kernel in one batch of a hundred: whoever counted what is further off than before alone counted these alone."""
    float32 = Calibration().honest(NodeArithmetic("transformers", "float32", "cpu"))
    for node in range(40):
        rng, seen, test = np.random.default_rng(node), SeenTokens(node), NodeTest(float32)
        right = np.full(7, np.log(P))
        for g in range(20):
            for answer in group_of_answers(20 * node + g, members=32):
                off = np.where(rng.random(7) < 0.02, 3e-3, 1e-7) * rng.standard_normal(7)
                again = seen.again((1000 + g, 3), answer, range(7), right + off, right)
                test.look(np.zeros(7), right + off, right, np.zeros(7), again=again)
        assert test.most_evidence < np.log(1_000), node


class One:
    """One token in one context, that comes again and again."""

    def __init__(self, secret: int = 0, prompt: tuple[int, ...] = (1,)) -> None:
        self.seen, self.prompt = SeenTokens(secret), prompt

    def __call__(self, off: float, prompt: tuple[int, ...] = ()) -> float:
        return float(self.seen.again(prompt or self.prompt, (2,), [0], np.array([-1.0 + off]), np.array([-1.0]))[0])


def test_a_token_is_known_again_by_all_that_stands_before_it() -> None:
    seen, right = SeenTokens(), np.full(3, -1.0)

    def again(prompt: tuple[int, ...], ids: tuple[int, ...], places: Sequence[int]) -> list[bool]:
        n = len(places)
        return (~np.isnan(seen.again(prompt, ids, places, right[:n], right[:n]))).tolist()

    assert again((1, 2), (7, 8, 9), range(3)) == [False] * 3
    assert again((1, 2), (7, 8, 9), range(3)) == [True] * 3
    assert again((1, 2), (7, 5, 9), range(3)) == [True, False, False]
    assert again((1, 3), (7, 8, 9), range(3)) == [False] * 3
    assert again((1, 2), (7, 8, 9), [2]) == [True]
    assert again((1, 2, 7), (8,), [0]) == [True], "wherever a completion begins"
    assert again((1, 2), (), []) == []


def test_what_is_asked_counts_by_how_much_it_is_further_off() -> None:
    one = One()
    assert np.isnan(one(-0.1)) and one(-0.1 - SAME / 2) == 0, "the first one that comes again is asked always"
    asked = [found for _ in range(2_000) if (found := one(0.3)) != UNASKED]
    assert asked[0] == pytest.approx(0.2) and set(asked[1:]) == {0.0} and 3 <= len(asked) < 20
    worst = [found for _ in range(20_000) if (found := one(np.nan)) != UNASKED]
    assert not worst or worst[0] == pytest.approx(0.7)


def test_which_ones_are_asked_is_the_heads_secret_and_not_a_matter_of_what_they_say() -> None:
    def asked(secret: int, off: float, prompt: int) -> list[bool]:
        one = One(secret, (prompt,))
        one(0.0)
        return [one(off) != UNASKED for _ in range(40)]

    assert asked(5, 0.0, 1) == asked(5, 0.3, 1) != asked(6, 0.0, 1)
    shares = np.array([asked(5, 0.0, prompt) for prompt in range(2_000)]).mean(axis=0)
    for k in (1, 2, 3, 5, 10, 40):
        assert shares[k - 1] == pytest.approx(1 / k, rel=0.25), k


def test_tokens_that_say_nothing_of_rounding_are_not_kept() -> None:
    seen = SeenTokens()
    for p, known in ((-0.01, 0), (-0.01, 0), (-1.0, 0), (-1.0, OF_ONE)):
        same = np.full(50, p)
        assert (~np.isnan(seen.again((1,), tuple(range(50)), range(50), same, same))).sum() == known


def test_the_last_ones_are_kept() -> None:
    one = One()
    for i in range(MOST_KEPT + 1):
        assert np.isnan(one(0.0, (9, i)))
    assert one(0.0, (9, MOST_KEPT)) == 0 and one(0.0, (9, 1)) == 0
    assert np.isnan(one(0.0, (9, 0))), "the first one is forgotten"


def test_each_node_has_its_own_and_gone_ones_are_forgotten() -> None:
    here = {"a"}
    nodes, right = SeenByNode(b"secret", 2, here.__contains__), np.array([-1.0])

    def new(name: str) -> bool:
        return bool(np.isnan(nodes.of(name).again((1,), (2,), [0], right, right)[0]))

    assert new("a") and new("b") and new("c")
    assert not new("a") and new("b"), "b was gone longest"
    nodes.forget("a")
    assert new("a")


def test_of_trusted_nodes_it_is_the_kind_that_has_seen_a_token() -> None:
    standing = Standing(StandingRules(checks=True, trusted=frozenset({"a", "b"})))
    calibration = Calibration()
    plan = AuditPlan(b"s" * 32, 1, standing, calibration, kind_of=lambda peer: ToldKind(ROUNDS))
    answers = [tuple(map(int, np.random.default_rng(i).integers(0, 10, 9))) for i in range(ENOUGH // 9 + 1)]
    for node in ("a", "b"):
        for i, answer in enumerate(answers):
            part = MadePart(Version(1, 0), 2, 9, node)
            check = Check(i, (i,), answer, (0.0,) * 9, seed=i, parts=(part,), kinds=(ROUNDS,), given=((4, 6),))
            found = Deviations(*(column[[2, 3, 6, 7, 8]] for column in deviations((i,), answer)))
            plan.found(check, [found])
    once = [deviations((i,), answer) for i, answer in enumerate(answers)]
    columns = [np.concatenate([column[[2, 3, 6, 7, 8]] for column in of]) for of in zip(*once, strict=True)]
    assert calibration.tokens(ROUNDS) == 10 * len(answers) > ENOUGH
    assert calibration.means[ROUNDS].level == pytest.approx(measure(*columns).level, rel=1e-9)


def test_who_is_forgiven_begins_anew(measured: HonestMeans) -> None:
    plan = plan_of(measured)
    first = judge(plan, 3, lambda answer, member: 0.5)
    plan.standing.expel("n", "audits", 0.0)
    assert judge(plan, 3, lambda answer, member: 0.5) == first, "told again"
    plan.standing.forgive("n")
    assert judge(plan, 3, lambda answer, member: 0.5) == first
