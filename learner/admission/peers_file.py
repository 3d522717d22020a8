"""The books of who may come: one SQLite file in the run directory, which the head and commands write at the same time.

Tickets, the identities that came by them, bans, and each peer's standing. Every call is one short transaction; a writer waits for
another's for `wait_s` at the most. Must not know links or what is signed. Times are Unix seconds.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from learner.admission.records import BanRow, IdentityRow, TicketRow
from learner.standing.standing import MOST_RECORDS, PeerRecord
from p2p.errors import UsageError
from p2p.files import make_private

PEERS_FILE = "peers.sqlite"
"""Name of the file in the run directory."""

APPLICATION_ID = 0x53485052
""""SHPR": tells our file from any other SQLite file."""

SCHEMA = 1
"""Of the tables below."""

WAIT_S = 2.0
"""Seconds that a command waits for another writer. Every transaction here takes milliseconds."""

MOST_IDENTITIES = 100_000
"""Identities that are kept: 20 MB. Beyond, those are forgotten first that were not seen for longest and came by a ticket without
a number of uses, none of those that are linked now; who comes back shows its ticket again."""

FORGET_EVERY = 1000
"""New identities from one look for too many of them to the next: the look counts them all."""

_TABLES = """
CREATE TABLE tickets (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, made REAL NOT NULL, expires INTEGER NOT NULL, uses INTEGER NOT NULL,
    rate INTEGER NOT NULL, allow TEXT NOT NULL, usd_per_hour REAL, revoked REAL NOT NULL
) STRICT;
CREATE UNIQUE INDEX live_names ON tickets (name) WHERE revoked = 0;
CREATE TABLE identities (
    peer TEXT PRIMARY KEY, ticket TEXT NOT NULL REFERENCES tickets, first_seen REAL NOT NULL, last_seen REAL NOT NULL
) STRICT;
CREATE INDEX by_ticket ON identities (ticket, first_seen);
CREATE TABLE bans (peer TEXT PRIMARY KEY, why TEXT NOT NULL, since REAL NOT NULL, until REAL NOT NULL) STRICT;
CREATE TABLE standing (peer TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT;
CREATE TABLE forgiven (peer TEXT PRIMARY KEY) STRICT;
"""
"""`forgiven`: by a command, and not yet known to the head."""


class BookChanges(NamedTuple):
    """Counts that grow with changes of tickets and bans."""

    others: int
    """by other processes"""
    own: int
    """by this one"""


class PeersFile:
    """One process's hold on the file. Synchronous; not for use from two threads. sqlite3.OperationalError when the disk is full
    or another writer keeps the file for longer than it may."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._own = 0
        self._came = 0
        self.here: Collection[str] = ()
        """the peers that are linked now, which are never forgotten"""

    @classmethod
    def open(cls, path: Path, *, wait_s: float = WAIT_S) -> PeersFile:
        """Open or create the file, for its owner alone (mode 0600). UsageError when it is another program's, or of another
        schema."""
        try:
            make_private(path)  # SQLite gives its two files beside this one the same mode
        except OSError as error:
            raise UsageError(f"cannot open {path}: {error.strerror}") from None
        db = sqlite3.connect(path, isolation_level=None, timeout=wait_s)
        try:
            _to_wal(db, wait_s)
            _prepare(db, path)
        except sqlite3.OperationalError:
            db.close()
            raise
        except (sqlite3.DatabaseError, UsageError) as error:
            db.close()
            raise error if isinstance(error, UsageError) else UsageError(f"{path} is no file of peers: {error}") from None
        return cls(db)

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    def __enter__(self) -> PeersFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def changes(self) -> BookChanges:
        """Another value after tickets or bans were changed, by this process or by another one."""
        return BookChanges(int(self._one("PRAGMA data_version")[0]), self._own)

    # ---- tickets

    def add_ticket(self, ticket: TicketRow) -> None:
        """UsageError when a ticket of that name is there that was not revoked."""
        with self._changing():
            try:
                self._add(ticket)
            except sqlite3.IntegrityError:
                raise UsageError(f"a ticket named {ticket.name!r} is there already: choose another name, or revoke it") from None

    def add_numbered(self, ticket: TicketRow, prefix: str) -> TicketRow:
        """The ticket with a name of its own: `prefix` and the first number from 1 on that no ticket has."""
        with self._changing():  # commands that run at once take different numbers
            taken = {row[0] for row in self._db.execute("SELECT name FROM tickets")}
            number = next(number for number in count(1) if f"{prefix}{number}" not in taken)
            ticket = replace(ticket, name=f"{prefix}{number}")
            self._add(ticket)
        return ticket

    def _add(self, ticket: TicketRow) -> None:
        self._db.execute("INSERT INTO tickets VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (
            ticket.id, ticket.name, ticket.made, ticket.expires, ticket.uses, ticket.rate, " ".join(ticket.allow),
            ticket.usd_per_hour, ticket.revoked,
        ))  # fmt: skip

    def ticket(self, id: str) -> TicketRow | None:
        """The ticket of that id."""
        return next(iter(self._tickets("WHERE id = ?", id)), None)

    def live_ticket(self, name: str) -> TicketRow | None:
        """The ticket of that name that was not revoked."""
        return next(iter(self._tickets("WHERE name = ? AND revoked = 0", name)), None)

    def tickets(self) -> list[TicketRow]:
        """All of them, the oldest first."""
        return self._tickets("ORDER BY made, id")

    def revoke(self, id: str, now: float) -> None:
        """From now on nobody comes by this ticket, nor stays who came by it."""
        with self._changing():
            self._db.execute("UPDATE tickets SET revoked = ? WHERE id = ? AND revoked = 0", (now, id))

    def _tickets(self, where: str, *values: object) -> list[TicketRow]:
        rows = self._db.execute(f"SELECT * FROM tickets {where}", values).fetchall()
        return [
            TicketRow(
                id=id, name=name, made=made, expires=expires, uses=uses, rate=rate, allow=tuple(allow.split()), usd_per_hour=usd,
                revoked=revoked,
            )
            for id, name, made, expires, uses, rate, allow, usd, revoked in rows
        ]  # fmt: skip

    # ---- identities

    def identity(self, peer: str) -> IdentityRow | None:
        """What is known of a peer that came."""
        row = self._db.execute("SELECT * FROM identities WHERE peer = ?", (peer,)).fetchone()
        return IdentityRow(*row) if row is not None else None

    def peers_ending(self, end: str) -> list[str]:
        """The peers that came, or were banned, whose ids end so."""
        query = "SELECT peer FROM identities UNION SELECT peer FROM bans"
        rows = self._db.execute(f"SELECT peer FROM ({query}) WHERE substr(peer, ?) = ? ORDER BY peer LIMIT 100", (-len(end), end))
        return [row[0] for row in rows]

    def brought(self, ticket: str, since: float = 0.0) -> int:
        """Identities that came by the ticket of that id, for the first time at `since` or later."""
        query = "SELECT count(*) FROM identities WHERE ticket = ? AND first_seen >= ?"
        return int(self._one(query, ticket, since)[0])

    def came(self, peer: str, ticket: str, now: float) -> None:
        """`peer` came by the ticket of that id: for the first time, or by another one than before."""
        self._db.execute(
            "INSERT INTO identities VALUES (?, ?, ?, ?) ON CONFLICT (peer) DO UPDATE SET last_seen = excluded.last_seen, "
            "first_seen = iif(ticket = excluded.ticket, first_seen, excluded.first_seen), ticket = excluded.ticket",
            (peer, ticket, now, now),
        )
        self._came += 1
        if self._came % FORGET_EVERY == 0:
            self._forget(now)

    def seen(self, peers: Iterable[str], now: float) -> None:
        """They came back, or are still here."""
        with self._transaction():
            self._db.executemany("UPDATE identities SET last_seen = ? WHERE peer = ?", [(now, peer) for peer in peers])

    def _forget(self, now: float) -> None:
        over = int(self._one("SELECT count(*) FROM identities")[0]) - MOST_IDENTITIES
        if over > 0:
            self.seen(self.here, now)
            self._db.execute(
                "DELETE FROM identities WHERE peer IN (SELECT peer FROM identities JOIN tickets ON ticket = id WHERE uses = 0 "
                "ORDER BY last_seen LIMIT ?)", (over,),
            )  # fmt: skip

    # ---- bans

    def ban(self, ban: BanRow) -> None:
        """It takes the place of an earlier ban of that peer."""
        with self._changing():
            self._db.execute("INSERT OR REPLACE INTO bans VALUES (?, ?, ?, ?)", (ban.peer, ban.why, ban.since, ban.until))
            self._db.execute("DELETE FROM forgiven WHERE peer = ?", (ban.peer,))

    def unban(self, peer: str) -> bool:
        """The operator forgives it, an expulsion of the head's as well (`take_forgiven`). Whether it was banned."""
        with self._changing():
            found = self._db.execute("DELETE FROM bans WHERE peer = ?", (peer,)).rowcount
            self._db.execute("INSERT OR IGNORE INTO forgiven VALUES (?)", (peer,))
        return found > 0

    def ban_of(self, peer: str) -> BanRow | None:
        """The ban of a peer, also one whose time is over."""
        row = self._db.execute("SELECT * FROM bans WHERE peer = ?", (peer,)).fetchone()
        return BanRow(*row) if row is not None else None

    def bans(self) -> list[BanRow]:
        """All of them, the oldest first."""
        return [BanRow(*row) for row in self._db.execute("SELECT * FROM bans ORDER BY since, peer")]

    def take_forgiven(self) -> set[str]:
        """The peers that were unbanned since the last call: the head clears their expulsions."""
        found = {row[0] for row in self._db.execute("SELECT peer FROM forgiven")}
        if found:
            self._db.execute("DELETE FROM forgiven")
        return found

    # ---- standing

    def records(self) -> list[PeerRecord]:
        """What `keep` kept."""
        known = {field.name for field in fields(PeerRecord)}
        rows = (json.loads(row[0]) for row in self._db.execute("SELECT record FROM standing ORDER BY peer"))
        return [PeerRecord(**{key: value for key, value in row.items() if key in known}) for row in rows]

    def keep(self, records: Collection[PeerRecord]) -> None:
        """Keep these records, in place of earlier ones of the same peers. At most MOST_RECORDS stay, as in `Standing`."""
        if not records:
            return
        rows = [(record.peer, json.dumps(asdict(record))) for record in records]
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO standing VALUES (?, ?)", rows)
            over = int(self._one("SELECT count(*) FROM standing")[0]) - MOST_RECORDS
            if over > 0:
                order = "json_extract(record, '$.delivered'), json_extract(record, '$.barred_until')"
                least = f"SELECT peer FROM standing ORDER BY {order} LIMIT ?"
                self._db.execute(f"DELETE FROM standing WHERE peer IN ({least})", (over,))

    # ---- inside

    def _one(self, query: str, *values: object) -> tuple[int, ...]:
        row: tuple[int, ...] = self._db.execute(query, values).fetchone()
        return row

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._transaction():
            yield
        self._own += 1


def _to_wal(db: sqlite3.Connection, wait_s: float) -> None:
    """Readers and a writer at once. Of two that open a new file together, the later one is told at once that the file is locked:
    for the change of the journal's mode SQLite does not wait by itself, so this does."""
    until = time.monotonic() + wait_s
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.005)


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Check an existing file or fill a new one."""
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("BEGIN IMMEDIATE")  # two processes may come to a new file at once
    application = db.execute("PRAGMA application_id").fetchone()[0]
    if not application and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        for statement in _statements():
            db.execute(statement)
        application = APPLICATION_ID
    db.execute("COMMIT")
    if application != APPLICATION_ID:
        raise UsageError(f"{path} is no file of peers")
    schema = db.execute("PRAGMA user_version").fetchone()[0]
    if schema != SCHEMA:
        raise UsageError(f"{path} has schema {schema}, this program writes {SCHEMA}")


def _statements() -> Iterable[str]:
    yield from (text for text in _TABLES.split(";\n") if text.strip())
    yield f"PRAGMA application_id = {APPLICATION_ID}"
    yield f"PRAGMA user_version = {SCHEMA}"
