"""Who is read more slowly: nobody while there is time, then whoever takes more than its share; the others are not."""

from __future__ import annotations

import pytest

from p2p.membership.workload import BUSY, MOST, PeerLoad


def served(costs: dict[str, float], every: dict[str, float], seconds: float = 60.0) -> dict[str, float]:
    """Share of the last half of so many seconds that each peer takes, which sends a message of so much work every so often."""
    work, now, due, took = PeerLoad(), 0.0, dict.fromkeys(costs, 0.0), dict.fromkeys(costs, 0.0)
    while now < seconds:
        ready = [peer for peer in costs if due[peer] <= now]
        if not ready:
            now = min(due.values())
        for peer in ready:
            now += costs[peer]
            took[peer] += costs[peer] * (now > seconds / 2)
            due[peer] = now + max(work.spent(peer, costs[peer], now), every[peer])
    return {peer: spent / (seconds / 2) for peer, spent in took.items()}


def test_nobody_waits_while_there_is_time() -> None:
    work = PeerLoad()
    assert not any(work.spent(f"n{i % 100}", 0.0004, i / 1000) for i in range(60_000))  # 40 % of the time, all alike


def test_one_alone_is_never_slowed() -> None:
    assert served({"a": 0.01}, {"a": 0.0})["a"] == pytest.approx(1.0, abs=0.01)


def test_who_floods_is_slowed_and_the_others_are_not() -> None:
    shares = served({"flood": 0.04, "a": 0.001, "b": 0.001}, {"flood": 0.0, "a": 0.25, "b": 0.25})
    assert shares["flood"] <= BUSY and shares["a"] == pytest.approx(0.004, rel=0.15) == pytest.approx(shares["b"], rel=0.15)


@pytest.mark.parametrize("many", [8, 60])
def test_many_that_flood_share_what_one_may_take(many: int) -> None:
    floods = {f"f{i}": 0.02 for i in range(many)}
    shares = served(floods | {"a": 0.001}, dict.fromkeys(floods, 0.0) | {"a": 0.25}, 120.0)
    assert sum(shares[f] for f in floods) <= BUSY + 0.1 and max(shares[f] for f in floods) < MOST
    assert shares["a"] >= 0.003
