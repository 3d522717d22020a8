"""A forecast as a person reads it: a line, a table, and which setting helps where it is too much. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from learner.trainer.forecast.forecast import ACTIVATIONS, GRADIENTS, OPTIMIZER, REFERENCE, MemoryForecast, kept_layers
from p2p.quantities import human_bytes


def line(found: MemoryForecast) -> str:
    """In one line."""
    where = "on the trainer's device" if found.plan.own_memory else "for the trainer"
    parts = [f"{human_bytes(found.device)} {where} ({_each(found, found.device)} bytes a parameter: {', '.join(_parts(found))})"]
    if found.host:
        parts.append(f"{human_bytes(found.host)} on its host")
    if found.disk:
        parts.append(f"{human_bytes(found.disk)} on the disk")
    return "; ".join(parts)


def _parts(found: MemoryForecast) -> Iterator[str]:
    for name in ("weights", GRADIENTS, OPTIMIZER, REFERENCE):
        size = sum(i.size for i in found.items if i.name == name and i.place == "device")
        if size:
            yield f"{name} {_each(found, size)}"
    if found.costs.activations:
        yield f"activations {human_bytes(found.size_of(ACTIVATIONS))} at {found.costs.tokens:,} tokens"
    else:
        yield "activations not counted"


def _each(found: MemoryForecast, size: float) -> str:
    return f"{size / max(1, found.costs.parameters):.3g}"


def table(found: MemoryForecast) -> list[str]:
    """Every item, with its bytes and bytes a parameter."""
    lines = [f"{'':<34}{'where':<8}{'bytes':>10}{'a parameter':>13}"]
    for item in found.items:
        when = "" if item.when == "always" else f", while {item.when}"
        lines.append(f"{item.name + when:<34}{item.place:<8}{human_bytes(item.size):>10}{_each(found, item.size):>13}")
    totals = [("at most", "device" if found.plan.own_memory else "memory", found.device)]
    totals += [("at most", "host", found.host)] if found.host else []
    totals += [("", "disk", found.disk)] if found.disk else []
    lines += [f"{'in total' + (', ' + what if what else ''):<34}{where:<8}{human_bytes(size):>10}{_each(found, size):>13}"
              for what, where, size in totals]  # fmt: skip
    return lines


def what_helps(found: MemoryForecast) -> str:
    """The setting that saves most, for a trainer that takes too much."""
    costs, plan = found.costs, found.plan
    activations = found.size_of(ACTIVATIONS)
    saves = {
        "lower trainer.micro_batch_tokens": activations // 2,
        'set trainer.activation_checkpointing = "on"': kept_layers(costs, plan) * costs.layer_bytes if costs.layers
        else activations // 2 + 1,
        "set trainer.kl_coef = 0": found.size_of(REFERENCE),
    }
    on_device = sum(i.size for i in found.items if i.name == OPTIMIZER and i.place == "device")
    if plan.optimizer in ("adamw", "muon") and plan.ranks == 1:  # several have AdamW alone
        saves['set trainer.optimizer = "adamw_8bit"'] = on_device * 3 // 4
        if plan.own_memory:
            saves['set trainer.optimizer = "adamw_host"'] = on_device
    best = max(saves, key=lambda how: saves[how])
    return f"{best}, or take a smaller model or a larger machine" if saves[best] else "take a smaller model or a larger machine"
