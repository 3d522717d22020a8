"""Scenarios and fleets of `shoal simulate`: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from netem.planning.cost_scenario import build_scenario, load_preset, load_scenario, preset_names
from netem.planning.priced_fleet import nodes_of, rows_of_csv
from netem.planning.runner import explained
from netem.planning.traces import spot_trace
from p2p.errors import UsageError

NODE: dict[str, Any] = {"kind": "a", "usd_per_hour": 1.0, "tokens_per_s": 100.0}


def refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        build_scenario({"fleet": {"nodes": [NODE]}, **values}, "x.toml", Path())


def test_what_is_not_known_is_refused_by_name() -> None:
    refused({"learner": {"tarin_s": 3.0}}, r"x.toml: learner.tarin_s: unknown key")
    refused({"fleet": {"nodes": [{**NODE, "gpu": "L40S"}]}}, "give gpu or tokens_per_s")
    refused({"fleet": {"nodes": [{"kind": "a", "usd_per_hour": 1.0, "gpu": "L41"}]}}, "no GPU 'L41'")
    refused({"fleet": {"nodes": [NODE, NODE]}}, "two rows are called 'a'")
    refused({"fleet": {"nodes": [{**NODE, "availability": "sometimes"}]}}, "availability 'sometimes'")
    refused({"fleet": {"nodes": []}}, "no nodes")
    refused({"steps": 4}, "the first 4 are not counted")
    refused({"activation": {"margin": 0.3, "release": 0.1}}, "nodes would come and go")


def test_a_csv_is_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text(
        "# rented\nkind,count,usd_per_hour,gpu,tokens_per_s,availability\nfast,2,0.5,L40S,,always\nslow,3,0.1,,80,trace t.csv\n"
    )
    (tmp_path / "t.csv").write_text("seconds,nodes\n0,3\n10,1\n20,2\n")
    (tmp_path / "s.toml").write_text('[fleet]\nfile = "fleet.csv"\n')
    scenario = load_scenario(tmp_path / "s.toml")
    assert [(row.kind, row.count) for row in scenario.rows] == [("fast", 2), ("slow", 3)]
    nodes = nodes_of(scenario.rows, tmp_path, 100.0, 0)
    inf = float("inf")
    assert [n.there for n in nodes] == [((0.0, inf),)] * 2 + [((0.0, inf),), ((0.0, 10.0), (20.0, inf)), ((0.0, 10.0),)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kind,usd_per_hour\n", "no rows"),
        ("kind,usd_per_hour,tokens_per_s\na,cheap,3\n", "row 1: usd_per_hour: 'cheap' is no number"),
        ("kind,usd_per_hour,tokens_per_s,price\na,3,1,2\n", "price: unknown column"),
        ("kind,usd_per_hour\na,3,4\n", "columns are named"),
    ],
)
def test_a_csv_that_is_none_says_where(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "f.csv").write_text(text)
    with pytest.raises(UsageError, match=word):
        rows_of_csv(tmp_path / "f.csv")


def test_values_are_changed_by_dotted_keys_and_lists_are_replaced() -> None:
    scenario = build_scenario({"fleet": {"nodes": [NODE]}}, "x.toml", Path())
    assert scenario.with_value("fleet.nodes.0.usd_per_hour", 2.0).rows[0].usd_per_hour == 2.0
    assert scenario.with_value("policy.staleness", 5).file.policy.staleness == 5
    assert scenario.rows[0].usd_per_hour == 1.0
    assert scenario.changed({"fleet": {"nodes": [{**NODE, "kind": "b"}]}}).rows[0].kind == "b"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_read_and_its_assumptions_are_of_keys_that_it_has(name: str) -> None:
    scenario = load_preset(name)
    for system in scenario.file.systems:
        scenario.changed(system.set)
    assert all(row["value"] is not None and row["why"] for row in explained(scenario))
    assert bool(scenario.file.systems) == bool(scenario.file.published) == bool(scenario.file.assumptions)
    assert all(a.tries for a in scenario.file.assumptions if a.kind == "fitted" and a.key != "learner.samples")


def test_a_spot_trace_has_the_mean_that_was_asked() -> None:
    trace = spot_trace(3.76, 7, 10_900.0, 50_000.0, 3)
    until = [at for at, _ in trace[1:]] + [50_000.0]
    mean = sum(count * (end - at) for (at, count), end in zip(trace, until, strict=True)) / 50_000.0
    assert mean == pytest.approx(3.76, rel=0.03)
    assert max(count for _, count in trace) <= 7
