"""What a plan or a simulation takes for granted, in a few lines that are printed with its answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from netem.planning.cost_scenario import CostScenario


def assumed(scenario: CostScenario, step_s: float | None = None) -> list[dict[str, Any]]:
    """Rows of {"what", "keys", "default"}: what is assumed, the scenario's keys that say it, and which of them nobody gave, so
    that they have their defaults. `step_s`: what a plan is made for, instead of the learner's own time."""
    file, w = scenario.file, scenario.workload
    learner, lengths, policy, delta = file.learner, file.lengths, file.policy, file.delta
    own = f"a step is to take {step_s:g} s" if step_s else f"a step takes {learner.train_s + learner.update_s:g} s of training"
    hour = f"the learner costs ${learner.usd_per_hour:g} an hour, and its uplink is {learner.up_mbit:g} Mbit/s"
    size = f"a version is {scenario.delta_bytes / 1e6:,.0f} MB" + ("" if delta.bytes else f" ({delta.density:g} of the values)")
    known = "known beforehand" if file.activation.known else "not known beforehand"
    rows: list[tuple[str, tuple[str, ...]]] = [
        (f"a step trains on {learner.groups:,} groups of {learner.samples} completions, {learner.groups * learner.samples:,} "
         "in all", ("learner.groups", "learner.samples")),
        (f"a completion has {lengths.median:,.0f} tokens in the median, {w.mean_length():,.0f} in the mean, {lengths.most:,} at "
         f"most; a prompt has {lengths.prompt:,}", ("lengths.median", "lengths.most", "lengths.prompt")),
        (f"the model is {file.model.name}, {file.model.parameters / 1e9:.3g}B parameters", ("model.name", "model.parameters")),
        (f"{own}; {hour}", ("learner.usd_per_hour", "learner.up_mbit") + (() if step_s else ("learner.train_s",))),
        (f"no token is trained on that is more than {policy.staleness} steps old", ("policy.staleness",)),
        (f"{size}, {'relayed by the nodes' if delta.relayed else 'sent to each node by the learner'}",
         ("delta.bytes" if delta.bytes else "delta.density", "delta.relayed")),
        (f"a margin of {file.activation.margin:.0%} is kept, and what a kind of node makes is {known}",
         ("activation.margin", "activation.known")),
    ]  # fmt: skip
    return [{"what": what, "keys": list(keys), "default": _not_given(scenario.values, keys)} for what, keys in rows]


def _not_given(values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    out = []
    for key in keys:
        section, name = key.split(".")
        if name not in values.get(section, {}):
            out.append(key)
    return out
