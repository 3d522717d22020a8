"""Who works and why: no flapping, losses, joiners, trials, caps."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from learner.economy.activation import Activation
from learner.economy.candidates import ACTIVE, ASLEEP, WARM, Candidate, Decision, Rules
from learner.economy.demand import Demand, required
from learner.economy.rates import Estimate
from tests.support.nightly import examples

TRAIN = 10.0


def demand(rate: float, **more: float) -> Demand:
    return Demand(rate * TRAIN, TRAIN, 3, 1, **more)


def quick(_: Collection[str]) -> float:
    return 1.0


@dataclass
class Pool:
    """A fleet that does as it is told."""

    activation: Activation
    nodes: dict[str, Candidate]
    noise: float = 0.0
    seed: int = 0
    now: float = 0.0
    spent: float = 0.0
    changes: int = 0
    said: list[str] = field(default_factory=list)
    catching: dict[str, float] = field(default_factory=dict)
    """joiner -> ready at"""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def step(self, want: Demand | None, every: float = 10.0, spread=quick, **more) -> Decision:
        for peer, at in list(self.catching.items()):
            if at <= self.now and peer in self.nodes:
                self.nodes[peer] = replace(self.nodes[peer], ready=True)
                del self.catching[peer]
        seen = [
            replace(c, rate=replace(c.rate, mean=c.rate.mean * max(0.1, self.rng.gauss(1, self.noise)))) for c in
            self.nodes.values()
        ]  # fmt: skip
        out = self.activation.decide(self.now, want, seen, spread, self.spent, **more)
        assert out.active <= self.nodes.keys()
        for change in out.changes:
            c = self.nodes[change.peer]
            assert change.to != c.state and change.why
            self.changes += ACTIVE in (change.to, c.state)
            self.said.append(f"{change.peer}: {change.why}")
        for peer, c in self.nodes.items():
            state = ACTIVE if peer in out.active else WARM
            self.nodes[peer] = replace(c, state=state)
            if state == ACTIVE and not c.ready:
                self.catching.setdefault(peer, self.now + c.catch_up_s)
            elif peer in self.catching:
                del self.catching[peer]
        self.spent += out.usd_per_hour * every / 3600
        self.now += every
        return out


def fleet(*nodes: tuple[float, float], sd: float = 0.0, **more) -> dict[str, Candidate]:
    """(price, rate) of known nodes that are warm and ready."""
    return {
        f"n{i}": Candidate(f"n{i}", price, Estimate(rate, sd * rate, True), WARM, True, catch_up_s=30.0, **more)
        for i, (price, rate) in enumerate(nodes)
    }


fleets = st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.0]), st.floats(5, 100)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(fleets, st.floats(0.05, 1.5), st.floats(0, 0.2))
def test_the_rule_holds_or_it_is_said_that_it_cannot(nodes: list[tuple[float, float]], share: float, sd: float) -> None:
    want = demand(share * sum(r for _, r in nodes))
    pool = Pool(Activation(Rules()), fleet(*nodes, sd=sd))
    for _ in range(30):
        out = pool.step(want)
        lower = sum(pool.nodes[p].rate.lower(1) for p in out.active)
        assert out.required == pytest.approx(required(want, 1.0)) and out.supply == pytest.approx(lower)
        if out.short_by > 1e-6 * out.required:
            assert out.active == set(pool.nodes) and out.short_by == pytest.approx(out.required - lower)
            assert "all there are make" in out.blocked
        else:
            assert lower >= out.required * (1 - 1e-6) and not out.blocked


@settings(max_examples=20, deadline=None)
@given(fleets.filter(lambda f: len(f) > 2), st.floats(0.1, 0.8), st.integers(0, 1000))
@example([(0.3, 20.0), (0.0, 5.0), (0.3, 91.0), (0.0, 55.0), (0.3, 13.0)], 0.2265625, 108)
def test_no_flapping(nodes: list[tuple[float, float]], share: float, seed: int) -> None:
    """Constant true rates, 10 % noise on each at each decision, 500 decisions."""
    pool = Pool(Activation(Rules()), fleet(*nodes), noise=0.1, seed=seed)
    want = demand(share * sum(r for _, r in nodes))
    first = pool.step(want)
    pool.changes = 0
    for _ in range(500):
        pool.step(replace(want, train_s=TRAIN * pool.rng.gauss(1, 0.02)))
    assert pool.changes <= 8 + len(first.active) // 2, pool.said


def test_what_it_says() -> None:
    pool = Pool(Activation(Rules()), fleet((0.3, 412.0), (0.5, 400.0), (2.0, 500.0)))
    pool.step(demand(300))
    assert pool.said == ["n0: cheapest: 412 tokens/s for $0.30/h"]
    del pool.nodes["n0"]
    out = pool.step(demand(300))
    assert pool.said[1:] == ["n1: replaces n0, which left (cheapest: 400 tokens/s for $0.50/h)"] and out.active == {"n1"}
    # Nothing moves while it is enough, and not at once when it is too much.
    pool.nodes |= {"n0": replace(pool.nodes["n1"], peer="n0", usd_per_hour=0.4, state=WARM)}
    for _ in range(12):
        assert pool.step(demand(300)).active == {"n1"}
    for _ in range(3):
        out = pool.step(demand(300))
    assert out.active == {"n0"} and "n0: cheaper: $0.40/h instead of $0.50/h" in pool.said
    for _ in range(5):
        out = pool.step(demand(500))
    assert out.active == {"n0", "n1"}
    for _ in range(20):
        out = pool.step(demand(300))
    assert len(out.active) == 1 and any("not needed: 400 of 300 tokens/s without it" in x for x in pool.said)


def test_a_single_node_that_is_all() -> None:
    pool = Pool(Activation(Rules()), fleet((1.0, 100.0)))
    for _ in range(50):
        assert pool.step(demand(90)).active == {"n0"}
    for _ in range(50):
        assert pool.step(demand(20)).active == {"n0"}
    assert pool.changes == 1


def test_before_the_first_step_all_work() -> None:
    unknown = {p: replace(c, rate=Estimate()) for p, c in fleet((0.0, 1.0), (1.0, 1.0), (5.0, 1.0)).items()}
    pool = Pool(Activation(Rules(max_usd_per_hour=2.0)), dict(unknown))
    out = pool.step(None)
    assert out.active == {"n0", "n1"} and out.required == math.inf and "max_usd_per_hour 2.00" in out.blocked
    pool = Pool(Activation(Rules()), dict(unknown))
    assert pool.step(Demand(0.0, 0.0, 3, 1)).active == {"n0", "n1", "n2"}
    # One step was made: rates are known, and the dear one is not needed.
    pool.nodes = {p: replace(c, rate=Estimate(100.0, 5.0, True)) for p, c in pool.nodes.items()}
    assert pool.step(demand(120)).active == {"n0", "n1", "n2"}
    for _ in range(14):
        out = pool.step(demand(120))
    assert out.active == {"n0", "n1"}


def test_a_joiner_counts_when_it_has_caught_up() -> None:
    nodes = fleet((1.0, 100.0), (0.4, 100.0))
    nodes["n1"] = replace(nodes["n1"], state=ASLEEP, ready=False)
    pool = Pool(Activation(Rules()), nodes)
    out = pool.step(demand(80))
    assert out.active == {"n0"}  # who can work now comes first
    for _ in range(13):
        out = pool.step(demand(80))
    assert out.active == {"n0", "n1"} and out.supply == 100.0 and not pool.nodes["n1"].ready
    for _ in range(5):
        out = pool.step(demand(80))
    assert out.active == {"n1"}  # make, then break
    # Nobody else: it is activated, does not count, and nobody is activated twice for it.
    nodes = {p: replace(c, state=ASLEEP, ready=False) for p, c in fleet((0.4, 100.0), (0.5, 100.0)).items()}
    pool = Pool(Activation(Rules()), nodes)
    out = pool.step(demand(80))
    assert out.active == {"n0"} and out.supply == 0 and out.short_by == 80
    assert pool.step(demand(80)).active == {"n0"}


def test_a_joiner_that_never_comes_is_given_up() -> None:
    nodes = {p: replace(c, state=ASLEEP, ready=False) for p, c in fleet((0.4, 100.0), (0.5, 100.0)).items()}
    nodes["n0"] = replace(nodes["n0"], catch_up_s=math.inf)
    pool = Pool(Activation(Rules()), nodes)
    outs = [pool.step(demand(80)) for _ in range(200)]
    assert outs[0].active == {"n0"} and outs[31].active == {"n1"}
    assert "n0: was not ready within 300 s: not asked again for 300 s" in pool.said
    paid = sum("n0" in out.active for out in outs)
    assert paid < 120 and sum(out.short_by > 0 for out in outs) < 40


def test_work_held_back_proves_that_it_is_enough() -> None:
    """All are short of work, so they look slow: more of them would make them look slower still."""
    pool = Pool(Activation(Rules()), fleet((1.0, 100.0), (1.0, 100.0)))
    pool.step(demand(80))
    pool.nodes = {p: replace(c, rate=Estimate(70.0, 0.0, True)) for p, c in pool.nodes.items()}
    for _ in range(30):
        assert len(pool.step(demand(80), held_back=True).active) == 1
    for _ in range(5):
        out = pool.step(demand(80))
    assert len(out.active) == 2


def test_with_work_in_hand_no_margin_is_paid_for() -> None:
    pool = Pool(Activation(Rules()), fleet(*[(1.0, 10.0)] * 12))
    want = Demand(80 * 60.0, 60.0, 3, 1)
    pool.step(None)
    assert [len(pool.step(want).active) for _ in range(60)][-1] == 10  # 1.25 times of what is required
    seen = [len(pool.step(want, held_back=True).active) for _ in range(60)]
    assert seen[0] == 10 and seen[-1] == 8, "what is required, and no less"
    assert [len(pool.step(want).active) for _ in range(6)] == [8] * 6, "a step's work is there"
    assert [len(pool.step(want).active) for _ in range(60)][-1] == 9  # 1.1 times


@pytest.mark.slow
@settings(max_examples=examples(12, 300), deadline=None)
@given(fleets.filter(lambda f: len(f) > 2), st.floats(0.1, 0.8), st.integers(0, 1000))
def test_work_in_hand_makes_no_flapping(nodes: list[tuple[float, float]], share: float, seed: int) -> None:
    """What is made beyond what is used is kept, up to three steps' worth, then held back."""
    pool = Pool(Activation(Rules()), fleet(*nodes), noise=0.05, seed=seed)
    want = demand(share * sum(r for _, r in nodes))
    kept, changes, waited = 0.0, 0, 0
    for i in range(1500):
        out = pool.step(want, held_back=kept >= 3 * want.tokens)
        made = sum(nodes[int(p[1:])][1] for p in out.active)
        kept = min(3 * want.tokens, kept + 10.0 * (made - want.tokens / TRAIN))
        waited, kept = waited + (kept < 0 and i > 100), max(0.0, kept)
        changes = pool.changes if i < 500 else changes
    assert not waited
    assert pool.changes - changes <= 10, pool.said


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(fleets, st.floats(0.1, 1.5), st.floats(0, 6), st.integers(0, 100), st.floats(0.0, 0.05))
# A joiner is given up while a trial is under way, and a dearer node is needed in its place: both do not fit.
@example([(2.0, 32.0), (2.0, 51.0), (1.0, 26.0), (0.3, 89.0), (2.0, 63.0), (2.0, 50.0), (2.0, 71.0)], 0.3, 5.5, 95, 0.0)
def test_the_cap_is_never_exceeded(nodes: list[tuple[float, float]], share: float, cap: float, seed: int, idle: float) -> None:
    want = demand(share * sum(r for _, r in nodes))
    rules = Rules(max_usd_per_hour=cap, dwell_s=30.0, explore_share=0.5)
    pool = Pool(Activation(rules), fleet(*nodes, idle_usd_per_hour=idle), noise=0.1, seed=seed)
    rng = random.Random(seed)
    for _ in range(60):
        for peer in pool.nodes:
            if rng.random() < 0.03:
                c = pool.nodes[peer]
                pool.nodes[peer] = replace(c, rate=replace(c.rate, known=not c.rate.known), ready=rng.random() < 0.7)
        out = pool.step(want if rng.random() < 0.9 else None)
        pays = sum(c.usd_per_hour if p in out.active else c.idle_usd_per_hour for p, c in pool.nodes.items())
        assert pays == pytest.approx(out.usd_per_hour)
        assert pays <= cap * (1 + 1e-6) or not {p for p in out.active if pool.nodes[p].usd_per_hour > idle}
    plain = Pool(Activation(Rules(max_usd_per_hour=cap)), fleet(*nodes)).step(want)
    free = Pool(Activation(Rules()), fleet(*nodes)).step(want)
    if free.usd_per_hour > cap * (1 + 1e-6):
        assert f"max_usd_per_hour {cap:.2f} allows" in plain.blocked


