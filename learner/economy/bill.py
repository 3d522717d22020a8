"""What the run costs: each node's time by its state, and the bytes sent to it. Pure: told what happened, and when.

Each node has an account, by name, so one that leaves and returns goes on with its own. Time is charged up to each event at the
price that applied until then. An event with an earlier time changes what applies from now on, and charges nothing twice.
What the learner itself costs is an account like any other. Must not know why a node is active.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

GB = 1e9
"""Bytes of a GB, as egress is priced."""

ACTIVE = "active"
"""The state in which a node costs its full price; in any other it costs its idle price."""


@dataclass(frozen=True, slots=True)
class NodeBill:
    """A node's account."""

    peer: str
    active_s: float
    usd: float


@dataclass
class _Account:
    since: float
    state: str = ""
    """"active", any other word for there and idle, "" for gone"""
    usd_per_hour: float = 0.0
    idle_usd_per_hour: float = 0.0
    usd_per_gb: float = 0.0
    active_s: float = 0.0
    usd: float = 0.0
    counter: float = 0.0
    """bytes that the present connection has counted"""
    held_back: bool = False
    """it is owed nothing until it delivers something"""

    @property
    def owed(self) -> float:
        return 0.0 if self.held_back else self.usd

    def charge(self, now: float) -> None:
        seconds = max(0.0, now - self.since)
        self.since = max(now, self.since)
        if self.state == ACTIVE:
            self.active_s += seconds
            self.usd += seconds / 3600 * self.usd_per_hour
        elif self.state:
            self.usd += seconds / 3600 * self.idle_usd_per_hour


@dataclass
class Bill:
    """All accounts."""

    _accounts: dict[str, _Account] = field(default_factory=dict, init=False, repr=False)
    _now: float = field(default=-math.inf, init=False, repr=False)
    """the latest time that it was told"""
    _billed: float = field(default=0.0, init=False, repr=False)
    """$ that are in the bills of steps"""

    # ---- what happens

    def state(
        self, peer: str, now: float, state: str, usd_per_hour: float, idle_usd_per_hour: float = 0.0, usd_per_gb: float = 0.0
    ) -> None:
        """From now on a node is "active", or in any other state idle, at these prices in $. Saying so again changes nothing."""
        account = self._account(peer, now)
        account.charge(self._now)
        account.state, account.usd_per_hour = state, usd_per_hour
        account.idle_usd_per_hour, account.usd_per_gb = idle_usd_per_hour, usd_per_gb

    def hold_back(self, peer: str, now: float) -> None:
        """A node has delivered nothing yet: what it costs is owed once it does, and not before."""
        self._account(peer, now).held_back = True

    def delivered(self, peer: str) -> None:
        """It has: all that its time came to is owed."""
        self._account(peer).held_back = False

    def owes(self, peer: str) -> bool:
        """Whether a node's time costs anything as yet."""
        return not self._account(peer).held_back

    def left(self, peer: str, now: float) -> None:
        """A node is gone, and costs nothing from now on. One that has delivered nothing leaves nothing behind: identities are
        free."""
        account = self._account(peer, now)
        account.charge(self._now)
        account.state, account.counter = "", 0.0
        if account.held_back:
            del self._accounts[peer]

    def egress(self, peer: str, sent: float) -> None:
        """So many more bytes were sent to a node, or by the learner."""
        account = self._account(peer)
        account.usd += sent / GB * account.usd_per_gb

    def counted(self, peer: str, total: float) -> None:
        """A node's connection has counted so many bytes. A smaller number than before is a new connection, which began at 0."""
        account = self._account(peer)
        new = total - account.counter if total >= account.counter else total
        account.counter = total
        self.egress(peer, new)

    def step(self, now: float) -> float:
        """A step of the learner ended: all $ that were spent and are in no step's bill yet."""
        spent = self.spent(now)
        usd, self._billed = spent - self._billed, spent
        return usd

    # ---- what it comes to

    def spent(self, now: float | None = None) -> float:
        """US dollars so far."""
        self._until(now)
        return math.fsum(account.owed for account in self._accounts.values())

    def usd(self, peer: str, now: float) -> float:
        """What one node has cost so far."""
        account = self._accounts.get(peer)
        if account is None:
            return 0.0
        self._now = max(self._now, now)
        account.charge(self._now)
        return account.owed

    def rows(self, now: float | None = None) -> list[NodeBill]:
        """Every node's account, by name."""
        self._until(now)
        accounts = sorted(self._accounts.items())
        return [NodeBill(peer, a.active_s, a.owed) for peer, a in accounts]

    def _account(self, peer: str, now: float | None = None) -> _Account:
        if now is not None:
            self._now = max(self._now, now)
        return self._accounts.setdefault(peer, _Account(self._now))

    def _until(self, now: float | None) -> None:
        if now is not None:
            self._now = max(self._now, now)
        for account in self._accounts.values():
            account.charge(self._now)
