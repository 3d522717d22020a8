"""What `shoal bench trainer` measures of what it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from netem.bench.trainer import bench
from netem.bench.trainer.bench import TrainerBench
from netem.cli.trainer_verbs import LONG_ROW, MEMORY, SAVED, SPEED


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
