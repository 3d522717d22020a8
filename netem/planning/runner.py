"""Runs a scenario or a preset, and what would change the answer. Returns what `shoal simulate --json` prints; callbacks tell of
progress. Whoever ends the work with Ctrl-C or SIGTERM gets what there is by then (`CutShort`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from typing import Any, Literal

from netem.planning.assumed import assumed
from netem.planning.by_group import GroupSimulation
from netem.planning.by_sequence import PricedSimulation
from netem.planning.cost_scenario import CostScenario, File, Metric, PublishedSection, SystemSection
from netem.planning.interrupts import CutShort, between_events, held_back, leave_to_the_parent
from netem.planning.outcome import Result
from netem.planning.policies import policy_of
from netem.planning.simulated_fleet import Tell
from p2p.errors import UsageError

Ran = Callable[[int, int], None]
"""Hears how many runs of a series are done, and how many there are."""

AUTO_NODES = 100
"""A scenario of up to so many nodes runs sequence by sequence, a larger one group by group: by sequences it would take
minutes."""

KNOB_STEPS = 16
"""Learner steps of a run that only shows what one knob changes."""


def detail_of(scenario: CostScenario) -> Literal["sequences", "groups"]:
    """The simulator for a scenario. UsageError where it asks for groups and the group-level simulator cannot show it."""
    file = scenario.file
    plain = file.policy.name == "shoal" and not file.learner.gpu
    if file.detail == "groups" and not plain:
        raise UsageError(f'{scenario.source}: detail = "groups" knows the policy shoal alone, without learner.gpu')
    if file.detail != "auto":
        return file.detail
    return "groups" if plain and scenario.nodes > AUTO_NODES else "sequences"


def run_once(scenario: CostScenario, tell: Tell = lambda step: None) -> Result:
    """One run with the scenario's seed."""
    return _run(_simulation(scenario, tell))


def _simulation(scenario: CostScenario, tell: Tell) -> GroupSimulation | PricedSimulation:
    if detail_of(scenario) == "groups":
        return GroupSimulation(scenario, tell)
    return PricedSimulation(scenario, policy_of(scenario.file.policy), tell)


def _run(simulation: GroupSimulation | PricedSimulation) -> Result:
    return simulation.run() if isinstance(simulation, GroupSimulation) else simulation.result()


def simulate(scenario: CostScenario, tell: Tell, knobs: bool, jobs: int, ran: Ran = lambda done, of: None) -> dict[str, Any]:
    """Run a scenario and, with `knobs`, what would change the answer, in `jobs` processes. CutShort, with what there is, when
    somebody ends it; "steps" is then how many of those that count were done."""
    out: dict[str, Any] = {
        "ok": True, "name": scenario.name, "nodes": scenario.nodes, "assumed": assumed(scenario),
        "delta_bytes": scenario.delta_bytes, "bound": scenario.file.policy.staleness, "interrupted": "",
    }  # fmt: skip
    simulation = _simulation(scenario, tell)
    try:
        with between_events(simulation):
            out |= _run(simulation).as_dict()
    except KeyboardInterrupt as error:
        counted, warm = simulation.fleet.counted, scenario.file.warm
        if error is simulation.stopped_by and counted:  # else it came in the midst of an event
            out |= simulation.account().as_dict()
        said = f"step {simulation.step + 1} of {scenario.file.steps}, of which the first {warm} are not counted"
        raise CutShort({**out, "ok": False, "steps": counted, "interrupted": said}, error) from None
    if knobs and scenario.file.policy.name == "shoal" and scenario.rows:
        rows: list[dict[str, Any]] = []
        out["would_change"] = rows
        try:
            what_would_change(scenario, jobs, rows, ran)
        except KeyboardInterrupt as error:
            said = "what would change the answer"
            raise CutShort({**out, "ok": False, "interrupted": said}, error) from None
    return out


# ---- what would change the answer


