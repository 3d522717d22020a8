"""A trainer of a person's own against the real head: what it does not say is said."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from learner.client.messages import Log
from learner.client.mismatch import NodeMismatch
from learner.client.port import BY_NODE
from tests.swarm.test_head import good, open_head


@pytest.mark.parametrize(("says", "standing", "warned"), [(False, {}, True), (True, {}, False), (False, None, False)])
async def test_a_trainer_that_watches_no_node_is_said_once_where_there_are_strangers(
    tmp_path, autojump_clock, caplog, says: bool, standing: dict[str, Any] | None, warned: bool
) -> None:
    async with open_head(tmp_path / "run", standing=standing) as bench:
        node = await bench.join(good)
        watch = NodeMismatch()
        for group in await bench.batch(0, 60):
            for t in group.trajectories:
                watch.add(t, t.logprobs)
        with caplog.at_level(logging.WARNING, "shoal.head"):
            for _ in range(2):
                logged: dict[str, Any] = {"reward/mean": 0.5} | ({BY_NODE: watch.take()} if says else {})
                bench.head.trainer_requests.on_log(Log(1, json.dumps(logged)))
        told = [r for r in caplog.records if "does not say what each node's tokens come to" in r.getMessage()]
        assert len(told) == warned
        assert bench.head.trust.mismatch.seen == ({node.peer: 8} if says else {})
