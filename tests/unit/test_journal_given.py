"""What an environment gave, in the journal; and journals of the schema before, which had none of it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from learner.journal.journal import Journal
from learner.journal.records import Piece, ReservedGroup, Unwritten
from learner.journal.schema import APPLICATION_ID, SCHEMA_VERSION
from learner.rollouts.recovery import plan_resume
from p2p.version import Version

START, LATER = Version(1, 0), Version(1, 1)

SCHEMA_4 = """
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
    extra INTEGER NOT NULL DEFAULT 0,  -- members generated beyond `samples`
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
CREATE TABLE pieces (  -- tokens of groups that are reserved: only of those
    group_id INTEGER NOT NULL, member INTEGER NOT NULL, start INTEGER NOT NULL,
    epoch INTEGER NOT NULL, step INTEGER NOT NULL,  -- the version that made them
    ids BLOB NOT NULL, logprobs BLOB NOT NULL, maker INTEGER NOT NULL,
    PRIMARY KEY (group_id, member, start),
    CHECK (length(ids) > 0 AND length(ids) % 4 = 0 AND length(ids) = length(logprobs))
) STRICT, WITHOUT ROWID;
CREATE TRIGGER pieces_follow BEFORE INSERT ON pieces
WHEN NEW.start <> coalesce((SELECT start + length(ids) / 4 FROM pieces WHERE group_id = NEW.group_id AND member = NEW.member
                            ORDER BY start DESC LIMIT 1), 0)
BEGIN SELECT RAISE(ABORT, 'a piece does not begin where the one before ends'); END;
CREATE TRIGGER pieces_of_reserved BEFORE INSERT ON pieces
WHEN NOT EXISTS (SELECT 1 FROM groups WHERE group_id = NEW.group_id AND state = 'reserved' AND NEW.member < samples + extra)
BEGIN SELECT RAISE(ABORT, 'a piece of a group that is not reserved'); END;
CREATE TRIGGER pieces_go AFTER UPDATE OF state ON groups WHEN OLD.state = 'reserved'
BEGIN DELETE FROM pieces WHERE group_id = OLD.group_id; END;
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
"""The tables as schema 4 made them."""


def sampled(start: int, tokens: int = 2, version: Version = START, node: str = "a", member: int = 0, group: int = 0) -> Piece:
    return Piece(group, member, start, version, b"\1\0\0\0" * tokens, b"\0\0\0\xbf" * tokens, node)


def given(start: int, tokens: int = 3, member: int = 0) -> Piece:
    return Piece(0, member, start, None, b"\4\0\0\0" * tokens, b"", "")


def opened(folder: Path) -> Journal:
    return Journal.open(folder / "journal.db", "run", clock=lambda: 0.0)


def reserved(journal: Journal) -> None:
    journal.new_epoch()
    journal.record_reserved([ReservedGroup(0, 0, START, 2)])


def test_given_pieces_are_kept_in_order_with_the_sampled_ones(tmp_path: Path) -> None:
    pieces = [sampled(0), given(2), sampled(5, version=LATER, node="b"), given(7, 1), sampled(0, member=1)]
    with opened(tmp_path) as journal:
        reserved(journal)
        journal.record_tokens(pieces)
    with opened(tmp_path) as journal:
        (left,) = journal.unfinished()
        assert left.members == (tuple(pieces[:4]), (pieces[4],)) and left.tokens == 10
        with pytest.raises(ValueError, match="were given"):
            left.members[0][1].event()
        with pytest.raises(ValueError, match="does not begin where"):
            journal.record_tokens([given(9)])
        journal.cut_tokens([(0, 0, 0)])  # an episode begins anew
        journal.record_tokens([sampled(0, 1)])
        assert journal.unfinished()[0].members == ((sampled(0, 1),), (pieces[4],))
        journal.record_aborted([0], "failures")
        assert journal.unfinished() == ()


