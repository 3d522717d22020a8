"""The books of who may come: two writers, reopened, bounded, readable by their owner alone."""

from __future__ import annotations

import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from learner.admission import peers_file
from learner.admission.peers_file import PeersFile
from learner.admission.records import BanRow, TicketRow, judge_ticket
from learner.standing.standing import EXPELLED_S, PeerRecord, Standing
from p2p.errors import UsageError

NOW = 1_800_000_000.0
BOB = TicketRow("aa", "bob", NOW, expires=int(NOW) + 100, uses=2, rate=5, allow=("p1", "p2"), usd_per_hour=0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "peers.sqlite"


def test_what_was_written_is_there_after_a_restart(path: Path) -> None:
    record = PeerRecord("p1", delivered=7, allowance=3.5, recheck=4096, why="slow")
    with PeersFile.open(path) as books:
        books.add_ticket(BOB)
        books.came("p1", "aa", NOW)
        books.ban(BanRow("p9", "spam", NOW))
        books.keep([record, PeerRecord("p2")])
        books.keep([PeerRecord("p2", doubts=1)])
    with PeersFile.open(path) as books:
        assert books.tickets() == [BOB] and books.ticket("aa") == BOB and books.live_ticket("bob") == BOB
        assert books.brought("aa") == 1 and books.identity("p1").ticket == "aa" and books.identity("p2") is None
        assert books.ban_of("p9") == BanRow("p9", "spam", NOW) and books.bans() == [books.ban_of("p9")]
        assert books.records() == [record, PeerRecord("p2", doubts=1)]


def test_only_its_owner_reads_it(path: Path) -> None:
    path.touch(0o644)
    with PeersFile.open(path) as books:
        books.add_ticket(BOB)
        found = [file for file in path.parent.iterdir() if file.name.startswith("peers.sqlite")]
        assert len(found) == 3  # the file, its log, its index
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in found)


def test_the_head_notices_what_a_command_changed(path: Path) -> None:
    with PeersFile.open(path) as head, PeersFile.open(path) as command:
        before = head.changes
        assert head.changes == before
        command.add_ticket(BOB)
        after = head.changes
        assert after != before and head.live_ticket("bob") == BOB
        head.came("p1", "aa", NOW)
        assert head.changes == after  # what the head itself notes of peers is no news to it
        head.ban(BanRow("p1", "", NOW))
        assert head.changes != after
        command.revoke("aa", NOW + 1)
        assert head.ticket("aa").revoked == NOW + 1 and head.live_ticket("bob") is None


def test_names_are_unique_among_those_that_were_not_revoked(path: Path) -> None:
    with PeersFile.open(path) as books:
        books.add_ticket(BOB)
        with pytest.raises(UsageError, match="named 'bob' is there already"):
            books.add_ticket(TicketRow("bb", "bob", NOW))
        books.revoke("aa", NOW)
        books.revoke("aa", NOW + 5)  # again changes nothing
        books.add_ticket(TicketRow("bb", "bob", NOW + 1))
        assert [(t.id, t.revoked) for t in books.tickets()] == [("aa", NOW), ("bb", 0.0)]


def test_an_unban_reaches_the_head_once_and_clears_an_expulsion(path: Path) -> None:
    standing = Standing()
    standing.expel("p1", "lied", NOW)
    standing.expel("p2", "lied", NOW)
    assert standing.barred_s("p1", NOW + 1) == EXPELLED_S[0] - 1 and standing.barred_s("stranger", NOW) == 0.0
    with PeersFile.open(path) as head, PeersFile.open(path) as command:
        assert not command.unban("p1")  # it was not banned; what the head did to it is forgiven all the same
        command.ban(BanRow("p3", "", NOW))
        assert command.unban("p3") and command.ban_of("p3") is None
        command.unban("p4")
        command.ban(BanRow("p4", "after all", NOW))
        forgiven = head.take_forgiven()
        assert forgiven == {"p1", "p3"} and head.take_forgiven() == set()
    standing.forgive(forgiven)
    assert standing.barred_s("p1", NOW + 1) == 0.0 and standing.barred_s("p2", NOW + 1) > 0.0


def test_identities_count_once_a_ticket(path: Path) -> None:
    with PeersFile.open(path) as books:
        books.add_ticket(BOB)
        books.add_ticket(TicketRow("bb", "any", NOW))
        books.came("p1", "aa", NOW)
        books.came("p1", "aa", NOW + 50)
        assert books.identity("p1").first_seen == NOW and books.identity("p1").last_seen == NOW + 50
        assert (books.brought("aa"), books.brought("aa", NOW + 1)) == (1, 0)
        books.came("p1", "bb", NOW + 60)
        assert (books.brought("aa"), books.brought("bb", NOW + 60)) == (0, 1)
        books.seen(["p1"], NOW + 70)
        assert books.identity("p1").last_seen == NOW + 70


def test_what_strangers_leave_behind_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_file, "MOST_IDENTITIES", 20)
    monkeypatch.setattr(peers_file, "FORGET_EVERY", 10)
    monkeypatch.setattr(peers_file, "MOST_RECORDS", 20)
    with PeersFile.open(path) as books:
        books.add_ticket(TicketRow("aa", "counted", NOW, uses=5))
        books.add_ticket(TicketRow("bb", "any", NOW))
        for i in range(5):
            books.came(f"counted-{i}", "aa", NOW)
        for i in range(95):
            books.came(f"any-{i}", "bb", NOW + i)
        assert books.brought("aa") == 5  # a number of uses is not to be had anew by bringing others
        assert books.brought("bb") <= 20 and books.identity("any-94") and not books.identity("any-0")
        books.keep([PeerRecord("good", delivered=100), PeerRecord("out", barred_until=NOW)])
        books.keep([PeerRecord(f"stranger-{i:02}") for i in range(40)])
        kept = {record.peer for record in books.records()}
        assert len(kept) == 20 and {"good", "out"} <= kept


