"""What a benchmark of broadcasts came to, for people: a table, Markdown, a plot. Must not know how it was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from netem.contest.trial import number

COLUMNS = ("policy", "T/T*", "cold", "simulated", "T max s", "T median s", "source", "duplicates", "CPU s", "TCP", "")

WIDTH = 110
"""Of a table that goes to no terminal."""

COLOURS = {
    "shoal": "#1b6ca8", "star": "#c9c9c9", "chain": "#a9a9a9", "tree": "#898989", "shardcast": "#e08e45", "libtorrent": "#5aa469",
}  # fmt: skip


def print_bench(result: dict[str, Any]) -> None:
    """Tables on stderr."""
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    for scenario in result["scenarios"]:
        table = Table(title=headline(scenario), title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("policy", "TCP", "") else "right")
        for row in scenario["rows"]:
            table.add_row(*cells(scenario, row))
        console.print(table)
    for why in result["skipped"].values():
        console.print(f"skipped: {why}", markup=False, highlight=False)


def headline(scenario: dict[str, Any]) -> str:
    scale = "" if scenario["scale"] == 1 else f", rates times {scenario['scale']:g}"
    return (
        f"{scenario['name']}: {scenario['nodes']} nodes, {scenario['payload_bytes'] / 2**20:g} MiB, "
        f"T* {scenario['t_star']:.2f} s, MTU {scenario['mtu']}{scale}"
    )


def cells(scenario: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Of COLUMNS. What was cut off is "> ": it took longer than that."""
    if row["ratio"] is None:
        return [row["policy"], *["-"] * (len(COLUMNS) - 3), row["congestion"], "; ".join(row["failures"])]
    more, size = "> " if row["cut_off"] else "", scenario["payload_bytes"]
    notes = ["cut off"] if row["cut_off"] else []
    notes += [f"{len(row['failures'])} failed"] if row["failures"] else []
    notes += [f"emulator {row['late_ms']:.0f} ms late"] if row["late_ms"] > 10 else []
    return [
        row["policy"], f"{more}{row['ratio']:.2f}", number(row["cold_ratio"], 2), number(_simulated(row), 2),
        f"{more}{row['t_max']:.2f}", f"{row['t_median']:.2f}", f"{row['source_bytes'] / size:.2f}",
        f"{100 * row['duplicate_bytes'] / (size * scenario['nodes']):.2f} %", f"{row['cpu_s']:.1f}", row["congestion"],
        ", ".join(notes),
    ]  # fmt: skip


def _simulated(row: dict[str, Any]) -> float | None:
    return row["simulated"]["ratio"] if row.get("simulated") else None


def markdown(result: dict[str, Any]) -> str:
    """The tables in Markdown, one for each scenario."""
    lines = []
    for scenario in result["scenarios"]:
        lines += [f"**{headline(scenario)}**", "", "| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * 8 + "|---|---|"]
        lines += ["| " + " | ".join(cells(scenario, row)) + " |" for row in scenario["rows"]] + [""]
    return "\n".join(lines)


def write_markdown(result: dict[str, Any], file: Path) -> None:
    file.write_text(markdown(result), encoding="utf-8")


def write_plot(result: dict[str, Any], file: Path) -> None:
    """Bars of T/T*, a group a scenario; hatched: cut off. Whiskers span the repeats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scenarios = result["scenarios"]
    policies = list(dict.fromkeys(row["policy"] for s in scenarios for row in s["rows"]))
    width = 0.8 / max(1, len(policies))
    figure, axes = plt.subplots(figsize=(max(6.0, 0.35 * len(scenarios) * len(policies) + 2.0), 4.2), layout="constrained")
    for i, policy in enumerate(policies):
        for x, scenario in enumerate(scenarios):
            row = next((r for r in scenario["rows"] if r["policy"] == policy and r["ratio"] is not None), None)
            if row is None:
                continue
            at, top = x + (i - (len(policies) - 1) / 2) * width, row["ratio"]
            spread = [[top - min(row["ratios"])], [max(row["ratios"]) - top]]
            axes.bar(at, top, 0.92 * width, color=COLOURS.get(policy, "#777777"), hatch="//" if row["cut_off"] else None,
                     edgecolor="white", linewidth=0.5, yerr=spread if len(row["ratios"]) > 1 else None,
                     error_kw={"elinewidth": 1, "ecolor": "#333333"})  # fmt: skip
            axes.annotate(f"{'>' if row['cut_off'] else ''}{top:.2f}", (at, max(top, *row["ratios"])), ha="center", va="bottom",
                          fontsize=7, rotation=90, xytext=(0, 3), textcoords="offset points")  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(scenarios)), [f"{s['name']}\nT* {s['t_star']:.2f} s" for s in scenarios], fontsize=8)
    axes.set_ylabel("time to the last node / fluid bound T*")
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS.get(p, "#777777")) for p in policies]
    figure.legend(handles, policies, ncols=len(policies), frameon=False, fontsize=8, loc="outside upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
