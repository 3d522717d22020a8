"""`shoal status`: the status of a run as tables for people. Must not know the head or the journal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from p2p.errors import UsageError

TIMEOUT_S = 5.0
"""Seconds that a head has to answer: the page is built in its own loop, so one that needs longer is stuck or has ended."""

WIDTH = 120
"""Columns when the output is a file or a pipe, where there is no terminal to ask."""


def fetch_status(run_dir: Path) -> dict[str, Any]:
    """The status that the learner of `run_dir` gives now ("finished": False), or the summary it left ("finished": True).

    UsageError, one line, when there is no run, when its learner is not running and left no summary, or when no answer
    comes within TIMEOUT_S.
    """
    import httpx

    run = _read(run_dir / "run.json").get("run")
    if run is None:
        raise UsageError(f"{run_dir} holds no run")
    port = _read(run_dir / "status.json").get("port")
    if isinstance(port, int):
        try:
            # Loopback: a proxy from the environment has no business here.
            answer = httpx.get(f"http://127.0.0.1:{port}/status", timeout=TIMEOUT_S, trust_env=False)
            status = answer.json() if answer.status_code == 200 else {}
        except httpx.TimeoutException:
            what = f"the learner of {run_dir} does not answer on port {port} within {TIMEOUT_S:.0f} s"
            raise UsageError(what) from None
        except (httpx.HTTPError, ValueError):
            status = {}
        # Another program, or another run, may have the port by now.
        if isinstance(status, dict) and status.get("run") == run:
            return {**status, "finished": False}
    summary = _read(run_dir / "summary.json")
    if summary.get("run") == run:
        return {**summary, "finished": True}
    hint = f"go on with: shoal learner {run_dir}/config.toml --resume"
    raise UsageError(f"the learner of {run_dir} is not running ({hint})")


def _read(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    return values if isinstance(values, dict) else {}


# --- words for numbers, shared with the demo's pages -----------------------------------------------------------------


def short_peer(peer: str) -> str:
    """The end of a peer id: the beginning is the same for all of them."""
    return f"…{peer[-6:]}" if len(peer) > 8 else peer


def human_bytes(size: float) -> str:
    """Bytes in binary units, three significant digits: 605246 is 591 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def human_seconds(seconds: float) -> str:
    """31 s, 5 min 12 s, 2 h 05 min."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(values: Mapping[str, Any], key: str, form: str = ".3f") -> str:
    """One value of `values` as text; a dash when it is missing or null."""
    value = values.get(key)
    return format(value, form) if isinstance(value, (int, float)) else "–"


# --- the page --------------------------------------------------------------------------------------------------------


def print_status(status: Mapping[str, Any], console: Console | None = None) -> None:
    """The run, its nodes and its recent reports as tables on stdout."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=int(os.environ.get("COLUMNS") or WIDTH))
    console.print(Group(run_table(status), Text(), node_table(status.get("nodes", []))))
    changes = (status.get("pool") or {}).get("changes")
    for title, lines in (("who generates, and why", changes), ("recent reports", status.get("reports"))):
        if lines:
            console.print(Text(f"\n{title}"), style="bold")
        for line in lines or ():
            console.print(Text(f"  {line}"), highlight=False)


def run_table(status: Mapping[str, Any]) -> Table:
    """The run's numbers, as a table of two columns: name and value."""
    metrics = status.get("metrics") or {}
    tally = status.get("trajectories") or {}
    aborted = ", ".join(f"{n} {reason}" for reason, n in (tally.get("aborted") or {}).items())
    state = "finished" if status.get("finished") else "running"
    trained, under_way = f"{tally.get('consumed', 0)} trained on", f"{tally.get('outstanding', 0)} under way"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in (
        ("run", f"{status.get('run')} (epoch {status.get('epoch')})"),
        ("state", f"{state}, {human_seconds(status.get('seconds', 0))}"),
        ("step", f"{status.get('step')} of {status.get('steps')}"),
        ("version", f"{status.get('version') or '–'} ({status.get('versions_published', 0)} published)"),
        ("reward", f"{number(metrics, 'reward/mean')} mean, exact {number(metrics, 'exact/mean')}"),
        ("held out", f"exact {number(metrics, 'eval/exact/mean')}") if "eval/exact/mean" in metrics else ("", ""),
        ("staleness", f"{status.get('max_staleness_seen')} seen, bound {status.get('max_staleness')} (steps)"),
        (
            "trajectories",
            f"{trained} of {tally.get('reserved', 0)}, {under_way}"
            + (f", aborted: {aborted}" if aborted else "")
            + (f", LOST {tally['lost']}" if tally.get("lost") else ""),
        ),
        ("cut", cut_short(status.get("redundancy") or {})),
        ("capacity", capacity(status.get("pool") or {})),
        ("local engine", local_engine(status.get("local_engine") or {})),
        ("spent", spent(status.get("pool") or {})),
        (
            "weights sent",
            f"{human_bytes(status.get('learner_egress_bytes', 0))} by the learner, "
            f"{human_bytes(status.get('peer_bytes', 0))} between nodes",
        ),
        (
            "one version",
            f"{human_bytes(status.get('delta_bytes_mean', 0))} as a delta (mean), "
            f"{human_bytes(status.get('anchor_bytes', 0))} whole",
        ),
    ):
        if name and value:
            table.add_row(name, value)
    return table


