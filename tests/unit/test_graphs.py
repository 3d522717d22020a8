"""CUDA graphs of vLLM's engine: what vLLM is asked for by the setting, and what a bench of them says and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from netem.bench.engine.graphs import GraphsBench, bench_graphs, describe_graphs
from node.engine.settings import VllmSettings
from node.engine.vllm.compat import graph_arguments
from p2p.errors import UsageError

ROW: dict[str, Any] = {
    "graphs": "decode", "start_s": 14.57, "speeds": [{"sequences": 8, "tokens_per_s": 2035.9, "step_s": 0.00377}],
    "commits": [{"stage_s": 0.06, "pause_s": 0.49, "apply_s": 0.19}],
    "apart": {"mean": 0.0076, "most": 0.035, "other": 0.78, "tokens": 3072},
}  # fmt: skip


def test_graphs_are_a_gpus() -> None:
    assert graph_arguments("auto", cpu=True) == graph_arguments("none", cpu=False) == {"enforce_eager": True}
    assert graph_arguments("auto", cpu=False) == graph_arguments("decode", cpu=False)
    asked = graph_arguments("decode", cpu=False)
    assert "enforce_eager" not in asked and asked["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert graph_arguments("compiled", cpu=False) == {}, "vLLM's own default"
    with pytest.raises(ValueError, match="graphs 'all' is none of auto, none, decode, compiled"):
        VllmSettings(graphs="all")  # type: ignore[arg-type]


def test_a_bench_says_what_it_measured_and_what_failed() -> None:
    text = describe_graphs({"model": "0.6b", "dtype": "bfloat16", "rank": 16, "rows": [ROW, {"graphs": "none", "failed": "why"}]})
    assert "an adapter of rank 16" in text and "none         failed: why" in text
    assert "starts in 14.6 s; tokens/s: 2,036 of 8 at once (3.8 ms a step)" in text
    assert "0.490 (copy 0.190)" in text and "0.0076 (0.035 at most), from the other 0.78" in text


@pytest.mark.parametrize("wrong", [{"ways": ("eager",)}, {"model": "7b"}, {"new": 0}, {"rank": -1}, {"sequences": (8, 0)}])
def test_it_refuses_what_there_is_not(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        bench_graphs(GraphsBench(**wrong), tmp_path, print)
