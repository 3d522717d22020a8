"""The tables of the journal and the laws that SQLite itself keeps. Must not know what anybody does with them.

Triggers and keys make a second consumption, a step back in a group's life, or a gap in a journaled trajectory an error
inside SQLite and not a matter of care.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from p2p.errors import UsageError

SCHEMA_VERSION = 5
"""2: pieces of unfinished trajectories, and the digest of what they were made from. 3: members beyond need. 4: that digest is
called `spec_digest`, and no longer `recipe`. 5: pieces that an environment gave, without version, maker and log probabilities."""

APPLICATION_ID = 0x53484F4C
""""SHOL": tells our file from any other SQLite file."""

_EXTRA = "extra INTEGER NOT NULL DEFAULT 0"
_PIECES_OF_RESERVED = """
CREATE TRIGGER pieces_of_reserved BEFORE INSERT ON pieces
WHEN NOT EXISTS (SELECT 1 FROM groups WHERE group_id = NEW.group_id AND state = 'reserved' AND NEW.member < samples + extra)
BEGIN SELECT RAISE(ABORT, 'a piece of a group that is not reserved'); END;
"""

_PIECES = """
CREATE TABLE pieces (  -- tokens of groups that are reserved: only of those
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL,
    epoch INTEGER, step INTEGER,  -- the version that made them; NULL: an environment gave them
    ids BLOB NOT NULL, logprobs BLOB NOT NULL, maker INTEGER,
    PRIMARY KEY (group_id, member, start),
    CHECK ((epoch IS NULL) = (maker IS NULL) AND (step IS NULL) = (maker IS NULL)),
    CHECK (length(ids) > 0 AND length(ids) % 4 = 0),
    CHECK (length(logprobs) = CASE WHEN maker IS NULL THEN 0 ELSE length(ids) END)
) STRICT, WITHOUT ROWID;
"""
_PIECES_FOLLOW = """
CREATE TRIGGER pieces_follow BEFORE INSERT ON pieces
WHEN NEW.start <> coalesce((SELECT start + length(ids) / 4 FROM pieces WHERE group_id = NEW.group_id AND member = NEW.member
                            ORDER BY start DESC LIMIT 1), 0)
