"""What came from each node of late."""

from __future__ import annotations

import math

import pytest

from learner.rollouts.deliveries import LATELY_S, Deliveries
from p2p.forgetting import MOST_NODES


def test_what_came_fades() -> None:
    deliveries = Deliveries()
    assert deliveries.last("a") == -math.inf and deliveries.lately("a", 0.0) == 0.0
    deliveries.came("a", 10, 1.0)
    deliveries.came("a", 5, 1.0 + LATELY_S)
    deliveries.came("a", 0, 99.0)
    assert deliveries.last("a") == 1.0 + LATELY_S, "nothing is nothing"
    assert deliveries.lately("a", 1.0 + LATELY_S) == pytest.approx(5 + 10 / math.e)
    assert deliveries.lately("a", 1.0 + 2 * LATELY_S) == pytest.approx(5 / math.e + 10 / math.e**2)


def test_nodes_of_long_ago_are_forgotten() -> None:
    deliveries = Deliveries()
    for number in range(MOST_NODES + 2):
        deliveries.came(f"n{number}", 1, float(number))
    deliveries.came("n0", 1, 1e5)
    deliveries.forget("n1".__eq__)
    assert deliveries.last("n0") == 1e5 and deliveries.last("n1") == 1.0 and deliveries.last("n2") == -math.inf
