"""What the checks of an answer say of nodes, and which of it counts. Pure. Must not know how it was found, or what follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from learner.audit.sequential import Verdict


class Judged(NamedTuple):
    """What a node's tokens of one answer came to."""

    node: str
    tokens: int
    """that were looked at"""
    verdict: Verdict
    whole: bool = False
    """with what was looked at before they are a whole completion, which nobody else had a part in"""


def that_count(said: Iterable[Judged]) -> Iterator[Judged]:
    """Of what is said one after the other: once some of a node's was grossly wrong, what else it had made by then does not speak
    for it any more."""
    odd = set[str]()
    for judged in said:
        if judged.verdict.caught or judged.node not in odd:
            yield judged
        if judged.verdict.gross:
            odd.add(judged.node)
