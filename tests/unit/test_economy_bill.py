"""The bill adds up, the controller of local_rollout settles, and advice stops where a node would not be used in full."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.economy.allocation import more_nodes
from learner.economy.bill import Bill, NodeBill
from learner.economy.local_rollout import LocalRollout
from p2p.forgetting import MOST_NODES

PRICES = {"a": (3.6, 0.36, 0.1), "b": (7.2, 0.0, 0.0), "c": (0.0, 1.8, 2.0)}

events = st.lists(
    st.tuples(
        st.floats(0, 1000), st.sampled_from("abc"), st.sampled_from(["active", "warm", "asleep", "left", "egress", "counted",
        "step"]), st.floats(0, 1e9),
    ),
    max_size=40,
)  # fmt: skip


def told(bill: Bill, now: float, peer: str, what: str, number: float, steps: list) -> None:
    if what == "step":
        steps.append(bill.step(now))
    elif what == "left":
        bill.left(peer, now)
    elif what == "egress":
        bill.egress(peer, number)
    elif what == "counted":
        bill.counted(peer, number)
    else:
        bill.state(peer, now, what, *PRICES[peer])


@settings(deadline=None)
@given(events)
def test_it_adds_up_in_any_order(history: list) -> None:
    """Also with times that go back: a late word charges nothing twice, and no more time passes than passes."""
    bill, steps = Bill(), []
    for event in history:
        told(bill, *event, steps)
    end = max([1000.0, *(e[0] for e in history)])
    steps.append(bill.step(end))
    rows = bill.rows()
    assert bill.spent() == pytest.approx(math.fsum(r.usd for r in rows)) == pytest.approx(math.fsum(steps))
    for row in rows:
        assert 0 <= row.active_s <= end + 1e-9
        assert row.usd >= row.active_s / 3600 * PRICES[row.peer][0] - 1e-9
    assert all(usd >= 0 for usd in steps)
    before = bill.spent()
    assert bill.spent(end) == before == bill.spent(end - 500)


def test_who_is_gone_for_long_is_folded_into_one_sum() -> None:
    """A ticket with a price may bring any number of identities."""
    bill = Bill()
    bill.state("stays", 0.0, "active", 1.0)
    for i in range(3 * MOST_NODES):
        bill.state(str(i), 1.0 * i, "active", 3600.0)
        bill.left(str(i), 1.0 * i + 1)
    assert len(bill.rows()) <= MOST_NODES and bill.rows(3600.0)[-1].peer == "stays"
    assert bill.spent(30_000.0) == pytest.approx(3 * MOST_NODES + 30_000 / 3600)


@settings(deadline=None)
@given(events, st.integers(0, 1000))
def test_it_is_the_same_however_nodes_interleave(history: list, seed: int) -> None:
    """Each node's own events in order; whose comes first, and how often one asks, makes no difference."""
    own = {p: sorted((e for e in history if e[1] == p and e[2] != "step"), key=lambda e: e[0]) for p in "abc"}
    apart, together = list[NodeBill](), Bill()
    for peer in "abc":
        one = Bill()
        for event in own[peer]:
            told(one, *event, [])
        own[peer].append((2000.0, peer, "left", 0.0))
        told(one, *own[peer][-1], [])
        apart += one.rows()
    rng = random.Random(seed)
    for event in sorted((e for mine in own.values() for e in mine), key=lambda e: e[0]):
        told(together, *event, [])
        if rng.random() < 0.3:
            together.spent(event[0])
    for mine, theirs in zip(apart, together.rows(), strict=True):
        assert mine.usd == pytest.approx(theirs.usd) and mine.active_s == pytest.approx(theirs.active_s)


def test_a_bill_by_hand() -> None:
    bill = Bill()
    bill.state("a", 0.0, "active", 3.6, 0.36, 0.1)
    bill.state("learner", 0.0, "active", 36.0)
    assert bill.step(100.0) == pytest.approx(0.1 + 1.0)
    bill.state("a", 150.0, "warm", 3.6, 0.36, 0.1)
    bill.counted("a", 2e9)
    bill.counted("a", 3e9)
    bill.left("a", 250.0)
    bill.state("a", 300.0, "active", 3.6, 0.36, 0.1)  # it comes back: one account, and its connection counts anew
    bill.state("a", 310.0, "active", 3.6, 0.36, 0.1)
    bill.counted("a", 1e9)
    row = bill.rows(320.0)[0]
    assert row.active_s == 170.0 and row.usd == pytest.approx(0.17 + 0.01 + 0.4)
    assert bill.step(320.0) == pytest.approx(row.usd - 0.1 + 2.2)


