"""`shoal bench head`, small: its numbers add up. What they are on a quiet machine is in bench/head.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.bench.head.bench import HeadBench, bench_head, describe
from p2p.errors import UsageError
from tests.support.watchdog import PATIENCE_S

pytestmark = pytest.mark.e2e


def test_a_few_nodes_stream_to_a_real_head(tmp_path: Path) -> None:
    said: list[str] = []
    bench = HeadBench(nodes=4, rate=1000.0, seconds=1.0, sequences=4, length=10.0, settle=0.5)
    result = bench_head(bench, tmp_path, said.append)
    assert result["lost"] == 0 and result["refusals"] == 0
    assert result["nodes"] == 4 and result["accepted_per_s"] > 100
    # Nothing was made up: what was accepted was sent, and what was not is at most what came in the last moment.
    assert 0 <= result["backlog_end"] <= 4 * 1000.0
    assert 0 < result["accept_s"]["p50"] < result["accept_s"]["p99"] < PATIENCE_S
    assert 0 < result["journal_s"]["p50"] < PATIENCE_S
    assert result["cpu_per_s"] > 0 and result["rss_end"] > 0 and not list(tmp_path.iterdir())
    assert "4 nodes x 4 sequences" in describe(result) and "joined" in said[0]


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for wrong in ({"nodes": 0}, {"rate": 0.0}, {"seconds": -1.0}, {"length": 1.0}, {"flush_s": -1.0}, {"sequences": 0}):
        with pytest.raises(UsageError):
            bench_head(HeadBench(**wrong), tmp_path, print)
