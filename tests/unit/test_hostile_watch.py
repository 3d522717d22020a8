"""What the hostile bench reads of a head's log is what a head writes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from learner.admission.peers_file import PeersFile
from learner.standing.standing import STRANGER_DOUBTS
from netem.bench.hostile.watched import NodeWatch
from tests.unit.test_trust import PEER, open_trust


def test_an_expulsion_is_written_down(tmp_path: Path) -> None:
    """Once the line was written by another way, no cheat that was expelled came again as somebody else."""
    log = logging.getLogger("shoal.head")
    reader, writer = os.pipe()
    watch = NodeWatch(writer)
    log.addHandler(watch)
    try:
        with PeersFile.open(tmp_path / "peers.sqlite") as books:
            trust = open_trust(books, [1000.0], [])
            for _ in range(STRANGER_DOUBTS):
                trust.doubt(PEER, "it withheld\nand more")
    finally:
        log.removeHandler(watch)
        os.close(writer)
    with os.fdopen(reader) as lines:
        (what,) = map(json.loads, lines)
    assert what[:2] == ["expelled", PEER] and "it withheld" in what[2]
