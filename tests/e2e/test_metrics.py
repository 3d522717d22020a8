"""A live run's metrics: its lines and its page have what the catalogue lists, a real Prometheus answers the board's queries."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from learner.config import build_config, dump_toml
from learner.status.catalogue import entries
from learner.tasks.registry import make_task
from netem.demo.tiny_model import build_demo_model
from netem.processes.children import MODEST, POLITE_S, Children
from p2p.processes import Process, child_environment, start
from tests.support.board import MONITORING, alarm_queries, board_queries
from tests.support.warm_parts import WithWarmParts
from tests.support.watchdog import PATIENCE_S, until

pytestmark = pytest.mark.e2e

PROMETHEUS = shutil.which("prometheus")

CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: shoal
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

NOT_IN_A_PLAIN_RUN = ("redundancy/", "local_engine/", "episodes/")
"""Keys of a run with rollout.extra_*, a local engine or turns: tests/swarm/test_metrics.py and test_episodes.py have them."""

MEANS_OF_TOKENS = (
    "entropy", "ratio/mean", "mismatch_kl/mean", "mismatch_kl/max", "off_policy/effective", "objective/weight_mean",
    "clip_ratio/low_mean", "clip_ratio/high_mean",
)  # fmt: skip
"""Keys that a step without a forward does not have."""

WITHOUT_SERIES: dict[str, str] = {}
"""Queries of the board that a short run has no series for -> why."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    runner = WithWarmParts(tmp_path_factory.mktemp("metrics"))
    yield runner
    runner.end(POLITE_S)


@pytest.fixture(scope="module")
def run_dir(runner: Children) -> Path:
    """A run under way: a learner that trains with two nodes, and has some steps behind it."""
    folder = runner.folder
    model = build_demo_model(folder / "model", make_task("reverse", 0, {"digits": 3}), steps=4, batch=16)
    settings = {
        "run_dir": str(folder / "run"), "model": str(model), "task": {"options": {"digits": 3}},
        "rollout": {"groups_per_step": 2, "samples": 4, "max_new_tokens": 5}, "activation": {"learner_usd_per_hour": 3.6},
        "swarm": {"listen": ["/ip4/127.0.0.1/tcp/0"]},
        "trainer": {"steps": 1_000_000, "eval_size": 4, "eval_every": 1, "threads": 1},
    }  # fmt: skip
    (folder / "run.toml").write_text(dump_toml(build_config(settings, "test").model_dump()))
    runner.start("learner", "learner", str(folder / "run.toml"), "--json")
    until("a ticket", (folder / "run" / "status.json").exists, runner)
    for name in ("one", "two"):
        runner.start(
            name, "node", "--join", str(folder / "run" / "ticket.txt"), "--dir", str(folder / name), "--name", name, "--json",
            "--capacity", "16", "--listen", "/ip4/127.0.0.1/tcp/0",
        )  # fmt: skip
    # A delta that somebody has installed, and steps enough that what the learner needs is known.
    until("steps", lambda: any({"broadcast/max_s", "pool/kappa"} <= line.keys() for line in lines(folder / "run")), runner)
    until("an evaluation", lambda: any("eval/exact/stderr" in line for line in lines(folder / "run")), runner)
    return folder / "run"


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def status_port(run_dir: Path) -> int:
    port: int = json.loads((run_dir / "status.json").read_text())["port"]
    return port


def test_the_lines_of_a_run_have_what_is_listed_and_nothing_else(run_dir: Path) -> None:
    written = {key for line in lines(run_dir) for key in line if not key.startswith("mismatch_kl/age_")}
    assert written == {e.key for e in entries() if e.key and not e.is_family and not e.key.startswith(NOT_IN_A_PLAIN_RUN)}


def test_the_page_of_a_run_is_valid_openmetrics(run_dir: Path) -> None:
    answer = httpx.get(
        f"http://127.0.0.1:{status_port(run_dir)}/metrics", headers={"Accept": "application/openmetrics-text"}, trust_env=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]
    samples = [s for s in samples if s.name != "shoal_mismatch_kl_by_age_nats"]  # which ages there are depends on the run
    listed = {e.series for e in entries() if e.name and not e.is_family}
    absent = ("shoal_redundancy_kept", "shoal_redundancy_cut", "shoal_local_engine", "shoal_episodes_")
    # The page is of the newest step. One whose groups were all equal had no forward, and has no means of tokens.
    of_tokens = {e.series for e in entries() if e.key in MEANS_OF_TOKENS}
    assert of_tokens and {s.name for s in samples} | of_tokens == {name for name in listed if not name.startswith(absent)}
    assert {label for s in samples for label in s.labels} == {"run", "reason", "state", "class"}
    assert len(samples) < 200


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed (Debian: apt-get install prometheus)")
def test_prometheus_answers_every_query_of_the_board(run_dir: Path, runner: Children) -> None:
    assert PROMETHEUS is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (runner.folder / "prometheus.yml").write_text(CONFIG.format(port=status_port(run_dir)))
    prometheus = runner.start(
        "prometheus", f"--config.file={runner.folder}/prometheus.yml", f"--storage.tsdb.path={runner.folder}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", module=PROMETHEUS, starter=start_program,
    )  # fmt: skip

    def api(what: str, **params: str) -> Any:
        assert not prometheus.failed(), runner.said("prometheus")
        url = f"http://127.0.0.1:{port}/api/v1/{what}"
        answer = httpx.get(url, params=params, trust_env=False, timeout=PATIENCE_S).json()
        assert answer["status"] == "success", (params, answer)
        return answer["data"]

    def ask(query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = api("query", query=query)["result"]
        return found

    def up() -> bool:
        assert not prometheus.failed(), runner.said("prometheus")
        try:
            return httpx.get(f"http://127.0.0.1:{port}/-/ready", trust_env=False, timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    until("Prometheus", up, runner)
    until("a scrape", lambda: ask("shoal_run_info"), runner)
    [run] = ask("shoal_run_info")  # what the board's variable offers
    assert run["metric"]["instance"] == f"127.0.0.1:{status_port(run_dir)}"
    queries = board_queries()
    waiting = set(queries.values()) - WITHOUT_SERIES.keys()

    def all_answered() -> bool:
        waiting.difference_update([query for query in waiting if ask(query)])
        (runner.folder / "unanswered.out").write_text("\n".join(sorted(waiting)))  # shown when patience ends
        return not waiting

    until("series for every query of the board", all_answered, runner)
    assert WITHOUT_SERIES.keys() <= set(queries.values()) and not [query for query in WITHOUT_SERIES if ask(query)]
    for query in alarm_queries():
        ask(query)  # it is understood; a sound run gives no alarm
    [target] = api("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    known = api("metadata")
    for entry in entries():
        if entry.name in known:
            assert known[entry.name][0]["type"] == entry.kind, entry.name
    assert sum(entry.name in known for entry in entries()) > 60


def start_program(module: str, arguments: Sequence[str], out: Path, log: Path) -> Process:
    return start([module, *arguments], stdout=out, stderr=log, environment=child_environment(MODEST))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_the_pages_example_is_a_configuration_of_prometheus(runner: Children) -> None:
    [example] = re.findall(r"(?m)^    scrape_configs:\n(?:    .*\n)+", MONITORING.read_text(encoding="utf-8"))
    path = runner.folder / "example.yml"
    path.write_text(example)
    checked = subprocess.run(["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
