"""Nodes whose word counts, or who have ended one sequence where nobody's does, and who turn then: they withhold, refuse, fail or
trickle. Against a live head with honest nodes, on a mock clock."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.protocol.generation import GenerateRequest
from tests.attacks.test_withholding import (
    BEGUN_S,
    LEAST,
    MEASURED_S,
    TOKEN_S,
    Behaviour,
    Run,
    fail,
    honest,
    open_run,
    refuse,
    trickle,
    withhold,
)
from tests.support.harness import wall
from tests.support.nightly import HOW_MANY, cases
from tests.swarm.test_head import Node


class Turned:
    """Honest until `on`; then each sequence but one in `honest_each` is withheld. 0: all of them, after the first `first`.
    Negative: one in so many is withheld. `badly`: what is done with those in place of withholding them."""

    def __init__(self, honest_each: int = 0, first: int = 0, on: bool = True, badly: Behaviour = withhold) -> None:
        self.honest_each, self.first, self.on, self.badly = honest_each, first, on, badly
        self.asked: Counter[str] = Counter()

    async def join(self, run: Run, nursery: trio.Nursery, count: int) -> None:
        """So many, who have worked for their standing."""
        for _ in range(count):
            node = await run.join(self)
            run.bench.head.trust.standing.ended(node.peer, 100)
            nursery.start_soon(run.keep_coming, node, self)
        await trio.sleep(5)

    async def __call__(self, node: Node, request: GenerateRequest) -> None:
        number = self.asked[node.peer]
        self.asked[node.peer] += self.on
        makes = self.honest_each != 0 and (number % self.honest_each == 0) == (self.honest_each > 0)
        if not self.on or number < self.first or makes:
            await honest(node, request)
        else:
            await self.badly(node, request)


async def check_pace_beside_proven(path: Path, what: str, count: int, **turned_more: Any) -> None:
    """`count` proven nodes that turn, beside two honest ones."""
    turned = Turned(on=False, **turned_more)
    async with trio.open_nursery() as nursery, open_run(path, nursery, stall_s=120.0) as run:
        await trio.sleep(20)
        alone = await run.pace(MEASURED_S)
        await turned.join(run, nursery, count)
        assert all(map(run.bench.head.trust.credible, [n.peer for n in run.nodes]))
        turned.on = True
        await trio.sleep(BEGUN_S)
        under_attack = await run.pace(MEASURED_S)
        print(f"turned {what}, {count}: {under_attack:.2f} of {alone:.2f}")
        assert under_attack >= LEAST * alone
        assert sum(n.behaviour is honest and not n.closed for n in run.nodes) == 2


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("honest_each", cases([2, -10], 0, 8, -4))
async def test_proven_nodes_that_turn(tmp_path: Path, autojump_clock, honest_each: int, count: int) -> None:
    """Their word counted: what they held was waited for, for as long as `stall_s`, and eight of them stopped the run for good."""
    await check_pace_beside_proven(tmp_path, str(honest_each), count, honest_each=honest_each)


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("badly", [refuse, fail, trickle])
async def test_proven_nodes_that_turn_and_are_not_silent(tmp_path: Path, autojump_clock, badly: Behaviour, count: int) -> None:
    """What they hold comes back, or goes on, and so is no silence."""
    await check_pace_beside_proven(tmp_path, badly.__name__, count, badly=badly)


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("badly", cases([withhold], refuse, fail))
async def test_one_sequence_buys_nothing_while_nobody_is_proven(
    tmp_path: Path, autojump_clock, badly: Behaviour, count: int
) -> None:
    """Whoever had delivered one token was waited for as if it were proven, until somebody was; which nobody could become."""
    turned = Turned(first=1, badly=badly)
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, standing={}, stall_s=120.0) as run:
        await trio.sleep(5)
        alone = await run.pace(15)
        for _ in range(count):
            node = await run.join(turned)
            nursery.start_soon(run.keep_coming, node, turned)
        await trio.sleep(BEGUN_S)
        under_attack = await run.pace(MEASURED_S)
        print(f"one sequence, then {badly.__name__}, {count}: {under_attack:.2f} of {alone:.2f}")
        assert under_attack >= LEAST * alone


async def test_an_engine_that_dies_once_expels_its_node_once_at_most(tmp_path: Path, autojump_clock) -> None:
    """No attack: an honest node of 16 places whose word counts says of all that it holds that its engine died, as `node.serving`
    does. It is expelled after eight; what others make of the rest while it is away doubts and expels it again and again."""
    held: dict[str, GenerateRequest] = {}

    async def makes(node: Node, request: GenerateRequest) -> None:
        held[request.request_id] = request

        async def make() -> None:
            await trio.sleep(2 * TOKEN_S)
            if held.pop(request.request_id, None) and not node.closed:
                await node.finish(request)

        node.nursery.start_soon(make)

    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery) as run:
        await trio.sleep(20)
        node = await run.join(makes, capacity=16)
        standing = run.bench.head.trust.standing
        standing.ended(node.peer, 5000)
        await run.bench.until(lambda: len(held) >= 16)
        lost = list(held.values())
        held.clear()
        for request in lost:
            await refuse(node, request)
        await trio.sleep(10)
        expelled, barred = standing.of(node.peer).expelled, standing.barred_s(node.peer, wall())
        print(f"an engine died with {len(lost)} sequences: expelled {expelled} times, may come again in {barred:.0f} s")
        assert expelled <= 1
