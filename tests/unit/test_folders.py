"""Which folder a node takes that was told of none, and which nodes of a run are found on a machine."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

import shoal
from node import folders
from node.folders import LOCK, RECORD, default_folder, hold_folder, hold_free_folder, running_beside
from p2p.errors import UsageError
from p2p.identity import Identity
from p2p.membership.admission import make_ticket


def test_a_second_node_takes_the_next_folder_and_a_restarted_one_its_own(tmp_path: Path) -> None:
    first = tmp_path / "nodes" / "00aa"
    with hold_free_folder(first, "") as one:
        with hold_free_folder(first, "") as two, hold_free_folder(first, "") as three:
            assert [f.name for f in (one, two, three)] == ["00aa", "00aa-2", "00aa-3"]
            assert running_beside(first) == [one, two, three]
            assert (two / LOCK).read_text() == str(os.getpid())
        with hold_free_folder(first, "") as again:  # the others of 00aa-2 and 00aa-3 have ended
            assert again == two
    assert running_beside(first) == []
    with hold_free_folder(first, "") as again:
        assert again == one


def test_a_name_finds_the_folder_that_it_had(tmp_path: Path) -> None:
    first = tmp_path / "00aa"
    with ExitStack() as held:
        folders = {name: held.enter_context(hold_free_folder(first, name)) for name in ("", "a", "b")}
    assert sorted(f.name for f in folders.values()) == ["00aa", "00aa-2", "00aa-3"]
    for name in ("b", "a", ""):  # whichever starts first, and although the others' are free
        with hold_free_folder(first, name) as again:
            assert again == folders[name]
            assert running_beside(first, name) == [again]
    with hold_free_folder(first, "c") as third:  # one that no name was given to is anybody's
        assert third == folders[""]
        with hold_free_folder(first, "") as fresh:
            assert fresh.name == "00aa-4"


def test_a_folder_that_another_node_named_meanwhile_stays_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came after this one had read the names, and had gone before this one had the lock."""
    first, take = tmp_path / "00aa", folders.take_lock

    def name_first(fd: int, wait_s: float) -> bool:
        if not (first / RECORD).exists():
            (first / RECORD).write_text('{"name": "b"}')
        return take(fd, wait_s)

    monkeypatch.setattr(folders, "take_lock", name_first)
    with hold_free_folder(first, "a") as taken:
        assert taken.name == "00aa-2"
    with hold_free_folder(first, "b") as taken:
        assert taken == first


def test_a_look_at_the_lock_refuses_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_folder(tmp_path):
        pass
    with open(tmp_path / LOCK) as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr("p2p.files.time.sleep", lambda s: fcntl.flock(looking, fcntl.LOCK_UN))
        with hold_folder(tmp_path):
            pass


def test_a_full_disk_is_told_of_the_folder_that_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("node.service.Identity.load_or_create", fail)
    ticket = make_ticket(Identity.generate(), "00aa", ("/ip4/127.0.0.1/tcp/1",)).encode()
    with hold_folder(default_folder("00aa")):
        assert shoal.main(["node", "--join", ticket, "--engine", "fake"]) == 1
    assert capsys.readouterr().err.strip().endswith("No space left on device: " + f"{default_folder('00aa')}-2")


def test_other_runs_and_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("00aab", "00aa-x", "00aa-"):
        (tmp_path / name).mkdir()
    (tmp_path / "00aa-2").write_text("a file")
    with pytest.raises(UsageError, match="cannot use"), hold_free_folder(tmp_path / "00aa-2", ""):
        pass
    with hold_free_folder(tmp_path / "00aa", "") as one:
        assert one == tmp_path / "00aa" and running_beside(one) == [one]
        with hold_free_folder(one, "") as second:
            assert second.name == "00aa-3"


def test_a_folder_that_was_asked_for_is_not_exchanged_for_another(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "x") as one:
        assert one == tmp_path / "x"
        with pytest.raises(UsageError, match=r"another node runs in .*/x: give this one its own --dir"), hold_folder(one):
            pass


def test_a_ticket_cannot_name_a_folder_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder("00aa") == tmp_path / "shoal" / "nodes" / "00aa"
    for run in ("../x", "", ".", "a/b", "a-2", "é", "0" * 65, "/etc"):
        with pytest.raises(UsageError, match="--dir"):
            default_folder(run)


def test_no_other_node_is_drained_than_the_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("another node was ended"))
    ticket = make_ticket(Identity.generate(), "00aa", ()).encode()
    with hold_free_folder(default_folder("00aa"), "alice"):
        assert shoal.main(["node", "drain", "--join", ticket, "--name", "bob"]) == 2
    assert "no node named 'bob' runs here" in capsys.readouterr().err


def test_nodes_one_after_the_other_do_not_share_a_folder_of_another_name(tmp_path: Path) -> None:
    taken = []
    for name in ("a", "b", "a", "", "c"):
        with hold_free_folder(tmp_path / "00aa", name) as folder:
            taken.append(folder.name)
    assert taken == ["00aa", "00aa-2", "00aa", "00aa-3", "00aa-3"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_disk_without_locks_is_told_and_fills_with_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for hold in (hold_folder(tmp_path / "00aa"), hold_free_folder(tmp_path / "00aa", "")):
        with pytest.raises(UsageError, match=f"cannot lock .*00aa/lock: {os.strerror(number)}"), hold:
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["00aa"]


def test_the_search_for_a_free_folder_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(*_: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", held)
    with pytest.raises(UsageError, match="no folder is free"), hold_free_folder(tmp_path / "00aa", ""):
        pass
