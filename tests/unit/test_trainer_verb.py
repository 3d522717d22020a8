"""What `shoal bench trainer` measures of what it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from netem.bench.trainer import bench
from netem.bench.trainer.bench import TrainerBench
from netem.bench.trainer.gpu import GpuCase, bench_on_gpu, describe_on_gpu
from netem.cli.trainer_verbs import LONG_ROW, MEMORY, SAVED, SPEED
from p2p.errors import UsageError
from tests.support.nightly import nightly


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[TrainerBench]:
    """What was to be measured, in place of doing it."""
    found: list[TrainerBench] = []

    def bench_trainer(what: TrainerBench, folder: Path | None, say: Any) -> dict[str, Any]:
        found.append(what)
        return {"ok": True, "saved": None, "memory": [], "rows": [], "speed": []}

    monkeypatch.setattr(bench, "bench_trainer", bench_trainer)
    return found


@pytest.mark.parametrize(
    ("arguments", "memory", "saved"),
    [
        ([], MEMORY, SAVED),
        (["--memory"], MEMORY, ""),
        (["--memory", "2m:512"], ("2m:512",), ""),
        (["--saved"], (), SAVED),
        (["--saved", "0.5b:128", "--memory"], MEMORY, "0.5b:128"),
        (["--saved", "", "--memory", "2m:64"], ("2m:64",), ""),
        (["--before", "/tree"], (), ""),
        (["--row"], (), ""),
        (["--before", "/tree", "--memory"], MEMORY, ""),
    ],
)
def test_what_is_asked_for_is_measured_and_nothing_else(
    measured: list[TrainerBench], arguments: list[str], memory: tuple[str, ...], saved: str
) -> None:
    assert shoal.main(["bench", "trainer", "--json", *arguments]) == 0
    assert measured[0].memory == memory and measured[0].saved == saved and measured[0].speed == SPEED


def test_a_long_row_is_asked_for_by_name(measured: list[TrainerBench]) -> None:
    assert shoal.main(["bench", "trainer", "--json", "--row", "--memory"]) == 0
    assert measured[0].rows == (LONG_ROW,) and measured[0].memory == MEMORY
    assert shoal.main(["bench", "trainer", "--json", "--row", "20m:512"]) == 0
    assert measured[1].rows == ("20m:512",)
    assert shoal.main(["bench", "trainer", "--json"]) == 0
    assert not measured[2].rows


def test_speed_is_compared_with_something(measured: list[TrainerBench], capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal.main(["bench", "trainer", "--speed", "2m:64"]) == 2 and not measured
    assert "--before TREE" in capsys.readouterr().err
    assert shoal.main(["bench", "trainer", "--speed", "2m:64", "--before", "/tree"]) == 0
    assert measured[0].speed == ("2m:64",) and measured[0].before == Path("/tree") and not measured[0].memory


@pytest.mark.parametrize("text", ["9b:64", "2m", "2m:64:sgd", "2m:64:lora", "2m:64:lora0", "2m:many"])
def test_a_case_for_a_gpu_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not SHAPE:TOKENS"):
        GpuCase.read(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_what_needs_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal.main(["bench", "trainer", "--gpu", "2m:64"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_steps_of_a_gpu_s_bench_run_on_a_processor_too(tmp_path: Path) -> None:
    """All but the device's memory."""
    [row] = bench_on_gpu(["2m:128:lora4"], tmp_path, lambda _: None, device="cpu")["gpu"]
    assert "failed" not in row and row["parameters"] > 1_800_000 and row["steps_tokens"] > row["computed"]
    assert {"forward and backward", "update", "publish", "snapshot"} <= row["median"].keys() and row["tokens_a_second"] > 0
    assert "2m" in describe_on_gpu({"gpu": [row]})
    assert not any(tmp_path.iterdir())


@nightly
def test_a_case_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    rows = bench_on_gpu(["2m:128:adamw_8bit"], tmp_path, lambda _: None, device="cpu")
    assert not rows["ok"] and "8" in rows["gpu"][0]["failed"]
    assert "failed: " in describe_on_gpu(rows)
