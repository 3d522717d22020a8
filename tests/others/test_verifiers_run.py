"""A whole run with an installed environment of verifiers: learner, node, real processes, real libp2p, a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from learner.config import build_config, dump_toml
from netem.demo.tiny_model import EOS, build_random_model
from netem.processes.children import Children
from tests.support.request_twin import CHAT_TEMPLATE
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e

WORD, STEPS, GROUPS, SAMPLES = "kelp", 3, 2, 4


def build_chat_model(folder: Path) -> None:
    """A small random model whose tokenizer has a chat template."""
    build_random_model(folder, size="0.4m", characters="<>/_,!ABCDEFGHIJKLMNOPQRSTUVWXYZ \n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def own_scores(reply: str) -> dict[str, float]:
    """What the environment's two reward functions make of a last reply (packages/shoal_words_v1)."""
    return {"right": float(WORD in reply), "letters": sum(c in WORD for c in reply) / len(reply) if reply else 0.0}


@pytest.fixture
def shoal(tmp_path: Path):
    runner = Children(tmp_path)
    yield runner
    runner.end(0)


def test_a_run_trains_on_its_episodes_with_its_own_rewards(shoal: Children, tmp_path: Path, installed_words: Path) -> None:
    model, run_dir, config = tmp_path / "model", tmp_path / "run", tmp_path / "run.toml"
    build_chat_model(model)
    settings = {
        "run_dir": str(run_dir), "model": str(model), "seed": 1,
        "task": {"name": "verifiers:shoal-words-v1", "options": {
            "taskset": {"kind": "again", "words": [WORD]}, "agent": {"runtime": {"type": "subprocess"}}, "shoal": {"held_out": 0},
        }},
        "environment": {"turn_tokens": 6},
        "rollout": {"max_staleness": 2, "groups_per_step": GROUPS, "samples": SAMPLES, "max_new_tokens": 120,
                    "micro_batch_groups": GROUPS},
        "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"]},
        "trainer": {"lr": 1e-4, "threads": 1, "eval_size": 0, "steps": STEPS},
        "status": {"samples_per_step": GROUPS * SAMPLES},
    }  # fmt: skip
    config.write_text(dump_toml(build_config(settings, "test").model_dump()))
    learner = shoal.start("learner", "learner", str(config), "--json")
    until("a ticket", (run_dir / "ticket.txt").exists, shoal)
    node = shoal.start(
        "node-1", "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(tmp_path / "node-1"), "--name", "node-1",
        "--capacity", "16", "--json", "--listen", "/ip4/127.0.0.1/tcp/0",
    )  # fmt: skip
    assert status_of(learner, shoal) == 0, shoal.said("learner")
    assert status_of(node, shoal) == 0, shoal.said("node-1")
    result = shoal.result("learner")
    assert result["step"] == STEPS and result["trajectories"]["consumed"] == STEPS * GROUPS * SAMPLES
    assert result["trajectories"]["lost"] == 0 and "orphaned" not in result["trajectories"]["aborted"]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == STEPS * GROUPS * SAMPLES
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = []
    for sample in samples:
        asked = "<user>no, again</user><assistant>"
        said = sample["completion"].split("</assistant>" + asked)
        turns.append(len(said))
        scores = own_scores(said[-1].strip())  # as `Trace.last_reply` has it
        assert sample["parts"] == pytest.approx(scores), sample
        assert sample["reward"] == pytest.approx(scores["right"] + 0.5 * scores["letters"])
        given = [piece["tokens"] for piece in sample.get("turns", []) if piece["by"] == "environment"]
        assert len(given) == len(said) - 1 and all(g >= len(tokenizer.encode(asked)) for g in given)
    assert set(turns) <= {1, 2, 3} and 3 in turns
    assert EOS not in "".join(sample["completion"] for sample in samples)