@pytest.mark.parametrize(
    "row",
    [
        "(0, 0, 0, NULL, NULL, x'01000000', x'00000000', NULL)",  # given, with a log probability
        "(0, 0, 0, 1, 0, x'01000000', x'', NULL)",  # of a version, and nobody made it
        "(0, 0, 0, NULL, NULL, x'01000000', x'00000000', 1)",  # made under no version
        "(0, 0, 0, 1, 0, x'01000000', x'', 1)",  # made, without its log probability
        "(0, 0, 0, NULL, NULL, x'', x'', NULL)",  # nothing
    ],
)
def test_the_database_refuses_what_is_neither_sampled_nor_given(tmp_path: Path, row: str) -> None:
    with opened(tmp_path) as journal:
        reserved(journal)
        db = sqlite3.connect(tmp_path / "journal.db")
        with pytest.raises(sqlite3.IntegrityError):
            db.execute(f"INSERT INTO pieces VALUES {row}")
        db.close()


def test_a_journal_of_schema_4_goes_on(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "journal.db")
    piece = sampled(0)
    db.executescript(
        f"{SCHEMA_4} INSERT INTO meta VALUES ('run', 'run'); PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 4;"
        "INSERT INTO epochs VALUES (1, 0, 0.0); INSERT INTO makers VALUES (1, 'a');"
        "INSERT INTO groups (group_id, task_index, samples, epoch, step, state) VALUES (0, 0, 2, 1, 0, 'reserved');"
        "INSERT INTO groups (group_id, task_index, samples, epoch, step, state) VALUES (1, 1, 2, 1, 0, 'reserved');"
        "UPDATE totals SET groups = 2, trajectories = 4;"
    )
    for group in (0, 1):
        db.execute("INSERT INTO pieces VALUES (?, 0, 0, 1, 0, ?, ?, 1)", (group, piece.ids, piece.logprobs))
    db.commit()
    db.close()
    for _ in range(2):  # the second time there is nothing to change
        with opened(tmp_path) as journal:
            assert [g.members for g in journal.unfinished()] == [((sampled(0, group=g),), ()) for g in (0, 1)]
    with opened(tmp_path) as journal:
        journal.record_tokens([given(2)])
        with pytest.raises(ValueError, match="does not begin where"):
            journal.record_tokens([sampled(0, group=1)])
        with pytest.raises(ValueError, match="not reserved"):
            journal.record_tokens([sampled(0, group=1, member=2)])
        journal.record_aborted([1], "restart")
    db = sqlite3.connect(tmp_path / "journal.db")
    assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,) == (5,)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert db.execute("SELECT group_id, start, maker FROM pieces").fetchall() == [(0, 0, 1), (0, 2, None)]
    names = {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
    db.close()
    (tmp_path / "new").mkdir()
    opened(tmp_path / "new").close()
    db = sqlite3.connect(tmp_path / "new" / "journal.db")
    assert names == {row[0] for row in db.execute("SELECT name FROM sqlite_master")}
    db.close()


def test_what_waits_to_be_written_is_joined_and_a_member_can_be_dropped() -> None:
    waiting = Unwritten()
    for p in (sampled(0), given(2, 1), given(3, 2), sampled(5), sampled(0, member=1)):
        waiting.add(0, p.member, node=p.node, start=p.start, version=p.version, ids=p.ids, logprobs=p.logprobs)
    assert (waiting.tokens, waiting.longest) == (9, 7)
    waiting.drop_member(0, 1)
    waiting.drop_member(0, 5)
    assert waiting.tokens == 7 and waiting.take() == [sampled(0), given(2, 3), sampled(5)]


def test_a_piece_of_lost_weights_takes_what_was_answered_to_it(tmp_path: Path) -> None:
    lost = Version(1, 9)
    with opened(tmp_path) as journal:
        reserved(journal)
        journal.record_tokens([sampled(0), given(2), sampled(5, version=lost), given(7), sampled(10, version=lost)])
        journal.record_tokens([sampled(0, member=1), given(2, member=1)])
        plan = plan_resume(journal.epochs(), 0, (), journal.unfinished(), 2)
        assert plan.cut == ((0, 0, 5),)
        assert plan.go_on[0].members == ((sampled(0), given(2)), (sampled(0, member=1), given(2, member=1)))
        journal.cut_tokens(plan.cut)
        assert journal.unfinished() == plan.go_on
