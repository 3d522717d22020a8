"""The bench's numbers as tables of Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from netem.bench.audit.judging import AMONG, ELSEWHERE, KNOWN, LATE, NOBODY_TRUSTED, UNKNOWN


def tables(result: Mapping[str, Any]) -> str:
    """What is printed: honest nodes, then cheats by what is known of a node."""
    out = [_honest(result["honest"])]
    out.append(f"Honest nodes of which there are few tokens\n\n{_beginnings(result['honest'])}")
    if short := [row for row in result["honest"] if row.get("short answers")]:
        out.append(f"Honest nodes whose answers are short\n\n{_short(short)}")
    engines = [row["engine"] for row in result["honest"]]
    for known in (KNOWN, AMONG, UNKNOWN, NOBODY_TRUSTED, ELSEWHERE, LATE, f"{KNOWN}, with suspects", f"{AMONG}, with suspects"):
        rows = [row for row in result["cheats"] if known in row]
        if rows:
            out.append(f"Tokens until caught, median (90th percentile): {known}\n\n{_cheats(rows, engines, known)}")
    return "\n\n".join(out)


def cost_line(result: Mapping[str, Any]) -> str:
    """What `audited_run` found, for people."""
    checked = f"{result['checked']:,} of {result['tokens']:,} tokens checked ({result['checked_share']:.2%})"
    seconds = f"engines {result['engines_s']:.2f} s of a core, the auditor {result['auditor_s']:.2f} s: **{result['cost']:.2%}**"
    load = f"load {result['load'][0]:.1f} to {result['load'][1]:.1f}"
    return f"{result['steps']} steps, {checked}; {seconds} ({load}; {result['before_s']:.1f} s of the auditor before them)"


def _honest(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ["honest node", "tokens", "nats a token", "exact", "further than 0.005", "off (nats)", "caught"]
    names += ["most evidence: kind known", "of a known kind", "never measured", "nobody trusted", "says cuda", "with suspects"]
    names += ["strange prompts"]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        ways = [row[way] for way in (KNOWN, AMONG, UNKNOWN, NOBODY_TRUSTED, ELSEWHERE, "with suspects", "other prompts")]
        caught = sum(way["caught"] for way in ways if way)
        most = [f"{way['most_evidence']:.3g}" if way else "-" for way in ways]
        shares = f"{row['nats']:.2f} | {row['exact']:.5f} | {row['near']:.2g} | {row['off']:.2g}"
        lines.append(
            f"| {row['engine']} | {row['tokens']:,} | {shares} | {caught} of {ways[0]['nodes']} | {' | '.join(most)} |"
        )
    return "\n".join(lines)


def _beginnings(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ["honest node", *(f"{way}: {what}" for way in (KNOWN, NOBODY_TRUSTED) for what in ("caught", "most evidence"))]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        lines.append(f"| {row['engine']} | {' | '.join(map(_caught, map(row['beginnings'].get, (KNOWN, NOBODY_TRUSTED))))} |")
    return "\n".join(lines)


def _caught(of: Mapping[str, Any]) -> str:
    return f"{of['caught']} of {of['nodes']:,} | {of['most_evidence']:.3g}"


def _short(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ["honest node", "tokens", "nats a token", "that came before"]
    names += [f"{way}: {what}" for way in (KNOWN, NOBODY_TRUSTED) for what in ("caught", "most evidence")]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in rows:
        short = row["short answers"]
        found = [_caught(short[way]) for way in (KNOWN, NOBODY_TRUSTED)]
        facts = f"{short['tokens']:,} | {short['nats']:.2f} | {short['repeated']:.1%}"
        lines.append(f"| {row['engine']} | {facts} | {' | '.join(found)} |")
    return "\n".join(lines)


def _cheats(rows: Sequence[Mapping[str, Any]], engines: Sequence[str], known: str) -> str:
    lines = [f"| cheat | {' | '.join(engines)} | by |", "|" + "---|" * (len(engines) + 2)]
    for name in dict.fromkeys(row["cheat"] for row in rows):
        cells = {row["engine"]: row[known] for row in rows if row["cheat"] == name}
        shown = [_cell(cells[e]) if e in cells else "" for e in engines]
        why = next((cell["why"] for cell in cells.values() if cell["why"]), "")
        lines.append(f"| {name} | {' | '.join(shown)} | {why} |")
    return "\n".join(lines)


def _cell(found: Mapping[str, Any]) -> str:
    if found["median"] is None:
        return f"not in {found['of']:,}"
    return f"{found['median']:,} ({_or(found['p90'])})"


def _or(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"
