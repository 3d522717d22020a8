"""Whose tokens a completion's are, and under which version they were made. Pure. Must not know what is checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from learner.trajectory import Trajectory
from p2p.version import Version


class MadePart(NamedTuple):
    """Sampled tokens [first, stop) of a completion, all of one node's making under one version."""

    version: Version
    first: int
    stop: int
    node: str


def parts_of(trajectory: Trajectory) -> Iterator[MadePart]:
    """Runs of tokens by maker and version, in order; those that an environment gave lie within, and are in no run alone."""
    makers = [(m.start, m.node) for m in trajectory.makers] or [(0, trajectory.node)]
    ends = [start for start, _ in makers[1:]] + [len(trajectory.completion_ids)]
    for span in trajectory.spans:
        for (start, node), end in zip(makers, ends, strict=True):
            first, stop = max(span.start, start), min(span.stop, end)
            if first < stop:
                yield MadePart(span.version, first, stop, node)


def tokens_of(parts: Sequence[MadePart]) -> int:
    """Tokens of these together."""
    return sum(part.stop - part.first for part in parts)


def most_of(parts: Iterable[MadePart]) -> str:
    """The node that made most of these."""
    by_node = Counter[str]()
    for part in parts:
        by_node[part.node] += part.stop - part.first
    return by_node.most_common(1)[0][0]