def test_a_trial_gives_way_to_what_is_needed() -> None:
    pool = Pool(Activation(Rules(max_usd_per_hour=3.0, explore_share=0.5)), fleet((1.0, 100.0), (1.5, 100.0)))
    pool.nodes["new"] = Candidate("new", 1.0, Estimate(), WARM, True)
    while "new" not in (out := pool.step(demand(80))).active:
        assert out.usd_per_hour <= 3.0
    assert out.active == {"n0", "new"}
    out = pool.step(demand(150))
    assert out.active == {"n0", "n1"} and out.usd_per_hour == 2.5
    assert pool.said[-1] == "new: max_usd_per_hour 3.00 leaves no room for a trial"


def test_the_cap_in_words() -> None:
    pool = Pool(Activation(Rules(max_usd_per_hour=4.0)), fleet(*[(1.0, 203.0)] * 6))
    for _ in range(30):
        out = pool.step(demand(1034.0))
        assert out.blocked == "max_usd_per_hour 4.00 allows 812 of 1,034 tokens/s" and len(out.active) == 4
    assert pool.changes == 4


def test_a_budget_that_is_spent_stays_spent() -> None:
    pool = Pool(Activation(Rules(budget_usd=1.0)), fleet((60.0, 100.0), (0.0, 30.0)))
    outs = [pool.step(demand(80)) for _ in range(30)]
    assert outs[0].active == {"n0"}
    assert outs[-1].blocked == "budget of $1.00 is spent" and "n0" not in outs[-1].active
    assert 0.5 < pool.spent <= 1.0 + 60.0 * 10 / 3600
    assert outs[-1].active == {"n1"}  # what costs nothing goes on
    assert sum("n0" in x and "budget" in x for x in pool.said) == 1


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(0.05, 2.0), min_size=1, max_size=8), st.booleans(), st.integers(0, 100))
@example([1.0, 1.5, 1.375, 0.875, 0.875], False, 0)  # the last trial begins within 140 s of the last look
def test_trials_end_and_stay_within_their_share(prices: list[float], learns: bool, seed: int) -> None:
    rules = Rules(explore_share=0.05)
    pool = Pool(Activation(rules), fleet((2.0, 300.0), (2.0, 300.0)))
    for i, price in enumerate(prices):
        pool.nodes[f"u{i}"] = Candidate(f"u{i}", price, Estimate(200.0, 100.0), ASLEEP, False, catch_up_s=20.0)
    tried: dict[str, float] = {}
    total = on_trials = 0.0
    for _ in range(800):
        out = pool.step(demand(250))
        for peer in [p for p in out.active if p.startswith("u") and not pool.nodes[p].rate.known]:
            tried[peer] = tried.get(peer, 0.0) + 10
            on_trials += pool.nodes[peer].usd_per_hour * 10 / 3600
            if learns and pool.nodes[peer].ready and tried[peer] > 60:
                pool.nodes[peer] = replace(pool.nodes[peer], rate=Estimate(1.0, 0.1, True))
        total += out.usd_per_hour * 10 / 3600
        assert on_trials <= 0.05 * total + max(prices) * 20 / 3600
    assert all(seconds <= 120 + 20 + 20 for seconds in tried.values())
    cheap = [p for p in range(len(prices)) if prices[p] < 0.2]
    assert all(f"u{i}" in tried for i in cheap)
    still = {p for p in out.active if p.startswith("u")}  # whose trial the last look fell into
    for _ in range(16):
        out = pool.step(demand(250))
    assert not still & out.active
    assert out.active and pool.changes <= 2 + 2 * len(prices)


