"""A million damaged inputs, or ten million with SHOAL_NIGHTLY=1: each is read or refused, within 50 ms and 64 MiB of memory."""

from __future__ import annotations

import pytest

from p2p.protocol.messages import decode
from tests.fuzz.run import LARGE_KIB, SLOW_S, PeakMemory, Reading, fuzz
from tests.fuzz.targets import Target, targets
from tests.support.nightly import examples

PARTS = 8
"""Tests that share the inputs, for as many cores."""


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_but_refusals(part: int) -> None:
    found = fuzz(examples(1_000_000 // PARTS, 10_000_000 // PARTS), seed=part).found
    assert not found, "\n".join(map(str, found[:20]))


def test_what_is_not_clean_is_found() -> None:
    def wrong(data: bytes) -> None:
        raise KeyError(data)

    def large(data: bytes) -> int:
        return len(bytearray(b"\1" * (LARGE_KIB * 4096)))

    def slow(data: bytes) -> int:
        return sum(range(int(1e8 * SLOW_S)))

    reading = Reading()
    for read in (wrong, large, slow):
        reading.read("t", Target([b""], read), b"x")
    assert len(reading.found) == 3 and reading.tallies["t"].inputs == 3


@pytest.mark.skipif(not PeakMemory().resets, reason="this system keeps one peak of memory for all of a process's life")
def test_an_earlier_peak_hides_nothing() -> None:
    earlier = bytearray(b"\1" * (LARGE_KIB * 4096))
    del earlier
    reading = Reading()
    reading.read("t", Target([b""], lambda data: len(bytearray(b"\1" * (LARGE_KIB * 1536)))), b"x")
    assert [finding.what[-3:] for finding in reading.found] == ["KiB"]
    assert reading.tallies["t"].largest_kib > LARGE_KIB


def test_every_kind_of_message_has_an_undamaged_input() -> None:
    assert {type(decode(data)) for data in targets()["messages"].seeds} == set(decode.kinds.values())


def test_undamaged_inputs_are_read() -> None:
    for name, target in targets().items():
        for seed in target.seeds[:1]:
            if name not in ("part", "membership") and "Empty" not in name:  # those are refused as they stand
                target.read(seed)
