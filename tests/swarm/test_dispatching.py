"""When the head calls its dispatcher: soon after something moved, and not for every sequence by itself."""

from __future__ import annotations

from itertools import pairwise

import trio

from learner.rollouts.controller import DISPATCH_LEAST_S
from tests.swarm.test_head import check_books, good, open_head, silent


async def test_what_moves_at_once_is_dispatched_once(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", staleness=4) as bench:
        rollouts = bench.head.rollouts
        dispatch, times = rollouts.dispatch, []

        def counted() -> None:
            times.append(trio.current_time())
            dispatch()

        rollouts.dispatch = counted  # type: ignore[method-assign]
        for _ in range(6):
            await bench.join(good, capacity=8)
        for step in range(2):
            assert len(await bench.batch(step, 30.0)) == 2
        assert sum(rollouts.collector.tokens_by_node.values()) >= 2 * 8 and len(times) > 2  # two tokens a sequence
        assert min(b - a for a, b in pairwise(times)) >= 0.9 * DISPATCH_LEAST_S
        check_books(bench.head)


async def test_a_free_place_does_not_wait_for_the_timer(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        await bench.until(lambda: trio.current_time() > 5)
        node = await bench.join(silent)
        joined = trio.current_time()
        await bench.until(lambda: bool(node.requests), 5.0)
        assert trio.current_time() - joined < 0.3  # the twin looks for requests every 0.1 s


async def test_slow_dispatching_leaves_time_for_tokens(tmp_path, autojump_clock) -> None:
    """One that takes 30 ms may run a tenth of the time, however much moves."""
    async with open_head(tmp_path / "run", staleness=4) as bench:
        rollouts = bench.head.rollouts
        dispatch, calls = rollouts.dispatch, 0

        def slow() -> None:
            nonlocal calls
            calls += 1
            autojump_clock.jump(0.03)
            dispatch()

        rollouts.dispatch = slow  # type: ignore[method-assign]
        start = trio.current_time()
        while trio.current_time() < start + 3.0:
            rollouts.need_dispatch()
            await trio.sleep(0.005)
        assert 5 <= calls <= 3.0 / 0.3 + 1


async def test_a_node_is_given_what_its_memory_holds(tmp_path, autojump_clock) -> None:
    """A prompt is three tokens, a completion at most four."""
    given = {}
    for kv_tokens in (0, 30):
        async with open_head(tmp_path / f"run-{kv_tokens}", staleness=4) as bench:
            node = await bench.join(silent, capacity=64)
            node.kv_tokens = kv_tokens
            await bench.until(lambda node=node: bool(node.requests), 5.0)  # one, whatever it holds: nobody else might take it
            await trio.sleep(5)
            given[kv_tokens] = len(node.requests)
    assert given[0] == 20 and 4 <= given[30] <= 10, given
