"""Answers that never end, in real processes: they hold up their own node's groups and nobody else's."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import trio

from learner.rewards.group_scorer import PooledScorer
from learner.rewards.port import Answer
from learner.rewards.settings import RewardPart, RewardSettings
from learner.tasks.port import Prompt, Task
from tests.support.nightly import NIGHTLY

pytestmark = pytest.mark.e2e

ANSWERS, WORKERS, DEADLINE_S = 256 if NIGHTLY else 32, 2, 0.25
"""Looping answers, processes and seconds an answer: a run's 256, 8 and 4 made smaller."""


class Code(Task):
    """Every prompt wants a function f that gives back what it is given."""

    name = "code"

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, "Write f.", {"tests": ["assert f(1) == 1", "assert f(2) == 2"]})

    def held_out(self, index: int) -> Prompt:
        return self.prompt(index)


def group(text: str, node: str) -> list[Answer]:
    return [Answer(text, node) for _ in range(4)]


async def test_answers_that_loop_for_ever_hold_up_no_other_nodes_groups() -> None:
    settings = RewardSettings(reward=[RewardPart(function="unit_tests")], reward_workers=WORKERS, reward_s=DEADLINE_S)
    ended: list[str] = []
    seconds: dict[str, list[float]] = {}
    with PooledScorer(Code(), settings, allow_unconfined=True) as scorer:

        async def score(name: str, answers: Sequence[Answer], want: float) -> None:
            began = trio.current_time()
            assert [s.reward for s in await scorer.score(0, answers)] == [want] * len(answers)
            ended.append(name)
            seconds.setdefault(name, []).append(trio.current_time() - began)

        await trio.to_thread.run_sync(scorer.pool.await_spares)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(ANSWERS // 4):
                nursery.start_soon(score, "looping", group("while True: pass", "bad"), 0.0)
            while scorer.pool.queue.held_by("bad") < WORKERS:
                await trio.sleep(0.01)
            for _ in range(ANSWERS // 10):
                await score("good", group("def f(x):\n    return x", "good"), 1.0)
                assert scorer.pool.queue.held_by("bad") <= WORKERS
            assert scorer.pool.queue.waiting, "answers that loop still wait when the other node's groups have their rewards"
        assert ended.count("looping") == ANSWERS // 4 and scorer.lost_in_a_row == 0, "it is the answers' own fault"
        took, bound = trio.current_time() - began, ANSWERS * DEADLINE_S / WORKERS
    good = sorted(seconds["good"])
    print(f"{ANSWERS} looping answers, {WORKERS} workers, {DEADLINE_S:g} s each: {took:.1f} s (deadline x answers / workers: "
          f"{bound:g} s); {len(good)} groups of four of another node meanwhile: {good[len(good) // 2]:.2f} s in the middle, "
          f"{good[-1]:.2f} s at the most; load {os.getloadavg()[0]:.1f}")  # fmt: skip
