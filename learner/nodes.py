"""What the head knows of one live node, from what the node says of itself. Must not know sockets or decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from learner.dispatch import NodeView
from p2p.peering import Link
from p2p.protocol.messages import Installed, NodeStatus
from p2p.version import Version

STATUS_SILENCE_S = 30.0
"""A node whose link lives but which has not reported for so long gets no new work."""

NO_VERSION = Version(0, 0)
"""what a node that has installed nothing reports"""


@dataclass
class NodeState:
    """One node. Times are on the head's clock; `bytes_*` count chunk payload of the versions it installed."""

    link: Link
    joined: float
    reading_from: Version | None
    """oldest version it may still ask for while it catches up"""
    version: Version = NO_VERSION
    digest_ok: bool = False
    ready: bool = False
    capacity: int = 0
    tokens_per_s: float = 0.0
    tokens: int = 0
    pause_s: float = 0.0
    apply_s: float = 0.0
    bytes_from_head: int = 0
    bytes_from_peers: int = 0
    pid: int = 0
    rss_bytes: int = 0
    heard: float = 0.0
    draining: bool = False

    def on_status(self, message: NodeStatus, now: float) -> None:
        self.ready, self.capacity, self.heard = message.ready, message.capacity, now
        self.version, self.tokens_per_s = message.version, message.tokens_per_s
        self.pid, self.rss_bytes = message.pid, message.rss_bytes

    def on_installed(self, message: Installed, expected: bytes | None, current: Version | None) -> None:
        """`expected` is the version's state digest (None when there is no such version), `current` the newest one."""
        self.digest_ok = expected is not None and expected == message.state_digest
        self.pause_s, self.apply_s = message.pause_s, message.apply_s
        self.bytes_from_head += message.bytes_from_head
        self.bytes_from_peers += message.bytes_from_peers
        self.reading_from = None if current is not None and message.version >= current else message.version

    def view(self, load: int, epoch: int, now: float) -> NodeView:
        """For the dispatcher; `load` requests are with this node."""
        live = self.ready and self.version.epoch == epoch and now - self.heard < STATUS_SILENCE_S
        return NodeView(
            self.link.peer, self.version, min(load, self.capacity), max(0, load - self.capacity), self.capacity,
            self.tokens_per_s, live=live, draining=self.draining,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Plain values for the status page."""
        return {
            "peer": self.link.peer, "name": self.link.name, "alive": True, "version": str(self.version),
            "digest_ok": self.digest_ok, "ready": self.ready, "tokens": self.tokens, "tokens_per_s": self.tokens_per_s,
            "bytes_from_learner": self.bytes_from_head, "bytes_from_peers": self.bytes_from_peers,
            "pause_s": self.pause_s, "apply_s": self.apply_s, "capacity": self.capacity, "pid": self.pid,
            "rss_bytes": self.rss_bytes, "draining": self.draining,
        }  # fmt: skip
