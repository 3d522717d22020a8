"""The command line as a person meets it: bad input is one line and status 2, interruptions are quiet, --json parses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal as cli
from learner.config import dump_toml, load_config
from learner.service import prepare_run
from netem.processes.children import MODEST, Children
from p2p.identity import Identity
from p2p.membership.admission import Ticket, make_ticket, read_ticket
from p2p.processes import child_environment
from tests.support.watchdog import PATIENCE_S, status_of, until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Children]:
    """Here nodes too are started as a user starts them."""
    runner = Children(tmp_path)
    yield runner
    runner.end(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, barely trained."""
    from learner.tasks.registry import make_task
    from netem.demo.tiny_model import build_demo_model

    folder = tmp_path_factory.mktemp("model") / "m"
    return build_demo_model(folder, make_task("reverse", 0, {"digits": 3}), steps=2, batch=8)


def config_file(folder: Path, model: Path | str, **sections: Any) -> Path:
    """A small run in `folder`/run on loopback."""
    values: dict[str, Any] = {
        "run_dir": str(folder / "run"), "model": str(model), "task": {"options": {"digits": 3}},
        "rollout": {"groups_per_step": 2, "samples": 2, "max_new_tokens": 4, "micro_batch_groups": 2},
        "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"]}, "trainer": {"steps": 2, "threads": 1, "eval_size": 4},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "c.toml"
    path.write_text(dump_toml(values))
    return path


def call(*argv: object) -> int:
    """`shoal ARGV` in this process; its exit status."""
    try:
        return cli.main([str(a) for a in argv])
    except SystemExit as leaving:
        return int(leaving.code or 0)


