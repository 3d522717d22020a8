"""What is kept of nodes that came once is bounded, however many identities a ticket brings."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.audit.calibration import Calibration, NodeArithmetic
from learner.audit.node_tests import MOST_TESTED
from learner.audit.plan import AuditPlan, ToldKind
from learner.economy.bill import Bill
from learner.economy.candidates import Rules
from learner.economy.exploration import Exploration, Trial
from learner.economy.rates import NodeRates
from learner.head.trust import Trust
from learner.journal.journal import Journal
from learner.journal.records import Piece, ReservedGroup
from learner.rollouts.outcomes import Accepted
from learner.rollouts.rescue import Rescue
from learner.standing.mismatch import MismatchWatch
from learner.standing.port import NobodyDoubted
from learner.standing.standing import Standing, StandingRules
from p2p.forgetting import MOST_NODES, forget_oldest, renewed
from p2p.version import Version
from tests.unit.test_audit_plan import group, trajectory

MANY = 2 * MOST_NODES
"""Identities that came."""


def test_the_oldest_go_but_for_those_that_stay() -> None:
    known = {str(i): i for i in range(20)}
    renewed(known, "1")
    assert forget_oldest(known, 20) == []
    known["20"] = 20
    assert forget_oldest(known, 20, {"0", "3"}.__contains__) == ["2", "4", "5"]
    assert len(known) == 18 and {"0", "3", "1"} <= known.keys()


def test_what_the_trainer_was_handed_and_what_did_not_fit() -> None:
    trust = Trust(StandingRules(), {"here": Any}, wall=lambda: 0.0, expel=lambda peer, why: None)  # type: ignore[dict-item]
    trust.handed([group(0, trajectory("here", 7))])
    for i in range(MANY):
        trust.handed([group(i, trajectory(f"n{i}"))])
        trust.mismatch.add({f"n{i}": (10, 1.0)})
    assert len(trust.trained) <= MOST_NODES and trust.trained["here"] == 7 and trust.trained[f"n{MANY - 1}"] == 10
    assert len(trust.mismatch.seen) <= MOST_NODES and trust.mismatch.mean(f"n{MANY - 1}") == 0.1 and not trust.mismatch.mean("n0")


def test_who_is_trained_on_again_is_not_the_oldest() -> None:
    watch = MismatchWatch()
    watch.add({"old": (10, 1.0)})
    for i in range(MANY):
        watch.add({f"n{i}": (10, 1.0)} | ({"old": (10, 1.0)} if i % 1000 == 0 else {}))
    assert watch.seen["old"] > 10


def test_tests_of_nodes_that_are_gone() -> None:
    here = {"here": ToldKind(NodeArithmetic("transformers", "float32", "cpu"))}
    plan = AuditPlan(b"s" * 16, 1, Standing(StandingRules(checks=True)), Calibration({}), kind_of=here.get)
    for node in ["here", *(f"n{i}" for i in range(2 * MOST_TESTED))]:
        if node != "here":
            here[node] = here["here"]
        plan.whole(group(1, trajectory(node)))
        (check,) = plan.next(1000)
        plan.found(check, [None])
        plan._tests.test(node, check.kinds[0])  # as `found` does with what scoring gave
        if node != "here":
            del here[node]
    assert plan.tests("here") and plan.tests(f"n{2 * MOST_TESTED - 1}") and not plan.tests("n0")
    kept = (plan._tests, plan._kinds)  # what is kept has no other face
    assert all(len(of) <= MOST_TESTED for of in kept), [len(of) for of in kept]


def test_what_is_counted_of_who_holds_nothing() -> None:
    collector: Any = SimpleNamespace(
        tokens_by_node={}, failures_by_node={}, progress=lambda: {"here": {"r": 1}}, working=lambda node: []
    )
    nobody: Any = SimpleNamespace(progress=dict, working=lambda node: [])
    told: list[tuple[str, int]] = []

    class Told(NobodyDoubted):
        def ended(self, peer: str, tokens: int) -> None:
            told.append((peer, tokens))

    rescue = Rescue(
        collector, SimpleNamespace(), Told(), stall_s=30, beside=lambda: nobody, report=print, cancel=print, send=print  # type: ignore[arg-type]
    )
    for node in ["here", "gone", *(f"n{i}" for i in range(MANY))]:
        collector.tokens_by_node[node] = 5
        collector.failures_by_node[node] = 1
        rescue.ended_at(node, "r", Accepted("r", 1), 0.0)
    rescue.look(1.0, list)
    kept = (collector.tokens_by_node, collector.failures_by_node, rescue.ended, rescue._credited)  # has no other face
    assert all(len(each) <= MOST_NODES for each in kept) and rescue.ended["here"] == 1
    collector.tokens_by_node["gone"] = collector.tokens_by_node.get("gone", 0) + 3
    rescue.ended_at("gone", "r", Accepted("r", 1), 2.0)
    assert told[-1] == ("gone", 3), "nothing is credited twice"


def test_accounts_and_rates() -> None:
    bill, rates = Bill(), NodeRates()
    bill.state("paid", 0.0, "active", 3600.0)
    for i in range(MANY):
        bill.hold_back(f"n{i}", 0.0)
        bill.state(f"n{i}", 0.0, "active", 99.0)
        bill.left(f"n{i}", 1.0)
        rates.observe(f"n{i}", 0.0, 10.0, 10.0, True, "kind")
    bill.left("paid", 1.0)
    assert [(row.peer, row.usd) for row in bill.rows()] == [("paid", 1.0)]
    assert len(rates._rates) <= MOST_NODES and len(rates._kinds) <= MOST_NODES  # what is kept has no other face


def test_nodes_that_were_tried() -> None:
    exploration = Exploration(Rules())
    for i in range(MANY):
        exploration.trials[f"n{i}"] = Trial(0.0, 10.0, 0.0)
        exploration.end(f"n{i}", 10.0)
    assert len(exploration.tried) <= MOST_NODES and f"n{MANY - 1}" in exploration.tried


def test_rows_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.journal.journal.MOST_ROWS", 100)
    monkeypatch.setattr("learner.journal.journal.FORGET_EVERY", 10)
    clock = iter(range(10**6))
    with Journal.open(tmp_path / "journal.db", "run", clock=lambda: float(next(clock))) as journal:
        journal.new_epoch()
        journal.record_node("worked", "w", tokens=5)
        journal.record_reserved([ReservedGroup(0, 0, Version(1, 0), samples=200, spec_digest=0)])
        for i in range(150):
            journal.record_tokens([Piece(0, i, 0, Version(1, 0), b"abcd", b"abcd", f"m{i}")])
        journal.cut_tokens([(0, i, 0) for i in range(120)])
        for i in range(300):
            journal.record_node(f"n{i}", f"name {i}")
        assert journal.node_name("worked") == "w" and journal.node_name("n299") == "name 299" and not journal.node_name("n0")
        journal.record_tokens([Piece(0, 160, 0, Version(1, 0), b"abcd", b"abcd", "m5")])
        (left,) = journal.unfinished()
        assert [piece.node for piece in left.members[125]] == ["m125"] and [piece.node for piece in left.members[160]] == ["m5"]
    db = sqlite3.connect(tmp_path / "journal.db")
    rows = [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("nodes", "makers")]
    db.close()
    assert rows[0] <= 100 and rows[1] == 31


def test_crowds_that_are_expelled_push_out_nobody_who_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be expelled is free. Who was barred, even long ago, stayed before a proven node: 10,000 identities undid standing."""
    monkeypatch.setattr("learner.standing.standing.MOST_RECORDS", 64)
    standing = Standing()
    standing.ended("proven", 5_000_000)
    for i in range(500):
        standing.expel(f"crowd{i}", "a malformed message", float(i))
    assert standing.proven("proven") and len(standing) <= 64
    assert standing.barred_s("crowd499", 500.0) > 0
