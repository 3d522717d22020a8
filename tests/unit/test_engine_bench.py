"""`shoal bench engine`: what is computed from its measurements, and who is asked what."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from netem.bench.engine import vllm_alone
from netem.bench.engine.bench import EngineBench, bench_engine, node_share, spread, verdicts
from netem.bench.engine.models import Model, prompts
from netem.bench.engine.table import describe
from p2p.errors import UsageError
from p2p.layout import Layout


def one(value: float) -> dict[str, float]:
    return spread([value])


def test_medians_and_quartiles() -> None:
    assert spread([3.0]) == {"median": 3.0, "low": 3.0, "high": 3.0, "n": 1}
    found = spread([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found["low"], found["median"], found["high"]) == (2.0, 3.0, 4.0)


def test_a_node_is_compared_turn_by_turn_with_the_better_layout() -> None:
    made = {"node": [90.0, 45.0], "offline": [100.0, 50.0], "spread": [120.0, 10.0]}
    share = node_share(made)
    assert share is not None and share["median"] == pytest.approx(0.9)
    assert node_share({"node": [1.0]}) is None


def result(pause_s: float, apply_s: float, share: float) -> dict[str, object]:
    ours = {name: one(0.01) for name in ("call_s", "stage_s", "gap_s", "first_step_s", "bytes")}
    ours |= {"pause_s": one(pause_s), "apply_s": one(apply_s), "apply_gbps": one(2.0)}
    theirs = {name: one(0.025) for name in ("call_s", "gap_s", "bare_s", "bare_gap_s")}
    found = {
        "cores": 2, "dtype": "float32", "load_before": 0.5, "load_after": 1.0,
        "pause": {"model": "0.45m", "parameters": 450_000, "sequences": 32, "vllm": theirs, "ours": ours, "apply_gbps": one(0.5)},
        "sizes": [{"model": "0.45m", "parameters": 450_000, "sequences": 32, "step_s": one(0.002), "state_bytes": 1_800_000,
                   "all": ours, "tenth": ours}],
        "throughput": [{
            "model": "57m", "parameters": 57_000_000, "prompts": 64, "length": 40, "new": 64, "running": 32,
            "tokens_per_s": {"node": one(90.0), "offline": one(100.0)}, "cpu": {"head": one(0.1)}, "node_share": one(share),
        }],
    }  # fmt: skip
    return found | {"holds": verdicts(found)}


def test_what_holds_is_judged_by_medians() -> None:
    assert result(0.040, 0.003, 0.91)["holds"] == {"pause": True, "apply": False, "throughput 57m": True}
    assert result(0.041, 0.003, 0.89)["holds"] == {"pause": False, "apply": False, "throughput 57m": False}
    told = describe(result(0.041, 0.003, 0.91))
    assert "DOES NOT HOLD: pause" in told and "holds: throughput 57m" in told
    assert "a node makes 91.0%" in told and "20 ms of it a sleep" in told


def test_without_vllm_beside_it_nothing_is_judged() -> None:
    found = result(0.04, 0.003, 0.9)
    found["pause"]["vllm"] = {}  # type: ignore[index]
    found["throughput"][0]["node_share"] = None  # type: ignore[index]
    assert verdicts(found) == {}
    describe(found | {"holds": {}})


def test_all_are_given_the_same_prompts() -> None:
    ask = {"seed": 7, "count": 3, "length": 5, "vocabulary": 48}
    assert [tuple(ids) for ids in vllm_alone.prompts(ask)] == prompts(7, 3, 5, 48)


def test_a_part_of_a_model_is_whole_tensors() -> None:
    layout = Layout.build([(f"t{i}", "float32", (i + 1,)) for i in range(20)])
    model = Model("x", Path(), None, layout, (Path("a"), Path("b")), 48, 210, 0)
    some = model.some(0.1)
    assert len(some) == 2 and set(some) < set(model.some(1)) == set(layout.by_name)
    assert model.touched(model.some(1)) == 4 * 210
    assert model.state(3).path == Path("b") and model.state(4).version.step == 4


def test_what_makes_no_sense_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for wrong in (
        {"engine": "fake"}, {"rounds": 0}, {"running": 8}, {"new": 5000}, {"sizes": ("9b",)}, {"pause_model": "9b"},
        {"engine": "vllm", "python": sys.executable, "throughput": ("9b",)},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            bench_engine(EngineBench(**wrong), tmp_path, print)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
