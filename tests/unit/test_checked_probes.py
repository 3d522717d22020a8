"""Which tokens of probes are checked, and what it costs the head, without links."""

from __future__ import annotations

from itertools import pairwise

import pytest

from learner.audit.plan import SOON_TOKENS
from learner.audit.waiting import PEER_TOKENS
from learner.rollouts.probe import FreeNode, Probe
from learner.rollouts.probes import ProbeBook
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version
from tests.unit.test_long_ones import batches, long_plan

V1, STOP = Version(1, 0), 0


def given(limit: int, prompt: int = 2) -> ProbeBook:
    """One probe, at "a"."""
    book = ProbeBook(50, None, draw=lambda: 0.0)
    book.published(V1)
    request = Generate("7.0.0", (1,) * prompt, limit, (STOP,), 3, V1)
    assert book.give([("other", GenerateRequest.of(request))], [FreeNode("a", V1, 4)], 0.0)
    return book


def said(book: ProbeBook, start: int, ids: list[int], finish: str = "") -> Probe:
    probe = book.tokens("a", TokenEvent.of("7.0.0", start, ids, [-1.0] * len(ids), V1, finish), 1.0).probe
    assert probe is not None
    return probe


@pytest.mark.parametrize("finish", ["interrupt", "stop", "lost"])
def test_all_of_a_probe_is_checked_whether_it_ended_or_not(finish: str) -> None:
    """A node that gave a copy back after 400 tokens had 300 of them checked."""
    book, plan = given(1000), long_plan()
    plan.on_alert = lambda: True
    made = 0
    for _ in range(40):
        plan.probe(said(book, made, [5] * 10))
        made += 10
    if finish == "lost":
        (probe,) = book.lost("a", 2.0)
    else:
        probe = said(book, made, [STOP] if finish == "stop" else [], finish)
    assert plan.probe(probe) and probe.over and probe.ended == (finish == "stop")
    parts = sorted((p.first, p.stop) for check in batches(plan) for p in check.parts)
    assert parts[0][0] == 0 and parts[-1][1] == probe.tokens >= made
    assert all(a[1] == b[0] for a, b in pairwise(parts)), "and none twice"
    assert plan.counts["probed"] == probe.tokens


@pytest.mark.parametrize("behind", [False, True])
def test_a_copy_that_its_node_can_tell_is_no_whole_completion_that_was_sound(behind: bool) -> None:
    book, plan = given(1000), long_plan()
    probe = said(book, 0, [5, 5, STOP], "stop")
    probe.behind = behind
    assert plan.probe(probe)
    (check,) = batches(plan)
    assert check.whole is not behind


def test_a_long_probe_that_comes_token_by_token_costs_the_head_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """One message of 8,192 tokens held the head for three seconds once what waited of the node had no more room."""
    looks, so_far = [0], Probe.so_far

    def counted(probe: Probe) -> object:
        looks[0] += 1
        return so_far(probe)

    monkeypatch.setattr(Probe, "so_far", counted)
    limit = PEER_TOKENS
    book, plan = given(limit, prompt=200), long_plan()
    plan.on_alert = lambda: True
    for i in range(limit):
        plan.probe(said(book, i, [5]))
        assert plan.waiting_tokens <= SOON_TOKENS or i == limit - 1
    assert looks[0] <= 20 and not plan.counts["dropped"]
    (waits,) = batches(plan)
    assert [(p.first, p.stop) for p in waits.parts] == [(0, limit)], "in place of what waited of it before"
    assert plan.counts["probed"] == limit
