"""Where a node's ticket comes from, and that no complaint repeats one."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from node.tickets import ticket_of
from p2p.errors import UsageError
from p2p.identity import Identity
from p2p.membership.admission import make_ticket

TICKET = make_ticket(Identity.from_seed(bytes(32)), "00aa", ("/ip4/192.0.2.1/tcp/1",), id="5eed")
TEXT = TICKET.encode()


def test_every_way_leads_to_the_same_ticket(tmp_path: Path) -> None:
    file = tmp_path / "ticket.txt"
    file.write_text(TEXT + "\n")
    env = {"SHOAL_TICKET": TEXT, "PATH": "x"}
    assert ticket_of(TEXT, None, environment={}) == TICKET
    assert ticket_of(str(file), None, environment={}) == TICKET
    assert ticket_of(None, file, environment={}) == TICKET
    assert ticket_of("-", None, environment={}, stdin=io.StringIO(TEXT[:40] + "\n" + TEXT[40:] + "\n")) == TICKET
    assert ticket_of(None, None, environment=env) == TICKET and env == {"PATH": "x"}  # children do not inherit it
    assert ticket_of(None, None, environment={}) is None


def test_a_pipe_is_a_file(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    assert ticket_of(None, Path(f"/dev/fd/{reading}"), environment={}) == TICKET
    os.close(reading)


def test_a_flag_wins_over_the_environment_which_is_cleared_all_the_same() -> None:
    env = {"SHOAL_TICKET": "something else"}
    assert ticket_of(TEXT, None, environment=env) == TICKET and not env


def test_no_complaint_repeats_a_ticket(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_text(TEXT[:-9])
    cases: list[tuple[str | None, Path | None, str]] = [
        (TEXT[:-9], None, "cut off or altered"),
        (TEXT[1:], None, "neither a ticket nor a file"),  # the first letter was not copied
        (None, Path(TEXT), "there is no file"),
        (None, cut, "cut off or altered"),
        ("shoal1" + TEXT[6:], None, "not a ticket of this release"),
        ("nothing", None, "'nothing' is neither a ticket nor a file"),
        (TEXT, cut, "leave one of them out"),
        (None, tmp_path, "there is no file"),
    ]
    for join, file, words in cases:
        with pytest.raises(UsageError, match=words) as error:
            ticket_of(join, file, environment={})
        said = str(error.value)
        assert not any(TEXT[at : at + 16] in said for at in range(6, len(TEXT) - 16)), said
