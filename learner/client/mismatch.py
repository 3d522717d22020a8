"""What each node's tokens come to under the trainer's own weights: by it the head compares nodes (`learner.standing.mismatch`).
Pure; for a trainer of any kind.

    watch = NodeMismatch()
    ...
    watch.add(trajectory, logprobs)                         # for each trajectory of the step, once
    client.log(step, metrics | {BY_NODE: watch.take()})

Must not know torch, or what follows from a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from learner.trajectory import Maker, Trajectory

MOST_KL = 8.0
"""Nats that one token counts at most: a node is judged by many."""

MOST_LOG_RATIO = 20.0
"""Nats of a difference beyond which it counts as that much: a token's KL is MOST_KL long before."""

MOST_NODES = 256
"""Nodes that are told of a step, those with most mismatch a token: more would not fit a message of metrics."""


def token_makers(trajectory: Trajectory) -> list[str]:
    """The node that made each sampled token, in order."""
    makers = list(trajectory.makers) or [Maker(0, trajectory.node)]
    ends = [start for start, _ in makers[1:]] + [len(trajectory.completion_ids)]
    given = {at for gap in trajectory.given for at in range(gap.start, gap.stop)}
    of_all = [node for (start, node), end in zip(makers, ends, strict=True) for _ in range(start, end)]
    return [node for at, node in enumerate(of_all) if at not in given]


def told(nodes: Mapping[str, tuple[float, float]]) -> dict[str, list[float]]:
    """From (tokens, sum of their mismatch in nats) by node to what the head is told."""
    worst = sorted(nodes, key=lambda node: -nodes[node][1] / nodes[node][0])[:MOST_NODES]
    return {node: [int(nodes[node][0]), round(nodes[node][1], 4)] for node in worst}


class NodeMismatch:
    """Sums of one step."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[float, float]] = {}

    def add(self, trajectory: Trajectory, logprobs: Sequence[float]) -> None:
        """`logprobs`: nats, one for each of the completion's tokens under the weights that the step began with, of the
        distribution that nodes draw from (`rollout.temperature`); those of tokens that an environment gave do not count.
        ValueError for another number of them."""
        if len(logprobs) != len(trajectory.completion_ids):
            raise ValueError(f"{len(logprobs)} log probabilities of {len(trajectory.completion_ids)} tokens")
        given = {at for gap in trajectory.given for at in range(gap.start, gap.stop)}
        ratios = [own - said for own, said in zip(logprobs, trajectory.logprobs, strict=True)]
        sampled = [ratio for at, ratio in enumerate(ratios) if at not in given]
        for node, ratio in zip(token_makers(trajectory), sampled, strict=True):
            tokens, mismatch = self._nodes.get(node, (0.0, 0.0))
            self._nodes[node] = tokens + 1.0, mismatch + _token_kl(ratio)

    def take(self) -> dict[str, list[float]]:
        """Of the step: node -> [tokens, sum of their mismatch in nats], to be logged as BY_NODE. The next one begins at zero."""
        nodes, self._nodes = self._nodes, {}
        return told(nodes)


def _token_kl(log_ratio: float) -> float:
    """Schulman's k3, as the trainer's own (`learner.trainer.losses`); a number that is none counts most."""
    if math.isnan(log_ratio):
        return MOST_KL
    x = min(max(log_ratio, -MOST_LOG_RATIO), MOST_LOG_RATIO)
    return min(math.expm1(x) - x, MOST_KL)
