"""What training takes, by a model's shape alone: `shoal bench trainer --forecast`."""

from __future__ import annotations

from typing import Any

from learner.trainer.forecast.count import count_model
from learner.trainer.forecast.forecast import TrainingPlan, forecast
from learner.trainer.forecast.sizes import shape_config
from learner.trainer.settings import OptimizerName
from p2p.quantities import human_bytes

OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adamw_8bit", "adamw_host")
"""Those whose bytes differ most; several devices have the first alone."""


def forecast_sizes(names: list[str], tokens: int, ranks: int) -> dict[str, Any]:
    """Of each shape on a device with memory of its own, in bfloat16, every layer run again in the backward: bytes on the
    device, the host and the disk, by optimizer."""
    rows = []
    for name in names:
        costs = count_model(shape_config(name), tokens, checkpointing="on", bfloat16=True, gpu=True)
        for optimizer in OPTIMIZERS if ranks == 1 else OPTIMIZERS[:1]:
            plan = TrainingPlan(own_memory=True, optimizer=optimizer, ranks=ranks, states=3, copies=3, versions=3)
            found = forecast(costs, plan)
            rows.append({
                "model": name, "optimizer": optimizer, "parameters": costs.parameters, "activations": costs.activations,
                "device": found.device, "host": found.host, "disk": found.disk,
            })  # fmt: skip
    return {"ok": True, "tokens": tokens, "ranks": ranks, "forecast": rows}


def describe_forecasts(result: dict[str, Any]) -> str:
    """A table."""
    heads = f"{'parameters':>12}{'device':>10}{'a param.':>9}{'activations':>12}{'host':>10}{'disk':>10}"
    lines = [f"{'model':<7}{'optimizer':<12}{heads}"]
    for row in result["forecast"]:
        lines.append(
            f"{row['model']:<7}{row['optimizer']:<12}{row['parameters'] / 1e9:>11.2f}B{human_bytes(row['device']):>10}"
            f"{row['device'] / row['parameters']:>9.1f}{human_bytes(row['activations']):>12}{human_bytes(row['host']):>10}"
            f"{human_bytes(row['disk']):>10}"
        )
    lines.append(
        f"bfloat16 computation, forwards of {result['tokens']:,} tokens with every layer run again in the backward, "
        f"{result['ranks']} device(s); by shapes, nothing of it was run on a GPU"
    )
    return "\n".join(lines)
