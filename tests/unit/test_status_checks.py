"""What a node may not say of itself."""

from __future__ import annotations

import pytest

from learner.head.status_checks import check_status
from p2p.errors import Refusal
from p2p.protocol.generation import ComputesWith, NodeStatus
from p2p.version import Version

STATUS = NodeStatus(True, Version(1, 3), 0, 0, 4, 0, 0.0, 1, 1)
KEEPS = NodeStatus(True, Version(1, 3), 0, 0, 4, 0, 0.0, 1, 1, computes=ComputesWith("vllm/float32/cpu", True))


def test_who_keeps_keys_and_values_is_told_why_it_may_not_where_its_work_is_checked() -> None:
    """By its own word nearly all that it made was of no version, and so was checked for nothing: 3.98 million tokens."""
    with pytest.raises(Refusal, match="--kv-policy recompute") as refused:
        check_status(KEEPS, Version(1, 3), True)
    assert refused.value.fatal
    check_status(KEEPS, Version(1, 3), False)  # the operator answers for it, or nothing is checked
    check_status(STATUS, Version(1, 3), True)


def test_nobody_serves_what_was_not_published() -> None:
    with pytest.raises(Refusal, match="not published"):
        check_status(STATUS, Version(1, 2), False)
