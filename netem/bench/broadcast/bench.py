"""`shoal bench broadcast`: our broadcast and its peers on the same emulated links in one run.

The schedule, the medians and the JSON are pure; `bench` is the shell. Policies take turns, so that what the machine does
meanwhile meets all of them, and one set of players at a time is on the machine. Must not know what a player does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from netem.bench.broadcast.prediction import foretell
from netem.contest.contest import RoundResult, run_contest
from netem.contest.players import PEERS, is_ours, peer_argv
from netem.contest.scenario import Scenario, find_scenario
from netem.contest.tuning import congestion_in_force, missing, player_options
from netem.emulation.backends import AUTO, choose
from p2p.errors import ShoalError, UsageError

POLICIES = ("shoal", "star", "chain", "tree", "shardcast", "libtorrent")
DEFAULT_SCENARIOS = ("homogeneous-32", "homogeneous-64", "heterogeneous", "delays", "small")

ONCE = ("star", "chain", "tree")
"""Slow by design: one turn each, cut off at CUT_ONCE T*."""
CUT_ONCE = 5.0
CUT = 10.0
CUT_SLACK_S = 20.0
"""The others are cut off at CUT T* and this: only a hang is."""

BRIEF_S = 2.0
"""With a T* below this everyone has a second round, as Shoal always has: connections that start slowly would be most of it. Of a
peer's two its better one counts, for a second round is not warmer to all of them."""

SET_UP_S, PEER_SET_UP_S = 6.5, 4.5
"""For network and nine players to come and go, and to make the payload, on two cores; less for players that are not ours."""
LIKELY = {"shoal": 1.1, "libtorrent": 1.4, "shardcast": 2.3}
"""T/T*, to say beforehand how long it will take."""

FAR = 2.0
"""A peer that has never taken less than so many T* is not asked again: it is far behind, and it takes long."""


@dataclass(frozen=True, slots=True)
class ContestTurn:
    """One set of players, and the rounds that it plays."""

    scenario: Scenario
    policy: str
    repeat: int
    """from 0"""

    @property
    def rounds(self) -> int:
        """Two: the first is the cold one."""
        return 2 if self.policy == "shoal" or self.scenario.t_star < BRIEF_S else 1

    @property
    def cut_s(self) -> float:
        t_star = self.scenario.t_star
        return CUT_ONCE * t_star if self.policy in ONCE else CUT * t_star + CUT_SLACK_S

    @property
    def expected_s(self) -> float:
        """Seconds that the turn is likely to take, network and players included; 0 when it is likely to be left out."""
        t_star = self.scenario.t_star
        ratio = LIKELY.get(self.policy) or min(static_seconds(self.policy, self.scenario) / t_star, CUT_ONCE)
        if self.is_idle([ratio] * self.repeat):
            return 0.0
        return (SET_UP_S if is_ours(self.policy) else PEER_SET_UP_S) + self.rounds * (ratio * t_star + 0.5)

    def is_idle(self, ratios: Sequence[float]) -> bool:
        """Whether it can be left out, after turns of its policy that took so many times T*."""
        return not is_ours(self.policy) and min(ratios, default=0.0) > FAR