class Complaint:
    """`complaint(argv...)`: checks status 2, nothing on stdout, one line on stderr, and returns that line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *argv: object) -> str:
        self.capsys.readouterr()
        status = call(*argv)
        out, err = self.capsys.readouterr()
        assert status == 2, (status, out, err)
        assert out == "" and err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err, (out, err)
        assert err.startswith("shoal") and len(err) < 400, err
        return err


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complaint:
    return Complaint(capsys)


def one_line(text: str) -> str:
    """What a failed process said, log lines aside (they start with a date)."""
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if not line[:4].isdigit()]
    assert len(lines) == 1, text
    return lines[0]


@pytest.fixture
def no_root() -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([], "VERB"),
        (["lerner"], "lerner"),
        (["node"], "--join"),
        (["learner"], "CONFIG.toml"),
        (["status"], "run_dir"),
        (["export", "x"], "out"),
        (["status", ".", "--colour"], "--colour"),
        (["demo", "--colour", "red"], "--colour"),
        (["demo", "--steps", "many"], "--steps"),
        (["demo", "--recipe", "soup"], "--recipe"),
        (["demo", "--steps", "-3"], "--steps"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--nodes", "0"], "--nodes"),
        (["demo", "--resume", "--run-dir", "/nowhere"], "/nowhere"),
        (["demo", "--run-dir", "/dev/null/x"], "/dev/null"),
        (["demo", "--run-dir", __file__], "not a directory"),
        (["learner", "/nowhere/c.toml"], "/nowhere/c.toml"),
        (["learner", "/tmp"], "/tmp"),
        (["learner", "--dry-run", "--seed"], "CONFIG.toml"),
        (["learner", "--rollout.max_staleness", "3", "/nowhere/c.toml"], "/nowhere/c.toml"),
        (["learner", "--rollout.max_staleness=3", "--dry-run", "/nowhere/c.toml"], "/nowhere/c.toml"),
        (["learner", "--seed", "--resume", "/nowhere/c.toml"], "/nowhere/c.toml"),
        (["learner", "-x", "/nowhere/c.toml"], "/nowhere/c.toml"),
        (["node", "--join", "shoal2"], "not a ticket"),
        (["node", "--join", "shoal1 !!!"], "not a ticket"),
        (["node", "--join", "/nowhere/ticket"], "--join"),
        (["node", "--join", "x", "--capacity", "lots"], "--capacity"),
        (["node", "--join", "x", "--device", "tpu"], "--device"),
        (["status", "/nowhere"], "/nowhere"),
        (["status", "/dev/null"], "/dev/null"),
        (["export", "/nowhere", "/tmp/nothing-here"], "/nowhere"),
    ],
)
def test_bad_command_lines(complaint: Complaint, argv: list[str], word: str) -> None:
    assert word in complaint(*argv)


@pytest.mark.parametrize(
    ("text", "flags", "word"),
    [
        ("run_dir = ", (), "not TOML"),
        ("run_dir = 'r'\n", (), "model"),
        ("colour = 1\n", (), "colour"),
        ("", ("--colour", "1"), "colour"),
        ("", ("--rollout.samples", "many"), "rollout.samples"),
        ("", ("--rollout.samples", "0"), "rollout.samples"),
        ("", ("--rollout.max_staleness", "-1"), "rollout.max_staleness"),
        ("", ("--rollout.temperature", "inf"), "rollout.temperature"),
        ("", ("--trainer.steps", "-1"), "trainer.steps"),
        ("", ("--trainer.device", "tpu"), "trainer.device"),
        ("", ("--trainer.grad_clip", "-1"), "trainer.grad_clip"),
        ("", ("--rollout.top_p", "0.9"), "trainer.objective"),
        ("", ("--task.options.x", "2024-01-01"), "task.options.x"),
        ("", ("--task.name", "reasoning_gym:basic_arithmetic", "--task.options", "{seed = 3}"), "task.seed"),
        ("", ("--task.name", "reasoning_gym:basic_arithmetic", "--task.options", "{size = 0}"), "size"),
        ("", ("--task.name", "sudoku"), "unknown task"),
        ("", ("--task.name", "reasoning_gym:nope"), "nope"),
        ("", ("--task.options", "{digits = 'three'}"), "digits"),
        ("", ("--task.options", "{colour = 3}"), "colour"),
        ("", ("--model", "/nowhere/model"), "/nowhere/model"),
        ("", ("--model", "./nope"), "./nope"),
        ("", ("--run_dir", "/dev/null/run"), "/dev/null/run"),
        ("", ("--swarm.listen", '["localhost:80"]'), "localhost:80"),
        ("", ("--swarm.listen", "[]"), "listen"),
        ("", ("--resume",), "nothing to resume"),
        ("", ("stray",), "stray"),
    ],
)
def test_bad_settings(
    complaint: Complaint, tmp_path: Path, model: Path, text: str, flags: tuple[str, ...], word: str
) -> None:
    path = config_file(tmp_path, model)
    if text:
        path.write_text(text if "run_dir" in text else text + path.read_text())
    assert word in complaint("learner", path, *flags)
    prepare_run(load_config(config_file(tmp_path, model)), resume=False)  # the refused start is not in the way


def test_bad_model_folders(complaint: Complaint, tmp_path: Path, model: Path) -> None:
    empty, bare, broken, odd = (tmp_path / name for name in ("empty", "bare", "broken", "odd"))
    for folder in (empty, bare, broken, odd):
        folder.mkdir()
    (bare / "config.json").write_bytes((model / "config.json").read_bytes())
    (broken / "config.json").write_text("{")
    (odd / "config.json").write_text("[]")
    for folder, word in ((empty, "config.json"), (bare, "tokenizer"), (broken, "config.json"), (odd, "vocab_size")):
        line = complaint("learner", config_file(tmp_path, folder))
        assert word in line and str(folder) in line
    whole = tmp_path / "whole"
    shutil.copytree(model, whole)
    for text in ("", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [null]}'):
        (whole / "generation_config.json").write_text(text)
        line = complaint("learner", config_file(tmp_path, whole))
        assert "generation_config.json" in line or "eos_token_id" in line
    assert not (tmp_path / "run").exists()
    assert "no-such-owner" in complaint("learner", config_file(tmp_path, "no-such-owner/no-such-model"))


def test_a_run_directory_is_not_taken_over(complaint: Complaint, tmp_path: Path, model: Path) -> None:
    path = config_file(tmp_path, model)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"run": "0011"}')
    (tmp_path / "run" / "status.json").write_text("{}")
    assert "--resume" in complaint("learner", path)
    assert "not running" in complaint("status", tmp_path / "run")
    line = complaint("export", tmp_path / "run", tmp_path / "out")
    assert "run" in line and not (tmp_path / "out").exists()
    for text in ("{", "", "[]"):
        (tmp_path / "run" / "run.json").write_text(text)
        assert "run.json" in complaint("learner", path, "--resume")
        (tmp_path / "run" / "status.json").unlink(missing_ok=True)
        assert "run.json" in complaint("learner", path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "precious").write_text("mine")
    assert "not an earlier demo" in complaint("demo", "--run-dir", tmp_path / "demo")
    assert (tmp_path / "demo" / "precious").exists()


def test_unreadable_files(complaint: Complaint, tmp_path: Path, model: Path, no_root: None) -> None:
    path = config_file(tmp_path, model)
    path.chmod(0)
    assert "cannot read" in complaint("learner", path)
    (tmp_path / "d").mkdir(mode=0)
    assert "d" in complaint("status", tmp_path / "d")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/run/x/metrics.jsonl"), ("No space left", "/run/x/metrics.jsonl")),
        (PermissionError(errno.EACCES, "Permission denied", "/run/x"), ("Permission denied", "/run/x")),
        (sqlite3.OperationalError("database or disk is full"), ("disk is full", "/run/x/journal.sqlite")),
        (ExceptionGroup("a nursery", [OSError(errno.ENOSPC, "No space left on device")]), ("No space left", "/run/y")),
    ],
)
def test_what_the_system_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, words: tuple[str, ...]
) -> None:
    if isinstance(error, sqlite3.Error):
        error.add_note("/run/x/journal.sqlite")

    def fail(args: Any) -> dict[str, Any]:
        args.where = "/run/y"
        raise error

    monkeypatch.setattr("learner.cli._status", fail)
    assert call("status", "x") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("shoal status: ") and all(word in said for word in words)
    assert call("status", "x", "--verbose") == 1
    assert "Traceback" in capsys.readouterr().err


def test_doctor_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("doctor") == 0
    said = capsys.readouterr().out
    assert "--engine transformers" in said and "GiB of memory" in said and "--engine vllm" in said
    assert "reward sandbox" in said and "disk: checkpoints" in said and "\nA node would run here: 0 wrong" in said
    assert call("doctor", "--json", "--engine-python", "/nowhere/python", "--dir", "/dev/null/x") == 1
    facts = json.loads(capsys.readouterr().out)
    assert "cannot be run" in facts["engines"]["vllm"]["missing"] and not facts["ok"]
    wrong = {found["what"] for found in facts["findings"] if found["state"] == "wrong"}
    assert wrong == {"--engine transformers", "--engine vllm", "disk: chunks"} and all(
        found["todo"] for found in facts["findings"] if found["state"] != "ok"
    )


def test_doctor_takes_a_ticket(complaint: Complaint, capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither a ticket nor a file" in complaint("doctor", "--join", "nothing")
    assert call("doctor", "--join", a_ticket().encode()) == 1
    said = capsys.readouterr().out
    assert "127.0.0.1:1 does not: Connection refused" in said and "No node would run here as it is: 1 wrong" in said


def a_ticket(run: str = "00aa") -> Ticket:
    head = Identity.from_seed(bytes(32))
    return make_ticket(head, run, (f"/ip4/127.0.0.1/tcp/1/p2p/{head.peer_id}",))


def test_bad_nodes(complaint: Complaint, tmp_path: Path) -> None:
    text = a_ticket().encode()
    for bad in (text[:-9], text[:40], text[:60] + "AAAA" + text[64:], "shoal1" + text[6:]):
        assert "--join" in complaint("node", "--join", bad) or "ticket" in complaint("node", "--join", bad)
    (tmp_path / "t").write_text("hello\n")
    assert "not a ticket" in complaint("node", "--join", tmp_path / "t")
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00")
    assert "ticket" in complaint("node", "--join", tmp_path / "t")
    node = ("node", "--join", text, "--dir", tmp_path / "n")
    for flag, value in (("--capacity", "-1"), ("--threads", "0"), ("--store-gib", "-0.5"), ("--store-gib", "nan")):
        assert flag in complaint(*node, flag, value)
    assert "unknown engine" in complaint(*node, "--engine", "steam")
    assert "cannot be run" in complaint(*node, "--engine", "vllm", "--engine-python", tmp_path / "no-python")
    assert "no Python that answers" in complaint(*node, "--engine-python", "/bin/true")
    assert "cannot listen" in complaint(*node, "--listen", "localhost:80")
    assert "/dev/null" in complaint("node", "--join", text, "--dir", "/dev/null/n")
    (tmp_path / "n" / "node.key").write_text("x")
    (tmp_path / "n" / "node.key").chmod(0o600)
    assert "node.key" in complaint(*node, "--no-listen")


def test_a_node_directory_of_another_run(complaint: Complaint, tmp_path: Path) -> None:
    shadow = tmp_path / "n" / "shadow"
    shadow.mkdir(parents=True)
    (shadow / "state.json").write_text(json.dumps({"format": 1, "run": "another"}))
    line = complaint("node", "--join", a_ticket("00aa").encode(), "--dir", tmp_path / "n", "--no-listen")
    assert "another" in line
    assert json.loads((shadow / "state.json").read_text())["run"] == "another"


def test_ports_in_use(complaint: Complaint, tmp_path: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = config_file(tmp_path, model)
        assert str(port) in complaint("learner", path, "--swarm.listen", f'["/ip4/127.0.0.1/tcp/{port}"]')
        assert str(port) in complaint("learner", path, "--status.port", port)
        node = ("node", "--join", a_ticket().encode(), "--dir", tmp_path / "n")
        assert str(port) in complaint(*node, "--listen", f"/ip4/127.0.0.1/tcp/{port}")


def test_status_of_what_does_not_answer(
    complaint: Complaint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A port that accepts and says nothing; then another run's learner behind it; then a summary left behind."""
    from learner.status import source
    from learner.status.server import serve_status

    monkeypatch.setattr(source, "TIMEOUT_S", 0.3)  # seconds, of a server that never answers
    (tmp_path / "run.json").write_text('{"run": "0011"}')
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        (tmp_path / "status.json").write_text(json.dumps({"port": mute.getsockname()[1], "pid": 1}))
        assert "does not answer" in complaint("status", tmp_path)
    with serve_status(0, lambda: {"run": "2233"}) as port:
        (tmp_path / "status.json").write_text(json.dumps({"port": port, "pid": 1}))
        assert "not running" in complaint("status", tmp_path)
        (tmp_path / "summary.json").write_text('{"run": "0011", "step": 3, "nodes": []}')
        assert call("status", tmp_path, "--json") == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["finished"] is True


