"""A run whose trainer samples through the endpoint (`rollout.groups_per_step` = 0): nothing is generated for training, steps go
as the trainer takes them, and requests have all places at once. The real head on a mock clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from learner.client.messages import Begin, CommitStep, NextBatch
from learner.requests.port import Ask
from p2p.errors import ShoalError
from p2p.version import Version
from tests.swarm.test_head import STOP, Bench, check_books, good, open_head, publish, silent

ASK = Ask(request_class="serving", prompt_ids=(1, 2, 3), max_new_tokens=4, stop_ids=(STOP,), seed=5)


async def test_steps_are_the_trainers_own(tmp_path: Path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", groups_per_step=0) as bench:
        node = await bench.join(good)
        await trio.sleep(60)
        assert not node.requests
        trainer = bench.head.trainer_requests
        with pytest.raises(ShoalError, match="groups_per_step is 0"):
            await trainer.on_next(NextBatch(0, 0))
        await publish(bench.head, 1)
        trainer.on_commit(CommitStep(3, "c"))  # what was taken between two of these is nobody's business here
        await publish(bench.head, 7)
        assert bench.head.publisher.current == Version(1, 7) and bench.head.journal.last_commit().step == 3
        with pytest.raises(ShoalError, match="out of order"):
            trainer.on_begin(Begin(6, "anchor", None, "layout"))
        node.version = Version(1, 7)
        assert await sampled(bench, Version(1, 7)) == Version(1, 7)
        assert bench.head.status()["trajectories"]["reserved"] == 0
        check_books(bench.head)
    async with open_head(tmp_path / "run", groups_per_step=0) as bench:
        assert bench.head.rollouts.ledger.step == 3


async def sampled(bench: Bench, version: Version) -> Version:
    """The version that made a sequence for which it was the least."""
    with trio.fail_after(60):
        async with bench.head.requests.sample(replace(ASK, min_version=version)) as tokens:
            async for made in tokens:
                return made.version
    raise AssertionError


@pytest.mark.parametrize("groups, held", [(0, 10), (2, 1)])
async def test_requests_have_all_places_at_once(tmp_path: Path, autojump_clock, groups: int, held: int) -> None:
    """Where training may want them, requests wait for seconds before they get more than their share."""
    async with open_head(tmp_path / "run", groups_per_step=groups) as bench:
        await bench.join(silent, capacity=10)
        await trio.sleep(5)

        async def ask() -> None:
            async with bench.head.requests.sample(ASK) as tokens:
                async for _ in tokens:
                    pass

        for _ in range(10):
            bench.nursery.start_soon(ask)
        await trio.sleep(1)
        assert bench.head.requests.status()["running"]["serving"] == held


async def test_groups_of_a_life_that_had_some_are_given_up(tmp_path: Path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        await bench.join(good)
        await bench.batch(0, 60)
        await bench.join(silent)
        await bench.until(lambda: bench.head.status()["trajectories"]["outstanding"] > 0)
    async with open_head(tmp_path / "run", groups_per_step=0) as bench:
        await trio.sleep(5)
        assert bench.head.status()["trajectories"]["outstanding"] == 0
        check_books(bench.head)
