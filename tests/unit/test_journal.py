"""The journal: lives of groups, exactly once, and a kill before every single statement."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from learner.journal.journal import CommittedStep, Journal
from learner.journal.records import Piece, ReservedGroup, Unwritten
from learner.rollouts.recovery import plan_resume
from learner.run_dir import check_idle
from learner.trajectory import Group, Trajectory
from p2p.errors import UsageError
from p2p.protocol.rollout import Completion, Span, TokenEvent
from p2p.version import Version
from tests.support.database import read_rows, run_script


def open_journal(path: Path, run: str = "run") -> Journal:
    return Journal.open(path / "journal.db", run, clock=lambda: 1.5)


START = Version(1, 0)


def finished(group_id: int, version: Version = START, samples: int = 2) -> Group:
    one = Trajectory(
        prompt_ids=(1, 2), completion_ids=(3, 4), logprobs=(-0.25, -0.5), spans=(Span(version, 0, 2),),
        reward=1.0, finish="stop", node="node", seed=7, exact=True,
    )
    return Group(group_id, group_id, (one,) * samples)


def reserve(journal: Journal, *group_ids: int, version: Version = START) -> None:
    journal.record_reserved([ReservedGroup(g, g, version, 2) for g in group_ids])


def piece(group_id: int, start: int, count: int = 2, member: int = 0, version: Version = START, node: str = "n") -> Piece:
    ids = np.arange(start, start + count, dtype="<i4").tobytes()
    logprobs = np.linspace(-1, -0.1, count, dtype="<f4").tobytes()
    return Piece(group_id, member, start, version, ids, logprobs, node)


def left(journal: Journal) -> list[int]:
    return [g.group_id for g in journal.unfinished()]


def test_a_group_lives_once(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        assert journal.new_epoch() == 1 and journal.last_commit() is None
        reserve(journal, 0, 1, 2, 3)
        for g in (0, 1, 2):
            journal.record_finished(finished(g))
        journal.record_aborted([2], "budget")
        assert journal.unconsumed() == (finished(0), finished(1)) and left(journal) == [3]
        journal.commit(1, "ckpt/1", [0, 1])
        assert journal.last_commit() == CommittedStep(1, 1, "ckpt/1", 1.5)
        assert journal.unconsumed() == ()
        counts = journal.counts()
        groups, trajectories = counts.groups, counts.trajectories
        assert (groups.reserved, groups.outstanding, groups.finished, groups.consumed) == (4, 1, 0, 2)
        assert groups.aborted == {"budget": 1} and groups.lost == 0
        assert (trajectories.reserved, trajectories.outstanding, trajectories.consumed) == (8, 2, 4)
        assert trajectories.aborted == {"budget": 2} and trajectories.lost == 0


def test_what_is_not_a_next_step_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        with pytest.raises(ValueError, match="before any epoch"):
            journal.commit(1, "c", [])
        journal.new_epoch()
        reserve(journal, 0, 1, 2)
        with pytest.raises(ValueError, match="reserved twice"):
            reserve(journal, 3, 0)
        assert journal.counts().groups.reserved == 3
        journal.record_finished(finished(0))
        journal.record_finished(finished(1))
        with pytest.raises(ValueError, match="group 0 is finished, not reserved"):
            journal.record_finished(finished(0))
        with pytest.raises(ValueError, match="group 2 is reserved, not finished"):
            journal.commit(1, "c", [0, 2])
        with pytest.raises(ValueError, match="unknown"):
            journal.commit(1, "c", [0, 9])
        with pytest.raises(ValueError, match="group 0 is consumed"):
            journal.commit(1, "c", [0, 0])
        assert journal.last_commit() is None and len(journal.unconsumed()) == 2
        journal.commit(1, "c", [0])
        with pytest.raises(ValueError, match="group 0 is consumed, not finished"):
            journal.commit(2, "c", [0, 1])
        with pytest.raises(ValueError, match="step 1 after step 1"):
            journal.commit(1, "c", [1])
        with pytest.raises(ValueError, match="group 0 is consumed"):
            journal.record_aborted([2, 0], "late")
        with pytest.raises(ValueError, match="reason"):
            journal.record_aborted([2], "")
        assert left(journal) == [2] and journal.counts().groups.lost == 0


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO consumed VALUES (0, 1)",
        "UPDATE groups SET state = 'finished', payload = x'00', consumed_step = NULL WHERE group_id = 0",
        "UPDATE groups SET state = 'consumed', consumed_step = 1 WHERE group_id = 0",
        "UPDATE groups SET state = 'consumed', consumed_step = 1 WHERE group_id = 1",
        "UPDATE groups SET state = 'consumed', payload = NULL WHERE group_id = 1",
        "DELETE FROM groups WHERE group_id = 0",
        "INSERT INTO commits VALUES (1, 1, 'again', 0.0)",
        "INSERT INTO commits VALUES (2, 77, 'no such epoch', 0.0)",
    ],
)
def test_the_database_itself_forbids_a_second_consumption(tmp_path: Path, statement: str) -> None:
    """Group 0 is consumed and 1 reserved; even our own SQL, wrong, cannot break what exactly-once rests on."""
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        reserve(journal, 0, 1)
        journal.record_finished(finished(0))
        journal.commit(1, "c", [0])
        with pytest.raises(sqlite3.IntegrityError):
            journal._db.execute(statement)  # foreign keys are enforced on the journal's own connection only
        assert journal.counts().groups.consumed == 1


def test_tokens_are_there_after_a_crash_until_their_group_is_over(tmp_path: Path) -> None:
    first = [piece(0, 0), piece(0, 0, 3, member=1), piece(2, 0, version=Version(1, 1))]
    then = [piece(0, 2, 1, version=Version(1, 1), node="other"), piece(1, 0), piece(1, 2)]
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        journal.record_reserved([ReservedGroup(g, 10 + g, START, 2, 99 + g) for g in range(4)])
        journal.record_tokens(first)
        journal.record_tokens([])
        journal.record_tokens(then)
        journal.record_finished(finished(1))
    with open_journal(tmp_path) as journal:
        groups = journal.unfinished()
        assert [g.group for g in groups] == [ReservedGroup(g, 10 + g, START, 2, 99 + g) for g in (0, 2, 3)]
        assert groups[0].members == ((first[0], then[0]), (first[1],)) and groups[0].tokens == 6
        assert groups[1].members == ((first[2],), ()) and groups[2].members == ((), ())
        journal.cut_tokens([(0, 0, 2), (0, 1, 0)])
        assert journal.unfinished()[0].members == ((first[0],), ())
        journal.record_tokens([piece(0, 2, 5)])  # goes on where it was cut
        journal.record_aborted([0, 2], "orphaned")
        assert left(journal) == [3]
        assert read_rows(tmp_path / "journal.db", "SELECT count(*) FROM pieces") == [(0,)]


def test_members_beyond_need_have_tokens_too_and_are_no_trajectories(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        journal.record_reserved([ReservedGroup(0, 0, START, 2, 7, extra=1), ReservedGroup(1, 1, START, 2)])
        journal.record_tokens([piece(0, 0, member=2), piece(0, 0, member=1)])
        for beyond in (piece(0, 0, member=3), piece(1, 0, member=2)):
            with pytest.raises(ValueError, match="not reserved"):
                journal.record_tokens([beyond])
    with open_journal(tmp_path) as journal:
        group = journal.unfinished()[0]
        assert group.group == ReservedGroup(0, 0, START, 2, 7, extra=1) and group.group.members == 3
        assert group.members == ((), (piece(0, 0, member=1),), (piece(0, 0, member=2),))
        journal.record_finished(finished(0))
        counts = journal.counts().trajectories
        assert (counts.reserved, counts.finished, counts.outstanding, counts.lost) == (4, 2, 2, 0)
        assert read_rows(tmp_path / "journal.db", "SELECT count(*) FROM pieces") == [(0,)]


def test_prompts_of_surplus_groups_are_drawn_again(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        reserve(journal, 0, 1, 2)
        journal.record_aborted([0, 1], "surplus")
        assert journal.tasks_to_retry() == (0, 1) and journal.surplus_tasks() == {0, 1}
        journal.record_reserved([ReservedGroup(3, 1, START, 2)])
        assert journal.tasks_to_retry() == (0,) and journal.surplus_tasks() == {0, 1}
        journal.record_finished(Group(3, 1, finished(3).trajectories))
        assert journal.surplus_tasks() == {0}


OLD_TRIGGER = """
CREATE TRIGGER pieces_of_reserved BEFORE INSERT ON pieces
WHEN NOT EXISTS (SELECT 1 FROM groups WHERE group_id = NEW.group_id AND state = 'reserved' AND NEW.member < samples)
BEGIN SELECT RAISE(ABORT, 'a piece of a group that is not reserved'); END;
"""


def test_a_run_of_the_schema_before_goes_on(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        reserve(journal, 0)
        journal.record_tokens([piece(0, 0)])
        run_script(
            tmp_path / "journal.db",
            f"DROP TRIGGER pieces_of_reserved; ALTER TABLE groups DROP COLUMN extra; {OLD_TRIGGER} "
            "ALTER TABLE groups RENAME COLUMN spec_digest TO recipe; PRAGMA user_version = 2;",
        )
    with pytest.raises(UsageError, match="belongs to run"):
        open_journal(tmp_path, "other")
    for _ in range(2):
        with open_journal(tmp_path) as journal:
            assert read_rows(tmp_path / "journal.db", "PRAGMA user_version") == [(5,)]
            assert journal.unfinished()[0].group == ReservedGroup(0, 0, START, 2)
    with open_journal(tmp_path) as journal:
        journal.record_reserved([ReservedGroup(1, 1, START, 1, extra=1)])
        journal.record_tokens([piece(0, 2), piece(1, 0, member=1)])
        with pytest.raises(ValueError, match="not reserved"):
            journal.record_tokens([piece(0, 0, member=2)])


def test_log_probabilities_come_back_bit_for_bit(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0x80000000, 0xC2700000, 10_000, dtype=np.uint32)  # -0.0 down to -60
    run = TokenEvent.of("0.0.0", 0, tuple(range(10_000)), bits.view(np.float32), START)
    unwritten = Unwritten()
    unwritten.add(0, 0, "n", run.start, run.version, run.packed_ids, run.packed_logprobs)
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        reserve(journal, 0)
        journal.record_tokens(unwritten.take())
        back = journal.unfinished()[0].members[0][0].event()
    assert back.ids == tuple(range(10_000)) and np.array_equal(back.logprobs.view(np.uint32), bits)
    completion = Completion()
    completion.add(back)
    assert np.array_equal(np.array(completion.logprobs, np.float32).view(np.uint32), bits)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([piece(0, 3)], "does not begin where"),
        ([piece(0, 1)], "does not begin where"),
        ([piece(0, 0)], "does not begin where"),
        ([piece(0, 2), piece(0, 3)], "does not begin where"),
        ([piece(0, 1, member=1)], "does not begin where"),
        ([piece(0, 0, member=2)], "not reserved"),
        ([piece(0, 2), piece(1, 0)], "not reserved"),
        ([piece(7, 0)], "not reserved"),
        ([Piece(0, 0, 2, START, b"", b"", "n")], "CHECK"),
        ([Piece(0, 0, 2, START, bytes(8), bytes(4), "n")], "CHECK"),
    ],
)
def test_tokens_that_do_not_follow_are_refused_whole(tmp_path: Path, pieces: list[Piece], reason: str) -> None:
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        reserve(journal, 0, 1)
        journal.record_finished(finished(1))
        journal.record_tokens([piece(0, 0)])
        with pytest.raises(ValueError, match=reason):
            journal.record_tokens(pieces)
        assert journal.unfinished()[0].members == ((piece(0, 0),), ())


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        assert [journal.next_group_id() for _ in range(3)] == [0, 1, 2]
        assert [journal.next_task_index() for _ in range(2)] == [0, 1]
        journal.new_epoch()
        journal.record_reserved([ReservedGroup(0, 0, Version(1, 0), 2), ReservedGroup(2, 1, Version(1, 0), 2)])
    with open_journal(tmp_path) as journal:
        assert (journal.next_group_id(), journal.next_task_index()) == (3, 2)
        assert journal.epoch == 1 and journal.new_epoch() == 2
        assert journal.epochs() == {1: 0, 2: 0}


def test_prompts_of_a_crash_come_back_once(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        reserve(journal, 0, 1, 2, 3)
        journal.record_finished(finished(3))
        journal.record_aborted([0, 1], "restart")
        journal.record_aborted([2], "member 0 failed 8 times")
        assert journal.tasks_to_retry() == (0, 1)
        journal.record_reserved([ReservedGroup(4, 0, Version(1, 0), 2)])
        assert journal.tasks_to_retry() == (1,)
        journal.record_aborted([4], "orphaned")
        assert journal.tasks_to_retry() == (0, 1)


def test_several_crashes_in_a_row(tmp_path: Path) -> None:
    """Epoch 1 commits 1 and runs on to 2; epoch 2 starts at 1 and commits 2: a span of (1, 2) stays orphaned."""
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        reserve(journal, 0, 1, 2)
        journal.record_finished(finished(0))
        journal.commit(1, "c1", [0])
        journal.record_finished(finished(1, Version(1, 2)))
        journal.record_finished(finished(2, Version(1, 1)))
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        journal.commit(2, "c2", [])
    with open_journal(tmp_path) as journal:
        assert journal.new_epoch() == 3 and journal.epochs() == {1: 0, 2: 1, 3: 2}
        last = journal.last_commit()
        assert last is not None
        plan = plan_resume(journal.epochs(), last.step, journal.unconsumed(), journal.unfinished(), 2)
        assert [g.group_id for g in plan.keep] == [2] and plan.abort == {"orphaned": (1,)}


def test_versions_and_nodes_add_up(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.record_version(Version(1, 0), "anchor", "mid0", "", 1000)
        journal.record_version(Version(1, 1), "delta", "mid1", "mid0", 10)
        journal.record_node("peer", "old name", tokens=5, size=50)
        journal.record_node("peer", "name", tokens=2, size=20)
        assert read_rows(tmp_path / "journal.db", "SELECT step, kind, base, bytes FROM versions ORDER BY step") == [
            (0, "anchor", "", 1000),
            (1, "delta", "mid0", 10),
        ]
        assert read_rows(tmp_path / "journal.db", "SELECT * FROM nodes") == [("peer", "name", 1.5, 1.5, 7, 70)]


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    with open_journal(tmp_path, "it's mine"):
        pass
    with pytest.raises(UsageError, match="belongs to run"):
        open_journal(tmp_path, "other")
    run_script(tmp_path / "journal.db", "PRAGMA user_version = 99")
    with pytest.raises(UsageError, match="schema 99"):
        open_journal(tmp_path, "it's mine")
    other = tmp_path / "other"
    other.mkdir()
    db = sqlite3.connect(other / "journal.db")
    db.execute("CREATE TABLE cake (x)")
    db.commit()
    db.close()
    with pytest.raises(UsageError, match="not a journal"):
        open_journal(other)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "journal.db").write_bytes(b"some text, long enough to be read as a header " * 40)
    with pytest.raises(UsageError, match="not a journal"):
        open_journal(tmp_path / "text")


def test_a_full_disk_is_no_fault_of_the_file(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.new_epoch()
        ((pages,),) = read_rows(tmp_path / "journal.db", "PRAGMA page_count")
        journal._db.execute(f"PRAGMA max_page_count = {pages}")  # the limit is the connection's
        with pytest.raises(sqlite3.OperationalError, match="full") as caught:
            reserve(journal, *range(10_000))
        assert caught.value.__notes__ == [str(tmp_path / "journal.db")]
        journal._db.execute("PRAGMA max_page_count = 1000000")  # the same
        reserve(journal, *range(10_000))
        assert journal.counts().groups.outstanding == 10_000, "the failed transaction left nothing behind"
    (tmp_path / "journal.db").unlink()
    (tmp_path / "journal.db").mkdir()
    with pytest.raises(sqlite3.OperationalError) as caught:
        open_journal(tmp_path)
    assert caught.value.__notes__ == [str(tmp_path / "journal.db")]


def test_one_learner_at_a_time(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        with pytest.raises(UsageError, match="another learner is running on this directory"):
            open_journal(tmp_path)
        code = (
            "import sys; from pathlib import Path; from learner.journal.journal import Journal\n"
            "from p2p.errors import UsageError\n"
            "try: Journal.open(Path(sys.argv[1]), 'run')\n"
            "except UsageError as error: print(error); sys.exit(2)"
        )
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "journal.db")], cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 2 and "another learner" in done.stdout, done.stderr
        journal.close()
        journal.close()
    with open_journal(tmp_path):
        pass


def test_a_look_at_the_lock_refuses_no_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever only looks whether a learner runs holds the lock for an instant."""
    open_journal(tmp_path).close()
    looking = os.open(tmp_path / "journal.db.lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("p2p.files.time.sleep", lambda s: fcntl.flock(looking, fcntl.LOCK_UN))
    open_journal(tmp_path).close()
    os.close(looking)


def test_a_disk_that_cannot_lock_is_not_taken_for_another_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / "journal.sqlite.lock").touch()
    monkeypatch.setattr("p2p.files.fcntl.flock", fail)
    for use in (lambda: open_journal(tmp_path), lambda: check_idle(tmp_path)):
        with pytest.raises(UsageError, match=r"cannot lock .*\.lock: No locks available"):
            use()