def test_who_is_linked_is_not_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_file, "MOST_IDENTITIES", 20)
    monkeypatch.setattr(peers_file, "FORGET_EVERY", 10)
    with PeersFile.open(path) as books:
        books.add_ticket(TicketRow("aa", "any", NOW))
        books.came("works", "aa", NOW)
        books.here = ["works"]
        for i in range(200):
            books.came(f"stranger-{i}", "aa", NOW + 1 + i)
        assert books.identity("works") and books.brought("aa") <= 20 + 10


def test_commands_that_run_at_once_take_different_names(path: Path) -> None:
    def make(name: str) -> None:
        with PeersFile.open(path) as books:
            for i in range(25):
                made.append(books.add_numbered(TicketRow(f"{name}-{i}", "", NOW), "ticket-").name)

    made: list[str] = []
    threads = [threading.Thread(target=make, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(f"ticket-{i}" for i in range(1, 101))


def test_two_writers_at_once(path: Path) -> None:
    """The head and a command, a hundred transactions each: none fails, none is lost."""

    def write(name: str) -> None:
        with PeersFile.open(path) as books:
            for i in range(100):
                books.ban(BanRow(f"{name}-{i}", "", NOW))

    threads = [threading.Thread(target=write, args=(name,)) for name in ("head", "command")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with PeersFile.open(path) as books:
        assert len(books.bans()) == 200


def test_many_open_a_new_file_at_once(path: Path) -> None:
    """Each gets it: SQLite itself refuses who comes while another one changes the journal's mode."""
    failed: list[BaseException] = []

    def come(where: Path, start: threading.Barrier) -> None:
        start.wait()
        try:
            PeersFile.open(where).close()
        except BaseException as error:
            failed.append(error)

    for i in range(50):
        where, start = path.with_name(f"{i}.sqlite"), threading.Barrier(4)
        threads = [threading.Thread(target=come, args=(where, start)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


def test_a_file_of_another_kind(path: Path) -> None:
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(UsageError, match=r"peers\.sqlite is no file of peers"):
        PeersFile.open(path)
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (a)")
    with pytest.raises(UsageError, match="is no file of peers"):
        PeersFile.open(path)
    path.unlink()
    PeersFile.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(UsageError, match="has schema 9"):
        PeersFile.open(path)


def test_a_record_of_another_release_is_read(path: Path) -> None:
    PeersFile.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute("""INSERT INTO standing VALUES ('p', '{"peer": "p", "delivered": 3, "colour": "blue"}')""")
    with PeersFile.open(path) as books:
        assert books.records() == [PeerRecord("p", delivered=3)]


@pytest.mark.parametrize(("ticket", "facts", "reason", "passing"), [
    (TicketRow("a", "t", NOW), {}, "", False),
    (TicketRow("a", "t", NOW, revoked=NOW), {"came": True}, "the ticket 't' was revoked", False),
    (TicketRow("a", "t", NOW, expires=int(NOW) - 7), {"came": True}, "the ticket 't' expired 7 s ago", False),
    (TicketRow("a", "t", NOW, allow=("p2",)), {"came": True}, "the ticket 't' is not for this peer, p1", False),
    (TicketRow("a", "t", NOW, allow=("p2", "p1")), {}, "", False),
    (TicketRow("a", "t", NOW, uses=3), {"brought": 3}, "the ticket 't' has brought 3 identities, and is for 3", False),
    (TicketRow("a", "t", NOW, uses=3), {"brought": 3, "came": True}, "", False),
    (TicketRow("a", "t", NOW, uses=3), {"brought": 2}, "", False),
    (TicketRow("a", "t", NOW, rate=4), {"lately": 4}, "brought 4 new identities in the last hour, and may bring 4", True),
    (TicketRow("a", "t", NOW, rate=4), {"lately": 4, "came": True}, "", False),
    (TicketRow("a", "t", NOW, rate=4), {"lately": 3, "brought": 900}, "", False),
])  # fmt: skip
def test_a_ticket_is_judged(ticket: TicketRow, facts: dict, reason: str, passing: bool) -> None:
    verdict = judge_ticket("p1", ticket, NOW, **{"came": False, "brought": 0, "lately": 0, **facts})
    assert (reason in verdict.reason if reason else not verdict.reason) and verdict.passing == passing


def test_what_a_ticket_is_good_for() -> None:
    assert [BOB.state(n, NOW) for n in (0, 1, 2)] == ["live", "live", "spent"] and BOB.state(0, NOW + 101) == "expired"
    assert TicketRow("a", "t", NOW, revoked=NOW).state(0, NOW) == "revoked"
    assert TicketRow("a", "t", NOW).state(10**6, 1e12) == "live"
    assert BanRow("p", "", NOW).holds(1e12) and BanRow("p", "", NOW, NOW + 1).holds(NOW) and not BanRow("p", "", 0, 1).holds(NOW)
