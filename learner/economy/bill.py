"""What the run costs: each node's time by its state, and the bytes sent to it. Pure: told what happened, and when.

Each node has an account, by name, so one that leaves and returns goes on with its own; of some ten thousand that are gone those
that came first are folded into one sum. Time is charged up to each event at the price that applied until then. An event with an
earlier time changes what applies from now on, and charges nothing twice.
What the learner itself costs is an account like any other. Must not know why a node is active.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from p2p.forgetting import MOST_NODES, forget_oldest

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
    own_price: bool = False
    """it said itself what it costs"""
    held_back: bool = False
    """it is owed nothing for now"""
    spare: float = 0.0
    """$ that its work came to since it last named its price, less what its idle time did"""

    def charge(self, now: float) -> None:
        hours = max(0.0, now - self.since) / 3600
        self.since = max(now, self.since)
        if self.state == ACTIVE:
            self.active_s += 3600 * hours
        if self.held_back or not self.state:
            return
        if self.state == ACTIVE:
            work = hours * self.usd_per_hour
            self.usd, self.spare = self.usd + work, self.spare + work
        else:
            idle = hours * self.idle_usd_per_hour
            idle = min(idle, self.spare) if self.own_price else idle
            self.usd, self.spare = self.usd + idle, max(0.0, self.spare - idle)


@dataclass
class Bill:
    """All accounts."""

    _accounts: dict[str, _Account] = field(default_factory=dict, init=False, repr=False)
    _now: float = field(default=-math.inf, init=False, repr=False)
    """the latest time that it was told"""
    _gone_usd: float = field(default=0.0, init=False, repr=False)
    """$ of nodes that are forgotten"""
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
        """A node says itself what it costs: it is owed nothing until its word counts, and never more for idle time than for
        work."""
        account = self._account(peer, now)
        account.charge(self._now)
        account.own_price, account.held_back, account.spare = True, True, 0.0

    def counts(self, peer: str, now: float) -> None:
        """Its word counts: what its time comes to from now on is owed."""
        account = self._account(peer, now)
        if account.held_back:
            account.charge(self._now)
            account.held_back = False

    def owes(self, peer: str) -> bool:
        """Whether what a node asks for counts."""
        return not self._account(peer).held_back

    def owes_idle(self, peer: str) -> bool:
        """Whether a node's idle time costs anything now."""
        account = self._account(peer)
        return not account.held_back and (account.spare > 0 or not account.own_price)

    def left(self, peer: str, now: float) -> None:
        """A node is gone, and costs nothing from now on. One that is owed nothing leaves nothing behind: identities are free."""
        account = self._account(peer, now)
        account.charge(self._now)
        account.state, account.counter = "", 0.0
        if account.held_back and not account.usd:
            del self._accounts[peer]
        if len(self._accounts) > MOST_NODES:
            known = dict(self._accounts)
            gone = forget_oldest(self._accounts, stays=lambda node: known[node].state)
            self._gone_usd += math.fsum(known[node].usd for node in gone)

    def egress(self, peer: str, sent: float) -> None:
        """So many more bytes were sent to a node, or by the learner. Those of one that named its price count while it works."""
        account = self._account(peer)
        if not account.held_back and (account.state == ACTIVE or not account.own_price):
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
        return self._gone_usd + math.fsum(account.usd for account in self._accounts.values())

    def usd(self, peer: str, now: float) -> float:
        """What one node has cost so far."""
        account = self._accounts.get(peer)
        if account is None:
            return 0.0
        self._now = max(self._now, now)
        account.charge(self._now)
        return account.usd

    def rows(self, now: float | None = None) -> list[NodeBill]:
        """Every node's account, by name, but for those that are forgotten."""
        self._until(now)
        accounts = sorted(self._accounts.items())
        return [NodeBill(peer, a.active_s, a.usd) for peer, a in accounts]

    def _account(self, peer: str, now: float | None = None) -> _Account:
        if now is not None:
            self._now = max(self._now, now)
        return self._accounts.setdefault(peer, _Account(self._now))

    def _until(self, now: float | None) -> None:
        if now is not None:
            self._now = max(self._now, now)
        for account in self._accounts.values():
            account.charge(self._now)