def life(path: Path, statements_left: int) -> int:
    """A short run over two epochs. Dies with os._exit before the statement after `statements_left`; else returns how
    many it took. Acknowledged commits go to a file the moment `commit` returns, as a trainer would see them."""
    count = 0

    def trace(_: str) -> None:
        nonlocal count
        count += 1
        if count > statements_left:
            os._exit(9)

    connect = sqlite3.connect

    def traced(*args: object, **options: object) -> sqlite3.Connection:
        db = connect(*args, **options)  # type: ignore[call-overload]
        db.set_trace_callback(trace)
        return db

    sqlite3.connect = traced  # type: ignore[assignment]
    try:
        with open_journal(path) as journal:
            journal.new_epoch()
            reserve(journal, 0, 1, 2)
            journal.record_tokens([piece(0, 0), piece(1, 0), piece(1, 0, member=1)])
            journal.record_finished(finished(0))
            journal.record_finished(finished(1))
            journal.commit(1, "c1", [0, 1])
            (path / "acknowledged").write_text("1")
            journal.record_aborted([2], "restart")
            reserve(journal, 3, 4, version=Version(1, 1))
            journal.record_tokens([piece(3, 0, version=Version(1, 1)), piece(4, 0, version=Version(1, 1))])
            journal.record_tokens([piece(4, 2, version=Version(1, 1))])
            (path / "tokens").write_text("4")
            journal.record_finished(finished(3, Version(1, 1)))
        with open_journal(path) as journal:
            journal.new_epoch()
            journal.cut_tokens([(4, 0, 2)])
            (path / "tokens").write_text("2")
            journal.record_aborted([4], "restart")
            (path / "tokens").unlink()
            journal.commit(2, "c2", [3])
            (path / "acknowledged").write_text("2")
    finally:
        sqlite3.connect = connect  # type: ignore[assignment]
    return count


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a killed process loses no page it wrote, so syncing only costs time."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


