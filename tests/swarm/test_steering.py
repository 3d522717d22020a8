"""The real head moves sequences between living nodes, and drops groups that teach nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import trio

from learner.rewards.port import Answer, GroupUnscored
from learner.tasks.port import Score
from p2p.protocol.generation import GenerateRequest, Interrupt, Tokens
from p2p.protocol.rollout import TokenEvent, unpack_ids
from tests.swarm.test_head import Node, check_books, good, open_head


class Slow(Node):
    """Makes one token of each sequence and no more; hands back, with another, what it is asked for."""

    async def first(self, request: GenerateRequest) -> None:
        await self._say(request.request_id, len(unpack_ids(request.prefix_ids)), 5, "")

    async def hand_back(self) -> None:
        seen = 0
        while not self.closed:
            await trio.sleep(0.05)
            while seen < len(self.heard):
                message, seen = self.heard[seen], seen + 1
                if isinstance(message, Interrupt):
                    for request_id in message.request_ids:
                        await self._say(request_id, 1, 6, "interrupt")

    async def _say(self, request_id: str, start: int, token: int, finish: str) -> None:
        event = TokenEvent.of(request_id, start, (token,), np.array([-1.0], np.float32), self.version, finish)
        await self.say(Tokens((event,)))


async def test_a_slow_node_hands_back_what_a_fast_one_will_have_done_sooner(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", max_new_tokens=2000) as bench:
        rollouts = bench.head.rollouts
        slow = await bench.join(Slow.first, capacity=64)
        slow.__class__ = Slow
        bench.nursery.start_soon(slow.hand_back)
        await bench.until(lambda: len(slow.requests) == 8)  # two groups of two, for each of two steps
        fast = await bench.join(good, capacity=64)
        for running in (1, 2, 4, 8):
            rollouts.steering.forecast.observe(slow.peer, running, 3.0 * running)
            rollouts.steering.forecast.observe(fast.peer, running, 90.0 * running)
        groups = [*await bench.batch(0, 60)]
        assert {t.node for g in groups for t in g.trajectories} == {fast.peer}
        assert rollouts.steering.moves["slow"] > 0
        moved = [r for r in fast.requests if r.prefix_ids]
        assert moved and all(r.request_id.endswith(".1") for r in moved)
        # What the slow one made, the last token with the hand-over included, is the prefix: no token is made twice.
        assert {tuple(t.completion_ids) for g in groups for t in g.trajectories} == {(5, 6, 1, 0)}
        check_books(bench.head)


class Rewards:
    """0, 0, then 0, 1, then 0, 0 and so on: every other group of two teaches nothing."""

    def __init__(self) -> None:
        self._next = count()

    async def score(self, task_index: int, answers: Sequence[Answer]) -> list[Score]:
        return [Score(float(next(self._next) % 4 == 3), False) for _ in answers]


class Unscorable:
    """The reward of every other group cannot be had, and the others wait for one that never gets its own."""

    def __init__(self) -> None:
        self._next = count()
        self.lost: list[int] = []

    async def score(self, task_index: int, answers: Sequence[Answer]) -> list[Score]:
        number = next(self._next)
        if number == 0:
            await trio.sleep_forever()
        if number % 2:
            self.lost.append(task_index)
            raise GroupUnscored("no reward")
        return [Score(-7.5, False) for _ in answers]


async def test_a_group_without_a_reward_is_replaced_and_one_that_waits_for_it_holds_up_no_other(tmp_path, autojump_clock) -> None:
    scorer = Unscorable()
    async with open_head(tmp_path / "run", scorer=scorer) as bench:
        await bench.join(good)
        groups = await bench.batch(0, 60)
        assert len(groups) == 2 and {t.reward for g in groups for t in g.trajectories} == {-7.5}
        assert bench.head.status()["trajectories"]["aborted"]["unscored"] == 2 * len(scorer.lost) >= 4
        assert bench.head.status()["unscored"]["groups"] == len(scorer.lost) and bench.head.status()["unscored"]["last"]
        assert not {g.task_index for g in groups} & set(scorer.lost), "other prompts take their place"
        assert not bench.head.journal.tasks_to_retry()
        check_books(bench.head)


async def test_groups_that_teach_nothing_are_made_again(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", scorer=Rewards(), keep_equal=False) as bench:
        await bench.join(good)
        groups = await bench.batch(0, 60)
        assert len(groups) == 2
        assert all(len({t.reward for t in g.trajectories}) == 2 for g in groups)
        status = bench.head.status()["trajectories"]
        assert status["aborted"]["equal"] >= 2
        assert not bench.head.journal.tasks_to_retry()  # the prompts were no use: others are drawn
        check_books(bench.head)
