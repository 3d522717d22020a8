"""The Grafana board asks for what is in the catalogue, and imports cleanly. tests/e2e/test_metrics.py runs its queries."""

from __future__ import annotations

import re

from learner.status.catalogue import entries
from tests.support.board import alarm_queries, board_queries, read_board

BOARD = read_board()
SERIES = {e.series: e for e in entries() if e.name}


def test_every_query_asks_for_metrics_that_there_are() -> None:
    for where, query in board_queries().items():
        names = re.findall(r"\bshoal_\w+", query)
        assert names and set(names) <= set(SERIES), where
        assert "$" not in query, where
        # Whoever sums or graphs a counter as it stands sees the restarts; money is the exception, the run keeps that count.
        for name in names:
            if SERIES[name].kind == "counter" and name != "shoal_cost_usd_total":
                assert re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[", query), where
        assert query.count('instance=~".*"') == len(names), where


def test_the_panels_that_a_run_is_judged_by_are_there() -> None:
    asked = " ".join(board_queries().values())
    for name in (
        "shoal_reward_mean", "shoal_staleness_max_steps", "shoal_node_tokens_per_second", "shoal_step_wait_seconds",
        "shoal_nodes", "shoal_published_step", "shoal_learner_egress_bytes_total", "shoal_cost_usd_total", "shoal_refusals_total",
    ):  # fmt: skip
        assert name in asked


def test_it_imports_with_any_data_source() -> None:
    variables = {v["name"]: v for v in BOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "instance"} and variables["datasource"]["query"] == "prometheus"
    assert variables["instance"]["query"]["query"] == "label_values(shoal_run_info, instance)" and "shoal_run_info" in SERIES
    sources = [panel["datasource"] for panel in BOARD["panels"]] + [variables["instance"]["datasource"]]
    sources += [target["datasource"] for panel in BOARD["panels"] for target in panel["targets"]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


def test_panels_stand_beside_each_other() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["title"] and panel["description"].endswith("."), panel["title"]


def test_alarms_ask_for_metrics_that_there_are() -> None:
    queries = alarm_queries()
    assert len(queries) >= 5
    for query in queries:
        assert set(re.findall(r"\bshoal_\w+", query)) <= set(SERIES), query
