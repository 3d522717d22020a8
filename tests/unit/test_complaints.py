"""Lines about peers: the first few at once, then a count, however many peers there are and however much is wrong with them."""

from __future__ import annotations

import logging

from learner.head.latest import Latest
from p2p import complaints
from p2p.complaints import ALL_PER_S, EVERY_S, FIRST, FIRST_OF_ALL, MAX_LINE, MAX_PEERS_COUNTED, LineLimiter, complain, remark


def test_the_first_few_at_once_then_a_count() -> None:
    lines = LineLimiter()
    said = [lines.ask("p", 0.001 * i) for i in range(10_000)]
    assert said[:FIRST] == [0] * FIRST and sum(s is not None for s in said) == FIRST
    assert lines.ask("q", 10.0) == 0  # another peer's are not held back by it
    assert lines.ask("p", 10.0 + EVERY_S) == 10_000 - FIRST  # and what was left out is said


def test_many_peers_write_no_more_than_a_few() -> None:
    lines, written, seconds = LineLimiter(), 0, 60
    for i in range(seconds * 1000):
        written += lines.ask(str(i), i / 1000) is not None
    assert written <= FIRST_OF_ALL + seconds * ALL_PER_S + 1 and len(lines) == MAX_PEERS_COUNTED


def test_lines_are_short(caplog) -> None:
    log = logging.getLogger("shoal.test")
    for _ in range(100):
        complain(log, "p", "x" * 60_000)
    assert len(caplog.records) == FIRST and all(len(r.message) <= MAX_LINE + 3 for r in caplog.records)
    complaints.forget()
    complain(log, "p", "again")
    assert caplog.records[-1].message == "again"


def test_comings_and_goings_are_limited_by_themselves(caplog) -> None:
    """Identities that came and went 50 times a second wrote 3.2 GB a day."""
    caplog.set_level(logging.INFO, logger="shoal.test")
    log = logging.getLogger("shoal.test")
    for i in range(2 * FIRST_OF_ALL):
        remark(log, str(i), "joined")
    assert len(caplog.records) == FIRST_OF_ALL
    complain(log, "p", "is expelled")
    assert caplog.records[-1].message == "is expelled" and caplog.records[-1].levelno == logging.WARNING


def test_rows_of_those_who_went_last() -> None:
    rows = Latest(3)
    for name in "abcab":
        rows[name] = {"name": name}
    assert list(rows) == ["c", "a", "b"]
    rows["d"] = {}
    assert list(rows) == ["a", "b", "d"]
