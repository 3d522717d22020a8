"""One scenario on real emulated links with Shoal's own player: `shoal netem run`. Thin shell over `contest` and `scenario`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from netem.contest.contest import RoundResult, run_contest
from netem.contest.players import peer_argv
from netem.contest.scenario import Scenario, crossed, finish, judge
from netem.contest.tuning import congestion_in_force, player_options
from netem.emulation.backends import AUTO, choose
from p2p.membership.pairs import LinkBook
from p2p.protocol.reach import Linked

CUT = 5.0
CUT_SLACK_S = 20.0
"""A round is cut off after CUT times T* and CUT_SLACK_S seconds: late enough that a slow round fails by the scenario's
requirement, early enough that a hang ends."""


def run_scenario(
    scenario: Scenario, on_round: Callable[[str], None] = lambda line: None, backend: str = AUTO
) -> dict[str, Any]:
    """Run a scenario; returns what `shoal netem run --json` prints. `on_round` gets a line after each round. UsageError or
    ShoalError when network or players do not come up. Blocks."""
    rounds: list[dict[str, Any]] = []
    chosen, why = choose(backend, scenario.profile)
    if why:
        on_round(why)

    def tell(result: RoundResult) -> None:
        values = round_values(scenario, result, len(rounds) + 1)
        rounds.append(values)
        on_round(f"{scenario.name} round {values['round']}{' (warm-up)' if values['cold'] else ''}: {describe(values)}")

    cut_s = CUT * max(scenario.t_star, scenario.t_star_calm) + CUT_SLACK_S
    results = run_contest(
        scenario.profile, peer_argv(scenario.policy), scenario.payload_bytes,
        rounds=scenario.warm_up + scenario.rounds, seed=scenario.seed, cut_s=cut_s, faults=scenario.faults,
        options=player_options(scenario.policy, scenario.profile, scenario.payload_bytes, scenario.mesh),
        required=scenario.required if scenario.faults else None, backend=chosen, on_result=tell,
    )  # fmt: skip
    wrong = judge(scenario, results)
    warm = [r["ratio"] for r in rounds if not r["cold"] and r["ratio"] is not None]
    cold = [r["ratio"] for r in rounds if r["cold"] and r["ratio"] is not None]
    profile = scenario.profile
    return {
        "ok": not wrong, "holds": not wrong, "why": wrong, "name": scenario.name, "policy": scenario.policy,
        "nodes": len(profile.hosts) - 1, "payload_bytes": scenario.payload_bytes, "t_star": scenario.t_star, "backend": chosen,
        "mtu": profile.mtu, "scale": profile.scale,
        "congestion": congestion_in_force(scenario.policy, profile, results[0].congestion),
        "ratio": median(warm) if warm else None, "cold_ratio": cold[0] if cold else None, "rounds": rounds,
        "faults": [{"kind": type(f).__name__, **f.model_dump(exclude={"kind"})} for f in scenario.faults],
    }  # fmt: skip


def round_values(scenario: Scenario, result: RoundResult, number: int) -> dict[str, Any]:
    """One round as JSON; `number` counts from 1. A round that was cut off or failed has no t_max."""
    cold = number <= scenario.warm_up
    whole = not (result.cut_off or result.failures)
    t_star = scenario.t_star_calm if cold else scenario.t_star
    t_max = (max(result.verified.values()) if cold else finish(scenario, result)) if whole else None
    return {
        "round": number, "cold": cold, "t_star": t_star, "t_max": t_max,
        "t_median": median(result.verified.values()) if whole else None, "ratio": t_max / t_star if t_max is not None else None,
        "source_bytes": result.source_bytes, "source_share": result.source_bytes / scenario.payload_bytes,
        "duplicate_bytes": result.duplicate_bytes, "cpu_s": result.cpu_s, "late_ms": 1e3 * result.late_s,
        "dropped": result.dropped, "cut_off": result.cut_off, "failures": list(result.failures), "verified": result.verified,
        "joined": result.joined, "from_source": result.from_source, "crossed": crossed(scenario, result),
        "faults": len(result.faults), "named": result.named,
        "reported": result.reported, "banned": result.banned, "pairs": pairs_of(result) if scenario.profile.natted else [],
    }  # fmt: skip


def pairs_of(result: RoundResult) -> list[dict[str, str]]:
    """How each pair of nodes is linked, in the words of the side that knows more of it: one that was dialled knows only that."""
    book, names = LinkBook(), {*result.linked, *(other for kinds in result.linked.values() for other in kinds)}
    for one, kinds in result.linked.items():
        rows = [Linked(other, kind, result.unlinked.get(one, {}).get(other, "")) for other, kind in kinds.items()]
        book.put(one, rows, names.__contains__)
    return [pair._asdict() for pair in book.pairs(names, len(names) ** 2)]


def describe(values: dict[str, Any]) -> str:
    """One line for people about a round, from `round_values`."""
    if values["t_max"] is None:
        return "; ".join(values["failures"]) or "cut off"
    late = f", the emulator {values['late_ms']:.0f} ms late" if values["late_ms"] > 10 else ""
    return f"{values['t_max']:.2f} s, {values['ratio']:.3f} T*{late}"


def print_trial(result: dict[str, Any], console: Console) -> None:
    """Print what `run_scenario` returned: a table of rounds, who was named, and whether the requirements hold."""
    scale = "" if result["scale"] == 1 else f", rates times {result['scale']:g}"
    title = (
        f"{result['name']}: {result['nodes']} nodes, {result['payload_bytes']:,} bytes, policy {result['policy']}, T* "
        f"{result['t_star']:.2f} s (MTU {result['mtu']}, TCP {result['congestion']}{scale})"
    )
    table = Table(title=title, title_justify="left")
    for name in ("round", "T max s", "T median s", "T/T*", "source", "duplicates", "CPU s", "late ms"):
        table.add_column(name, justify="right")
    for r in result["rounds"]:
        share = f"{100 * r['duplicate_bytes'] / (result['payload_bytes'] * result['nodes']):.2f} %"
        table.add_row(
            f"{r['round']}{' cold' if r['cold'] else ''}", number(r["t_max"], 2), number(r["t_median"], 2), number(r["ratio"], 3),
            f"{r['source_share']:.2f}", share, f"{r['cpu_s']:.1f}", f"{r['late_ms']:.1f}",
        )  # fmt: skip
    console.print(table)
    for r in result["rounds"]:
        if r["crossed"]:
            shares = ", ".join(f"{site} {share:.3f}" for site, share in r["crossed"].items())
            console.print(f"round {r['round']}: of the payload came over the WAN to {shares}", markup=False, highlight=False)
        for host, nodes in r["named"].items():
            dropped = ", ".join(r["banned"].get(host, ())) or "nobody"
            reported = "reported to" if host in r["reported"] else "unknown to"
            told = f"round {r['round']}: {host} named by {', '.join(nodes)}, dropped by {dropped}, {reported} the source"
            console.print(told, markup=False, highlight=False)
    for pair in result["rounds"][-1]["pairs"] if result["rounds"] else ():
        why = f" ({pair['why']})" if pair["why"] else ""
        console.print(f"{pair['one']} - {pair['other']}: {pair['kind']}{why}", markup=False, highlight=False)
    console.print("holds" if result["holds"] else "does not hold: " + "; ".join(result["why"]), markup=False, highlight=False)


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
