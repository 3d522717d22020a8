"""Tickets that are made: the run's own, its local engine's, and those of `shoal ticket new`. Must not know links or the gate."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from learner.admission.peers_file import PeersFile
from learner.admission.records import TicketRow
from p2p.identity import Identity
from p2p.membership.admission import make_ticket

TICKET_FILE = "ticket.txt"
"""Name of the file in the run directory with the run's own ticket."""


def new_ticket_id() -> str:
    """Nobody guesses it, though a ticket without the head's signature is worth nothing anyway."""
    return secrets.token_hex(8)


def own_ticket(books: PeersFile, name: str, now: float, allow: tuple[str, ...] = ()) -> TicketRow:
    """The run's live ticket of that name: the one that it made in an earlier life, so that it stays good, or a new one."""
    found = books.live_ticket(name)
    if found is not None and found.allow == allow:
        return found
    if found is not None:
        books.revoke(found.id, now)
    made = TicketRow(new_ticket_id(), name, now, allow=allow)
    books.add_ticket(made)
    return made


def ticket_text(head: Identity, run: str, addresses: Sequence[str], ticket: TicketRow) -> str:
    """What the holder is given."""
    return make_ticket(head, run, tuple(addresses), ticket.expires, id=ticket.id).encode()
