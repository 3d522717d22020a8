"""Proven nodes that turn and withhold, beside honest ones that are slow and say nothing before a sequence ends: what is done
about the former must not stop the latter. A rule against sixty silent ones did, for good (docs/design/standing.md)."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from p2p.protocol.generation import GenerateRequest
from tests.attacks.test_withholding import BEGUN_S, LEAST, Turned, open_run
from tests.swarm.test_head import Node

SLOW_S = 5.0
"""Seconds of a sequence, all of which comes at its end."""

MEASURED_S = 120.0
"""Seconds for which steps are counted: one takes 4 s."""


async def slow(node: Node, request: GenerateRequest) -> None:
    async def make() -> None:
        await trio.sleep(SLOW_S)
        if not node.closed:
            await node.finish(request)

    node.nursery.start_soon(make)


@pytest.mark.parametrize("count", [1, 3, 8, 40])
async def test_slow_nodes_go_on(tmp_path: Path, autojump_clock, count: int) -> None:
    turned = Turned(on=False)
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, honest_nodes=0, stall_s=120.0) as run:
        standing = run.bench.head.trust.standing
        honest = [await run.join(slow) for _ in range(6)]
        await trio.sleep(60)
        for node in honest:
            standing.ended(node.peer, 100)
        alone = await run.pace(MEASURED_S)
        await turned.join(run, nursery, count)
        turned.on = True
        await trio.sleep(2 * BEGUN_S)
        under_attack = await run.pace(MEASURED_S)
        print(f"slow beside {count}: {under_attack:.2f} of {alone:.2f}")
        assert under_attack >= LEAST * alone > 0.1
        assert not any(node.closed for node in honest)