def knobs_of(scenario: CostScenario, kappa: int) -> list[tuple[str, CostScenario]]:
    """(what is changed, the scenario with it); `kappa`: steps between publications in the unchanged one."""
    file, rows = scenario.file, scenario.rows

    def fleet(**factors: float) -> CostScenario:
        changed = []
        for row in rows:
            values = row.model_dump(exclude_none=True)
            changed.append({**values, **{name: values[name] * by for name, by in factors.items() if name in values}})
        return scenario.changed({"fleet": {"file": "", "nodes": changed}})

    links = fleet(down_mbit=0.5, up_mbit=0.5).with_value("learner.up_mbit", file.learner.up_mbit / 2)
    s = file.policy.staleness
    found = [("S + 1", scenario.with_value("policy.staleness", s + 1))]
    if s > 1:
        found.append(("S - 1", scenario.with_value("policy.staleness", s - 1)))
    found += [
        ("a publication twice as rare", scenario.with_value("policy.kappa", 2 * kappa)),
        ("nodes 20 % cheaper", fleet(usd_per_hour=0.8, idle_usd_per_hour=0.8)),
        ("half the bandwidth", links),
        ("versions ten times as large", scenario.with_value("delta.bytes", 10 * scenario.delta_bytes)),
        ("completions 20 % longer", scenario.with_value("lengths.median", 1.2 * file.lengths.median)),
        ("a learner 20 % faster", scenario.with_value("learner.train_s", 0.8 * file.learner.train_s)),
        ("nodes idle while they receive", scenario.with_value("policy.overlap", False)),
    ]
    return found


def what_would_change(scenario: CostScenario, jobs: int, rows: list[dict[str, Any]], ran: Ran) -> None:
    """Short runs, group by group, each beside one of the scenario as it is. `rows` gets a row for each as soon as it is there."""
    short = scenario.changed({"learner": {"gpu": ""}, "detail": "groups", "steps": min(scenario.file.steps, KNOB_STEPS)})
    ran(0, len(knobs_of(short, 1)) + 1)
    base = run_once(short)
    work = knobs_of(short, base.kappa)
    ran(1, len(work) + 1)
    for (label, _), r in zip(work, _several([s for _, s in work], jobs), strict=True):
        rows.append({
            "knob": label, "usd_per_step": r.usd_per_step / base.usd_per_step - 1, "step_s": r.step_s / base.step_s - 1,
            "learner_busy": r.busy - base.busy,
        })  # fmt: skip
        ran(len(rows) + 1, len(work) + 1)


def _several(scenarios: Sequence[CostScenario], jobs: int) -> Iterator[Result]:
    """The results in the order of the scenarios, each as soon as those before it are there."""
    if jobs < 2 or len(scenarios) < 2:
        yield from map(run_once, scenarios)
        return
    with ProcessPoolExecutor(min(jobs, len(scenarios)), get_context("spawn"), leave_to_the_parent) as pool:
        try:
            with held_back():
                results = pool.map(run_once, scenarios)
            yield from results
        except BaseException:  # runs that nobody waits for any more may take minutes
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise


# ---- presets


def run_preset(
    scenario: CostScenario, say: Callable[[str], None], tries: bool, jobs: int, ran: Ran = lambda done, of: None
) -> dict[str, Any]:
    """Run every system of every case: what was published beside what was simulated and, with `tries`, what hangs on fitted
    numbers. `say` hears a line for each run. CutShort, with what there is, when somebody ends it."""
    file = scenario.file
    cases = [(case.name, scenario.changed(case.set)) for case in file.cases] or [("", scenario)]
    work = [(case, system, base.changed(system.set)) for case, base in cases for system in file.systems]
    of = len(work) + (sum(len(a.tries) for a in file.assumptions) * len(_needed(file)) if tries else 0)
    rows: dict[tuple[str, str], Result] = {}
    hangs_on: list[dict[str, Any]] = []
    cause: KeyboardInterrupt | None = None
    try:
        ran(0, of)
        for (case, system, _), result in zip(work, _several([s for _, _, s in work], jobs), strict=True):
            say(f"{case + ': ' if case else ''}{system.name}: {result.step_s:.1f} s and ${result.usd_per_step:.2f} a step")
            rows[case, system.name] = result
            ran(len(rows), of)
        for row in _tries(scenario, cases, jobs, say) if tries else ():
            hangs_on.append(row)
            ran(len(rows) + len(hangs_on) * len(_needed(file)), of)
    except KeyboardInterrupt as error:
        cause = error
    claims = [
        _claim(p, rows, file.systems, case) for p in file.published for case, _ in cases
        if p.case in ("", case) and (cause is None or _both_ran(p, rows, file.systems, case))
    ]  # fmt: skip
    done = {
        "ok": cause is None and all(c["holds"] for c in claims), "name": scenario.name, "what": file.what,
        "steps": file.steps - file.warm,
        "cases": [
            {
                "name": case,
                "systems": [
                    {"name": s.name, "role": s.role, **rows[case, s.name].as_dict(), "series": []}
                    for s in file.systems
                    if (case, s.name) in rows
                ],
                "ours_saves": _ours(rows, file.systems, case),
            }
            for case, _ in cases
        ],
        "published": claims, "assumptions": explained(scenario), "hangs_on": hangs_on,
        "interrupted": "" if cause is None else f"{len(rows)} of {len(work)} systems were done",
    }  # fmt: skip
    if cause is not None:
        raise CutShort(done, cause)
    return done


