"""What to try next to link with a member, what kind of NAT this host is behind, and what a link is called. Pure: times are
passed in.

The order, each tried while the one before goes on: dial the addresses that the roster gives (IPv6, IPv4, a port that the router
mapped); if it is the other side's turn, dial all the same after PATIENCE_S, since that side may not get out; then have the head
arrange a meeting (a simultaneous open). What remains has no link: chunks reach it through members that both are linked with.
Must not know channels or messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from p2p.channel.opening import endpoint_of

Kind = Literal["direct IPv4", "direct IPv6", "in memory", "mapped port", "met", "inbound", "relayed"]
KINDS: tuple[str, ...] = get_args(Kind)
"""How a member is linked: this side dialled it (by either protocol, or within a test), it came by the port that this side's
router mapped, both opened at once, it came in, or it is not linked and hears of us through others."""

Nat = Literal["unknown", "none", "steady", "symmetric"]
NATS: tuple[str, ...] = get_args(Nat)
"""What is known of the NAT in front of a host: nothing yet; there is none, or it changes no address; the outside port is the same
whoever is talked to, so others can meet it; each connection has another one, so nobody knows which is next."""

PATIENCE_S = 3.0
"""Seconds that the side whose turn it is has to make the link before the other side tries, too. A dial over 300 ms takes 1.5."""

ASK_S = (4.0, 20.0, 60.0, 300.0)
"""Seconds from one request for a meeting to the next, by how many came to nothing; the last one repeats. Of those that come to
anything 97.6 % do at the first attempt (arXiv 2510.27500); a NAT that held a refused packet against us has forgotten it after 10
s."""

MEET_S = 6.0
"""Seconds that a meeting is tried. TCP repeats its SYN after 1 and 3 seconds, so three of each side pass."""

REDIAL_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait after a failed attempt to reach a peer, by attempt; the last one repeats. A short fault is over within the
first ones, and a peer that is gone for good costs one dial in eight seconds."""


def redial_s(attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt`, counted from 0."""
    return REDIAL_S[min(attempt, len(REDIAL_S) - 1)]


def nat_of(seen: Mapping[str, str], own: Collection[str]) -> Nat:
    """What is in front of this host. `seen`: who saw it -> this host's end as that one saw it, of connections that left from the
    port listened on; `own`: the hosts of this machine's interfaces. Two addresses of one router look like a symmetric NAT, and
    are as hard to meet. Where some saw an address of IPv4 those of IPv6 say nothing: they are seldom translated."""
    found = [end for end in map(endpoint_of, seen.values()) if end is not None]
    found = [end for end in found if ":" not in end.host] or found
    if any(end.host in own for end in found):
        return "none"
    if len(set(found)) > 1:
        return "symmetric"
    return "steady" if len(found) > 1 else "unknown"


def dialled_kind(remote: str) -> Kind:
    """What a link is called that this side dialled; `remote` is the other end."""
    if remote.startswith("/ip"):
        return "direct IPv6" if remote.startswith("/ip6/") else "direct IPv4"
    return "in memory"


Step = Literal["dial", "ask", "wait"]


@dataclass(slots=True)
class Pursuit:
    """One member that there is no link with, since `since`. `mine`: it is this side's turn to dial."""

    mine: bool
    since: float
    dials: int = 0
    asks: int = 0
    dial_at: float = 0.0
    ask_at: float = 0.0
    tried: str = ""
    """why the last dial failed; "" before there was one"""
    met: str = ""
    """why the last meeting failed, or the head arranged none; "" before"""

    def __post_init__(self) -> None:
        self.dial_at = self.since + (0.0 if self.mine else PATIENCE_S)
        self.ask_at = self.since + (PATIENCE_S if self.mine else 2 * PATIENCE_S)

    def next(self, now: float, *, dialable: bool, may_ask: bool) -> Step:
        """What to do now. `dialable`: the member has addresses; `may_ask`: meetings are possible for this side at all."""
        if dialable and now >= self.dial_at:
            return "dial"
        # Its own dial comes first, and the other side's: most links need no meeting.
        if may_ask and now >= self.ask_at and (self.dials or not dialable):
            return "ask"
        return "wait"

    def next_at(self, *, dialable: bool, may_ask: bool) -> float:
        """When `next` may say something else than to wait, as far as time decides."""
        times = ([self.dial_at] if dialable else []) + ([self.ask_at] if may_ask else [])
        return min(times, default=float("inf"))

    def dial_failed(self, now: float, why: str) -> None:
        """A dial came to nothing."""
        self.tried, self.dial_at = why, now + redial_s(self.dials)
        self.dials += 1

    def asked(self, now: float) -> None:
        """The head was asked for a meeting."""
        self.ask_at = now + ASK_S[min(self.asks, len(ASK_S) - 1)]
        self.asks += 1

    def not_met(self, why: str) -> None:
        """A meeting came to nothing, or the head says that there is none."""
        self.met = why

    @property
    def why(self) -> str:
        """Why there is no link, in one line."""
        parts = [self.tried and f"dialled: {self.tried}", self.met and f"meeting: {self.met}"]
        return "; ".join(part for part in parts if part) or "nothing was tried yet"

    @property
    def settled(self) -> bool:
        """Whether all that there is was tried at least once."""
        return bool(self.met)
