"""What each node's tokens come to under the trainer's own pass: sums by node, beside the step's statistics. Pure torch.

The trainer computes its own log probability of every token anyway, so this costs no forward. Must not know what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from learner.client.mismatch import MOST_KL, token_makers, told
from learner.trainer.losses import k3
from learner.trainer.packing import ForwardRow

TOKENS, MISMATCH = "node/tokens/", "node/mismatch/"
"""Beginnings of the statistics' names; a peer id follows. Sums of micro-batches and of ranks add up like any other."""


def by_node(rows: Sequence[ForwardRow], log_ratio: Tensor) -> dict[str, float]:
    """Sums over the rows' sampled tokens, given log(pi / mu) [N] of them, row after row."""
    found: dict[str, float] = {}
    mismatch = k3(log_ratio.detach().double()).clamp(max=MOST_KL).tolist()
    makers = [node for row in rows for node in token_makers(row.trajectory)]
    for node, value in zip(makers, mismatch, strict=True):
        found[TOKENS + node] = found.get(TOKENS + node, 0.0) + 1.0
        found[MISMATCH + node] = found.get(MISMATCH + node, 0.0) + value
    return found


def of_step(stats: Mapping[str, float]) -> dict[str, list[float]]:
    """Of a step's sums: node -> [tokens, sum of their mismatch in nats], as it is told to the head."""
    return told({
        name.removeprefix(TOKENS): (tokens, stats[MISMATCH + name.removeprefix(TOKENS)])
        for name, tokens in stats.items()
        if name.startswith(TOKENS)
    })  # fmt: skip
