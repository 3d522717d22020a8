"""learner/rollouts/redundancy.py: who is surplus, who is cut, when patience ends, and the account of it."""

from __future__ import annotations

import numpy as np

from learner.dispatch.lengths import Lengths
from learner.rollouts.collector import Collector
from learner.rollouts.ledger import Ledger, Surplus
from learner.rollouts.outcomes import Sampling
from learner.rollouts.redundancy import Patience, Redundancy, to_cut
from learner.status.facts import cut_short
from learner.status.run_state import RunState
from learner.trajectory import TRUNCATED, Finish, Group, Trajectory
from p2p.protocol.rollout import Span, TokenEvent
from p2p.version import Version
from tests.support.groups import open_group

V5 = Version(1, 5)
STOP = 9


def collector_with(groups: dict[int, list[int]], extra: int = 0) -> Collector:
    """Group id (its prompt is ten times that) -> tokens of each member so far, each at a node of its own."""
    collector = Collector(vocab_size=10)
    collector.published(V5)
    for group_id, members in groups.items():
        seeds = list(range(len(members)))
        open_group(collector, group_id, 10 * group_id, [1], V5, seeds, Sampling(100, (STOP,)), extra=extra)
        for m, count in enumerate(members):
            collector.assign(f"{group_id}.{m}.0", f"{group_id}.{m}")
            if count:
                make(collector, group_id, m, 0, [1] * count)
    return collector


def make(collector: Collector, group_id: int, member: int, start: int, ids: list[int]) -> None:
    event = TokenEvent.of(f"{group_id}.{member}.0", start, tuple(ids), np.full(len(ids), -0.5, np.float32), V5)
    collector.tokens(f"{group_id}.{member}", event)


def test_those_that_have_made_least_go_first_and_whole_ones_last() -> None:
    collector, redundancy = collector_with({1: [9, 9], 2: [1, 0], 3: [0, 2], 4: [0, 1], 5: [3, 3]}), Redundancy({20})
    whole = 0  # reserved, and not in the collector any more
    of = (whole, 1, 2, 3, 4, 5)
    # 2 was surplus once: all others go before it.
    assert [redundancy.choose(Surplus(n, of), collector) for n in (1, 2, 3)] == [[4], [4, 3], [4, 3, 5]]
    assert redundancy.choose(Surplus(6, of), collector) == [4, 3, 5, 1, 2, 0]
    assert Redundancy().choose(Surplus(2, (2, 4)), collector) == [4, 2]  # the newest of equals first


def test_those_are_cut_that_would_still_make_least() -> None:
    collector, ledger = collector_with({1: [50, 60], 2: [0, 90], 3: [80, 99], 4: [80, 97]}), Ledger(0, 3, 5)
    for group_id in (1, 2, 3):
        ledger.reserve(group_id, 5)
    lengths = Lengths(100)
    for task in range(200):
        lengths.ended(1000 + task, 1.0, [90, 100])
    assert to_cut(ledger, collector, lengths) == [3, 1]  # 2 has a member without a token, 4 is of no use to this step
    make(collector, 2, 0, 0, [1])
    assert to_cut(ledger, collector, lengths) == [3, 1, 2]
    make(collector, 3, 0, 80, [STOP])
    make(collector, 3, 1, 99, [STOP])
    assert collector.progress_of(3) is None and to_cut(ledger, collector, lengths) == [1, 2]  # it only waits for its reward
    ledger.occupy(3, 5)
    assert to_cut(ledger, collector, lengths) == [1, 2]


def test_what_comes_anyway_leaves_less_to_cut() -> None:
    collector, ledger = collector_with({1: [50, 60], 2: [7, 7]}), Ledger(1, 1, 5)
    ledger.reserve(1, 5)
    ledger.reserve(2, 5)
    assert len(to_cut(ledger, collector, Lengths(100))) == 1
    for member in (0, 1):
        make(collector, 2, member, 7, [STOP])
    assert to_cut(ledger, collector, Lengths(100)) == []


def test_members_beyond_need_may_lack_a_token() -> None:
    collector, ledger = collector_with({1: [50, 0, 60]}, extra=1), Ledger(0, 1, 5)
    ledger.reserve(1, 5)
    assert to_cut(ledger, collector, Lengths(100)) == [1]


def test_patience_is_for_one_step_without_a_break() -> None:
    patience = Patience(5.0)
    assert [patience.over(step, now) for step, now in ((0, 1.0), (0, 5.9), (0, 6.0), (0, 7.0))] == [False, False, True, True]
    assert [patience.over(step, now) for step, now in ((1, 7.5), (1, 12.4), (None, 12.5), (1, 12.6), (1, 17.5))] == [False] * 5
    assert patience.over(1, 17.7)
    assert not Patience(0.0).over(0, 1e9)


def test_the_account() -> None:
    def trajectory(length: int, finish: Finish) -> Trajectory:
        return Trajectory(
            prompt_ids=(1,), completion_ids=(2,) * length, logprobs=(-1.0,) * length, spans=(Span(V5, 0, length),),
            reward=0.0, finish=finish, node="n", seed=0,
        )

    redundancy = Redundancy()
    assert redundancy.metrics() == {
        f"redundancy/{name}": 0 for name in ("surplus_groups", "surplus_sequences", "surplus_tokens", "truncated")
    }
    redundancy.surplus_group(7, [4], [6, 0])
    redundancy.surplus_members([10])
    assert redundancy.spared == {7}
    redundancy.finished(Group(1, 7, (trajectory(3, "stop"), trajectory(5, "length"), trajectory(20, TRUNCATED))))
    assert redundancy.spared == set()
    first = {
        "surplus_groups": 1, "surplus_sequences": 4, "surplus_tokens": 20, "truncated": 1,
        "kept_mean_length": 4.0, "cut_mean_length": 12.0,
    }  # fmt: skip
    assert redundancy.metrics() == {f"redundancy/{name}": value for name, value in first.items()}
    redundancy.surplus_members([30])
    metrics = redundancy.metrics()
    assert metrics["redundancy/cut_mean_length"] == 30.0 and "redundancy/kept_mean_length" not in metrics
    said_of = lambda values: cut_short(RunState.of({"redundancy": values}))
    assert said_of(Redundancy().total.values()) == "" == said_of({})
    said = "5 surplus sequences (1 surplus groups among them, 50 tokens), 1 truncated; mean tokens 16 cut, 4 kept"
    assert said_of(redundancy.total.values()) == said
    assert redundancy.total.values() == first | {"surplus_sequences": 5, "surplus_tokens": 50, "cut_mean_length": 16.5}