def explained(scenario: CostScenario) -> list[dict[str, Any]]:
    """Every assumption, with the value at its key."""
    return [
        {"key": a.key, "value": scenario.value(a.key), "kind": a.kind, "why": a.why} for a in scenario.file.assumptions
    ]  # fmt: skip


def _named(systems: Sequence[SystemSection], what: str) -> str:
    return next((s.name for s in systems if what in (s.name, s.role)), what)


def measure(metric: Metric, of: Result, against: Result) -> float:
    """A metric of `PublishedSection` of one result over another."""
    if metric == "saving":
        return 1 - of.usd_per_step / against.usd_per_step
    if metric == "efficiency":
        return of.steps_per_usd / against.steps_per_usd - 1
    return against.step_s / of.step_s - 1


def _both_ran(
    p: PublishedSection, rows: dict[tuple[str, str], Result], systems: Sequence[SystemSection], case: str
) -> bool:
    return all((case, _named(systems, name)) in rows for name in (p.of, p.against))


def _needed(file: File) -> list[SystemSection]:
    """The systems that published numbers are about."""
    needed = {_named(file.systems, name) for p in file.published for name in (p.of, p.against)}
    return [s for s in file.systems if s.name in needed]


def _claim(
    p: PublishedSection, rows: dict[tuple[str, str], Result], systems: Sequence[SystemSection], case: str
) -> dict[str, Any]:
    try:
        of, against = rows[case, _named(systems, p.of)], rows[case, _named(systems, p.against)]
    except KeyError as error:
        raise UsageError(f"published: {p.what}: no system {error.args[0][1]!r}") from None
    value = measure(p.metric, of, against)
    return {
        "case": case, "what": p.what, "metric": p.metric, "low": p.low, "high": p.high, "value": value,
        "off": max(p.low - value, value - p.high, 0.0), "within": p.within,
        "holds": p.low - p.within <= value <= p.high + p.within,
    }  # fmt: skip


def _ours(rows: dict[tuple[str, str], Result], systems: Sequence[SystemSection], case: str) -> dict[str, Any]:
    """What ours saves of a step's dollars, against each of the others."""
    ours = rows.get((case, _named(systems, "ours")))
    if ours is None:
        return {}
    return {
        s.name: measure("saving", ours, rows[case, s.name])
        for s in systems
        if s.role in ("baseline", "paper") and (case, s.name) in rows
    }


def _tries(
    scenario: CostScenario, cases: Sequence[tuple[str, CostScenario]], jobs: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Published numbers with a fitted one at other values, in the first case that each speaks of."""
    file, systems = scenario.file, _needed(scenario.file)
    for a in file.assumptions:
        for value in a.tries:
            case, base = cases[0]
            results = _several([base.with_value(a.key, value).changed(s.set) for s in systems], jobs)
            rows = {(case, s.name): r for s, r in zip(systems, results, strict=True)}
            claims = [_claim(p, rows, file.systems, case) for p in file.published if p.case in ("", case)]
            say(f"{a.key} = {value:g}: " + ", ".join(f"{c['what']} {c['value']:.3f}" for c in claims))
            yield {"key": a.key, "value": value, "case": case, "found": {c["what"]: c["value"] for c in claims}}
