"""Audits in whole runs with real processes: a node that cheats is caught and what it made is made again; with --audit 0 not."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from learner.config import build_config, dump_toml
from learner.status.source import fetch_status
from netem.demo.recipes import RECIPES
from netem.processes.children import Children, ModuleStarter, start_module
from tests.support.nightly import NIGHTLY, nightly
from tests.support.watchdog import status_of, until

pytestmark = pytest.mark.e2e

FOUND_WITHIN = 500
"""Tokens within which a node that draws at another temperature is caught: the bench finds it in 16 where it looks each 16, and
here the auditor looks at a node's answers in batches."""

STEPS = 120 if NIGHTLY else 24
"""Of the run in which a cheat is caught and the auditor killed: what comes after goes on as it was. The auditor's second start is
that of a fork, and takes seconds: started as a user's it took half a minute of a busy machine, and 50 steps could be over."""


def start(
    shoal: Children, folder: Path, model: Path, steps: int, cheat: str, *flags: str, starter: ModuleStarter | None = None
) -> Path:
    """A learner to whom both nodes are strangers: an honest node that computes in bfloat16, and one that cheats."""
    run_dir, config = folder / "run", folder / "learner.toml"
    settings = RECIPES["reverse"].config(run_dir, model, steps, 0)
    settings["standing"] = {"trusted": []}
    config.write_text(dump_toml(build_config(settings, "test").model_dump()))
    shoal.start("learner", "learner", str(config), "--json", *flags, starter=starter)
    until("a ticket", (run_dir / "ticket.txt").exists, shoal)

    def options(name: str) -> list[str]:
        return ["--join", str(run_dir / "ticket.txt"), "--dir", str(folder / name), "--name", name, "--capacity", "64",
                "--listen", "/ip4/127.0.0.1/tcp/0", "--json"]  # fmt: skip

    shoal.start("honest", "node", *options("honest"), "--dtype", "bfloat16")
    shoal.start("cheat", cheat, *options("cheat"), module="tests.support.cheating_node")
    until("status", (run_dir / "status.json").exists, shoal)
    return run_dir


def made_again(run_dir: Path) -> int:
    """Groups and completions of those that were caught. None when all that a cheat had made went to the trainer just before; the
    cheat comes again then."""
    caught = fetch_status(run_dir)["caught"]
    return int(caught["remade_groups"] + caught["remade_completions"])


def learner_of(shoal: Children) -> Any:
    return next(child for child in shoal.all if child.name == "learner")


def test_a_cheat_is_caught_and_the_run_goes_on_without_it_and_without_its_auditor(
    shoal: Children, tmp_path: Path, demo_model: Path
) -> None:  # fmt: skip
    run_dir = start(shoal, tmp_path, demo_model, STEPS, "hotter")
    until("work of a cheat that is made again", lambda: made_again(run_dir), shoal)
    pid = fetch_status(run_dir)["audits"]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert status_of(learner_of(shoal), shoal) == 0, shoal.said("learner")
    result = shoal.result("learner")
    assert result["step"] == STEPS and result["trajectories"]["lost"] == 0 and result["max_staleness_seen"] <= 2
    assert result["trajectories"]["consumed"] == STEPS * 16 * 16
    nodes = {node["name"]: node for node in result["nodes"]}
    assert nodes["honest"]["alive"] and nodes["honest"]["expelled"] == 0 and nodes["honest"]["standing"] == "proven"
    cheat = nodes["cheat"]  # half a minute later it may come again, and is then a stranger of whom all is checked
    assert cheat["standing"] == "on trial" if cheat["alive"] else "audits: " in cheat["reason"], cheat
    caught, audits = result["caught"], result["audits"]
    assert "the auditor has measured what bfloat16 does to this model" in shoal.said("learner")
    assert audits["calibration"]["transformers/bfloat16/cpu"] < 0.12, "what is shipped for want of a measurement"
    said = shoal.said("learner")
    tokens = re.findall(r"shoal.head: node .* is expelled: audits: .* in (?:last )?(\d+) tokens, an honest", said)
    assert int(tokens[0]) <= FOUND_WITHIN, "when it was found first: its test goes on, and counts on, when it comes again"
    assert audits["caught"] == 1 and caught["last"].startswith("cheat (")
    assert caught["nodes"] == nodes["cheat"]["expelled"] >= 1, "it may have come back meanwhile, and was caught again"
    assert caught["remade_groups"] + caught["remade_completions"] > 0
    assert result["trajectories"]["aborted"].get("caught", 0) == caught["remade_groups"] * 16
    assert audits["starts"] == 2 and not audits["why"], "it was killed once, and started again"
    assert "the auditor is gone (it ended with status -9" in shoal.said("learner")
    assert re.search(r"of its tokens went to the trainer; \d+ groups", shoal.said("learner"))


@nightly
@pytest.mark.parametrize("cheat", ["slightly_hotter", "stale", "rounded"])
def test_a_mild_cheat_is_caught(shoal: Children, tmp_path: Path, demo_model: Path, cheat: str) -> None:
    """Draws at temperature 1.1, computes with the weights that it was given first, or with 4 bits: in float32, as it says itself,
    tens of checked tokens tell (bench/audit.md#nobody-is-trusted). The weights of the start are the newest at first."""
    run_dir = start(shoal, tmp_path, demo_model, 2000, cheat)
    until("a verdict", lambda: fetch_status(run_dir)["caught"]["nodes"] > 0, shoal)
    status, said = fetch_status(run_dir), shoal.said("learner")
    tokens = re.findall(r"shoal.head: node .* is expelled: audits: .* in (?:last )?(\d+) tokens, an honest", said)
    print(f"{cheat}: after {tokens[0]} checked tokens, in step {status['step']}; {status['caught']['last']}")
    assert status["caught"]["last"].startswith("cheat (") and int(tokens[0]) <= FOUND_WITHIN
    nodes = {node["name"]: node for node in status["nodes"]}
    assert nodes["honest"]["alive"] and nodes["honest"]["expelled"] == 0


@nightly
def test_without_audits_nothing_of_them_runs(shoal: Children, tmp_path: Path, demo_model: Path) -> None:
    # What runs is known by its command line, which forks have not.
    run_dir = start(shoal, tmp_path, demo_model, 12, "hotter", "--audit", "0", starter=start_module)
    until("work of the cheat", lambda: any(n["name"] == "cheat" and n["tokens"] for n in fetch_status(run_dir)["nodes"]), shoal)
    running = [" ".join(p.cmdline()) for p in psutil.Process(learner_of(shoal).pid).children(recursive=True)]
    assert any("learner.trainer" in line for line in running) and not any("learner.audit" in line for line in running)
    assert status_of(learner_of(shoal), shoal) == 0, shoal.said("learner")
    result = shoal.result("learner")
    assert result["audits"] == {} and result["caught"]["nodes"] == 0
    assert all(node["alive"] for node in result["nodes"]) and len(result["nodes"]) == 2
    assert not (run_dir / "logs" / "auditor.log").exists()
    assert not any(key.startswith("audit/") for key in result["metrics"])
