"""The Grafana board and the page about it, as their tests read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
BOARD, MONITORING = DOCS / "grafana" / "shoal.json", DOCS / "monitoring.md"

RATE_INTERVAL = "10s"
"""What stands for Grafana's $__rate_interval: some scrapes of a second each."""


def read_board() -> dict[str, Any]:
    """The board's JSON."""
    board: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    return board


def board_queries() -> dict[str, str]:
    """Title of the panel and letter -> its PromQL, with Grafana's variables filled in: all runs."""
    return {
        f"{panel['title']} {target['refId']} ({panel['type']})": target["expr"]
        .replace("$__rate_interval", RATE_INTERVAL).replace("$instance", ".*")
        for panel in read_board()["panels"] for target in panel["targets"]
    }  # fmt: skip


def alarm_queries() -> list[str]:
    """The queries of the page's table of alarms."""
    table = MONITORING.read_text(encoding="utf-8").partition("## Worth an alarm")[2]
    return re.findall(r"(?m)^\|.*\| `(.+)` \|$", table)