def test_a_good_one_that_was_tried_is_taken() -> None:
    pool = Pool(Activation(Rules()), fleet((2.0, 300.0)))
    pool.nodes["new"] = Candidate("new", 0.2, Estimate(), ASLEEP, False, catch_up_s=20.0)
    for _ in range(200):
        out = pool.step(demand(250))
        if "new" in out.active and pool.nodes["new"].ready:
            pool.nodes["new"] = replace(pool.nodes["new"], rate=Estimate(310.0, 5.0, True))
    assert out.active == {"new"}
    assert any(x.startswith("new: unknown: tried for up to $0.0") for x in pool.said)


def test_a_trial_makes_nobody_wait() -> None:
    """A version must reach an unknown node as well: one with a downlink that would make all wait is not tried."""
    nodes = fleet((1.0, 100.0), download=10.0)
    nodes |= {p: Candidate(p, 0.1, Estimate(), WARM, True, download=d) for p, d in (("slow", 1.0), ("fair", 9.0), ("fast", 20.0))}
    pool = Pool(Activation(Rules()), nodes)
    seen: set[str] = set()
    for _ in range(300):
        out = pool.step(demand(80), spread=lambda peers: 20 / min((pool.nodes[p].download for p in peers), default=1.0))
        seen |= out.active
        assert out.required <= out.supply
    assert seen == {"n0", "fair", "fast"}


def test_a_version_reaches_these_in_time() -> None:
    nodes = fleet((1.0, 100.0), (1.0, 100.0), (0.1, 100.0))
    nodes["n2"] = replace(nodes["n2"], download=1.0)
    slow = lambda peers: 40.0 if "n2" in peers else 2.0
    pool = Pool(Activation(Rules()), nodes)
    out = pool.step(demand(80), spread=slow)
    assert out.active <= {"n0", "n1"} and out.spread_s == 2.0
    pool = Pool(Activation(Rules()), nodes | {"n2": replace(nodes["n2"], state=ACTIVE)})
    assert pool.step(demand(80), spread=slow).active <= {"n0", "n1"}
    # Nobody is fast enough: what is in reach, and it is said.
    pool = Pool(Activation(Rules()), fleet((1.0, 100.0), (1.0, 100.0)))
    out = pool.step(demand(80), spread=lambda peers: 40.0)
    assert out.required == math.inf and out.active and "no capacity suffices with S=3, kappa=1" in out.blocked
