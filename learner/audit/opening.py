"""What an auditor must take to hold the states that it is asked about. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from p2p.protocol.versions import Catalog, CatalogEntry
from p2p.version import Version
from p2p.weights.catalog import plan_catch_up


def path_to_window(catalog: Catalog, window: int) -> list[CatalogEntry]:
    """Manifests in order: a whole state, and what leads from it to the current version, through as many of the last `window`
    versions, one by one, as it can be. [] while there is no whole state."""
    entries = _sealed(catalog)
    steps = {e.base: e for e in entries if e.kind == "delta"}
    versions = sorted({e.version for e in entries})[-window:]
    for first in versions:
        path = plan_catch_up(entries, first, None, None)
        if path is None:
            continue
        at = first
        while at != catalog.current and (step := steps.get(at)) is not None:
            path.append(step)
            at = step.version
        if at == catalog.current:
            return path
    return plan_catch_up(entries, catalog.current, None, None) or []


def path_through(catalog: Catalog, held: CatalogEntry, stops: Iterable[Version]) -> list[CatalogEntry] | None:
    """Manifests in order that lead from the version of `held` to each of `stops`, which are newer, by differences alone: a whole
    state would be the end of the states before it. The cheapest between two of them. None when they do not lead there."""
    entries = [e for e in _sealed(catalog) if e.kind != "anchor"]
    path = [held]
    for stop in sorted(stops):
        steps = plan_catch_up(entries, stop, path[-1].version, path[-1].state_digest)
        if steps is None:
            return None
        path += steps
    return path[1:]


def _sealed(catalog: Catalog) -> list[CatalogEntry]:
    return [e for e in catalog.entries if e.kind != "descriptor" and e.state_digest and e.version <= catalog.current]