def test_a_kill_before_any_statement_leaves_a_legal_journal(memory_path: Path) -> None:
    whole = memory_path / "whole"
    whole.mkdir()
    total = life(whole, 1 << 30)
    assert total > 60
    seen: set[tuple[int, int]] = set()
    for left in range(total):
        path = memory_path / str(left)
        path.mkdir()
        child = os.fork()
        if child == 0:
            try:
                life(path, left)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        with open_journal(path) as journal:
            last = journal.last_commit()
            step = last.step if last else 0
            acknowledged = path / "acknowledged"
            assert step >= (int(acknowledged.read_text()) if acknowledged.exists() else 0)
            counts = journal.counts()
            assert counts.groups.lost == 0 and counts.trajectories.lost == 0
            assert counts.trajectories.reserved == 2 * counts.groups.reserved
            # A commit and its groups are there together or not at all.
            database = path / "journal.db"
            consumed = read_rows(database, "SELECT group_id FROM consumed ORDER BY group_id")
            assert [g for (g,) in consumed] == {0: [], 1: [0, 1], 2: [0, 1, 3]}[step]
            assert read_rows(database, "SELECT group_id FROM groups WHERE state = 'consumed' ORDER BY group_id") == consumed
            assert read_rows(database, "PRAGMA integrity_check") == [("ok",)]
            assert read_rows(database, "PRAGMA foreign_key_check") == []
            # Tokens are there for groups that are reserved, and all that were acknowledged of group 4.
            tokens = {g.group_id: g.tokens for g in journal.unfinished()}
            reserved = "(SELECT group_id FROM groups WHERE state = 'reserved')"
            assert read_rows(database, f"SELECT count(*) FROM pieces WHERE group_id NOT IN {reserved}") == [(0,)]
            if (path / "tokens").exists() and 4 in tokens:
                said = int((path / "tokens").read_text())
                assert tokens[4] == said or ((tokens[4], said) == (2, 4) and journal.epoch == 2)  # cut, and not yet said
            # And the next learner can go on from there, training on what is left exactly once.
            epoch = journal.new_epoch()
            plan = plan_resume(journal.epochs(), step, journal.unconsumed(), journal.unfinished(), 2)
            for reason, ids in plan.abort.items():
                journal.record_aborted(ids, reason)
            journal.cut_tokens(plan.cut)
            assert {g.group_id: g.tokens for g in journal.unfinished()} == {g.group_id: g.tokens for g in plan.go_on}
            journal.record_aborted([g.group_id for g in plan.go_on], "restart")
            journal.commit(step + 1, "next", [g.group_id for g in plan.keep])
            after = journal.counts().groups
            assert after.outstanding == after.finished == after.lost == 0
            seen.add((epoch, step))
    assert seen == {(1, 0), (2, 0), (2, 1), (3, 1), (3, 2)}
