"""`shoal ticket`, `ban` and `unban` on the books of a run, and what they say of wrong input."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

import shoal
from learner.admission.issuing import own_ticket, ticket_text
from learner.admission.peers_file import PeersFile
from learner.admission.periods import dollars_of, hourly_of, seconds_of
from p2p.errors import UsageError
from p2p.identity import Identity
from p2p.membership.admission import check_ticket, read_ticket

PEER, OTHER = (Identity.from_seed(bytes([i]) * 32).peer_id for i in (5, 6))
ADDRESSES = ("/ip4/192.0.2.7/tcp/4001",)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """As a learner that was started leaves it; the books are open, as a running one has them."""
    (tmp_path / "run.json").write_text('{"run": "00aa"}')
    head = Identity.load_or_create(tmp_path / "head.key")
    with PeersFile.open(tmp_path / "peers.sqlite") as books:
        text = ticket_text(head, "00aa", ADDRESSES, own_ticket(books, "run", time.time()))
    (tmp_path / "ticket.txt").write_text(text + "\n")
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], run_dir: Path, *argv: str) -> dict:
    assert shoal.main([*argv, "--run-dir", str(run_dir), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_new_ticket_is_one_of_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PeersFile.open(run_dir / "peers.sqlite") as head:
        made = call(capsys, run_dir, "ticket", "new", "--name", "bob", "--expires", "7d", "--uses", "3", "--rate", "20/h",
                    "--allow", PEER, "--allow", OTHER, "--allow", PEER, "--usd-per-hour", "0.4")
        row = head.live_ticket("bob")
    ticket = read_ticket(made["ticket"])
    own = read_ticket((run_dir / "ticket.txt").read_text())
    assert (ticket.run, ticket.head, ticket.addresses) == (own.run, own.head, own.addresses) and ticket.id == row.id == made["id"]
    assert abs(ticket.expires - time.time() - 7 * 86_400) < 60 and ticket.expires == row.expires
    assert (row.uses, row.rate, row.allow, row.usd_per_hour) == (3, 20, (PEER, OTHER), 0.4)
    assert check_ticket(made["ticket"], head=own.head, run="00aa", now=time.time()) == ticket
    assert shoal.main(["ticket", "new", "--run-dir", str(run_dir)]) == 0
    assert read_ticket(capsys.readouterr().out).id  # nothing else is on stdout
    assert stat.S_IMODE((run_dir / "peers.sqlite").stat().st_mode) == 0o600


def test_tickets_are_listed_without_their_text_and_revoked(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [call(capsys, run_dir, "ticket", "new", *more) for more in ((), ("--uses", "1"), ("--name", "old", "--expires", "1s"))]
    with PeersFile.open(run_dir / "peers.sqlite") as head:
        head.came(PEER, made[1]["id"], time.time())
    time.sleep(1.1)
    rows = call(capsys, run_dir, "ticket", "list")["tickets"]
    assert [(row["name"], row["state"], row["brought"]) for row in rows] == [
        ("run", "live", 0), ("ticket-1", "live", 0), ("ticket-2", "spent", 1), ("old", "expired", 0),
    ]
    assert not any("shoal2" in str(value) for row in rows for value in row.values())
    assert call(capsys, run_dir, "ticket", "revoke", "ticket-1")["state"] == "revoked"
    assert call(capsys, run_dir, "ticket", "revoke", made[1]["id"])["brought"] == 1
    assert shoal.main(["ticket", "list", "--run-dir", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert out.count("revoked") == 2 and "anybody" in out and made[0]["id"] in out


def test_a_ban_is_kept_shown_and_lifted(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = call(capsys, run_dir, "ban", PEER, "--why", "copies\x1b[2J answers\n" + "x" * 400)["why"]
    assert why.startswith("copies?[2J answers x")
    assert call(capsys, run_dir, "ban", OTHER, "--for", "2h")["until"]
    bans = call(capsys, run_dir, "ban")["bans"]
    assert [ban["peer"] for ban in bans] == [PEER, OTHER] and len(bans[0]["why"]) <= 200 and bans[0]["until"] is None
    assert call(capsys, run_dir, "unban", PEER)["was_banned"] and not call(capsys, run_dir, "unban", PEER)["was_banned"]
    assert shoal.main(["ban", "--run-dir", str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith(OTHER)
    with PeersFile.open(run_dir / "peers.sqlite") as head:
        assert head.take_forgiven() == {PEER}


@pytest.mark.parametrize(("argv", "words"), [
    (("ticket", "new", "--expires", "soon"), "--expires: 'soon' is no time: write 30m"),
    (("ticket", "new", "--expires", "-7d"), "--expires"),
    (("ticket", "new", "--expires", "0d"), "is no time"),
    (("ticket", "new", "--expires", "9999999d"), "at most 3650d"),
    (("ticket", "new", "--uses", "0"), "--uses: '0' is no number from 1 on"),
    (("ticket", "new", "--uses", "many"), "--uses: 'many'"),
    (("ticket", "new", "--rate", "20/s"), "--rate: '20/s' is no rate: write 20/h"),
    (("ticket", "new", "--usd-per-hour", "nan"), "--usd-per-hour: 'nan' is no price"),
    (("ticket", "new", "--allow", "bob"), "--allow: 'bob' is no peer id"),
    (("ticket", "new", "--name", "a b"), "--name: 'a b' is no name"),
    (("ticket", "new", "--name", "run"), "a ticket named 'run' is there already"),
    (("ticket", "revoke", "nobody"), "'nobody' is the name or id of no ticket of this run (live ones: run)"),
    (("ban", "bob"), "ban: 'bob' is no peer id"),
    (("ban", PEER, "--for", "x"), "--for: 'x' is no time"),
    (("unban", PEER[:-1]), "is no peer id"),
])  # fmt: skip
def test_wrong_input_is_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str) -> None:
    try:
        status = shoal.main([*argv, "--run-dir", str(run_dir)])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1) and words in err, err


def test_a_directory_without_a_run_or_before_its_first_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["ticket", "list"], ["ban", PEER], ["unban", PEER], ["ticket", "revoke", "x"]):
        assert shoal.main([*argv, "--run-dir", str(tmp_path)]) == 2
        assert "holds no run" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"run": "00aa"}')
    assert shoal.main(["ticket", "new", "--run-dir", str(tmp_path)]) == 2
    assert "start the learner once" in capsys.readouterr().err
    assert not (tmp_path / "head.key").exists()


def test_a_ticket_that_was_revoked_frees_its_name(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = call(capsys, run_dir, "ticket", "new", "--name", "bob")
    call(capsys, run_dir, "ticket", "revoke", "bob")
    assert shoal.main(["ticket", "revoke", first["id"], "--run-dir", str(run_dir)]) == 2
    assert "was revoked before" in capsys.readouterr().err
    assert call(capsys, run_dir, "ticket", "new", "--name", "bob")["id"] != first["id"]


def test_times_and_rates_as_they_are_written() -> None:
    assert [seconds_of("f", text) for text in ("90s", "30m", "1.5h", "7d", "2w")] == [90, 1800, 5400, 604_800, 1_209_600]
    assert [hourly_of("f", text) for text in ("20/h", "1")] == [20, 1] and dollars_of("f", "0") == 0.0
    for wrong in ("", "7", "7 d", "1e3s", "²d", "7D", "1..5h"):
        with pytest.raises(UsageError):
            seconds_of("f", wrong)


def test_a_peer_that_came_is_named_by_its_end(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PeersFile.open(run_dir / "peers.sqlite") as head:
        ticket = head.live_ticket("run").id
        for peer in (PEER, OTHER, "12D3KooWxx" + PEER[-8:]):
            head.came(peer, ticket, time.time())
    assert call(capsys, run_dir, "ban", OTHER[-8:])["peer"] == OTHER
    assert call(capsys, run_dir, "unban", f"..{OTHER[-6:]}")["peer"] == OTHER
    assert shoal.main(["ban", PEER[-8:], "--run-dir", str(run_dir)]) == 2
    assert "2 peers end with" in capsys.readouterr().err
    for nobody in ("zzzzzz", OTHER[-5:], "%%%%%%"):
        assert shoal.main(["ban", nobody, "--run-dir", str(run_dir)]) == 2
        assert "is no peer id" in capsys.readouterr().err
    assert call(capsys, run_dir, "ban", PEER)["peer"] == PEER  # whole, though another ends like it
