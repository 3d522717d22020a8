"""Nodes that say themselves what they cost, against a live head with a budget, on a mock clock: they end a little of what they
are given, ask for much, and are not worth it. A budget of $1 was gone after one sequence of two tokens, and $4.99 were owed in
the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from p2p.protocol.prices import Terms
from tests.attacks.test_turning import Turned
from tests.attacks.test_withholding import LEAST, Run, open_run
from tests.support.nightly import HOW_MANY, NIGHTLY

BUDGET_USD, HONEST_USD_PER_HOUR = 1.0, 0.5
MEASURED_S = 150.0


async def open_to_all(run: Run) -> float:
    """The honest nodes name their price; steps a second without attackers."""
    for node in run.nodes:
        await node.say(Terms(HONEST_USD_PER_HOUR, HONEST_USD_PER_HOUR))
    await trio.sleep(30)
    return await run.pace(30)


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize(("usd", "idle_usd"), [(99.0, 99.0), (99.0, 0.0), (0.01, 99.0)] if NIGHTLY else [(99.0, 99.0)])
@pytest.mark.parametrize("first", [0, 1] if NIGHTLY else [1])
async def test_who_ends_little_is_owed_nothing(
    tmp_path: Path, autojump_clock, first: int, usd: float, idle_usd: float, count: int
) -> None:
    turned = Turned(first=first)
    activation = {"budget_usd": BUDGET_USD, "dwell_s": 5.0}
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, activation=activation) as run:
        alone = await open_to_all(run)
        for _ in range(count):
            node = await run.join(turned)
            await node.say(Terms(usd, idle_usd))
            nursery.start_soon(run.keep_coming, node, turned)
        await trio.sleep(30)
        under_attack = await run.pace(MEASURED_S)
        pool = run.bench.head.keeper.pool
        spent, hours = pool.spent_usd(trio.current_time()), trio.current_time() / 3600
        print(f"first {first}, ${usd:g} and ${idle_usd:g}, {count}: {under_attack:.2f} of {alone:.2f}, ${spent:.3f}")
        assert under_attack >= LEAST * alone
        assert spent <= 2 * HONEST_USD_PER_HOUR * hours, "the honest nodes' time, and nothing else"
        assert "is spent" not in run.bench.head.status()["pool"]["blocked"]


async def test_a_budget_ends_at_its_end(tmp_path: Path, autojump_clock) -> None:
    """A proven node that is worth its work while it works, and then costs as much for waiting."""
    turned = Turned(on=False)
    activation = {"budget_usd": BUDGET_USD, "dwell_s": 5.0}
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, activation=activation) as run:
        await open_to_all(run)
        node = await run.join(turned)
        run.bench.head.trust.standing.ended(node.peer, 100)
        await node.say(Terms(60.0, 60.0))
        await trio.sleep(120)
        pool = run.bench.head.keeper.pool
        at_its_end = pool.spent_usd(trio.current_time())
        await trio.sleep(300)
        print(f"${at_its_end:.3f}, five minutes later ${pool.spent_usd(trio.current_time()):.3f}")
        assert pool.spent_usd(trio.current_time()) == pytest.approx(at_its_end, abs=0.01) and at_its_end < 1.1 * BUDGET_USD