def cut_short(redundancy: Mapping[str, Any]) -> str:
    """Sequences that were aborted or truncated because enough others were done; "" when there were none."""
    if not redundancy.get("surplus_sequences") and not redundancy.get("truncated"):
        return ""
    return (
        f"{redundancy['surplus_sequences']} surplus sequences ({redundancy['surplus_groups']} surplus groups among them, "
        f"{redundancy['surplus_tokens']} tokens), {redundancy['truncated']} truncated; "
        f"mean tokens {number(redundancy, 'cut_mean_length', '.0f')} cut, {number(redundancy, 'kept_mean_length', '.0f')} kept"
    )


def dollars(usd: float) -> str:
    """Three digits that matter: $0.000123, $1.23, $1,230."""
    return f"${usd:,.0f}" if usd >= 1000 else f"${usd:.3g}" if not usd or usd >= 1e-4 else f"${usd:.1e}"


def capacity(pool: Mapping[str, Any]) -> str:
    """Tokens/s that the learner needs and that active nodes make, and why there are not more nodes; "" while it is not known."""
    if not pool.get("required_tokens_per_s"):
        return ""
    text = (
        f"{pool['supply_tokens_per_s']:,.0f} tokens/s of {pool['required_tokens_per_s']:,.0f} needed, "
        f"{pool['active']} of {pool['nodes']} nodes active"
    )
    for extra in (pool.get("blocked"), pool.get("advice"), pool.get("asked")):
        text += f"; {extra}" if extra else ""
    return text


def local_engine(own: Mapping[str, Any]) -> str:
    """What the learner's local engine does; "" where it has none."""
    if not own:
        return ""
    last = own.get("last") or {}
    now = "generates" if own.get("generates") else "the trainer's turn" if own.get("there") else "not there"
    return (
        f"{now}; last step {number(last, 'local_engine/seconds', '.1f')} s of its own, trainer waited "
        f"{number(last, 'local_engine/trainer_wait_s', '.1f')} s, nodes {number(last, 'local_engine/remote_wait_s', '.1f')} s"
    )


def spent(pool: Mapping[str, Any]) -> str:
    """Dollars spent so far, and now per hour; "" where nothing costs anything."""
    if not pool.get("spent_usd") and not pool.get("usd_per_hour"):
        return ""
    text = f"{dollars(pool['spent_usd'])}, now {dollars(pool['usd_per_hour'])}/h"
    if pool.get("usd_per_step"):
        text += f"; {dollars(pool['usd_per_step'])} a step, {dollars(pool['usd_per_mtok'])} a million tokens"
    if pool.get("budget_usd"):
        text += f" (budget {dollars(pool['budget_usd'])})"
    return text


def node_table(nodes: list[Mapping[str, Any]]) -> Table:
    """A row per node: those alive first, in the order they are given."""
    alive_now = sum(bool(n.get("alive")) for n in nodes)
    # Narrow enough for 80 columns.
    table = Table(
        title=f"nodes: {alive_now} of {len(nodes)} alive (learner, peers: bytes got from them)",
        title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    table.add_column("node", no_wrap=True)
    table.add_column("peer", no_wrap=True)
    table.add_column("state")
    priced = any(n.get("usd_per_hour") or n.get("usd") for n in nodes)
    for title in ("version", "tokens", "tok/s", *(("$/h", "$") if priced else ()), "learner", "peers", "pause"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("digest")
    for node in sorted(nodes, key=lambda n: not n.get("alive")):
        alive = bool(node.get("alive"))
        table.add_row(
            Text(str(node.get("name", ""))), Text(short_peer(str(node.get("peer", "")))), node_state(node),
            str(node.get("version", "–")), str(node.get("tokens", 0)),
            number(node, "tokens_per_s", ".0f") if alive else "–",
            *((number(node, "usd_per_hour", ".3g"), number(node, "usd", ".3g")) if priced else ()),
            human_bytes(node.get("bytes_from_learner", 0)), human_bytes(node.get("bytes_from_peers", 0)),
            f"{1000 * node.get('pause_s', 0):.1f} ms", "ok" if node.get("digest_ok") else "–",
            style=None if alive else "dim",
        )  # fmt: skip
    return table


def node_state(node: Mapping[str, Any]) -> str:
    """One word for a person: alive, starting, leaving, gone; or warm or asleep, when it is not needed."""
    if not node.get("alive"):
        return "gone"
    if node.get("draining"):
        return "leaving"
    if not node.get("ready"):
        return "starting"
    return "alive" if node.get("activity", "active") == "active" else str(node["activity"])
