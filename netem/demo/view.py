"""The demo's live page in the terminal, or one plain line now and then where there is no terminal.

Fed with status dictionaries; must not know processes, HTTP or files. Writes to stdout only when that is a terminal:
with --json, stdout is for the result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from learner.status.view import human_bytes, human_seconds, node_table, number

BARS = "▁▂▃▄▅▆▇█"
CURVE = 60
"""Characters of a curve."""

EVERY_STEPS = 10
"""Steps between two plain lines."""

SHOWN_EVENTS = 4
"""Latest events on the page: more would push the nodes off a small terminal."""


def sparkline(values: Sequence[float]) -> str:
    """`values` as at most CURVE bars between 0 and 1; where there are more values, means of neighbours."""
    if len(values) > CURVE:
        cuts = [i * len(values) // CURVE for i in range(CURVE + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(v * len(BARS))))] for v in values)


class DemoView:
    """`with DemoView(enabled, steps) as view: view.update(status, events)`, once or twice a second."""

    def __init__(self, enabled: bool, steps: int) -> None:
        self.steps, console = steps, Console()
        self._live: Live | None = None
        if enabled and console.is_terminal:
            # No alternate screen: the last state stays above the result when the demo is over.
            self._live = Live(Text("waiting for the learner ..."), console=console, auto_refresh=False)
        self._curves: dict[str, dict[int, float]] = {"reward": {}, "exact": {}}
        self._evals: dict[int, float] = {}
        self._said = -1
        self._events_said = 0

    def __enter__(self) -> DemoView:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, status: Mapping[str, Any], events: Sequence[str]) -> None:
        """Show what is new. Values that a young run does not have yet may be missing."""
        self._remember(status)
        if self._live is not None:
            self._live.update(self.page(status, events), refresh=True)
        else:
            self._say(status, events)

    def _remember(self, status: Mapping[str, Any]) -> None:
        metrics = status.get("metrics") or {}
        step = metrics.get("step")
        if not isinstance(step, int):
            return
        for name, curve in self._curves.items():
            value = metrics.get(f"{name}/mean")
            if isinstance(value, (int, float)):
                # After a resume the learner is behind what we drew: those steps are being done again.
                for later in [s for s in curve if s > step]:
                    del curve[later]
                curve[step] = value
        self._evals |= {int(s): value for s, value in status.get("evals", {}).items()}

    def page(self, status: Mapping[str, Any], events: Sequence[str]) -> Panel:
        """The whole page as one renderable."""
        step = int(status.get("step") or 0)
        metrics = status.get("metrics") or {}
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(1, self.steps), completed=step, width=CURVE - 14),
            f"{step} of {self.steps}, {human_seconds(status.get('seconds') or 0)}",
        )
        grid.add_row("step", bar)
        for name, curve in self._curves.items():
            values = [curve[s] for s in sorted(curve)]
            last = f"  {values[-1]:.2f}" if values else "–"
            grid.add_row(name, Text(sparkline(values), style="cyan" if name == "reward" else "green").append(last))
        if self._evals:
            tail = sorted(self._evals)[-6:]
            grid.add_row("held out", "  ".join(f"{self._evals[s]:.2f} at {s}" for s in tail))
        grid.add_row("version", f"{status.get('version') or '–'}, {status.get('versions_published', 0)} published")
        grid.add_row(
            "weights sent",
            f"{human_bytes(status.get('learner_egress_bytes') or 0)} by the learner, "
            f"{human_bytes(status.get('peer_bytes') or 0)} between nodes; "
            f"a delta is {human_bytes(metrics.get('broadcast/bytes') or status.get('delta_bytes_mean') or 0)}, "
            f"on every node in {number(metrics, 'broadcast/max_s', '.2f')} s",
        )
        seen, bound = status.get("max_staleness_seen"), status.get("max_staleness")
        grid.add_row("staleness", f"{seen} seen, bound {bound} (steps)")
        parts: list[Any] = [grid, Text(), node_table(list(status.get("nodes") or []))]
        parts += [Text(f"! {event}", style="yellow") for event in list(events)[-SHOWN_EVENTS:]]
        reports = status.get("reports") or []
        parts += [Text(str(line), style="red", overflow="ellipsis", no_wrap=True) for line in reports[-2:]]
        return Panel(Group(*parts), title=f"shoal demo, run {status.get('run', '')}", title_align="left")

    def _say(self, status: Mapping[str, Any], events: Sequence[str]) -> None:
        for event in list(events)[self._events_said :]:
            print(event, file=sys.stderr, flush=True)
        self._events_said = len(events)
        step = int(status.get("step") or 0)
        if step // EVERY_STEPS == self._said // EVERY_STEPS and not (step >= self.steps > self._said):
            return
        self._said = step
        metrics = status.get("metrics") or {}
        nodes = status.get("nodes") or []
        print(
            f"step {step} of {self.steps}: reward {number(metrics, 'reward/mean', '.2f')}, "
            f"exact {number(metrics, 'exact/mean', '.2f')}, {sum(bool(n.get('alive')) for n in nodes)} nodes, "
            f"{number(metrics, 'node/tokens_per_s', '.0f')} tokens/s, "
            f"staleness {status.get('max_staleness_seen')} of {status.get('max_staleness')}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