@dataclass(slots=True)
class TurnTally:
    """What the turns of one policy in one scenario came to."""

    turns: list[list[RoundResult]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def schedule(scenarios: Sequence[Scenario], policies: Sequence[str], repeat: int) -> list[ContestTurn]:
    """Scenario by scenario; within one, all policies before any comes again."""
    return [
        ContestTurn(scenario, policy, k)
        for scenario in scenarios
        for k in range(repeat)
        for policy in policies
        if k == 0 or policy not in ONCE
    ]


def static_seconds(policy: str, scenario: Scenario) -> float:
    """How long a star, chain or binary tree takes at least: its slowest edge, uplinks shared equally, nodes in the profile's
    order (the real order is that of their keys)."""
    hosts = [h.access for h in scenario.profile.hosts]
    count = len(hosts)
    children = {
        "star": lambda i: range(1, count) if i == 0 else range(0),
        "chain": lambda i: range(i + 1, min(i + 2, count)),
        "tree": lambda i: range(min(2 * i + 1, count), min(2 * i + 3, count)),
    }[policy]
    edges = [(i, child, len(children(i))) for i in range(count) for child in children(i)]
    rate = min(min(hosts[i].up / share, hosts[child].down) for i, child, share in edges)
    return 8 * scenario.payload_bytes / rate


# --- results -------------------------------------------------------------------------------------------------------------


def row_of(turn_of: ContestTurn, tally: TurnTally, options: dict[str, Any], on_hosts: str) -> dict[str, Any]:
    """One policy in one scenario: medians over its turns, each of the round that counts (`_counting`). `ratio` is t_max / T*.
    A round that was cut off counts with the time it was given, and so do nodes that had not finished."""
    t_star, profile = turn_of.scenario.t_star, turn_of.scenario.profile
    good = [results for results in tally.turns if results and not any(r.failures for r in results)]
    last = [_counting(turn_of.policy, results) for results in good]
    times = [_times(result, turn_of.cut_s, len(profile.hosts) - 1) for result in last]
    cold = [max(_times(r[0], turn_of.cut_s, len(profile.hosts) - 1)) / t_star for r in good if len(r) > 1]
    t_max = _median([max(t) for t in times])
    return {
        "policy": turn_of.policy, "t_max": t_max, "t_median": _median([median(t) for t in times]),
        "ratio": None if t_max is None else t_max / t_star,
        "source_bytes": _whole(_median([r.source_bytes for r in last])),
        "duplicate_bytes": _whole(_median([r.duplicate_bytes for r in last])), "cpu_s": _median([r.cpu_s for r in last]),
        "warm": any(r is not results[0] for r, results in zip(last, good, strict=True)), "cold_ratio": _median(cold),
        "cut_off": any(r.cut_off for r in last),
        "ratios": [max(t) / t_star for t in times], "repeats": len(last),
        "failures": [*tally.failures, *(f for results in tally.turns for r in results for f in r.failures)],
        "late_ms": max((1e3 * r.late_s for r in last), default=None), "dropped": _whole(_median([r.dropped for r in last])),
        "congestion": congestion_in_force(turn_of.policy, profile, on_hosts), "options": options,
    }  # fmt: skip


def _counting(policy: str, results: list[RoundResult]) -> RoundResult:
    """The last round of a turn that it got to; of a peer that is not ours the fastest."""
    return results[-1] if is_ours(policy) else min(results, key=lambda r: r.seconds)


def _times(result: RoundResult, cut_s: float, nodes: int) -> list[float]:
    return [*result.verified.values(), *[cut_s] * (nodes - len(result.verified))]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def scenario_values(scenario: Scenario, rows: list[dict[str, Any]], on_hosts: str, backend: str) -> dict[str, Any]:
    profile = scenario.profile
    return {
        "name": scenario.name, "nodes": len(profile.hosts) - 1, "payload_bytes": scenario.payload_bytes,
        "t_star": scenario.t_star, "backend": backend, "mtu": profile.mtu, "scale": profile.scale,
        "congestion_asked": profile.congestion, "congestion_on_hosts": on_hosts, "rows": rows,
    }  # fmt: skip


# --- the shell -----------------------------------------------------------------------------------------------------------


def bench(
    names: Sequence[str], policies: Sequence[str], repeat: int, mtu: int | None, say: Callable[[str], None], backend: str = AUTO
) -> dict[str, Any]:
    """What `shoal bench broadcast --json` prints. UsageError for what cannot be measured at all; what goes wrong in one turn is
    in its row. Blocks; nothing is left behind, whatever ends it."""
    scenarios, chosen, skipped = select(names, policies, repeat, mtu)
    backend, note = choose(backend, *(scenario.profile for scenario in scenarios))
    if note:
        say(note)
    for why in skipped.values():
        say(f"skipped: {why}")
    turns = schedule(scenarios, chosen, repeat)
    expected_s = sum(turn.expected_s for turn in turns)
    say(f"{len(turns)} turns, about {expected_s / 60:.0f} minutes")
    began, out, ok = time.monotonic(), [], True
    for scenario in scenarios:
        say(f"{scenario.name}: T* {scenario.t_star:.2f} s, {len(scenario.profile.hosts) - 1} nodes, MTU {scenario.profile.mtu}")
        tallies: dict[str, TurnTally] = {policy: TurnTally() for policy in chosen}
        mine = [turn for turn in turns if turn.scenario is scenario]
        for turn in mine:
            done = [_counting(turn.policy, r).seconds / scenario.t_star for r in tallies[turn.policy].turns if r]
            if turn.is_idle(done):
                say(f"  {turn.policy} {turn.repeat + 1}: left out, more than {FAR:g} T* before")
                continue
            _take(turn, tallies[turn.policy], say, backend)
        on_hosts = next((r.congestion for t in tallies.values() for results in t.turns for r in results), "")
        first = {turn.policy: turn for turn in reversed(mine)}
        rows = [row_of(first[p], tallies[p], _options(p, scenario), on_hosts) for p in chosen]
        for row in rows:
            row["simulated"] = _simulated(first[row["policy"]], row)
        ok = ok and all(row["repeats"] > 0 for row in rows)
        out.append(scenario_values(scenario, rows, on_hosts, backend))
    return {
        "ok": ok, "scenarios": out, "skipped": skipped, "repeat": repeat, "expected_s": round(expected_s),
        "took_s": round(time.monotonic() - began),
    }  # fmt: skip


class Selection(NamedTuple):
    """What a benchmark measures."""

    scenarios: list[Scenario]
    policies: list[str]
    """those that can be played here"""
    skipped: dict[str, str]
    """a policy that cannot be played -> why"""


def select(
    names: Sequence[str], policies: Sequence[str], repeat: int, mtu: int | None
) -> Selection:
    """What is to be measured. UsageError for what cannot be measured at all."""
    if repeat < 1:
        raise UsageError("--repeat must be at least 1")
    if mtu is not None and not 576 <= mtu <= 65_000:
        raise UsageError("--mtu must be between 576 and 65000")
    for policy in policies:
        if policy not in PEERS:
            raise UsageError(f"--policies: no policy {policy!r}: {', '.join(PEERS)}")
    if len(set(policies)) < len(policies):
        raise UsageError("--policies: one comes twice")
    scenarios = [find_scenario(name) for name in names]
    for scenario in scenarios:
        if scenario.faults:
            raise UsageError(f"{scenario.name} has faults: run it with shoal netem run")
    if len({s.name for s in scenarios}) < len(scenarios):
        raise UsageError("--scenario: two scenarios of one name")
    if mtu is not None:
        scenarios = [scenario.with_mtu(mtu) for scenario in scenarios]
    skipped = {policy: why for policy in policies if (why := missing(policy)) is not None}
    chosen = [policy for policy in policies if policy not in skipped]
    if not chosen:
        raise UsageError("; ".join(skipped.values()))
    return Selection(scenarios, chosen, skipped)


def _options(policy: str, scenario: Scenario) -> dict[str, Any]:
    return player_options(policy, scenario.profile, scenario.payload_bytes, scenario.mesh)


def _take(turn: ContestTurn, tally: TurnTally, say: Callable[[str], None], backend: str) -> None:
    scenario, began = turn.scenario, time.monotonic()
    try:
        results = run_contest(
            scenario.profile, peer_argv(turn.policy), scenario.payload_bytes, rounds=turn.rounds, cut_s=turn.cut_s,
            seed=scenario.seed + 100 * turn.repeat, options=_options(turn.policy, scenario), backend=backend,
        )  # fmt: skip
    except UsageError:
        raise
    except ShoalError as error:
        tally.failures.append(str(error))
        say(f"  {turn.policy}: {error}")
        return
    tally.turns.append(results)
    what = "; ".join(f for r in results for f in r.failures) or ", ".join(_brief(r, scenario.t_star) for r in results)
    late = max(r.late_s for r in results)
    slow = f", the emulator {1e3 * late:.0f} ms late" if late > 0.01 else ""
    say(f"  {turn.policy} {turn.repeat + 1}: {what} (took {time.monotonic() - began:.0f} s{slow})")


def _simulated(turn: ContestTurn, row: dict[str, Any]) -> dict[str, Any] | None:
    """For our own policy; the order of the plain ones' nodes is that of their keys, which a simulation has none of."""
    if turn.policy != "shoal" or row["ratio"] is None:
        return None
    return foretell(turn.scenario, turn.policy, turn.rounds, row["cpu_s"], row["duplicate_bytes"])


def _brief(result: RoundResult, t_star: float) -> str:
    return f"{result.seconds / t_star:.3f} T*" if isfinite(result.seconds) else "cut off"
