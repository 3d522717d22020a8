"""Who is forgotten where something is kept of each node that ever came: identities are free, and a ticket may bring new ones for
ever. Pure. Must not know what is kept."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

MOST_NODES = 10_000
"""Nodes, most of them gone, of which a number or two are kept: as many as have a record of their standing."""

SPARE = 8
"""An eighth more than need be goes at once, so that it is not looked for with each node that comes."""


def forget_oldest(
    known: MutableMapping[str, Any], most: int = MOST_NODES, stays: Callable[[str], object] = lambda node: False
) -> list[str]:
    """Where there are more than `most`, those that were put in first go, but for those that stay. Who went."""
    if len(known) <= most:
        return []
    over = len(known) - most + most // SPARE
    gone = [node for node in known if not stays(node)][:over]
    for node in gone:
        del known[node]
    return gone


def renewed(known: MutableMapping[str, Any], node: str) -> None:
    """It is put in anew, as the last one, where it is known."""
    if node in known:
        known[node] = known.pop(node)
