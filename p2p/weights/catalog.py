"""The cheapest sequence of manifests from the version that a node holds to the current one, in bytes. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

from p2p.protocol.versions import CatalogEntry
from p2p.version import Version
from p2p.weights.manifest import DELTAS

PER_INSTALL = 4096
"""Bytes that an install counts for besides its own: it costs a pause and a digest pass even when its bytes are few."""


def plan_catch_up(
    entries: Iterable[CatalogEntry], target: Version, held: Version | None, held_digest: bytes | None
) -> list[CatalogEntry] | None:
    """The cheapest sequence of manifests to install, in order, to reach `target`; [] when the node holds it already; None when no
    sequence of `entries` leads there. A sequence starts with an anchor, or with a delta whose base digest is the one held.

    Dijkstra over versions, edge cost = payload bytes plus a little per manifest, so that of two equal paths the one
    with fewer installs wins.
    """
    entries = [e for e in entries if e.kind in ("anchor", *DELTAS)]
    digests = {e.version: e.state_digest for e in entries if e.state_digest}
    if held == target or (held_digest and digests.get(target) == held_digest):
        return []
    tie, done = count(), set[Version]()
    queue: list[tuple[int, int, Version, tuple[CatalogEntry, ...]]] = [
        (entry.size + PER_INSTALL, next(tie), entry.version, (entry,))
        for entry in entries
        if entry.kind == "anchor" or (held_digest and entry.base_digest == held_digest)
    ]
    heapq.heapify(queue)
    while queue:
        cost, _, version, path = heapq.heappop(queue)
        if version == target:
            return list(path)
        if version in done:
            continue
        done.add(version)
        for entry in entries:
            if entry.kind in DELTAS and entry.base == version:
                heapq.heappush(queue, (cost + entry.size + PER_INSTALL, next(tie), entry.version, (*path, entry)))
    return None
