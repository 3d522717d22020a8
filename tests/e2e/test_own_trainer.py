"""The README's two commands: the learner that waits for a trainer, and the example's plain PyTorch that drives it."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from learner.config import build_config, dump_toml
from netem.processes.children import Children
from tests.support.examples import ours, start_example
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e

EXAMPLE = "own_trainer.py"
STEPS, KILLED_AT = 20, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that reverses three digits now and then."""
    from learner.tasks.registry import make_task
    from netem.demo.tiny_model import build_demo_model

    folder = tmp_path_factory.mktemp("model") / "m"
    return build_demo_model(folder, make_task("reverse", 0, {"digits": 3}), target=0.1, batch=32)


def test_a_trainer_of_ones_own_trains_and_resumes(shoal: Children, tmp_path: Path, model: Path) -> None:
    run_dir, config = tmp_path / "run", tmp_path / "run.toml"
    settings = {
        "run_dir": str(run_dir), "model": str(model), "task": {"options": {"digits": 3}},
        "rollout": {"groups_per_step": 8, "samples": 16, "max_new_tokens": 5}, "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"]},
        "trainer": {"steps": STEPS},
    }  # fmt: skip
    config.write_text(dump_toml(build_config(settings, "test").model_dump()))
    learner = shoal.start("learner", "learner", str(config), "--external_trainer", "true", "--json")
    until("a ticket", (run_dir / "status.json").exists, shoal)
    node = shoal.start(
        "node", "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(tmp_path / "node"), "--capacity", "64", "--json",
        "--listen", "/ip4/127.0.0.1/tcp/0",
    )  # fmt: skip
    first = start_example(shoal, EXAMPLE, "first", str(run_dir), "--lr", "3e-4")

    def committed() -> int:
        return max((int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step_*[0-9]")), default=0)

    until("some steps", lambda: committed() >= KILLED_AT or first.poll() is not None, shoal)
    first.kill()
    assert status_of(learner, shoal) == 1 and "--resume" in shoal.said("learner")

    again = shoal.start("again", "learner", str(config), "--external_trainer", "true", "--resume", "--json")
    second = start_example(shoal, EXAMPLE, "second", str(run_dir), "--lr", "3e-4")
    assert status_of(second, shoal) == 0, (tmp_path / "second.out").read_text()
    assert status_of(again, shoal) == 0, shoal.said("again")
    assert status_of(node, shoal) == 0, shoal.said("node")

    result = shoal.result("again")
    assert (result["step"], result["version"], result["epoch"]) == (STEPS, f"2.{STEPS}", 2)
    assert result["max_staleness_seen"] <= 2 and result["trajectories"]["lost"] == 0
    assert shoal.result("node")["version"] == f"2.{STEPS}" and all(n["digest_ok"] for n in result["nodes"])
    db = sqlite3.connect(run_dir / "journal.sqlite")
    consumed = [row[0] for row in db.execute("SELECT group_id FROM consumed")]
    commits = [row[0] for row in db.execute("SELECT step FROM commits ORDER BY step")]
    db.close()
    assert len(consumed) == len(set(consumed)) == 8 * STEPS and commits == list(range(1, STEPS + 1))
    steps = re.findall(r"step (\d+): reward ([0-9.]+)", (tmp_path / "second.out").read_text())
    assert [int(step) for step, _ in steps][-1] == STEPS and int(steps[0][0]) >= KILLED_AT

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = {line["step"]: line for line in lines if "reward/mean" in line}  # a step taken twice: what survived
    assert set(range(1, STEPS + 1)) - set(trained) <= {int(steps[0][0]) - 1}  # killed between its commit and its log
    rewards = [trained[step]["reward/mean"] for step in sorted(trained)]
    assert sum(rewards[-5:]) > sum(rewards[:5]), rewards
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert sorted(s["step"] for s in samples) == [step for step in range(1, STEPS + 1) for _ in range(4)]
    assert all(s["completion_tokens"] == sum(span["tokens"] for span in s["spans"]) for s in samples)
    assert {span["node"] for s in samples for span in s["spans"]} == {result["nodes"][0]["name"]}
    assert [s["step"] for s in result["samples"]] == [STEPS - 1] * 4 + [STEPS] * 4
    # Weights that nodes computed with are those that it trained: probabilities of the same tokens agree.
    assert all(0.9 < line["ratio/mean"] < 1.1 for line in trained.values())


def test_the_example_uses_the_client_and_nothing_of_our_trainer() -> None:
    client = {"learner.client.client", "learner.client.mismatch", "learner.client.port"}
    assert ours(EXAMPLE) == client | {"learner.trajectory"}  # the latter for a type
