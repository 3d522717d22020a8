"""Tickets and bans of a run whose learner is running: real processes, real commands, no ticket in anybody's arguments."""

from __future__ import annotations

import json
import stat
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

import shoal as cli
from learner.config import build_config, dump_toml
from netem.processes.children import Children, start_module
from p2p.membership.admission import read_ticket
from tests.support.watchdog import PATIENCE_S, status_of, until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from netem.demo.tiny_model import build_random_model

    return build_random_model(tmp_path_factory.mktemp("model"), size="20m")


@pytest.fixture
def run_dir(shoal: Children, tmp_path: Path, model: Path) -> Path:
    """A learner that would train for ever."""
    settings = {
        "run_dir": str(tmp_path / "run"), "model": str(model), "task": {"options": {"digits": 4}},
        "rollout": {"groups_per_step": 8, "samples": 8, "max_new_tokens": 400}, "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"]},
        "trainer": {"steps": 10_000, "threads": 1, "eval_size": 0, "lr": 1e-6},
        "audit": {"share": 0},  # the fake engine makes its tokens up, and audits would expel it for that within the test
    }  # fmt: skip
    config = tmp_path / "learner.toml"
    config.write_text(dump_toml(build_config(settings, "test").model_dump()))
    shoal.start("learner", "learner", str(config), "--json")
    until("a ticket", (tmp_path / "run" / "status.json").exists, shoal)
    return tmp_path / "run"


def alive(run_dir: Path) -> dict[str, str]:
    """Peer ids of the nodes that are here, by name."""
    port = json.loads((run_dir / "status.json").read_text())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=PATIENCE_S) as answer:
        return {node["name"]: node["peer"] for node in json.load(answer)["nodes"] if node["alive"]}


def start(shoal: Children, name: str, ticket: Path) -> Any:
    return shoal.start(
        name, "node", "--join-file", str(ticket), "--dir", str(shoal.folder / name), "--name", name, "--engine", "fake", "--json",
        "--listen", "/ip4/127.0.0.1/tcp/0", starter=start_module,
    )  # fmt: skip


def test_a_ban_and_a_revocation_reach_a_live_run(
    shoal: Children, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*argv: str) -> dict[str, Any]:
        assert cli.main([*argv, "--run-dir", str(run_dir), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    made = command("ticket", "new", "--name", "guests", "--uses", "2", "--expires", "1d")
    (shoal.folder / "guests.txt").write_text(made["ticket"])
    names = ("guest-1", "guest-2", "own")
    nodes = {name: start(shoal, name, shoal.folder / "guests.txt") for name in names[:2]}
    nodes["own"] = start(shoal, "own", run_dir / "ticket.txt")
    until("three nodes", lambda: set(alive(run_dir)) == set(names), shoal)

    # They are told of each other's loopback addresses, for all are on the learner's machine.
    until("links between nodes", lambda: any("link to guest-1" in shoal.said(other) for other in ("guest-2", "own")) or (
        "link to own" in shoal.said("guest-1") or "link to guest-2" in shoal.said("guest-1")
    ), shoal)  # fmt: skip

    # Nobody's arguments hold a ticket, and no log does.
    secrets = [made["ticket"], (run_dir / "ticket.txt").read_text().strip()]
    arguments = " ".join(" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True))
    assert "ticket.txt" in arguments and not any(secret in arguments for secret in secrets)
    assert not any(secret in shoal.said(name) for name in (*names, "learner") for secret in secrets)
    private = ("ticket.txt", "config.toml", "trainer.json", "journal.sqlite", "journal.sqlite-wal", "peers.sqlite", "head.key")
    assert {name: stat.S_IMODE((run_dir / name).stat().st_mode) for name in private} == dict.fromkeys(private, 0o600)

    assert [row["brought"] for row in command("ticket", "list")["tickets"]] == [1, 2]
    third = start(shoal, "guest-3", shoal.folder / "guests.txt")
    assert status_of(third, shoal) == 2 and "has brought 2 identities, and is for 2" in shoal.said("guest-3")

    command("ban", alive(run_dir)["guest-1"], "--why", "copies answers")
    assert status_of(nodes["guest-1"], shoal) == 2
    assert "the operator banned it: copies answers" in shoal.said("guest-1")
    command("ticket", "revoke", "guests")
    assert status_of(nodes["guest-2"], shoal) == 2
    assert "the ticket 'guests' was revoked" in shoal.said("guest-2")
    assert set(alive(run_dir)) == {"own"} and nodes["own"].poll() is None
    assert read_ticket(secrets[1]).id == command("ticket", "list")["tickets"][0]["id"]
