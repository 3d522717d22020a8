"""A run of the built-in game, as real processes: the default evaluation and a table's play whole episodes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from learner.config import build_config, dump_toml
from netem.demo.recipes import RECIPES
from netem.demo.tiny_model import build_random_model
from netem.processes.children import Children
from tests.e2e.test_run import metrics
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e


def test_a_game_is_evaluated_by_whole_episodes(shoal: Children, tmp_path: Path) -> None:
    model = build_random_model(tmp_path / "model", size="0.4m", characters="<>?")
    run_dir, config = tmp_path / "run", tmp_path / "learner.toml"
    settings = RECIPES["reverse"].config(run_dir, model, 2, 0)
    settings["task"] = {"name": "guess_number", "options": {"numbers": 2, "guesses": 3}}
    settings["environment"] = {"max_turns": 3, "turn_tokens": 1}
    settings["rollout"] |= {"groups_per_step": 2, "samples": 4, "max_new_tokens": 8, "micro_batch_groups": 2}
    settings["rollout"]["equal_groups"] = "train"
    settings["trainer"] |= {"eval_size": 8, "eval_every": 1}
    settings["eval"] = [{"name": "often", "prompts": 4, "samples": 4, "temperature": 1.0}]
    config.write_text(dump_toml(build_config(settings, "test").model_dump(exclude_none=True)))
    learner = shoal.start("learner", "learner", str(config), "--json")

    def hosts() -> int:
        children = psutil.Process(learner.pid).children()
        return sum("learner.environments.host_child" in " ".join(p.cmdline()) for p in children)

    until("a ticket", (run_dir / "ticket.txt").exists, shoal)
    until("environments' processes", lambda: hosts() == 2, shoal)  # training's, and the evaluations' own
    node = shoal.start("node", "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(tmp_path / "node"), "--name", "one",
                       "--listen", "/ip4/127.0.0.1/tcp/0", "--capacity", "16", "--json")  # fmt: skip
    assert status_of(learner, shoal) == 0, shoal.said("learner")
    assert status_of(node, shoal) == 0, shoal.said("node")
    lines = metrics(run_dir)
    default = [line for line in lines if "eval/exact/mean" in line]
    often = [line for line in lines if "eval/often/pass@4" in line]
    assert often[-1]["step"] == default[-1]["step"] == 2 and "evaluation of version 1.2" in shoal.said("learner")
    for line in [*default, *often]:
        name = "often/" if line in often else ""
        assert line[f"eval/{name}finished"] == 1.0 and 1 <= line[f"eval/{name}completions/mean_length"] <= 8
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["step"] == 2
