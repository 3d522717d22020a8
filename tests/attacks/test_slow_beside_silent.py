"""Proven nodes that turn and withhold, beside honest ones that are slow and say nothing before a sequence ends, or that pause now
and then: what is done about the former must not stop the latter. A rule against sixty silent ones did, for good
(docs/design/standing.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from p2p.protocol.generation import GenerateRequest
from tests.attacks.test_turning import Turned
from tests.attacks.test_withholding import BEGUN_S, LEAST, TOKEN_S, Run, late, open_run
from tests.support.harness import wall
from tests.support.nightly import NIGHTLY
from tests.swarm.test_head import Node

SLOW_S = 5.0
"""Seconds of a sequence, all of which comes at its end."""

PAUSE_S, PAUSES = 2.5, 10
"""Seconds that an engine pauses in each sequence of so many, twelve times what a sequence takes."""

MEASURED_S = 120.0
"""Seconds for which steps are counted: one takes 4 s."""


slow = late(SLOW_S)


async def check_pace_beside(
    path: Path, behave: Callable[..., Awaitable[None]], count: int, *, begun_s: float, least: float
) -> None:
    """Six honest nodes that make more than `least` steps a second alone, and `count` that turn."""
    turned = Turned(on=False)
    async with trio.open_nursery() as nursery, open_run(path, nursery, honest_nodes=0, stall_s=120.0) as run:
        honest = await six_proven(run, behave, after_s=60)
        alone = await run.pace(MEASURED_S)
        await turned.join(run, nursery, count)
        turned.on = True
        await trio.sleep(begun_s)
        under_attack = await run.pace(MEASURED_S)
        print(f"{'slow' if behave is slow else 'pausing'} beside {count}: {under_attack:.2f} of {alone:.2f}")
        assert under_attack >= LEAST * alone > least
        assert not any(node.closed for node in honest)


async def six_proven(run: Run, behave: Callable[..., Awaitable[None]], after_s: float) -> list[Node]:
    """They come, and are proven after so many seconds."""
    honest = [await run.join(behave) for _ in range(6)]
    await trio.sleep(after_s)
    for node in honest:
        run.bench.head.trust.standing.ended(node.peer, 100)
    return honest


@pytest.mark.parametrize("count", [1, 3, 8, 40] if NIGHTLY else [8])
async def test_slow_nodes_go_on(tmp_path: Path, autojump_clock, count: int) -> None:
    await check_pace_beside(tmp_path, slow, count, begun_s=2 * BEGUN_S, least=0.1)


@pytest.mark.parametrize("count", [12, 40] if NIGHTLY else [12])
async def test_nodes_that_pause_go_on(tmp_path: Path, autojump_clock, count: int) -> None:
    """Where many fall silent, patience is shorter than their pauses. Who delivers beside one that pauses is not to blame for it:
    doubted, all six were on trial at once, and nothing went on for as long as two minutes."""
    begun: Counter[str] = Counter()

    async def pausing(node: Node, request: GenerateRequest) -> None:
        begun[node.peer] += 1
        pauses = (begun[node.peer] + node.peer.encode()[-1]) % PAUSES == 0

        async def make() -> None:
            await trio.sleep(2 * TOKEN_S + pauses * PAUSE_S)
            if not node.closed:
                await node.finish(request)

        node.nursery.start_soon(make)

    await check_pace_beside(tmp_path, pausing, count, begun_s=BEGUN_S, least=0.3)


@pytest.mark.parametrize("doubts", [1, 3] if NIGHTLY else [3])
async def test_where_all_whose_word_counts_are_silent_others_go_on(tmp_path: Path, autojump_clock, doubts: int) -> None:
    """The honest nodes are on trial, and have nothing to do: all that strangers may hold, and all else, is with one that turned.
    No node whose word counts had a place that was not silent, so nothing was taken for as long as `stall_s`."""
    turned = Turned(on=False)
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, stall_s=600.0) as run:
        standing, honest = run.bench.head.trust.standing, list(run.nodes)
        await trio.sleep(20)
        alone = await run.pace(MEASURED_S)
        big = await run.join(turned, capacity=64)
        standing.ended(big.peer, 50_000)
        nursery.start_soon(run.keep_coming, big, turned)
        await trio.sleep(5)
        turned.on = True
        for node in honest:
            for _ in range(doubts):
                standing.doubt(node.peer, "paused", wall())
        await trio.sleep(BEGUN_S)
        under_attack = await run.pace(MEASURED_S)
        print(f"all whose word counts are silent, {doubts}: {under_attack:.2f} of {alone:.2f}")
        assert under_attack >= LEAST * alone
        assert not any(node.closed for node in honest)


@pytest.mark.parametrize("first_s", [5.0, 8.0] if NIGHTLY else [8.0])
async def test_a_long_prompt_now_and_then_is_nobody_s_fault(tmp_path: Path, autojump_clock, first_s: float) -> None:
    """No attack at all: the prompt of one group in 33 takes seconds, at whatever node. Taken after 3 s it would never end."""

    async def prefill(node: Node, request: GenerateRequest) -> None:
        long = int(request.request_id.partition(".")[0]) % 33 == 0

        async def make() -> None:
            await trio.sleep(2 * TOKEN_S + long * first_s)
            if not node.closed:
                await node.finish(request)

        node.nursery.start_soon(make)

    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, honest_nodes=0, stall_s=120.0) as run:
        standing, honest = run.bench.head.trust.standing, await six_proven(run, prefill, after_s=20)
        before = sum(standing.of(node.peer).doubted for node in honest)
        pace = await run.pace(MEASURED_S)
        print(f"long prompts of {first_s} s: {pace:.2f}")
        assert sum(standing.of(node.peer).doubted for node in honest) == before
        assert pace > 0.6 * 5.0 / first_s, "a long one in eight steps"