BEGIN SELECT RAISE(ABORT, 'a piece does not begin where the one before ends'); END;
"""
_PIECES_GO = """
CREATE TRIGGER pieces_go AFTER UPDATE OF state ON groups WHEN OLD.state = 'reserved'
BEGIN DELETE FROM pieces WHERE group_id = OLD.group_id; END;
"""
_COLUMNS = "group_id, member, start, epoch, step, ids, logprobs, maker"

_FROM = {
    2: f"ALTER TABLE groups ADD COLUMN {_EXTRA}; DROP TRIGGER pieces_of_reserved; {_PIECES_OF_RESERVED}",
    3: "ALTER TABLE groups RENAME COLUMN recipe TO spec_digest;",
    4: (
        "DROP TRIGGER pieces_follow; DROP TRIGGER pieces_of_reserved; DROP TRIGGER pieces_go; "
        f"ALTER TABLE pieces RENAME TO pieces_before; {_PIECES} "
        f"INSERT INTO pieces ({_COLUMNS}) SELECT {_COLUMNS} FROM pieces_before; DROP TABLE pieces_before; "
        f"{_PIECES_FOLLOW} {_PIECES_OF_RESERVED} {_PIECES_GO}"
    ),
}
"""Schema version -> what makes a journal of it one of the next version: a run that an earlier version of this program began goes
on."""

_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, start_step INTEGER NOT NULL, time REAL NOT NULL) STRICT;
CREATE TABLE commits (
    step INTEGER PRIMARY KEY, epoch INTEGER NOT NULL REFERENCES epochs, checkpoint TEXT NOT NULL, time REAL NOT NULL
) STRICT;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, task_index INTEGER NOT NULL, samples INTEGER NOT NULL,
    epoch INTEGER NOT NULL, step INTEGER NOT NULL,  -- the version it was reserved at
    state TEXT NOT NULL CHECK (state IN ('reserved', 'finished', 'consumed', 'aborted')),
    reason TEXT NOT NULL DEFAULT '', payload BLOB, consumed_step INTEGER REFERENCES commits,
    spec_digest INTEGER NOT NULL DEFAULT 0,
    {_EXTRA},  -- members generated beyond `samples`
    CHECK ((state = 'consumed') = (consumed_step IS NOT NULL)),
    CHECK ((state = 'finished') = (payload IS NOT NULL)),
    CHECK ((state = 'aborted') = (reason <> ''))
) STRICT;
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_task ON groups (task_index);
CREATE TRIGGER groups_go_forward BEFORE UPDATE OF state ON groups
WHEN NOT ((OLD.state = 'reserved' AND NEW.state IN ('finished', 'aborted'))
       OR (OLD.state = 'finished' AND NEW.state IN ('consumed', 'aborted')))
BEGIN SELECT RAISE(ABORT, 'a group cannot go back or end twice'); END;
CREATE TRIGGER groups_stay BEFORE DELETE ON groups BEGIN SELECT RAISE(ABORT, 'groups are never deleted'); END;
CREATE TABLE consumed (group_id INTEGER PRIMARY KEY REFERENCES groups, step INTEGER NOT NULL REFERENCES commits) STRICT;
CREATE TABLE makers (maker INTEGER PRIMARY KEY, peer TEXT NOT NULL UNIQUE) STRICT;  -- a peer id is longer than most pieces
{_PIECES}{_PIECES_FOLLOW}{_PIECES_OF_RESERVED}{_PIECES_GO}
CREATE TABLE totals (name TEXT PRIMARY KEY, groups INTEGER NOT NULL, trajectories INTEGER NOT NULL) STRICT;
CREATE TABLE versions (
    epoch INTEGER NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL, mid TEXT NOT NULL, base TEXT NOT NULL,
    bytes INTEGER NOT NULL, time REAL NOT NULL, PRIMARY KEY (epoch, step, kind, mid)
) STRICT;
CREATE TABLE nodes (
    peer TEXT PRIMARY KEY, name TEXT NOT NULL, first_seen REAL NOT NULL, last_seen REAL NOT NULL,
    tokens INTEGER NOT NULL, bytes INTEGER NOT NULL
) STRICT;
INSERT INTO totals VALUES ('reserved', 0, 0);
"""


def prepare(db: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Check an existing file or fill a new one. UsageError when it is not this run's journal."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA foreign_keys = ON")
    application = db.execute("PRAGMA application_id").fetchone()[0]
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not tables and not application:
        # One transaction with its two marks, so that a crash leaves an empty file or a whole one.
        quoted = db.execute("SELECT quote(?)", (run_id,)).fetchone()[0]
        db.executescript(
            f"PRAGMA synchronous = FULL; BEGIN IMMEDIATE; {_SCHEMA} INSERT INTO meta VALUES ('run', {quoted}); "
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    elif application != APPLICATION_ID:
        raise UsageError(f"{path} is not a journal")
    schema = db.execute("PRAGMA user_version").fetchone()[0]
    if schema not in (*_FROM, SCHEMA_VERSION):
        raise UsageError(f"{path} has schema {schema}, this program writes {SCHEMA_VERSION}")
    found = db.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()[0]
    if found != run_id:
        raise UsageError(f"{path} belongs to run {found!r}, not {run_id!r}")
    for old in range(schema, SCHEMA_VERSION):
        step = f"{_FROM[old]} PRAGMA user_version = {old + 1};"
        db.executescript(f"PRAGMA synchronous = FULL; BEGIN IMMEDIATE; {step} COMMIT;")
    db.execute("PRAGMA synchronous = NORMAL")
