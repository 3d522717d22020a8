"""`shoal bench engine`, small, with the engine that is always there: its parts meet, and its numbers add up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from netem.bench.engine.bench import EngineBench, bench_engine
from netem.bench.engine.table import describe
from tests.support.nightly import nightly

pytestmark = pytest.mark.e2e


@nightly
def test_pauses_and_tokens_of_a_transformers_node(tmp_path: Path) -> None:
    bench = EngineBench(
        engine="transformers", python=sys.executable, rounds=1, pauses=2, throughput=("0.45m",), sizes=("0.45m",), count=32,
        new=16,
    )  # fmt: skip
    result = bench_engine(bench, tmp_path, print)
    (size,), (row,) = result["sizes"], result["throughput"]
    for columns in (result["pause"]["ours"], size["all"], size["tenth"]):
        assert 0 < columns["apply_s"]["median"] <= columns["pause_s"]["median"]
        assert columns["first_step_s"]["median"] > 0 and columns["gap_s"]["median"] > 0
    assert size["tenth"]["bytes"]["median"] < size["all"]["bytes"]["median"] <= size["state_bytes"]
    assert set(row["tokens_per_s"]) == {"process", "node"} and row["tokens_per_s"]["node"]["median"] > 0
    assert set(row["cpu"]) == {"head", "agent", "engine"} and result["holds"] == {} and result["ok"]
    assert "a node: head, links, agent and engine" in describe(result) and not list(tmp_path.iterdir())
