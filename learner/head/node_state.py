"""What the head knows of one live node, from what the node says of itself. Must not know sockets or decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from learner.dispatch.dispatcher import NodeView
from learner.rollouts.beside import NOTHING, Footprint
from p2p.forgetting import forget_oldest
from p2p.membership.peering import Link
from p2p.protocol.generation import NodeStatus
from p2p.protocol.versions import Installed
from p2p.version import Version

STATUS_SILENCE_S = 30.0
"""A node whose link lives but which has not reported for so long gets no new work."""

BACKOFF_S = (0.5, 30.0)
"""A node that gives work back unmade gets no new work for so long: doubled each time up to the second, until a token
comes from it. Else the one that declines fastest always looks idle, and draws everything."""

MAX_CAPACITY = 4096
"""Sequences at once that a node is believed to decode; no engine does more, and a liar could hoard that many."""

DELIVERY_S = (2.0, 5.0)
"""What a node delivers is counted over the last of so many seconds; over less than the first it says nothing."""

DELIVERED = 1.5
"""It is believed to be so many times as fast as it delivers: tokens come in batches, its own count is as old as its status."""

MAX_BYTES = 1 << 53
"""What a node's own counters of bytes are believed up to: sums of them must fit wherever they are kept."""

MOST_BACK_OFFS = 4096
"""Nodes that are gone whose back-off is kept: who comes again soon goes on with its own."""

NO_VERSION = Version(0, 0)
"""what a node that has installed nothing reports"""


class Speed(NamedTuple):
    """What a node is believed to make: tokens per second over so many sequences that run at once."""

    running: int
    tokens_per_s: float


@dataclass(slots=True)
class BackOff:
    """How long a node gets no new work, since it gave work back or sat on it. Times in seconds of the head's clock."""

    until: float = 0.0
    lasted_s: float = 0.0

    def more(self, now: float, least_s: float = 0.0) -> None:
        """It gave work back, or sat on it; it gets none for `least_s` seconds at the least."""
        if now >= self.until:
            self.lasted_s = min(max(2 * self.lasted_s, BACKOFF_S[0]), BACKOFF_S[1])
            self.until = now + self.lasted_s
        self.until = max(self.until, now + least_s)


class BackOffs:
    """Those of all nodes. They outlive links: else who comes anew each second never waits."""

    def __init__(self, live: Collection[str]) -> None:
        self._live = live
        self._of: dict[str, BackOff] = {}

    def of(self, peer: str) -> BackOff:
        """A node's own, which it keeps."""
        found = self._of.pop(peer, None) or BackOff()
        self._of[peer] = found  # as the last one
        live = self._live
        forget_oldest(self._of, MOST_BACK_OFFS + len(live), stays=lambda node: node == peer or node in live)
        return found

    def more(self, peer: str, now: float, least_s: float) -> None:
        """Work was taken from a node by force: it gets no more for a while, for `least_s` seconds at the least."""
        if peer in self._live:
            self.of(peer).more(now, least_s)


