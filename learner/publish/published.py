"""The account of published manifests: recent ones one by one, older ones as sums. Must not know sockets.

A run has 10^5 versions and hundreds of nodes; the memory of this account must not grow with either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from p2p.version import Version

RECENT = 256
"""Manifests kept one by one: more than a straggler can be behind, so that traffic and installs of all live ones are counted."""


@dataclass
class Published:
    """One manifest of ours, with what happened to it. Times in seconds of the head's clock."""

    mid: bytes
    kind: str
    version: Version
    base: Version | None
    size: int = 0
    changed: int = 0
    words: int = 0
    encode_s: float = 0.0
    began: float = 0.0
    sealed: float = 0.0
    state_digest: bytes = b""
    base_digest: bytes = b""
    installed: dict[str, float] = field(default_factory=dict)
    """peer -> seconds from begin to installed"""
    sent: int = 0
    """chunk bytes the learner sent of it, kept when the manifest is dropped"""
    peer_bytes: int = 0

    @property
    def announced(self) -> bool:
        """Whether everybody who follows is told of its parts. Anchors, cumulative deltas and descriptors are fetched by those who
        need one."""
        return self.kind == "delta"


@dataclass
class _Sums:
    """Over sealed manifests (and `sent`, `peer_bytes` over all)."""

    deltas: int = 0
    delta_bytes: int = 0
    changed: int = 0
    words: int = 0
    ratios: float = 0.0
    rated: int = 0
    """manifests of which anything was sent"""
    sent: int = 0
    peer_bytes: int = 0

    def add(self, p: Published) -> None:
        self.sent += p.sent
        self.peer_bytes += p.peer_bytes
        if not p.sealed:
            return
        if p.kind == "delta":
            self.deltas += 1
            self.delta_bytes += p.size
            self.changed += p.changed
            self.words += p.words
        if p.size and p.sent:
            self.ratios += p.sent / p.size
            self.rated += 1


class PublishedVersions:
    """Manifests in the order they were begun. `done(published)` says that nothing more can happen to one: only those
    leave `recent`."""

    def __init__(self, done: Callable[[Published], bool], recent: int = RECENT) -> None:
        self.recent: list[Published] = []
        self.begun = 0
        self._done, self._limit = done, recent
        self._sums = _Sums()
        self._versions = 0
        self._newest: Version | None = None
        self.anchor_bytes = 0
        """size of the newest anchor, 0 before the first"""

    def add(self, published: Published) -> None:
        """Enter a manifest that was begun; the oldest ones beyond the limit become sums."""
        self.begun += 1
        self.recent.append(published)
        while len(self.recent) > self._limit and self._done(self.recent[0]):
            self._sums.add(self.recent.pop(0))

    def seal(self, published: Published) -> None:
        """Note that a manifest is sealed. An anchor and a delta of the same version count as one version."""
        if self._newest is None or published.version > self._newest:
            self._versions, self._newest = self._versions + 1, published.version
        if published.kind == "anchor":
            self.anchor_bytes = published.size

    def find(self, version: Version) -> Published | None:
        """The first manifest of `version`, while it is recent: later ones of the same version are for joiners. None otherwise."""
        return next((p for p in self.recent if p.version == version), None)

    def summary(self) -> dict[str, Any]:
        """Plain values for the status page; ratios and means are over manifests."""
        s = _Sums(**vars(self._sums))
        for published in self.recent:
            s.add(published)
        return {
            "versions_published": self._versions,
            "delta_bytes_mean": s.delta_bytes / s.deltas if s.deltas else 0,
            "delta_density_mean": s.changed / max(1, s.words),
            "anchor_bytes": self.anchor_bytes,
            "learner_egress_ratio": s.ratios / s.rated if s.rated else 0.0,
            "learner_egress_bytes": s.sent,
            "peer_bytes": s.peer_bytes,
        }
