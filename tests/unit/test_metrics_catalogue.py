"""The catalogue of metrics: well formed, docs/metrics.md is made of it, and the trainer writes what it lists and nothing else.

The head's keys are checked in tests/swarm/test_metrics.py, a real run's in tests/e2e/test_metrics.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from learner.client.port import BY_NODE
from learner.status.catalogue import MOVE_REASONS, NODE_STATES, SECTIONS, entries, find_entry
from learner.status.exposition import MOST_LABEL, MOST_OPEN, metrics_text, node_counts
from learner.status.metric_entries import OTHER, UNITS, MetricEntry
from learner.status.metrics_docs import metrics_markdown, metrics_rows
from learner.status.run_state import NodeRow
from learner.tasks.registry import make_task
from learner.trainer.model import load_model
from learner.trainer.settings import TrainerConfig
from learner.trainer.trainer import run_trainer
from netem.demo.tiny_model import build_random_model
from tests.support.trainer_twins import FakeClient, step_groups

ROOT = Path(__file__).parents[2]
OPENMETRICS = "application/openmetrics-text"

# One of everything that the status page may have.
STATUS: dict[str, Any] = {
    "run": 'a "run"\nid', "seconds": 3.5, "step": 4, "steps": 9, "version": "2.4", "versions_published": 5, "max_staleness": 2,
    "max_staleness_seen": 1, "refusals": 7, "turned_away": 6, "learner_egress_bytes": 100, "peer_bytes": 50, "anchor_bytes": 60,
    "trajectories": {"reserved": 8, "consumed": 4, "aborted": {"stale": 2, "a new reason": 1}, "outstanding": 1, "lost": 0},
    "moved": {"slow": 3}, "unscored": {"groups": 2, "last": "reward function score: it raised"},
    "requests": {
        name: {"evaluation": 1, "serving": 2}
        for name in ("waiting", "running", "asked", "ended", "failed", "cancelled", "busy", "moved", "tokens")
    },
    "pool": {"spent_usd": 1.5, "usd_per_hour": 0.5, "budget_usd": 0.0},
    "audits": {"checked": 5, "calibrated": 6, "unchecked": 7, "probed": 3, "waiting": 1, "caught": 1, "seconds": 0.5},
    "caught": {"nodes": 2, "trained_tokens": 90, "remade_groups": 3, "remade_tokens": 40},
    "redundancy": {"surplus_groups": 1, "surplus_sequences": 2, "surplus_tokens": 30, "truncated": 4},
    "nodes": [
        {"alive": True, "ready": True, "activity": "active", "tokens_per_s": 10.0},
        {"alive": True, "ready": True, "activity": "warm", "tokens_per_s": 0.5},
        {"alive": False, "ready": True, "tokens_per_s": 99.0},
    ],
    "metrics": {
        **{e.key: 0.5 for e in entries() if e.key and not e.is_family},
        "reward/form": 0.25, "mismatch_kl/age_2": 0.1, "my/own": 1, "eval/mine/pass@4": 0.5,
    },
}  # fmt: skip


def parsed(status: dict[str, Any]) -> dict[str, dict[tuple[str, ...], float]]:
    """Series -> (label values) -> value, as the client's own parser reads the OpenMetrics text."""
    out: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics_text(status, OPENMETRICS).body.decode()):
        for sample in family.samples:
            out.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return out


# --- the catalogue ---------------------------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    page = ROOT / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_markdown(), "make it anew: shoal config metrics > docs/metrics.md"
    assert [row["key"] for row in metrics_rows()] == [e.key for e in entries()]


def name_of(entry: MetricEntry) -> str:
    return entry.key or entry.name


@pytest.mark.parametrize("entry", list(entries()), ids=name_of)
def test_every_entry_is_well_formed(entry: MetricEntry) -> None:
    assert entry.what[:1].isupper() and entry.what.endswith("."), entry
    assert entry.key or entry.name, entry
    if entry.name:
        assert re.fullmatch(r"shoal(_[a-z0-9]+)+", entry.name), entry
        assert not entry.name.endswith(("_total", "_info")), "the kind adds it"
        assert entry.key or entry.path, "it has a source"
    elif not entry.is_family:
        assert "/metrics" in entry.what or entry.key == "pool/active", "it says where /metrics has it"
    assert bool(entry.label) == (entry.is_family or bool(entry.values) or entry.kind == "info"), entry


def test_no_name_and_no_key_is_there_twice() -> None:
    for names in ([e.key for e in entries() if e.key], [e.name for e in entries() if e.name]):
        assert sorted(names) == sorted(set(names))
    assert all(section.what.endswith(".") and section.entries for section in SECTIONS)
    assert {unit for e in entries() if (unit := e.unit)} == set(UNITS), "no unit is listed in vain"


def test_a_key_belongs_to_its_own_entry_or_to_the_family_with_the_longest_prefix() -> None:
    def found(key: str) -> str:
        entry = find_entry(key)
        assert entry is not None
        return entry.name

    assert found("reward/mean") == "shoal_reward_mean" and found("reward/form") == "shoal_reward_part"
    assert found("rewards") == found("reward_parts/x") == "shoal_other"


