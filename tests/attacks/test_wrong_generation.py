"""Nodes that generate something else, as the trainer's own pass sees it: against a live head on a mock clock."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from learner.client.messages import Log
from learner.client.port import BY_NODE
from tests.support.harness import wall
from tests.swarm.test_head import check_books, good, open_head


def step_log(step: int, **sums: list[float]) -> Log:
    return Log(step, json.dumps({"loss/mean": 0.5, BY_NODE: sums}))


async def test_who_does_not_fit_the_model_is_expelled_at_once(tmp_path: Path, autojump_clock, caplog) -> None:
    async with open_head(tmp_path / "run", standing={"proven_tokens": 8}, wall=wall) as bench:
        nodes = [await bench.join(good) for _ in range(3)]
        liar = nodes[2]
        for node in nodes[:2]:
            bench.head.trust.standing.ended(node.peer, 1000)
        caplog.set_level(logging.WARNING)
        sums = {nodes[0].peer: [400, 8.0], nodes[1].peer: [400, 20.0], liar.peer: [400, 2000.0]}
        bench.head.trainer_requests.on_log(step_log(1, **sums))
        await liar.until_closed()
        assert not nodes[0].closed and not nodes[1].closed
        assert bench.head.swarm.peering.is_banned(liar.peer)
        assert "mismatch 5 nats a token" in caplog.text and "; 0 of its tokens went to the trainer" in caplog.text
        line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
        assert BY_NODE not in line and line["loss/mean"] == 0.5
        assert len(await bench.batch(0, 60)) == 2  # the others go on
        check_books(bench.head)


async def test_what_a_trainer_of_ones_own_says_of_nodes_is_checked(tmp_path: Path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", standing={}, wall=wall) as bench:
        node = await bench.join(good)
        for odd in ([], [1], ["a", 1], [-1, 5.0], [400, float("inf")], [0, 1], {"x": 1}, [True, None], 7):
            bench.head.trainer_requests.on_log(Log(1, json.dumps({BY_NODE: {node.peer: odd}})))
        bench.head.trainer_requests.on_log(Log(1, json.dumps({BY_NODE: [1, 2]})))
        assert not node.closed and not bench.head.trust.mismatch.seen
