"""Strangers who take work, do not do it, and come as somebody else every few seconds, against a live head with honest nodes, on a
mock clock. Nothing is known of the next one. (How many identities a ticket lets in: test_identities.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from p2p.identity import Identity
from tests.attacks.test_withholding import (
    BEGUN_S,
    LEAST,
    MEASURED_S,
    Behaviour,
    Run,
    fail,
    honest,
    open_run,
    refuse,
    trickle,
    withhold,
)
from tests.support.nightly import HOW_MANY, NIGHTLY

STAY_S = 4.0
"""Seconds after which an attacker leaves and is somebody else: long enough to be given work, and to withhold it."""


class Sybils:
    """`came`: identities of theirs that have come."""

    def __init__(self, run: Run, behave: Behaviour) -> None:
        self.run, self.behave, self.came = run, behave, 0

    async def one(self) -> None:
        """For ever: comes, leaves after STAY_S or is sent away, and is somebody else at once."""
        while True:
            self.came += 1
            who = Identity.from_seed(b"anew" + self.came.to_bytes(28, "big"))
            try:
                node = await self.run.join(self.behave, who=who)
            except AssertionError:
                await trio.sleep(1)
                continue  # it is told to come later
            with trio.move_on_after(STAY_S):
                await node.until_closed(10_000)
            self.run.nodes.remove(node)
            if not node.closed:
                await node.control.aclose("bye")


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("behave", [withhold, trickle, refuse, fail] if NIGHTLY else [withhold])
async def test_the_run_keeps_its_pace_beside_those_who_are_others_each_time(
    tmp_path: Path, autojump_clock, behave: Behaviour, count: int
) -> None:
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery) as run:
        await trio.sleep(20)
        alone = await run.pace(MEASURED_S)
        sybils = Sybils(run, behave)
        for _ in range(count):
            nursery.start_soon(sybils.one)
        await trio.sleep(BEGUN_S)
        under_attack = await run.pace(MEASURED_S)
        print(f"{behave.__name__} {count}, {sybils.came} identities: {under_attack:.2f} of {alone:.2f}")
        assert sybils.came >= count * int((BEGUN_S + MEASURED_S) / STAY_S - 1)
        assert under_attack >= LEAST * alone
        assert sum(n.behaviour is honest and not n.closed for n in run.nodes) == 2
