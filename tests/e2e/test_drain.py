"""Preempted nodes, real processes: a signal or `shoal node drain` hands over every token; a second signal kills."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from learner.config import build_config, dump_toml
from netem.processes.children import Children
from tests.support.watchdog import PATIENCE_S, status_of, until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that sequences take a while."""
    from netem.demo.tiny_model import build_random_model

    return build_random_model(tmp_path_factory.mktemp("model"), size="20m")


@pytest.fixture
def run_dir(shoal: Children, tmp_path: Path, model: Path) -> Path:
    """A learner that would train for ever, and has work for its nodes however slowly it does. They are trusted: what the trainer
    waits for is taken from strangers, with what they have made of it and not sent."""
    settings = {
        "run_dir": str(tmp_path / "run"), "model": str(model), "task": {"options": {"digits": 4}},
        "rollout": {"groups_per_step": 8, "samples": 8, "max_new_tokens": 400, "max_staleness": 16},
        "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"]}, "standing": {"trusted": ["*"]},
        "trainer": {"steps": 10_000, "threads": 1, "eval_size": 0, "lr": 1e-6},
    }  # fmt: skip
    config = tmp_path / "learner.toml"
    config.write_text(dump_toml(build_config(settings, "test").model_dump()))
    shoal.start("learner", "learner", str(config), "--json")
    until("a ticket", (tmp_path / "run" / "status.json").exists, shoal)
    return tmp_path / "run"


def start_node(shoal: Children, run_dir: Path, name: str) -> Any:
    return shoal.start(
        name, "node", "--join", str(run_dir / "ticket.txt"), "--dir", str(shoal.folder / name), "--name", name, "--capacity",
        "16", "--listen", "/ip4/127.0.0.1/tcp/0", "--json",
    )  # fmt: skip


def nodes(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The learner's view of its nodes, by name."""
    port = json.loads((run_dir / "status.json").read_text())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=PATIENCE_S) as answer:
        return {node["name"]: node for node in json.load(answer)["nodes"]}


def tokens(run_dir: Path, name: str) -> int:
    return nodes(run_dir).get(name, {}).get("tokens", 0)


def handed_over(shoal: Children, name: str) -> int:
    found = re.search(r"leaving; (\d+) sequences go back", shoal.said(name))
    assert found, shoal.said(name)
    return int(found[1])


def test_no_token_is_lost_with_a_node_that_had_notice(shoal: Children, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shoal as cli

    first, second = start_node(shoal, run_dir, "one"), start_node(shoal, run_dir, "two")
    until("both in mid-generation", lambda: tokens(run_dir, "one") > 100 and tokens(run_dir, "two") > 100, shoal)
    first.send_signal(signal.SIGTERM)
    assert status_of(first, shoal) == 0, shoal.said("one")
    before = tokens(run_dir, "two")
    until("the other goes on", lambda: tokens(run_dir, "two") > before + 50, shoal)
    assert cli.main(["node", "drain", "--dir", str(shoal.folder / "two"), "--json"]) == 0
    drained = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert drained["pid"] == second.pid and 0 <= drained["seconds"] < PATIENCE_S
    assert status_of(second, shoal) == 0, shoal.said("two")

    until("both are gone", lambda: not any(node["alive"] for node in nodes(run_dir).values()), shoal)
    seen = nodes(run_dir)
    for name in ("one", "two"):
        result = shoal.result(name)
        assert handed_over(shoal, name) > 0 and "not handed over" not in shoal.said(name)
        # What the engine made is what went out, and what the learner goes on from: nothing is made again.
        assert result["made"] == result["tokens"] == seen[name]["tokens"] > 100
    # Nothing was left to be found out when their links went down.
    assert shoal.said("learner").count("; 0 sequences go elsewhere") == 2, shoal.said("learner")
    assert "refused" not in shoal.said("learner")


def test_a_second_signal_kills(shoal: Children, run_dir: Path) -> None:
    node = start_node(shoal, run_dir, "one")
    until("tokens", lambda: tokens(run_dir, "one") > 20, shoal)
    shoal.all[0].send_signal(signal.SIGSTOP)  # it will not say that it has everything
    node.send_signal(signal.SIGTERM)
    until("the node hands over", lambda: "leaving; " in shoal.said("one"), shoal)
    node.send_signal(signal.SIGTERM)
    assert status_of(node, shoal) == -signal.SIGTERM
    assert "Traceback" not in shoal.said("one")


def test_where_no_node_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shoal as cli

    free, other = tmp_path / "free", tmp_path / "other"
    free.mkdir()
    other.mkdir()
    (free / "lock").write_text("1")  # of a node that was killed: process 1 must come to no harm
    for where in (tmp_path / "nowhere", other, free, free / "lock"):
        assert cli.main(["node", "drain", "--dir", str(where)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"no node runs in {where}" in said
    for arguments, word in ((["drain"], "--dir"), (["drian"], "drian"), (["drain", "--join", "nothing"], "nothing")):
        try:
            status = cli.main(["node", *arguments])
        except SystemExit as error:
            status = int(error.code or 0)
        said = capsys.readouterr().err
        assert status == 2 and said.count("\n") == 1 and word in said