# --- what works ------------------------------------------------------------------------------------------------------


def test_the_config_file_may_come_after_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "some/model")
    assert call("learner", "--rollout.max_staleness", "3", path, "--dry-run", "--seed=5", "--trainer.lr", "1e-6", "--json") == 0
    config = json.loads(capsys.readouterr().out.splitlines()[-1])["config"]
    assert (config["rollout"]["max_staleness"], config["seed"], config["trainer"]["lr"]) == (3, 5, 1e-6)


def test_what_may_be_spent_has_short_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "some/model")
    assert call("learner", "--budget", "5", path, "--max-usd-per-hour=2.5", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["config"]["activation"]
    assert (found["budget_usd"], found["max_usd_per_hour"]) == (5, 2.5)


def test_dry_run_prints_a_config_that_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "some/model")
    flags = ["--trainer.lr", "1e-6", "--activation.ask_command", '["a \\"b\\""]', "--rollout.max-staleness=3"]
    assert call("learner", path, "--dry-run", *flags) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(printed)
    again = load_config(tmp_path / "again.toml")
    assert again == load_config(path, flags) and again.rollout.max_staleness == 3 and again.trainer.lr == 1e-6
    assert not (tmp_path / "run").exists()
    assert call("learner", tmp_path / "again.toml", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) ["config"] == again.model_dump()