# --- /metrics --------------------------------------------------------------------------------------------------------


def test_everything_listed_is_on_the_page_and_nothing_else() -> None:
    assert set(parsed(STATUS)) == {e.series for e in entries() if e.name}


def test_values_and_labels() -> None:
    page = parsed(STATUS)
    assert page["shoal_run_info"] == {('a "run"\nid',): 1.0}
    assert page["shoal_reward_mean"] == {(): 0.5} and page["shoal_published_step"] == {(): 4.0}
    assert page["shoal_learner_egress_bytes_total"] == {(): 100.0} and page["shoal_cost_usd_total"] == {(): 1.5}
    aborted = page["shoal_trajectories_aborted_total"]
    assert aborted[("stale",)] == 2 and aborted[(OTHER,)] == 1 and aborted[("equal",)] == 0
    assert page["shoal_sequences_moved_total"] == {(reason,): 3.0 * (reason == "slow") for reason in MOVE_REASONS}
    assert page["shoal_nodes"] == {(state,): float(state in ("generating", "warm", "gone")) for state in NODE_STATES}
    assert page["shoal_node_tokens_per_second"] == {(): 10.5}
    assert page["shoal_eval"] == {("mine/pass@4",): 0.5}
    assert page["shoal_reward_part"] == {("form",): 0.25} and page["shoal_other"] == {("my/own",): 1.0}


def test_nodes_are_counted_in_one_state_each() -> None:
    one = {"alive": True, "ready": True, "activity": "active"}
    for change, state in (
        ({}, "generating"), ({"activity": "warm"}, "warm"), ({"activity": "asleep"}, "asleep"), ({"ready": False}, "starting"),
        ({"draining": True, "ready": False}, "leaving"), ({"alive": False, "draining": True}, "gone"),
        ({"ready": False, "activity": "asleep"}, "asleep"), ({"ready": False, "activity": "warm"}, "starting"),
    ):  # fmt: skip
        assert {s: n for s, n in node_counts([one | change]).items() if n} == {state: 1}
        assert NodeRow.model_validate(one | change).state == state.replace("generating", "active")


def test_a_young_run_and_odd_numbers_leave_a_valid_page() -> None:
    young = parsed({"run": "r", "metrics": {}, "nodes": [], "version": None, "trajectories": {}, "moved": {}})
    assert "shoal_step" not in young and "shoal_published_step" not in young and young["shoal_nodes"][("gone",)] == 0
    assert parsed({})["shoal_node_tokens_per_second"] == {(): 0.0}
    odd = {"reward/mean": None, "loss/mean": float("nan"), "step": 10**400, "my": "text", "your": [1], "\x1b[31m": 2.0}
    page = parsed({"metrics": odd})
    assert "shoal_reward_mean" not in page and page["shoal_loss_mean"][()] != page["shoal_loss_mean"][()]
    assert page["shoal_step"] == {(): float("inf")} and page["shoal_other"] == {("?[31m",): 2.0}


def test_names_of_ones_own_are_bounded() -> None:
    page = parsed({"metrics": {f"{i:04}" + "x" * 500: 1.0 for i in range(1000)}})
    assert len(page["shoal_other"]) == MOST_OPEN and all(len(key) == MOST_LABEL for (key,) in page["shoal_other"])


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("text/html;q=0.9, application/openmetrics-text; version=1.0.0", "application/openmetrics-text; version=1.0.0"),
        ("application/openmetrics-text; version=nonsense", "text/plain"),
    ],
)
def test_who_asks_for_openmetrics_gets_it(accept: str, kind: str) -> None:
    answer = metrics_text(STATUS, accept)
    assert answer.content_type.startswith(kind)
    assert answer.body.endswith(b"# EOF\n") == kind.startswith(OPENMETRICS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_names_keep_the_conventions_of_prometheus() -> None:
    """Its own linter; it says nothing when all is well."""
    lint = subprocess.run(["promtool", "check", "metrics"], input=metrics_text(STATUS).body, capture_output=True, check=False)
    assert (lint.returncode, lint.stdout + lint.stderr) == (0, b"")


# --- the trainer's keys ----------------------------------------------------------------------------------------------


def test_the_trainer_writes_what_is_listed_and_nothing_else(tmp_path: Path) -> None:
    task = make_task("reverse", 0)
    folder = build_random_model(tmp_path / "model", size="0.4m")
    _, tokenizer = load_model(folder, "cpu")
    client = FakeClient(lambda step: step_groups(step, tokenizer, task, groups=1, size=2))
    config = TrainerConfig(
        model=str(folder), checkpoint_dir=str(tmp_path / "c"), device="cpu", threads=1, steps=1, max_new_tokens=4
    )
    run_trainer(client, config)
    written = {key for _, metrics in client.logs for key in metrics}
    assert written - {"mismatch_kl/age_0", BY_NODE} == {e.key for e in entries("trainer") if not e.is_family}
    json.dumps([metrics for _, metrics in client.logs], allow_nan=False)
