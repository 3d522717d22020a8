"""What an auditor that has nothing must take to hold the states of the last versions. Pure."""

from __future__ import annotations

from p2p.protocol.versions import Catalog, CatalogEntry
from p2p.weights.catalog import plan_catch_up


def path_to_window(catalog: Catalog, window: int) -> list[CatalogEntry]:
    """Manifests in order: a whole state, and what leads from it to the current version, through as many of the last `window`
    versions, one by one, as it can be. [] while there is no whole state."""
    entries = [e for e in catalog.entries if e.kind != "descriptor" and e.state_digest and e.version <= catalog.current]
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
