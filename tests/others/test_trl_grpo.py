"""TRL's GRPOTrainer, as installed, trains on two nodes of ours, of which one is killed."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.client.sampling import Sampled, SamplingClient
from learner.config import build_config, dump_toml
from learner.tasks.registry import make_task
from netem.demo.tiny_model import build_demo_model
from netem.processes.children import Children
from tests.support.examples import EXAMPLES, ours, start_example
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e

EXAMPLE = "trl_grpo.py"
STEPS, KILLED_AT, PROMPTS, SAMPLES = 20, 7, 4, 8
PLACES = {"kept": 8, "killed": 24}
"""Places of the nodes: a step's sequences fill both."""
TURN_S = 0.02
"""Seconds that the node which is to be stopped at work runs for, between two looks at it."""


def test_twenty_steps_over_two_nodes_one_of_them_killed(tmp_path: Path) -> None:
    task, run_dir = make_task("reverse", 0, {"digits": 3}), tmp_path / "run"
    config, data = tmp_path / "run.toml", tmp_path / "rows.jsonl"
    model = build_demo_model(tmp_path / "model", task, target=0.03, batch=32)
    rows = [{"prompt": task.prompt(i).text, "answer": task.solution(task.prompt(i))} for i in range(200)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "run_dir": str(run_dir), "model": str(model), "rollout": {"samples": SAMPLES, "max_new_tokens": 5},
        "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"]}, "trainer": {"steps": STEPS, "eval_size": 0},
    }  # fmt: skip
    config.write_text(dump_toml(build_config(settings, "test").model_dump()))
    with Children(tmp_path) as shoal:
        flags = ["--external_trainer", "true", "--rollout.groups_per_step", "0", "--endpoint.listen", "127.0.0.1:0"]
        learner = shoal.start("learner", "learner", str(config), *flags, "--json")
        until("a ticket", (run_dir / "status.json").exists, shoal)
        kept, killed = (
            shoal.start(
                name, "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(tmp_path / name), "--name", name,
                "--capacity", str(places), "--json", "--listen", "/ip4/127.0.0.1/tcp/0",
            )
            for name, places in PLACES.items()
        )
        trainer = start_example(
            shoal, EXAMPLE, "trl", str(run_dir), str(data), "--prompts", str(PROMPTS), "--lr", "3e-4", "--save-steps", "1"
        )
        until("two nodes", lambda: sum(node["ready"] for node in status(run_dir)["nodes"]) == 2, shoal)
        until("some steps", lambda: status(run_dir)["step"] >= KILLED_AT, shoal)
        step = stop_at_work(run_dir, killed)
        # The trainer waits for what the stopped node holds; the other one serves the weights that the trainer saved as they are.
        prompt = tuple(prompt_of(model, rows[0]["prompt"]))
        answers = SamplingClient.connect(run_dir).sample([prompt] * 4, max_tokens=5, min_step=step)
        check_policy(run_dir / "checkpoints" / f"checkpoint-{step}", prompt, answers, f"1.{step}")
        killed.send(signal.SIGKILL)
        assert status_of(trainer, shoal) == 0, (tmp_path / "trl.out").read_text()[-5000:]
        assert status_of(learner, shoal) == 0, shoal.said("learner")
        assert status_of(kept, shoal) == 0, shoal.said("kept")
        result = shoal.result("learner")

    assert (result["step"], result["version"]) == (STEPS, f"1.{STEPS}") and result["trajectories"]["reserved"] == 0
    assert result["checkpoint"].endswith(f"checkpoint-{STEPS}") and result["versions_published"] == STEPS + 1
    nodes = {node["name"]: node for node in result["nodes"]}
    assert (nodes["kept"]["version"], nodes["kept"]["digest_ok"]) == (f"1.{STEPS}", True)
    assert nodes["killed"]["version"] == f"1.{step}" and not nodes["killed"]["alive"]
    assert nodes["kept"]["tokens"] and nodes["killed"]["tokens"]
    requests = {name: count["serving"] for name, count in result["requests"].items()}
    assert requests["ended"] == requests["asked"] == STEPS * PROMPTS * SAMPLES + len(answers)
    assert requests["moved"] > 0 and not requests["failed"] and not requests["cancelled"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = {line["step"]: line for line in lines if "reward/mean" in line}
    assert sorted(trained) == list(range(1, STEPS + 1)) and all(0 < line["reward/mean"] <= 1 for line in trained.values())
    assert {line["staleness/max"] for line in trained.values()} == {0}, "a step was sampled under older weights than the last"


def status(run_dir: Path) -> dict[str, Any]:
    port = json.loads((run_dir / "status.json").read_text())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def stop_at_work(run_dir: Path, node: Any) -> int:
    """Stop the node (SIGSTOP) while it holds sequences of a step; how many steps were done then.

    A step's sequences take such a small model some 50 ms. So from here on the node runs for TURN_S at a time and is stopped
    between, looked at while it stands: what cannot all be with the other node is with this one.
    """
    main = psutil.Process(node.pid)
    processes = [main, *main.children(recursive=True)]  # the agent, and its engine if that is a process of its own
    while True:
        for process in processes:
            process.suspend()
        found = [status(run_dir)]
        if found[0]["requests"]["running"]["serving"] > PLACES["kept"]:
            time.sleep(0.5)  # what it had sent before it stopped arrives
            found.append(status(run_dir))
            if found[1]["requests"]["running"]["serving"] > PLACES["kept"]:
                return int(found[1]["step"])
        for process in processes:
            process.resume()
        time.sleep(TURN_S)


def prompt_of(model: Path, text: str) -> list[int]:
    return list(AutoTokenizer.from_pretrained(model)(text=text)["input_ids"])


def check_policy(checkpoint: Path, prompt: tuple[int, ...], answers: list[Sampled], version: str) -> None:
    """Log probabilities of the nodes are those of the model in TRL's checkpoint, as it is published: in bf16."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(torch.float32)
    for answer in answers:
        assert {str(span.version) for span in answer.spans} == {version}
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.ids]])).logits[0, len(prompt) - 1 : -1]
        want = torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        assert want.tolist() == pytest.approx(answer.logprobs, abs=2e-3)


def test_the_example_uses_the_two_clients_and_nothing_else_of_ours() -> None:
    assert ours(EXAMPLE) == {"learner.client.client", "learner.client.sampling"}
    assert len((EXAMPLES / EXAMPLE).read_text().splitlines()) < 120
