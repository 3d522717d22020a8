"""The bench of a hostile third: its cheats are strangers to the learner, as they would be."""

from __future__ import annotations

from pathlib import Path

from learner.config import build_config
from netem.bench.hostile.run import HostileRun, settings_of


def test_nobody_is_trusted_and_audits_are_on(tmp_path: Path) -> None:
    run = HostileRun(honest=2, hostile=True, seed=0, steps=3)
    config = build_config(settings_of(run, tmp_path / "run", tmp_path / "model"), "test")
    assert not config.standing.trusted and config.audit.share > 0 and config.trainer.eval_size == 0
    assert config.trainer.steps == 3
