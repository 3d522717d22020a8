"""The example with turns: what the game wrote is masked, earlier ids stay, each step is of the version just published."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from learner.config import build_config, dump_toml
from netem.demo.tiny_model import build_random_model
from netem.processes.children import Children
from tests.support.examples import EXAMPLES, ours, start_example
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e

EXAMPLE = "own_loop.py"
STEPS, GROUPS, SAMPLES, TURN_TOKENS = 4, 3, 4, 2


def test_a_loop_with_turns_trains_on_what_the_nodes_sampled(shoal: Children, tmp_path: Path) -> None:
    model, run_dir, config = build_random_model(tmp_path / "model", size="0.4m"), tmp_path / "run", tmp_path / "run.toml"
    settings = {
        "run_dir": str(run_dir), "model": str(model), "task": {"options": {"digits": 3}},
        "rollout": {"samples": SAMPLES, "max_new_tokens": TURN_TOKENS},
        "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"]}, "trainer": {"steps": STEPS, "eval_size": 0},
    }  # fmt: skip
    written = build_config(settings | {"external_trainer": True}, "test").model_dump()
    config.write_text(dump_toml(written))
    flags = ["--external_trainer", "true", "--rollout.groups_per_step", "0", "--endpoint.listen", "127.0.0.1:0"]
    learner = shoal.start("learner", "learner", str(config), *flags, "--json")
    until("a ticket", (run_dir / "status.json").exists, shoal)
    node = shoal.start(
        "node", "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(tmp_path / "node"), "--capacity", "16", "--json",
        "--listen", "/ip4/127.0.0.1/tcp/0",
    )  # fmt: skip
    loop = start_example(shoal, EXAMPLE, "loop", str(run_dir), "--groups", str(GROUPS), "--lr", "1e-2")
    assert status_of(loop, shoal) == 0, (tmp_path / "loop.out").read_text()
    assert status_of(learner, shoal) == 0, shoal.said("learner")
    assert status_of(node, shoal) == 0, shoal.said("node")

    result = shoal.result("learner")
    assert (result["step"], result["version"]) == (STEPS, f"1.{STEPS}") and result["trajectories"]["reserved"] == 0
    assert shoal.result("node")["version"] == f"1.{STEPS}" and all(n["digest_ok"] for n in result["nodes"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line) for line in (run_dir / "episodes.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step for step in range(1, STEPS + 1) for _ in range(GROUPS * SAMPLES)]
    for row in rows:
        check_episode(tokenizer, row)
    assert {row["ids"][len("0-9?")] for row in rows} != {rows[0]["ids"][len("0-9?")]}, "one seed for all"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
    for step in range(1, STEPS + 1):
        rewards = [row["reward"] for row in rows if row["step"] == step]
        assert logged[step] == pytest.approx(sum(rewards) / len(rewards))


def check_episode(tokenizer: Any, row: dict[str, Any]) -> None:
    """Replays the game from the ids alone."""
    ids, mask = row["ids"], row["mask"]
    assert len(ids) == len(mask) == len(row["logprobs"])
    assert all((value < 0) if own else (value == 0) for own, value in zip(mask, row["logprobs"], strict=True))
    at = len(tokenizer.encode("0-9?"))
    assert tokenizer.decode(ids[:at]) == "0-9?" and not any(mask[:at])
    reward, turns = 0.0, 0
    while at < len(ids):
        end = at
        while end < len(ids) and mask[end]:
            end += 1
        assert 0 < end - at <= TURN_TOKENS
        turns += 1
        digits = [c for c in tokenizer.decode(ids[at:end], skip_special_tokens=True) if c.isdigit()]
        guess = int(digits[-1]) if digits else None
        reward, at = float(guess == row["secret"]), end
        if end < len(ids):
            said = "?" if guess is None else "+" if guess < row["secret"] else "-"
            assert not reward and tokenizer.decode(ids[end]) == said
            at = end + 1
    assert row["reward"] == reward and (turns == 2 or reward)
    # Each turn was made under the weights that the step before had published, and not by any others.
    assert set(row["versions"]) == {f"1.{row['step'] - 1}"} and len(row["versions"]) == turns


def test_gradients_on_what_the_game_wrote_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("own_loop", "own_trainer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    example = importlib.import_module("own_loop")
    episodes = []
    for reward in (0.0, 1.0):
        one = example.Episode(secret=3, ids=[5, 6], mask=[0, 0], logprobs=[0.0, 0.0], reward=reward)
        one.add([7, 1], [-1.0, -2.0])
        one.add([8])
        one.add([9], [-0.5])
        episodes.append(one)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.randn(2, 5, 12))

        def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.logits)

    model = Model()
    example.policy_loss(model, episodes, 1.0).backward()
    assert model.logits.grad is not None
    learned = model.logits.grad.abs().sum(dim=2) > 0
    assert learned.tolist() == [[False, True, True, False, True]] * 2  # of the tokens 6, 7, 1, 8, 9


def test_the_example_uses_the_two_clients_and_nothing_else_of_ours() -> None:
    assert ours(EXAMPLE) == {"learner.client.client", "learner.client.sampling"}
