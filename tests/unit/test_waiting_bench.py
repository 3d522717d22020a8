"""`shoal bench waiting` on its smallest model: what it counts, not how long it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.bench.waiting.bench import PARTS, WAITS, bench_waiting, describe
from p2p.errors import UsageError


def test_it_tells_what_a_step_waited(tmp_path: Path) -> None:
    said: list[str] = []
    result = bench_waiting("0.45m", 3, 4, 16, compare=True, folder=tmp_path, say=said.append)
    assert list(result["runs"]) == ["beside", "waiting"] and len(said) == 2
    for run in result["runs"].values():
        assert set(run["seconds"]) == set(PARTS) and 0 < run["waits_share"] <= run["waits_share_max"] <= 1
        assert run["seconds"]["time/step"] >= max(run["seconds"][part] for part in WAITS)
        assert 12 * run["parameters"] <= run["checkpoint_bytes"] < 12.5 * run["parameters"] + 100_000
    assert "waits for checkpoints" in describe(result) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("model", "steps", "rows"), [("7t", 3, 4), ("0.45m", 1, 4), ("0.45m", 3, 5)])
def test_what_makes_no_sense_is_refused(model: str, steps: int, rows: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        bench_waiting(model, steps, rows, 16, compare=False, folder=tmp_path, say=print)
