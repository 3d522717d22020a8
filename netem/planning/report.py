"""What `shoal simulate` and `shoal plan` print and plot. Must not know how results come about."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from learner.status.curves import BLUE, GREEN, GREY, ORANGE

WIDTH = 130
"""Characters of a table that does not go to a terminal."""


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def print_simulation(result: dict[str, Any]) -> None:
    """Print what `runner.simulate` returned: the bill, who was active and why, and what would change it."""
    out = console()
    print_assumed(out, result["assumed"])
    if "usd_per_step" not in result:
        out.print(f"{result['name']}: interrupted in {result['interrupted']}: there is nothing to say yet", markup=False)
        return
    spent = f"${result['usd_per_step']:.2f} a step, ${result['usd_per_million_tokens']:.3f} a million tokens"
    lines = [
        f"{result['name']}: {result['nodes']} nodes, {result['steps']} steps ({result['detail']})",
        f"the learner is {result['learner_busy']:.1%} busy, a step takes {result['step_s']:.1f} s: {spent} "
        f"(learner ${result['usd_learner']:.2f}, nodes ${result['usd_nodes']:.2f}, egress ${result['usd_egress']:.2f})",
        f"versions every {result['kappa']} steps, {result['spread_s']:.1f} s to the last node; staleness "
        + ", ".join(f"{age}: {share:.0%}" for age, share in result["staleness"].items()),
    ]
    if result["blocked"]:
        lines.append(result["blocked"])
    out.print("\n".join(lines), markup=False, highlight=False)
    out.print(kinds_table(result["kinds"]))
    _print_reasons(out, result["kinds"])
    if result.get("would_change"):
        table = _table("what would change the answer (short runs, group by group)", ("knob", "$/step", "step time", "busy"))
        for row in result["would_change"]:
            table.add_row(row["knob"], f"{row['usd_per_step']:+.1%}", f"{row['step_s']:+.1%}", f"{row['learner_busy']:+.1%}")
        out.print(table)
    _print_interrupted(out, result)


def print_assumed(out: Console, rows: list[dict[str, Any]]) -> None:
    """Print what `assumed` returned: one line each, and which keys have their defaults because nobody gave them."""
    out.print("assumed:", markup=False)
    for row in rows:
        left = f" (default: {', '.join(row['default'])})" if row["default"] else ""
        out.print(Padding(Text(f"- {row['what']}{left}"), (0, 0, 0, 2)))


def _print_interrupted(out: Console, result: dict[str, Any]) -> None:
    if result["interrupted"]:
        out.print(f"interrupted: {result['interrupted']}; this is what there is", markup=False, highlight=False)


def kinds_table(kinds: dict[str, Any]) -> Table:
    """One row for each kind of node: how many were there and active, what they cost and made."""
    table = _table("who was active", ("kind", "nodes", "there", "active", "$", "Mtokens", "$/Mtokens"))
    for name, k in kinds.items():
        each = "-" if k["usd_per_million"] is None else f"{k['usd_per_million']:.3f}"
        table.add_row(
            name, str(k["nodes"]), f"{k['mean_there']:.1f}", f"{k['mean_active']:.1f}", f"{k['usd']:.2f}",
            f"{k['tokens'] / 1e6:,.1f}", each,
        )  # fmt: skip
    return table


def _print_reasons(out: Console, kinds: dict[str, Any]) -> None:
    """Why nodes of each kind were active or not, the commonest reasons first."""
    out.print("why (# stands for a number):", markup=False)
    for name, k in kinds.items():
        why = "; ".join(f"{n}x {what}" for what, n in list(k["changes"].items())[:3])
        out.print(Padding(Text(f"- {name}: {why or 'nothing was decided'}"), (0, 0, 0, 2)))


def print_preset(result: dict[str, Any]) -> None:
    """Print what `runner.run_preset` returned: the systems of each case, published numbers beside simulated ones, what hangs on
    fitted numbers."""
    out = console()
    out.print(f"{result['name']}: {result['what']}", markup=False, highlight=False)
    for case in result["cases"]:
        heads = ("system", "step s", "busy", "$/step", "$/Mtokens", "nodes", "local engine s", "staleness")
        table = _table(case["name"] or "systems", heads)
        for row in case["systems"]:
            active = sum(k["mean_active"] for k in row["kinds"].values())
            table.add_row(
                f"{row['name']} ({row['role']})", f"{row['step_s']:.1f}", f"{row['learner_busy']:.1%}",
                f"{row['usd_per_step']:.3f}", f"{row['usd_per_million_tokens']:.3f}", f"{active:.1f}",
                f"{row['local_engine_s']:.0f}", max(row["staleness"], key=int),
            )  # fmt: skip
        out.print(table)
        if case["ours_saves"]:
            saves = ", ".join(f"{value:.1%} against {name}" for name, value in case["ours_saves"].items())
            out.print(f"ours costs less a step by {saves}", markup=False, highlight=False)
    table = _table("published, and simulated", ("case", "what", "published", "simulated", "off by", ""))
    for c in result["published"]:
        holds = "holds" if c["holds"] else "does not hold"
        table.add_row(
            c["case"], c["what"], f"{c['low']:.1%} to {c['high']:.1%}", f"{c['value']:.1%}", f"{100 * c['off']:.1f} points", holds
        )
    out.print(table)
    for row in result["hangs_on"]:
        found = ", ".join(f"{what} {value:.1%}" for what, value in row["found"].items())
        out.print(f"with {row['key']} = {row['value']:g}: {found}", markup=False, highlight=False)
    _print_interrupted(out, result)


def print_explained(name: str, rows: list[dict[str, Any]]) -> None:
    """Print what `runner.explained` returned: where each number of the preset `name` is from."""
    table = _table(f"{name}: where its numbers are from", ("key", "value", "", "why"))
    for column in table.columns:
        column.justify = "left"
    for row in rows:
        table.add_row(row["key"], "" if row["value"] is None else str(row["value"]), row["kind"], row["why"])
    console().print(table)


def print_plan(result: dict[str, Any]) -> None:
    """Print what `plan.plan` returned: the cheapest set of nodes, if there is one, and the sentences about it."""
    out = console()
    print_assumed(out, result["assumed"])
    if result["chosen"]:
        table = _table("the cheapest set", ("kind", "nodes", "of", "tokens/s", "$/h"))
        for row in result["chosen"]:
            rate, usd = f"{row['tokens_per_s']:,.0f}", f"{row['usd_per_hour']:.2f}"
            table.add_row(row["kind"], str(row["nodes"]), str(row["of"]), rate, usd)
        out.print(table)
    for line in result["sentences"]:
        out.print(line, markup=False, highlight=False)


def _table(title: str, heads: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right")
    return table


def write_plot(result: dict[str, Any], file: Path) -> None:
    """A scenario: seconds a step, staleness, dollars by kind. A preset: dollars a step of each system, of each case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), dpi=120, layout="constrained")
    if "cases" in result:
        axes = figure.subplots(1, len(result["cases"]), squeeze=False)[0]
        colours = {"baseline": GREY, "paper": ORANGE, "ours": BLUE, "ablation": "#c9d1d8"}
        for ax, case in zip(axes, result["cases"], strict=True):
            names = [row["name"] for row in case["systems"]]
            ax.barh(names, [row["usd_per_step"] for row in case["systems"]], color=[colours[r["role"]] for r in case["systems"]])
            ax.invert_yaxis()
            _dress(ax, case["name"] or result["name"], "$ a step")
    else:
        steps, ages, kinds = figure.subplots(1, 3)
        steps.plot([r["step"] for r in result["series"]], [r["step_s"] for r in result["series"]], color=BLUE, linewidth=1.4)
        steps.set_ylim(bottom=0)
        _dress(steps, "seconds a step", "step")
        ages.bar(list(result["staleness"]), list(result["staleness"].values()), color=GREEN)
        _dress(ages, "staleness (share of groups)", "steps")
        shown = {name: k["usd"] for name, k in result["kinds"].items() if k["usd"]}
        kinds.barh(["learner", *shown], [result["usd_learner"], *shown.values()], color=ORANGE)
        kinds.invert_yaxis()
        _dress(kinds, "where the money goes", "$")
    figure.savefig(file)


def _dress(ax: Any, title: str, x: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold")
    ax.set_xlabel(x)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
