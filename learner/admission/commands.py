"""What `shoal ticket`, `ban` and `unban` do to the books of a run, while its learner runs and while it does not.

Must not know flags or what is printed. Each returns plain values.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from learner.admission.issuing import TICKET_FILE, new_ticket_id, ticket_text
from learner.admission.peers_file import PEERS_FILE, PeersFile
from learner.admission.records import BanRow, TicketRow
from p2p.errors import UsageError
from p2p.identity import Identity, public_key_of
from p2p.membership.admission import Ticket, read_ticket
from p2p.printable import printable

MAX_NAME = 64
"""Characters of a ticket's name."""

MAX_ALLOW = 1000
"""Peers on a ticket's allow-list."""

MAX_WHY = 200
"""Characters of the reason of a ban: the peer is told."""

_END = re.compile(r"[1-9A-HJ-NP-Za-km-z]{6,51}", re.ASCII)
"""The end of a peer id that is long enough to mean one peer."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketWish:
    """What a new ticket is to be. A name of "" is the next free one."""

    name: str = ""
    expires_s: float = 0.0
    """seconds from now; 0: never"""
    uses: int = 0
    rate: int = 0
    allow: tuple[str, ...] = ()
    usd_per_hour: float | None = None


def new_ticket(run_dir: Path, wish: TicketWish) -> dict[str, Any]:
    """Make a ticket; its row, and its text as `ticket`. UsageError when the run has not started yet, or the name is taken."""
    own = _own_ticket(run_dir)
    for peer in wish.allow:
        check_peer(peer, "--allow")
    if len(wish.allow) > MAX_ALLOW:
        raise UsageError(f"--allow: at most {MAX_ALLOW} peers")
    if wish.name and (not _NAME.fullmatch(wish.name) or len(wish.name) > MAX_NAME):
        raise UsageError(f"--name: {wish.name[:80]!r} is no name: letters, digits, '.', '_' and '-', at most {MAX_NAME}")
    head = Identity.load_or_create(run_dir / "head.key")
    if head.peer_id != own.head:
        raise UsageError(f"{run_dir}/head.key is another key than that of {TICKET_FILE}: start the learner once more")
    now = time.time()
    ticket = TicketRow(
        new_ticket_id(), wish.name, now, expires=int(now + wish.expires_s) if wish.expires_s else 0, uses=wish.uses,
        rate=wish.rate, allow=tuple(dict.fromkeys(wish.allow)), usd_per_hour=wish.usd_per_hour,
    )  # fmt: skip
    with _books(run_dir) as books:
        if wish.name:
            books.add_ticket(ticket)
        else:
            ticket = books.add_numbered(ticket, "ticket-")
    return _row(ticket, 0, now) | {"ticket": ticket_text(head, own.run, own.addresses, ticket)}


def list_tickets(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of all tickets, the oldest first."""
    now = time.time()
    with _books(run_dir) as books:
        return [_row(ticket, books.brought(ticket.id), now) for ticket in books.tickets()]


def revoke_ticket(run_dir: Path, which: str) -> dict[str, Any]:
    """Revoke the ticket of that name or id. UsageError when there is none that was not revoked."""
    now = time.time()
    with _books(run_dir) as books:
        ticket = books.live_ticket(which) or books.ticket(which)
        if ticket is None or ticket.revoked:
            names = ", ".join(t.name for t in books.tickets() if not t.revoked) or "none"
            what = "was revoked before" if ticket is not None else "is the name or id of no ticket of this run"
            raise UsageError(f"{which[:80]!r} {what} (live ones: {names:.500})")
        books.revoke(ticket.id, now)
        return _row(books.ticket(ticket.id) or ticket, books.brought(ticket.id), now)


def ban_peer(run_dir: Path, peer: str, why: str = "", for_s: float = 0.0) -> dict[str, Any]:
    """Ban a peer, for good or for so many seconds."""
    now = time.time()
    with _books(run_dir) as books:
        peer = whole_peer(books, peer, "ban")
        ban = BanRow(peer, printable(why, MAX_WHY), now, now + for_s if for_s else 0.0)
        books.ban(ban)
    return {"peer": peer, "why": ban.why, "until": when(ban.until)}


def unban_peer(run_dir: Path, peer: str) -> dict[str, Any]:
    """Forgive a peer: its ban, and its expulsion by the head if there is one."""
    with _books(run_dir) as books:
        peer = whole_peer(books, peer, "unban")
        return {"peer": peer, "was_banned": books.unban(peer)}


def list_bans(run_dir: Path) -> list[dict[str, Any]]:
    """The bans that hold, the oldest first."""
    now = time.time()
    with _books(run_dir) as books:
        return [
            {"peer": ban.peer, "why": ban.why, "since": when(ban.since), "until": when(ban.until)}
            for ban in books.bans() if ban.holds(now)
        ]  # fmt: skip


def check_peer(peer: str, where: str) -> None:
    """UsageError for what is no peer id: a node's name is not enough, anybody can take it."""
    try:
        public_key_of(peer)
    except ValueError:
        raise UsageError(f"{where}: {peer[:80]!r} is no peer id (12D3KooW..., 52 characters: shoal status --json)") from None


def whole_peer(books: PeersFile, text: str, where: str) -> str:
    """The peer id that a person gave, whole or by its end as `shoal status` shows it. UsageError when no peer that came, or more
    than one, has it."""
    end = text.removeprefix("..").removeprefix("…")
    found = books.peers_ending(end) if _END.fullmatch(end) else []
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{where}: {len(found)} peers end with {end!r}: give the whole id, one of {', '.join(found[:5])}")
    check_peer(text, where)
    return text


def when(at: float) -> str | None:
    """A time of the books in ISO form; None for "never"."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") if at else None


def _row(ticket: TicketRow, brought: int, now: float) -> dict[str, Any]:
    return {
        "name": ticket.name, "id": ticket.id, "state": ticket.state(brought, now), "brought": brought,
        "uses": ticket.uses or None, "rate": ticket.rate or None, "made": when(ticket.made), "expires": when(ticket.expires),
        "revoked": when(ticket.revoked), "allow": list(ticket.allow), "usd_per_hour": ticket.usd_per_hour,
    }  # fmt: skip


def _own_ticket(run_dir: Path) -> Ticket:
    """The run's own, which says what a ticket of this run is to say."""
    if not (run_dir / TICKET_FILE).exists() or not (run_dir / "head.key").exists():
        raise UsageError(f"{run_dir} has no {TICKET_FILE} yet: start the learner once, which says how it is reached")
    return read_ticket((run_dir / TICKET_FILE).read_text(encoding="utf-8", errors="replace"))


@contextmanager
def _books(run_dir: Path) -> Iterator[PeersFile]:
    """The books of a run that was started. UsageError when there is none."""
    if not (run_dir / "run.json").exists():
        raise UsageError(f"{run_dir} holds no run")
    with PeersFile.open(run_dir / PEERS_FILE) as books:
        yield books
