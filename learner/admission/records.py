"""What is kept of a ticket, of an identity that came by one, and of a ban; and how a ticket is judged. Pure; times are Unix
seconds.

Must not know files, links or how a ticket is signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RUN_TICKET = "run"
"""Name of the ticket that a run makes by itself, and prints when it starts."""

RATE_S = 3600.0
"""Seconds over which new identities are counted: a ticket's rate is by the hour."""

TicketState = Literal["live", "revoked", "expired", "spent"]


@dataclass(frozen=True, slots=True)
class TicketRow:
    """One ticket."""

    id: str
    """signed into the ticket's text"""
    name: str
    """for people, and for prices"""
    made: float
    expires: int = 0
    """0: never"""
    uses: int = 0
    """identities that it may bring; 0: any number"""
    rate: int = 0
    """new identities that it may bring in an hour; 0: any number"""
    allow: tuple[str, ...] = ()
    """peers that it is good for; empty: for any"""
    usd_per_hour: float | None = None
    """what a node costs that came by it, whatever the node says; None: what the node says"""
    revoked: float = 0.0
    """when; 0: it is not"""

    def state(self, brought: int, now: float) -> TicketState:
        """What it is good for at `now`, after it brought so many identities."""
        if self.revoked:
            return "revoked"
        if self.expires and now > self.expires:
            return "expired"
        return "spent" if self.uses and brought >= self.uses else "live"


@dataclass(frozen=True, slots=True)
class IdentityRow:
    """A peer that came by a ticket."""

    peer: str
    ticket: str
    """its id"""
    first_seen: float
    """by this ticket"""
    last_seen: float


@dataclass(frozen=True, slots=True)
class BanRow:
    """A peer that the operator wants out."""

    peer: str
    why: str
    since: float
    until: float = 0.0
    """0: until it is unbanned"""

    def holds(self, now: float) -> bool:
        return not self.until or now < self.until


@dataclass(frozen=True, slots=True)
class TicketVerdict:
    """What the books say of a peer that shows a ticket: nothing, or why it may not come."""

    reason: str = ""
    passing: bool = False
    """the same ticket may be good later"""


def judge_ticket(
    peer: str, ticket: TicketRow, now: float, *, came: bool, brought: int, lately: int
) -> TicketVerdict:
    """Whether `peer` may come by `ticket`. `came`: it is one of the identities that the ticket brought; `brought`: how many these
    are; `lately`: those of the last RATE_S."""
    named = f"the ticket {ticket.name!r}"
    if ticket.revoked:
        return TicketVerdict(f"{named} was revoked")
    if ticket.expires and now > ticket.expires:
        return TicketVerdict(f"{named} expired {now - ticket.expires:.0f} s ago")
    if ticket.allow and peer not in ticket.allow:
        return TicketVerdict(f"{named} is not for this peer, {peer}")
    if came:
        return TicketVerdict()
    if ticket.uses and brought >= ticket.uses:
        return TicketVerdict(f"{named} has brought {brought} identities, and is for {ticket.uses}")
    if ticket.rate and lately >= ticket.rate:
        return TicketVerdict(f"{named} brought {lately} new identities in the last hour, and may bring {ticket.rate}", True)
    return TicketVerdict()
