"""metrics.jsonl, and what the network adds to the trainer's numbers. Must not know sockets or torch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from learner.head.node_state import NodeState
from learner.publish.published import PublishedVersions
from p2p.files import append_whole
from p2p.version import Version

log = logging.getLogger("shoal.head")


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with null for NaN and infinity, since JSON has neither, and for whole numbers that are too large for a float."""
    return {k: None if isinstance(v, (int, float)) and not _is_finite(v) else v for k, v in values.items()}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def read_logged(text: str) -> dict[str, Any]:
    """What a trainer logged, with null for NaN and infinity. ValueError when it is no JSON object."""
    try:
        values = json.loads(text, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return values


class MetricsFile:
    """The run's metrics.jsonl. What cannot be written, because the disk is full for instance, is said and counted, and ends no
    run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._lost = 0
        """lines since the last that was written"""

    def append(self, values: Mapping[str, Any]) -> None:
        """One JSON object on a line of its own. `values` are finite."""
        try:
            append_whole(self._path, (json.dumps(values) + "\n").encode())
        except OSError as error:
            if not self._lost:
                why = "lines are lost until it can be written again, and the run goes on"
                log.warning("%s: %s; %s", self._path, error.strerror, why)
            self._lost += 1
            return
        if self._lost:
            log.warning("%s can be written again; %d lines were lost", self._path, self._lost)
            self._lost = 0


def network_metrics(
    published: PublishedVersions, nodes: Sequence[NodeState], current: Version | None
) -> dict[str, Any]:
    """`broadcast/*`, `node/*` and `pool/*` of the newest version that every live node has installed, or else that any has, or
    the newest."""
    out: dict[str, Any] = {"pool/live": len(nodes), "pool/active": sum(n.ready for n in nodes)}
    if nodes and current is not None:
        out["node/pause_s"] = max(n.pause_s for n in nodes)
        out["node/apply_s"] = max(n.apply_s for n in nodes)
        out["node/version_lag"] = max(current.step - n.version.step for n in nodes)
        out["node/tokens_per_s"] = sum(n.tokens_per_s for n in nodes)
    sealed = [p for p in published.recent if p.sealed and p.kind == "delta"]
    if not sealed:
        return out
    peers = {n.link.peer for n in nodes}
    somewhere = next((p for p in reversed(sealed) if p.installed), sealed[-1])
    spread = next((p for p in reversed(sealed) if peers and peers <= p.installed.keys()), somewhere)
    out |= {
        "broadcast/step": spread.version.step,
        "broadcast/bytes": spread.size,
        "broadcast/density": spread.changed / max(1, spread.words),
        "broadcast/ratio": spread.size / published.anchor_bytes if published.anchor_bytes else 0.0,
        "broadcast/encode_s": spread.encode_s,
        "broadcast/seed_egress_bytes": spread.sent,
        "broadcast/peer_bytes": spread.peer_bytes,
    }
    if spread.installed:
        out["broadcast/p50_s"] = median(spread.installed.values())
        out["broadcast/max_s"] = max(spread.installed.values())
    return out
