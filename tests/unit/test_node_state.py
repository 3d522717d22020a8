"""What the head believes of what a node says of itself."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from learner.head.node_state import DELIVERED, DELIVERY_S, MAX_BYTES, NodeState
from p2p.protocol.generation import NodeStatus
from p2p.version import Version


def status(running: int, rate: float, capacity: int = 8) -> NodeStatus:
    return NodeStatus(True, Version(1, 1), running, 0, capacity, 0, rate, 1, 1)


def told(state: NodeState, seconds: int, running: int, rate: float, delivers: float, load: int) -> tuple[int, float] | None:
    """What is believed after it has said the same each second and delivered so much."""
    start = int(state.heard)
    for second in range(start, start + seconds + 1):
        state.on_tokens(int(delivers) if second > start else 0)
        state.on_status(status(running, rate), float(second))
    return state.believed(status(running, rate), load)


def test_an_honest_node_is_believed_once_it_has_delivered_for_a_while() -> None:
    state = NodeState(Mock(), 0.0, None)
    assert told(state, int(DELIVERY_S[0]) - 1, 4, 100.0, 100.0, 5) is None
    assert told(state, 1, 4, 100.0, 100.0, 5) == (4, 100.0)


def test_a_node_that_boasts_is_believed_as_far_as_it_delivers() -> None:
    state = NodeState(Mock(), 0.0, None)
    seen = told(state, 10, 4, 1e9, 100.0, 5)
    assert seen == (4, pytest.approx(DELIVERED * 100.0))
    # It has stopped: what it delivered long ago no longer speaks for it.
    seen = told(state, int(DELIVERY_S[1]), 4, 1e9, 0.0, 5)
    assert seen is not None and seen[1] == 0.0


def test_nor_does_it_run_less_than_it_holds_or_more_than_it_was_given() -> None:
    state = NodeState(Mock(), 0.0, None)
    assert told(state, 10, 1, 100.0, 100.0, 8) is None  # so each would look eight times as fast
    assert state.believed(status(9, 100.0), 8) is None
    assert state.believed(status(4, 100.0), 8) == (4, 100.0)
    assert state.believed(status(8, 100.0), 20) == (8, 100.0)  # the others wait


@pytest.mark.parametrize(("says", "room"), [(0, 0.0), (5000, 5000.0), (-3, 0.0), (1 << 80, float(MAX_BYTES))])
def test_what_its_engine_can_hold_reaches_the_dispatcher(says: int, room: float) -> None:
    state = NodeState(Mock(), 0.0, None)
    state.on_status(replace(status(1, 1.0), kv_tokens=says), 1.0)
    assert state.view(0, 1, 1.0).room == room
