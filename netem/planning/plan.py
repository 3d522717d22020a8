"""`shoal plan`: the cheapest set of a fleet for a step time, and its bill, by the capacity model. No simulation.

A kind that comes and goes counts with the share of the time that it is there, both in its rate and in its price.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from learner.economy.cover import consistent
from learner.economy.demand import Demand, choose_kappa, period, required, slack
from netem.planning.assumed import assumed
from netem.planning.by_sequence import held_of
from netem.planning.cost_scenario import CostScenario, build_scenario
from netem.planning.dissemination import Dissemination
from netem.planning.priced_fleet import rows_of_csv
from p2p.errors import UsageError

MAX_NODES = 20_000
"""Most nodes of a fleet that a plan is made for. It bounds the time that finding the cheapest set takes."""


def plan(scenario: CostScenario, step_s: float) -> dict[str, Any]:
    """What `shoal plan --json` prints: the cheapest nodes with which a step takes `step_s` seconds, and the bill. `step_s`
    replaces the scenario's train_s + update_s. Where no set will do, "ok" is false and "sentences" say why. UsageError for a
    `step_s` or a fleet out of range."""
    if not 0 < step_s < math.inf:
        raise UsageError(f"--step-time {step_s}: a number of seconds above 0")
    if scenario.nodes > MAX_NODES:
        raise UsageError(f"{scenario.source}: {scenario.nodes:,} nodes, at most {MAX_NODES:,}")
    file, rows, spread = scenario.file, scenario.rows, Dissemination(scenario)
    activation, w = file.activation, scenario.workload
    held, model = held_of(scenario), file.model
    of = [i for i, row in enumerate(rows) for _ in range(row.count)]
    engines = [row.engine(model) for row in rows]
    full = [engine.full(held) for engine in engines]
    rates_by_row = [one.tokens_per_s * row.share_there for one, row in zip(full, rows, strict=True)]
    rates, prices = [rates_by_row[i] for i in of], [rows[i].usd_per_hour * rows[i].share_there for i in of]
    paces = [e.model.pace(one.sequences, one.sequences * held) for e, one in zip(engines, full, strict=True)]
    longest = w.most / min(paces, default=1.0)
    tokens = w.mean_length() * w.groups * w.samples
    everyone = spread.last(Counter(of))
    policy = file.policy
    kappa = policy.kappa or choose_kappa(policy.staleness, step_s, everyone, 0.0, overlap=policy.overlap)
    demand = Demand(tokens, step_s, policy.staleness, kappa)
    need = lambda seconds: (1 + activation.margin) * required(demand, seconds, overlap=policy.overlap)
    cover = consistent(
        prices, rates, need, lambda chosen: spread.last(Counter(of[i] for i in chosen)),
        downloads=[1e6 * rows[i].down_mbit / 8 for i in of],
    )  # fmt: skip
    chosen = Counter(of[i] for i in cover.chosen)
    spread_s = spread.last(chosen)
    wanted = required(demand, spread_s, overlap=policy.overlap)
    takes = period(demand, cover.rate, spread_s, overlap=policy.overlap)
    learner, hour = file.learner.usd_per_hour, cover.price + file.learner.usd_per_hour
    known = slack(demand, cover.rate, spread_s, overlap=policy.overlap)
    sentences, ok = [], cover.rate >= wanted
    if math.isinf(wanted):
        why = f"S={policy.staleness} with a publication every {kappa} steps" if spread_s <= kappa * step_s else (
            f"a version takes {spread_s:.0f} s to the last of them, and there is one every {kappa * step_s:.0f} s"
        )  # fmt: skip
        sentences.append(f"no set of nodes gives a step every {step_s:g} s: {why}")
    elif not ok:
        sentences.append(
            f"all {len(of)} nodes make {cover.rate:,.0f} of the {wanted:,.0f} tokens/s that a step every {step_s:g} s takes; "
            f"with all of them a step takes {takes:.0f} s"
        )
    cap = activation.max_usd_per_hour
    if ok and cap and cover.price > cap:
        ok = False
        sentences.append(f"the cheapest set costs ${cover.price:.2f} an hour, and activation.max_usd_per_hour is {cap:g}")
    if ok and cover.rate < (1 + activation.margin) * wanted:
        sentences.append(f"the rule holds, with less than the margin of {activation.margin:.0%}")
    step_usd = hour * takes / 3600
    if ok:
        sentences.append(
            f"{sum(chosen.values())} of {len(of)} nodes make {cover.rate:,.0f} tokens/s where {wanted:,.0f} are needed; "
            f"${cover.price:.2f} an hour for nodes and ${learner:.2f} for the learner: ${step_usd:.3f} a step, "
            f"${1e6 * step_usd / tokens:.3f} a million tokens"
        )
        every = f"{kappa} steps" if kappa > 1 else "step"
        sentences.append(f"a version is with the last of them after {spread_s:.1f} s, published every {every}")
        sentences += list(known.sentences)
    return {
        "ok": ok, "assumed": assumed(scenario, step_s), "step_s": step_s,
        "expected_step_s": takes if takes < math.inf else None, "nodes": len(of),
        "required_tokens_per_s": wanted if wanted < math.inf else None, "tokens_per_s": cover.rate,
        "usd_per_hour_nodes": cover.price, "usd_per_hour": hour, "usd_per_step": step_usd if takes < math.inf else None,
        "usd_per_million_tokens": 1e6 * step_usd / tokens if takes < math.inf else None, "kappa": kappa, "spread_s": spread_s,
        "proven": cover.proven, "longest_completion_s": longest,
        "chosen": [
            {"kind": rows[i].kind, "nodes": n, "of": rows[i].count, "tokens_per_s": n * rates_by_row[i],
             "usd_per_hour": n * rows[i].usd_per_hour * rows[i].share_there}
            for i, n in sorted(chosen.items())
        ],
        "sentences": sentences,
    }  # fmt: skip


def scenario_of_fleet(fleet: Path, settings: dict[str, Any]) -> CostScenario:
    """A scenario of a fleet's CSV and of settings by section, the flags of `shoal plan`."""
    rows_of_csv(fleet)  # before anything else, for its words
    return build_scenario({"fleet": {"file": fleet.name}, **settings}, str(fleet), fleet.parent)


def with_fleet(scenario: CostScenario, fleet: Path) -> CostScenario:
    """The same scenario with another fleet's CSV."""
    return replace(scenario.changed({"fleet": {"file": str(fleet.absolute()), "nodes": []}}), source=str(fleet))