@dataclass
class NodeState:
    """One node. Times are on the head's clock; `bytes_*` count chunk payload of the versions it installed."""

    link: Link
    joined: float
    reading_from: Version | None
    """oldest version it may still ask for while it catches up"""
    version: Version = NO_VERSION
    digest_ok: bool = False
    named: Version | None = None
    """the version of which it named the state's digest last: it is given work for no other. Anybody can read the digest in the
    catalog, so this says which version it means, and does not prove that it holds it"""
    ready: bool = False
    capacity: int = 0
    tokens_per_s: float = 0.0
    tokens: int = 0
    pause_s: float = 0.0
    apply_s: float = 0.0
    transfer_s: float = 0.0
    """receiving and decoding of the last version"""
    bytes_from_head: int = 0
    bytes_from_peers: int = 0
    sent_bytes: int = 0
    """chunk payload that it has sent, as it says"""
    kv_tokens: int = 0
    """tokens that its engine can hold, as it says; 0: it does not say"""
    arithmetic: str = ""
    """engine/dtype/device that it computes with, as it says"""
    keeps: bool = False
    """its tokens after an install in the midst of a sequence mix two versions, as it says"""
    pid: int = 0
    rss_bytes: int = 0
    heard: float = 0.0
    draining: bool = False
    updating: bool = False
    """it finishes what it runs before it commits a newer version"""
    rests: str = ""
    """why it takes no work for now, as it says; "" while it does"""
    limits: str = ""
    """what its owner allows it, as it says"""
    back_off: BackOff = field(default_factory=BackOff)

    _arrived: deque[tuple[float, int]] = field(default_factory=deque, init=False, repr=False)
    """(time, tokens accepted until then) at each status of the last DELIVERY_S"""

    def on_status(self, message: NodeStatus, now: float) -> None:
        """Take over what the node says of itself, its numbers bounded."""
        self._arrived.append((now, self.tokens))
        while len(self._arrived) > 2 and now - self._arrived[1][0] >= DELIVERY_S[1]:
            self._arrived.popleft()
        self.ready, self.capacity, self.heard = message.ready, min(message.capacity, MAX_CAPACITY), now
        self.version, self.tokens_per_s, self.updating = message.version, message.tokens_per_s, message.updating
        self.pid, self.rss_bytes = message.pid, message.rss_bytes
        self.sent_bytes = min(message.sent_bytes, MAX_BYTES)
        self.rests, self.limits = message.owner.rests, message.owner.limits
        self.kv_tokens = max(0, min(message.kv_tokens, MAX_BYTES))
        self.arithmetic, self.keeps = message.computes.arithmetic, message.computes.keeps

    def on_installed(self, message: Installed, expected: bytes | None, current: Version | None) -> None:
        """`expected` is the version's state digest (None when there is no such version), `current` the newest one."""
        self.digest_ok = expected is not None and expected == message.state_digest
        self.named = message.version if self.digest_ok else None
        self.pause_s, self.apply_s, self.transfer_s = message.pause_s, message.apply_s, message.transfer_s
        self.bytes_from_head = min(self.bytes_from_head + message.bytes_from_head, MAX_BYTES)
        self.bytes_from_peers = min(self.bytes_from_peers + message.bytes_from_peers, MAX_BYTES)
        self.reading_from = None if current is not None and message.version >= current else message.version

    def on_tokens(self, accepted: int) -> None:
        self.tokens += accepted
        if accepted:
            self.back_off.lasted_s = 0.0

    def believed(self, message: NodeStatus, load: int) -> Speed | None:
        """Its speed as far as its status is borne out by what we hold of it: `load` requests, and the tokens that arrived.
        None when that says too little. Who says that it is faster than it delivers must not draw work."""
        (began, before), (now, after) = self._arrived[0], self._arrived[-1]
        least = min(load, self.capacity) / 2
        if now - began < DELIVERY_S[0] or not least <= message.running <= load:
            return None
        return Speed(message.running, min(message.tokens_per_s, DELIVERED * (after - before) / (now - began)))

    def serves(self, epoch: int, now: float) -> bool:
        """Whether it generates for this epoch, if it is asked to."""
        return self._able(epoch, now) and not self.draining and not self.rests

    def _able(self, epoch: int, now: float) -> bool:
        named = self.version.epoch == epoch and self.version == self.named
        return self.ready and named and now - self.heard < STATUS_SILENCE_S

    def view(
        self, load: int, epoch: int, now: float, active: bool = True, *, beside: Footprint = NOTHING, limit: int | None = None,
        credible: bool = True, delivers: float = 0.0,
    ) -> NodeView:
        """For the dispatcher; `load` requests are with this node, `beside` is what those take that are not training's, `limit` is
        what it may hold, `credible` whether its word counts, and `delivers` as in the view."""
        live = self._able(epoch, now) and now >= self.back_off.until
        return NodeView(
            self.link.peer, self.version, min(load, self.capacity), max(0, load - self.capacity), self.capacity,
            tokens_per_s=self.tokens_per_s, live=live, draining=self.draining or self.updating or not active or bool(self.rests),
            holds_back=self.updating and active and not self.draining,
            context=beside.context, growth=beside.growth, room=float(self.kv_tokens), limit=limit, credible=credible,
            delivers=delivers, unheard_s=now - self.heard,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Plain values for the status page."""
        return {
            "peer": self.link.peer, "name": self.link.name, "alive": True, "version": str(self.version),
            "digest_ok": self.digest_ok, "ready": self.ready, "tokens": self.tokens, "tokens_per_s": self.tokens_per_s,
            "bytes_from_learner": self.bytes_from_head, "bytes_from_peers": self.bytes_from_peers,
            "pause_s": self.pause_s, "apply_s": self.apply_s, "transfer_s": self.transfer_s, "capacity": self.capacity,
            "pid": self.pid, "rss_bytes": self.rss_bytes, "draining": self.draining,
            "updating": self.updating, "rests": self.rests, "limits": self.limits, "kv_tokens": self.kv_tokens,
        }  # fmt: skip