def test_the_command_line_is_light() -> None:
    """torch takes seconds to import and libp2p half of one: not for --help, and not before they are needed."""
    code = """if True:
        import sys
        watched = {"torch", "transformers", "libp2p", "matplotlib"}
        heavy = lambda: sorted({m.split(".")[0] for m in sys.modules} & watched)
        import shoal
        try:
            shoal.main(["--help"])
        except SystemExit as leaving:
            assert leaving.code == 0
        assert not heavy(), heavy()
        assert "trio" not in sys.modules
        import learner.config, node.service, learner.status.outcome, learner.trainer.export, netem.demo.run, learner.service
        import learner.preflight.gather
        assert not heavy(), heavy()
        print("light")
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == "light", run.stderr
    verbs = ("learner", "node", "status", "export", "demo", "netem", "bench")
    assert "VERB" in run.stdout and all(verb in run.stdout for verb in verbs)


def test_a_real_process_complains_the_same(tmp_path: Path) -> None:
    for argv in (["learner", str(tmp_path / "no.toml")], ["nonsense"], ["status", str(tmp_path)]):
        run = subprocess.run([sys.executable, "-m", "shoal", *argv], capture_output=True, text=True, timeout=PATIENCE_S,
                             cwd=ROOT, env=child_environment(MODEST))  # fmt: skip
        assert (run.returncode, run.stdout) == (2, "")
        assert one_line(run.stderr).startswith("shoal")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    runner = Children(tmp_path_factory.mktemp("live"))
    yield runner
    runner.end(0)


@pytest.fixture(scope="module")
def live(runner: Children, model: Path) -> Path:
    """The run directory of a learner that waits for nodes."""
    runner.start("learner", "learner", str(config_file(runner.folder, model)), "--json")
    run = runner.folder / "run"
    until("a ticket and a status page", (run / "status.json").exists, runner)
    return run


def test_status_and_export_of_a_learner_that_waits(
    live: Path, complaint: Complaint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("status", live, "--json") == 0
    status = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status["finished"] is False and status["step"] == 0 and status["nodes"] == []
    assert call("status", live) == 0
    page = capsys.readouterr().out
    assert status["run"] in page and "running" in page and "0 of 2" in page
    assert "nothing is committed yet" in complaint("export", live, live.parent / "out")
    before = contents(live)
    changed = ("--resume", "--trainer.lr", "0.5")
    assert "another learner" in complaint("learner", live.parent / "c.toml", *changed)
    assert contents(live) == before, "the settings of the one that runs are as they were"
    assert call("status", live, "--json") == 0, "the refused second learner must not disturb the first"


def test_tickets_the_head_refuses(live: Path, runner: Children) -> None:
    genuine = read_ticket((live / "ticket.txt").read_text())
    head = Identity.load_or_create(live / "head.key")
    other_run = make_ticket(head, "another", genuine.addresses)
    expired = make_ticket(head, genuine.run, genuine.addresses, expires=1)
    cases = (("other", other_run, "another"), ("expired", expired, "expired"))
    nodes = [
        runner.start(name, "node", "--join", ticket.encode(), "--dir", str(runner.folder / name), "--no-listen")
        for name, ticket, _ in cases
    ]
    for node, (name, _, word) in zip(nodes, cases, strict=True):
        assert status_of(node, runner) == 2, runner.said(name)
        line = one_line(runner.said(name))
        assert "refused" in line and word in line
    assert (runner.folder / "other.out").read_text() == ""


def test_a_whole_run_with_json(shoal: Children, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps with one node; then status and export of the finished run, which the transformers library can load."""
    learner = shoal.start("learner", "learner", str(config_file(tmp_path, model)), "--audit", "0", "--json")
    run = tmp_path / "run"
    until("a ticket", (run / "status.json").exists, shoal)
    node = shoal.start(
        "node", "node", "--join", str(run / "ticket.txt"), "--dir", str(tmp_path / "n"), "--capacity", "8",
        "--listen", "/ip4/127.0.0.1/tcp/0", "--name", "one", "--json",
    )  # fmt: skip
    assert status_of(learner, shoal) == 0, shoal.said("learner")
    assert status_of(node, shoal) == 0, shoal.said("node")
    assert shoal.result("learner")["step"] == 2
    assert shoal.result("node")["version"] == "1.2" and shoal.result("node")["tokens"] > 0
    assert shoal.result("learner")["audits"] == {} and not (run / "logs" / "auditor.log").exists(), "it was told --audit 0"

    assert call("status", run, "--json") == 0
    status = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status["finished"] is True and status["step"] == 2 and status["nodes"][0]["name"] == "one"
    assert call("status", run) == 0
    assert "finished" in capsys.readouterr().out

    out = tmp_path / "out"
    assert call("export", run, out, "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"ok": True, "step": 2, "folder": str(out)}
    check_export(run, out)
    capsys.readouterr()
    Complaint(capsys)("export", run, out)
    before = contents(run)
    assert "nothing left to do" in Complaint(capsys)("learner", tmp_path / "c.toml", "--resume", "--trainer.lr", "0.5")
    assert contents(run) == before

    # Killed after its last commit and before its end: what is left is to publish the last version and to end.
    (run / "summary.json").unlink()
    again = shoal.start("again", "learner", str(tmp_path / "c.toml"), "--resume", "--json")
    assert status_of(again, shoal) == 0, shoal.said("again")
    assert shoal.result("again")["step"] == 2 and shoal.result("again")["version"] == "2.2"
    assert json.loads((run / "summary.json").read_text())["step"] == 2


def test_the_readmes_command_twice_on_one_machine(
    shoal: Children, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor finds the learner; then two nodes as typed, which take a folder each, work, and are drained by it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    learner = shoal.start("learner", "learner", str(config_file(tmp_path, model, trainer={"steps": 10_000})), "--json")
    run = tmp_path / "run"
    until("a ticket", (run / "status.json").exists, shoal)
    ticket = (run / "ticket.txt").read_text().strip()
    assert call("doctor", "--join", ticket, "--json") == 0
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    found = {finding["what"]: finding for finding in findings}
    assert " answers in " in found["learner"]["said"] and found["learner's clock"]["state"] == "ok"
    assert "on this machine" in found["seen as"]["said"]

    nodes = []
    for name in ("one", "two"):
        nodes.append(shoal.start(name, "node", "--join", ticket))
        until("its folder", lambda name=name: "this node's folder is" in shoal.said(name), shoal)
    until("both at work", lambda: len(working(run)) == 2, shoal)
    first = tmp_path / "data" / "shoal" / "nodes" / read_ticket(ticket).run
    assert f"folder is {first}\n" in shoal.said("one")
    assert f"folder is {first}-2 ({first.name} is another node's)\n" in shoal.said("two")
    for name in ("one", "two"):
        assert "dialling the learner at 127.0.0.1:" in shoal.said(name)
    assert "downloading version 1.0: a model of " in shoal.said("one") and "ready: waiting for work" in shoal.said("one")
    capsys.readouterr()
    assert call("node", "drain", "--join", ticket) == 2
    assert f"2 nodes of this run are here; say which with --dir: {first}, {first}-2" in capsys.readouterr().err
    assert call("node", "drain", "--dir", f"{first}-2") == 0 and status_of(nodes[1], shoal) == 0
    assert call("node", "drain", "--join", ticket) == 0 and status_of(nodes[0], shoal) == 0
    assert call("node", "drain", "--join", ticket) == 2
    assert f"no node runs in {first}" in capsys.readouterr().err
    assert learner.poll() is None


def working(run: Path) -> list[dict[str, Any]]:
    """The nodes that have made tokens, as the learner sees them."""
    port = json.loads((run / "status.json").read_text())["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=PATIENCE_S) as answer:
        return [node for node in json.load(answer)["nodes"] if node["alive"] and node["tokens"]]


def contents(run: Path) -> dict[str, bytes]:
    """The small files of a run directory that a second learner must leave alone."""
    names = ("run.json", "config.toml", "trainer.json", "listen.json", "status.json", "summary.json", "ticket.txt", "head.key")
    return {name: (run / name).read_bytes() for name in names if (run / name).exists()}


def check_export(run: Path, out: Path) -> None:
    """The folder holds the checkpoint's weights in bfloat16."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = load_file(run / "checkpoints" / "step_2" / "model.safetensors")
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert loaded.keys() <= saved.keys() and len(loaded) > 10
    for name, tensor in loaded.items():
        assert bool((tensor == saved[name].to(tensor.dtype)).all()), name
        assert str(tensor.dtype) == "torch.bfloat16"
    assert AutoTokenizer.from_pretrained(out).decode(AutoTokenizer.from_pretrained(out).encode("12")) == "12"


# --- interruptions ---------------------------------------------------------------------------------------------------


def test_ctrl_c(shoal: Children, tmp_path: Path, model: Path) -> None:
    learner = shoal.start("learner", "learner", str(config_file(tmp_path, model, trainer={"steps": 10_000})))
    run = tmp_path / "run"
    until("a ticket", (run / "status.json").exists, shoal)
    node = shoal.start(
        "node", "node", "--join", str(run / "ticket.txt"), "--dir", str(tmp_path / "n"),
        "--listen", "/ip4/127.0.0.1/tcp/0",
    )  # fmt: skip
    # Any: the first may be pruned already when we look.
    until("a first step", lambda: any((run / "checkpoints").glob("step_*")), shoal)
    node.send_signal(signal.SIGINT)
    assert status_of(node, shoal) in (0, 130)
    said = shoal.said("node") + (tmp_path / "node.out").read_text()
    assert "Traceback" not in said, said
    assert len([line for line in said.splitlines() if not line[:4].isdigit()]) == 1, said

    learner.send_signal(signal.SIGINT)
    assert status_of(learner, shoal) == 130
    assert "--resume" in one_line(shoal.said("learner"))
    # The trainer goes with its head: nothing of the run may be left running.
    trainer = until("the trainer's end", lambda: not _alive_on(run), shoal.folder)
    assert trainer


@pytest.mark.parametrize("background", [False, True])
def test_sigterm_ends_a_learner_as_ctrl_c_does(shoal: Children, tmp_path: Path, model: Path, background: bool) -> None:
    before = signal.getsignal(signal.SIGINT)
    if background:  # as a shell starts a script's background jobs
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        learner = shoal.start("learner", "learner", str(config_file(tmp_path, model)))
    finally:
        signal.signal(signal.SIGINT, before)
    run = tmp_path / "run"
    until("a ticket", (run / "status.json").exists, shoal)
    learner.send_signal(signal.SIGTERM)
    assert status_of(learner, shoal) == 143
    assert "--resume" in one_line(shoal.said("learner"))
    until("the trainer's end", lambda: not _alive_on(run), shoal.folder)


def _alive_on(run: Path) -> list[int]:
    import psutil

    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]


def test_ctrl_c_before_anything_happens(tmp_path: Path) -> None:
    """A node that still waits for a learner which is not there."""
    node = ["node", "--join", a_ticket().encode(), "--dir", str(tmp_path), "--no-listen"]
    command = [sys.executable, "-m", "shoal", *node]
    env = child_environment(MODEST)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    said: list[str] = []
    assert process.stderr is not None and process.stdout is not None
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()))
    reader.start()
    try:
        until("the first failed attempt", lambda: any("cannot reach" in line for line in said))
        process.send_signal(signal.SIGINT)
        assert status_of(process) in (0, 130)
    finally:
        process.kill()
        reader.join()
    text = "".join(said) + process.stdout.read()
    process.stdout.close()
    process.stderr.close()
    assert "Traceback" not in text, text
