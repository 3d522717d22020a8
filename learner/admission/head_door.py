"""The head's gate asks here: what the run's books say of a peer, and what became of whom they let in.

Joins the books on disk, which commands change while the head runs, with the expulsions of `learner.standing`. Must not know
links, signatures or nodes' work.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from learner.admission.peers_file import BookChanges, PeersFile
from learner.admission.records import RATE_S, TicketRow, judge_ticket
from learner.standing.standing import Standing
from p2p.errors import Refusal
from p2p.membership.admission import Ticket
from p2p.membership.doorkeeper import Doorkeeper

log = logging.getLogger("shoal.admission")

HEAD_WAIT_S = 0.1
"""Seconds that the head waits for a command that is writing: its event loop stands still meanwhile. Who comes just then is asked
to come again."""

SEEN_S = 60.0
"""Seconds from one time that a peer's coming back is written down to the next."""

STILL_HERE_S = 3600.0
"""Seconds from one time that it is written down who is still here to the next: a run goes on for weeks."""


class HeadDoor(Doorkeeper):
    """`books` may be changed by commands at any time; `standing` knows who was expelled."""

    def __init__(self, books: PeersFile, standing: Standing | None = None) -> None:
        self.books, self.standing = books, standing
        self._changes: BookChanges | None = None
        self._renewed = -math.inf
        """when it was last written down who is here"""

    def knows(self, peer: str, now: float) -> bool:
        """Whether it came by a ticket that was not revoked. Refusal when it was banned, or is expelled."""
        with _reading_books(peer):
            self._hear_forgiven()
            self._check_bans(peer, now)
            found = self.books.identity(peer)
            ticket = self.books.ticket(found.ticket) if found is not None else None
            if found is None or ticket is None or ticket.revoked:
                return False
            if now - found.last_seen > SEEN_S:
                self.books.seen([peer], now)
            return True

    def admit(self, peer: str, ticket: Ticket, now: float, *, visit: bool = False) -> None:
        """Judge the ticket by the books, and take down who came by it."""
        with _reading_books(peer):
            row = self.books.ticket(ticket.id)
            if row is None:
                raise Refusal("the learner's books do not know the ticket: it was not made for this run", peer=peer, fatal=True)
            found = self.books.identity(peer)
            verdict = judge_ticket(
                peer, replace(row, allow=()) if visit else row, now,
                came=found is not None and found.ticket == row.id, brought=self.books.brought(row.id) if row.uses else 0,
                lately=self.books.brought(row.id, now - RATE_S) if row.rate else 0,
            )  # fmt: skip
            if verdict.reason:
                raise Refusal(verdict.reason, peer=peer, fatal=not verdict.passing)
            if not visit:
                self.books.came(peer, row.id, now)

    def unwelcome(self, peers: Collection[str], now: float) -> Mapping[str, str]:
        """Those who were banned, whose ticket was revoked, or whom the books have forgotten, since the books changed."""
        self.books.here = peers
        try:
            self._hear_forgiven()
            if now - self._renewed > STILL_HERE_S:
                self.books.seen(peers, now)
                self._renewed = now
            changes = self.books.changes
            if changes == self._changes:
                return {}
            out = {peer: why for peer in peers if (why := self._against(peer, now))}
        except sqlite3.Error as error:  # a full disk, another writer: it is looked again in a second
            log.warning("the books of peers cannot be read: %s", error)
            return {}
        self._changes = changes
        return out

    def ticket_of(self, peer: str) -> TicketRow | None:
        """The ticket by which a peer came; None for one that the books do not know."""
        try:
            found = self.books.identity(peer)
            return self.books.ticket(found.ticket) if found is not None else None
        except sqlite3.Error as error:
            log.warning("the books of peers cannot be read: %s", error)
            return None

    def _against(self, peer: str, now: float) -> str:
        ban = self.books.ban_of(peer)
        if ban is not None and ban.holds(now):
            return _banned(ban.why)
        ticket = self.ticket_of(peer)
        if ticket is None:
            return "the learner's books do not know it"
        return f"the ticket {ticket.name!r}, by which it came, was revoked" if ticket.revoked else ""

    def _check_bans(self, peer: str, now: float) -> None:
        ban = self.books.ban_of(peer)
        if ban is not None and ban.holds(now):
            raise Refusal(_banned(ban.why), peer=peer, fatal=not ban.until)
        barred_s = self.standing.barred_s(peer, now) if self.standing is not None else 0.0
        if self.standing is not None and barred_s > 0:
            raise Refusal(f"it is expelled for another {barred_s:.0f} s: {self.standing.why(peer)}", peer=peer)

    def _hear_forgiven(self) -> None:
        if self.standing is not None and (forgiven := self.books.take_forgiven()):
            self.standing.forgive(forgiven)


def _banned(why: str) -> str:
    return f"the operator banned it: {why}" if why else "the operator banned it"


@contextmanager
def _reading_books(peer: str) -> Iterator[None]:
    """Books that cannot be read or written let nobody in; the peer is to come again."""
    try:
        yield
    except sqlite3.Error as error:
        log.warning("the books of peers cannot be used: %s", error)
        raise Refusal("the learner cannot use its books of peers just now", peer=peer) from error
