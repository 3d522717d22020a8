"""The cheapest sequence of manifests from the version that a node holds to the current one, in bytes. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from p2p.protocol.versions import CatalogEntry
from p2p.version import Version
from p2p.weights.manifest import DELTAS


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
    if held == target:
        return []
    if held_digest and digests.get(target) == held_digest:
        return []
    # An install costs a pause and a digest pass even when its bytes are few.
    per_install = 4096
    best: dict[Version, int] = {}
    queue: list[tuple[int, int, Version, tuple[CatalogEntry, ...]]] = []
    count = 0
    for entry in entries:
        if entry.kind == "anchor" or (held_digest and entry.base_digest == held_digest):
            heapq.heappush(queue, (entry.size + per_install, count, entry.version, (entry,)))
            count += 1
    deltas: dict[Version, list[CatalogEntry]] = {}
    for entry in entries:
        if entry.kind in DELTAS and entry.base is not None:
            deltas.setdefault(entry.base, []).append(entry)
    while queue:
        cost, _, version, path = heapq.heappop(queue)
        if version == target:
            return list(path)
        if best.get(version, 1 << 62) <= cost:
            continue
        best[version] = cost
        for entry in deltas.get(version, []):
            count += 1
            heapq.heappush(queue, (cost + entry.size + per_install, count, entry.version, (*path, entry)))
    return None
