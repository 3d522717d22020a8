"""A crowd of clients before a real run that trains: many leave early, and nothing of them is left. `shoal bench endpoint` does it
with a thousand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from netem.bench.beside.clients import Crowd, CrowdTally, ask_all
from netem.bench.beside.endpoint import held_by, settle, take_look
from netem.bench.beside.served_run import ServedRun
from tests.support.nightly import NIGHTLY
from tests.support.watchdog import PATIENCE_S, patience, until

pytestmark = pytest.mark.e2e

CLIENTS, LEAVE = (200 if NIGHTLY else 80), 0.3

WAITING = CLIENTS // 2
"""sequences that may wait: fewer than there are clients, so that some are told to come later"""


def test_of_a_crowd_that_leaves_early_nothing_is_left_and_training_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"requests": {"serving_share": 0.25, "serving_waiting": WAITING, "evaluation_share": 0.0}}

    with ServedRun(tmp_path, settings, capacity=16, wait_s=PATIENCE_S) as run:
        run.start(2)
        until("training", lambda: take_look(run).step >= 1, run.children)
        before, began = held_by(run), take_look(run)
        crowd = Crowd(url=run.url, key=run.key, clients=CLIENTS, leave=LEAVE, tokens=12)

        async def ask() -> CrowdTally:
            with patience():
                return await ask_all(crowd)

        tally = trio.run(ask)
        ended = take_look(run)
        assert not tally.broken and tally.busy > 0
        assert len(tally.whole_s) + tally.left == CLIENTS and 0 < tally.left <= LEAVE * CLIENTS
        assert ended.training > began.training and ended.serving > began.serving
        assert not settle(run, before)
        counts = {name: of["serving"] for name, of in run.status()["requests"].items()}
        assert counts["asked"] == counts["ended"] + counts["cancelled"] and counts["cancelled"] > 0 and not counts["failed"]
        assert counts["busy"] >= tally.busy
        until("steps after the crowd", lambda: take_look(run).step >= ended.step + 2, run.children)
