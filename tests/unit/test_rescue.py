"""What is taken from nodes, and when it may come back to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from learner.rollouts.rescue import AVOID_S, HEDGE_S, Rescue
from learner.rollouts.silences import BEGIN_S, EARLY_S, HURRY, LEAST_ENDED, Usual
from learner.standing.port import NobodyDoubted
from p2p.errors import Refusal

STALL_S = 30.0


@pytest.mark.parametrize("gave_up", [False, True])
def test_what_was_taken_from_a_node_may_come_back_after_some_seconds_but_for_what_it_gave_up(gave_up: bool) -> None:
    member = SimpleNamespace(failed_on=set(), gave_up={"n"} if gave_up else set())
    held = {"n": {"7.0.0": 3}}
    taken: list[tuple[str, str]] = []
    refused: list[tuple[str, Refusal]] = []

    def declined(node: str, request_id: str, why: str, *, retryable: bool, avoid: bool) -> None:
        assert retryable and avoid
        member.failed_on.add(node)
        del held[node][request_id]

    collector: Any = SimpleNamespace(
        progress=lambda: held, working=lambda node: tuple(held[node]), declined=declined, tokens_by_node={},
        failures_by_node={}, books=SimpleNamespace(groups={7: SimpleNamespace(members=[member])}),
    )  # fmt: skip
    nobody: Any = SimpleNamespace(progress=dict, working=lambda node: (), owns=lambda peer, request_id: False)
    rescue = Rescue(
        collector, SimpleNamespace(), NobodyDoubted(), stall_s=STALL_S, beside=lambda: nobody,  # type: ignore[arg-type]
        report=lambda peer, why: refused.append((peer, why)), cancel=taken.extend, send=print,
    )  # fmt: skip
    at = 0.0
    while not taken:
        rescue.look(at, list)
        at += 1.0
    assert taken == [("n", "7.0.0")] and STALL_S < at < STALL_S + 3 and rescue.taken == 1
    assert [peer for peer, _ in refused] == ["n"]
    rescue.look(at - 1.0 + AVOID_S, list)
    assert member.failed_on == {"n"}
    rescue.look(at + AVOID_S, list)
    assert member.failed_on == ({"n"} if gave_up else set())


def test_a_copy_is_late_where_its_original_would_be_taken_and_when_its_group_is_over() -> None:
    """Who was silent for two seconds lost each copy, and kept the originals for which nobody waited."""
    collector: Any = SimpleNamespace(books=SimpleNamespace(groups={7: None, 8: None}))
    buffers: Any = SimpleNamespace(ledger=SimpleNamespace(blockers=lambda: [7]))
    nobody: Any = SimpleNamespace()
    rescue = Rescue(
        collector, buffers, NobodyDoubted(), stall_s=STALL_S, beside=lambda: nobody, report=print, cancel=print, send=print,
    )  # fmt: skip
    silences = rescue._silences  # what ended is told by a whole head otherwise
    for i in range(LEAST_ENDED):
        silences.ended("n", f"{i}.0.0", 0.0)
        silences.made("n", 100, 1.0)
    usual = silences.usual("n")
    assert usual == (EARLY_S, HURRY * BEGIN_S, 100.0)

    def at(now: float) -> list[bool]:
        late = rescue.impatience(now)
        return [late("n", f"{group}.0.0") == usual for group in (7, 8, 9)]

    assert at(0.0) == [False, False, True], "nobody waits; the group of the last is over"
    rescue._waits = 0.0  # the trainer waits, as a head finds out
    assert at(HEDGE_S / 2) == [False, False, True]
    assert at(HEDGE_S) == [True, False, True], "for the group of the first"
    assert rescue.impatience(1.0)("n", "8.0.0") == Usual()
