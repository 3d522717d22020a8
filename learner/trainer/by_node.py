"""What each node's tokens come to under the trainer's own pass: sums by node, beside the step's statistics. Pure torch.

The trainer computes its own log probability of every token anyway, so this costs no forward. Must not know what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from learner.trainer.losses import k3
from learner.trainer.packing import ForwardRow
from learner.trajectory import Maker, Trajectory

MOST_KL = 8.0
"""Nats that one token counts at most: a node is judged by many."""

TOKENS, MISMATCH = "node/tokens/", "node/mismatch/"
"""Beginnings of the statistics' names; a peer id follows. Sums of micro-batches and of ranks add up like any other."""

MOST_NODES = 256
"""Nodes that are told of a step, those with most mismatch a token: more would not fit a message of metrics."""


def token_makers(trajectory: Trajectory) -> list[str]:
    """The node that made each sampled token, in order."""
    makers = list(trajectory.makers) or [Maker(0, trajectory.node)]
    ends = [start for start, _ in makers[1:]] + [len(trajectory.completion_ids)]
    given = {at for gap in trajectory.given for at in range(gap.start, gap.stop)}
    of_all = [node for (start, node), end in zip(makers, ends, strict=True) for _ in range(start, end)]
    return [node for at, node in enumerate(of_all) if at not in given]


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
    nodes = {
        name.removeprefix(TOKENS): (int(tokens), stats[MISMATCH + name.removeprefix(TOKENS)])
        for name, tokens in stats.items()
        if name.startswith(TOKENS)
    }
    worst = sorted(nodes, key=lambda node: -nodes[node][1] / nodes[node][0])[:MOST_NODES]
    return {node: [nodes[node][0], round(nodes[node][1], 4)] for node in worst}
