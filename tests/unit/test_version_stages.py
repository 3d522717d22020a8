"""The stages of a version: what a process says, and the table that `shoal bench wan` makes of it."""

from __future__ import annotations

import logging
import os
import time

import pytest

from netem.bench.wan.stages import Queueing, stage_seconds, table
from p2p.stages import LOGGER, Reached, reached, read_stages
from p2p.version import Version


def test_what_a_process_says_is_read_back_with_its_time(caplog: pytest.LogCaptureFixture) -> None:
    before = time.monotonic()
    with caplog.at_level(logging.DEBUG, LOGGER):
        reached(Version(1, 2), "chunks here")
        reached(Version(1, 2), "engine stops", ago_s=5.0)
    after = time.monotonic()
    found = read_stages("12:00:00 other line\n" + "\n".join(f"12:00:01 {r.getMessage()}" for r in caplog.records) + "\n")
    assert [(line.version, line.stage) for line in found] == [(Version(1, 2), "chunks here"), (Version(1, 2), "engine stops")]
    assert before - 1e-3 <= found[0].at_s <= after + 1e-3
    assert before - 5.001 <= found[1].at_s <= after - 4.999


def test_a_stage_counts_from_the_optimizer_step_and_once() -> None:
    v1, v2 = Version(1, 1), Version(1, 2)
    told = [(v1, "sealed", 1.0), (v2, "sealed", 10.5), (v2, "first token", 11.0), (v2, "sealed", 12.0)]
    assert stage_seconds([Reached(*one) for one in told], v2, 10.0) == {"sealed": 0.5, "first token": 1.0}


def test_the_table_has_the_medians_of_all_nodes_and_of_the_last_one() -> None:
    versions = [
        {"a": {"sealed": 0.1, "first token": 1.0}, "b": {"sealed": 0.1, "first token": 3.0}},
        {"a": {"sealed": 0.3, "first token": 2.0}, "b": {"sealed": 0.3, "first token": 1.0}},
    ]
    rows = {line[:18].strip(): [float(n) for n in line[18:].split()] for line in table(versions)[1:]}
    assert rows == {"sealed": [0.2, 0.2], "first token": [1.5, 2.5]}


def test_running_is_counted_for_a_process() -> None:
    counting = Queueing({"me": os.getpid()})
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    ran, waited = counting.since()["me"]
    assert ran > 0.15
    assert waited >= 0