# ---- local_rollout


def plant(turn_s: float, nodes: int, work: float = 600.0, train: float = 60.0) -> tuple[float, float]:
    """(the trainer's wait, the nodes' wait): nodes make what local_rollout leaves."""
    remote = max(0.0, work - 4 * turn_s) / nodes
    return max(0.0, turn_s + remote - train), max(0.0, train - turn_s - remote)


@settings(deadline=None)
@given(st.integers(4, 9), st.floats(0, 100), st.floats(0.0, 0.05), st.integers(0, 100))
def test_the_local_turn_settles_where_neither_waits(nodes: int, start: float, noise: float, seed: int) -> None:
    def waits(turn_s: float) -> tuple[float, float]:
        """More local_rollout, less for the trainer to wait for: by 1 s a second."""
        balance = 90.0 - 6 * nodes
        return max(0.0, balance - turn_s), max(0.0, turn_s - balance)

    rng, local_rollout = random.Random(seed), LocalRollout(turn_s=start)
    for _ in range(60):
        trainer, remote = waits(local_rollout.turn_s)
        local_rollout.stepped(trainer * rng.gauss(1, noise), remote * rng.gauss(1, noise), nodes)
    assert max(waits(local_rollout.turn_s)) < 1.0
    # One goes, and comes back: it is where it was, at once.
    settled = local_rollout.turn_s
    local_rollout.stepped(*waits(local_rollout.turn_s), nodes - 1)
    for _ in range(30):
        balance = 96.0 - 6 * nodes - local_rollout.turn_s
        local_rollout.stepped(max(0.0, balance), max(0.0, -balance), nodes - 1)
    assert local_rollout.turn_s == pytest.approx(settled + 6, abs=1.0)
    assert local_rollout.stepped(0.0, 0.0, nodes) == pytest.approx(settled, abs=1e-3)


def test_the_local_turn_at_its_floor() -> None:
    local_rollout = LocalRollout(turn_s=8.0)
    assert local_rollout.stepped(0.0, 30.0, 4) == 5.0
    assert local_rollout.stepped(0.0, 30.0, 4, holds=True) == 0.0
    assert local_rollout.stepped(9.0, 0.0, 4, holds=True) == 0.0 and local_rollout.stepped(30.0, 0.0, 4, holds=True) == 10.0
    assert local_rollout.stepped(math.nan, 0.0, 4) == 10.0
    assert LocalRollout(turn_s=50.0, most_s=40.0).stepped(99.0, 0.0, 4) == 40.0
    # A step in which nodes came and went says nothing of any count.
    before = dict(local_rollout.memory)
    local_rollout.stepped(60.0, 0.0, 4, changed=True)
    assert local_rollout.memory == before


# ---- allocation


@given(st.floats(1, 500), st.floats(1, 500), st.integers(1, 200))
def test_every_unit_that_is_asked_for_is_worth_it(generate_s: float, train_s: float, nodes: int) -> None:
    advice = more_nodes(generate_s, train_s, nodes)
    takes = lambda n: generate_s * nodes / n
    for n in range(nodes, nodes + advice.more):
        assert takes(n) - train_s >= takes(n) - takes(n + 1) - 1e-6
    n = nodes + advice.more
    assert takes(n) - train_s < takes(n) - takes(n + 1) + 1e-6 or takes(n) <= train_s
    assert advice.step_s == pytest.approx(max(train_s, takes(n)))


def test_advice_in_words() -> None:
    said = more_nodes(120.0, 50.0, 4, node_usd_per_hour=1.0, learner_usd_per_hour=30.0)
    assert said.more == 5 and said.why == "5 more: a step would take 53.3 s instead of 120 s, $0.578 instead of $1.133 a step"
    assert more_nodes(120.0, 50.0, 4, most=2).more == 2
    assert "no room" in more_nodes(120.0, 50.0, 4, most=0).why
    assert "no slower" in more_nodes(40.0, 50.0, 4).why
    assert more_nodes(55.0, 50.0, 4).more == 0 and "save more" in more_nodes(55.0, 50.0, 4).why
    assert more_nodes(0.0, 50.0, 0).more == 1 and more_nodes(1.0, 0.0, 3).more == 0
