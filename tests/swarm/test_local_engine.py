"""The learner's local engine, on a mock clock: a real head, and nodes that speak its protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from learner.client.messages import CommitStep
from learner.trajectory import Group
from p2p.identity import Identity
from p2p.protocol.join import Roster
from p2p.protocol.prices import Terms
from p2p.version import Version
from tests.swarm.test_activation import hand_back, orders, slow
from tests.swarm.test_head import Bench, Node, check_books, good, open_head, publish

LOCAL_ENGINE = Identity.from_seed(b"\x77" * 32)


@asynccontextmanager
async def open_with_own(run_dir: Path) -> AsyncIterator[Bench]:
    async with open_head(run_dir, own=LOCAL_ENGINE.peer_id, local_engine={"floor_s": 0.5}) as bench:
        yield bench


async def test_alone_it_makes_whole_steps_and_leaves_the_device_to_the_trainer(tmp_path, autojump_clock) -> None:
    async with open_with_own(tmp_path / "run") as bench:
        own = await bench.join(good, who=LOCAL_ENGINE)
        for step in range(3):
            groups = await bench.batch(step, 60)
            assert len(groups) == 2 and {t.node for g in groups for t in g.trajectories} == {own.peer}
            assert not bench.head.local_engine.generates and not bench.head.rollouts.collector.load(own.peer)
            asked = len(own.requests)
            await trio.sleep(20)  # the trainer trains
            assert len(own.requests) == asked and orders(own)[-1] == ("warm", "the trainer's turn")
            bench.head.trainer_requests.on_commit(CommitStep(step + 1, ""))
            await publish(bench.head, step + 1)
            own.version = Version(1, step + 1)
        status = bench.head.status()
        assert status["local_engine"]["there"] and status["nodes"][0]["activity"] == "warm"
        assert status["pool"]["nodes"] == 0  # what it makes is no capacity to count on
        check_books(bench.head)


async def with_help(bench: Bench, own: Node) -> tuple[list[Group], Node]:
    """A step that `own` begins alone, and that another node ends."""
    groups: list[Group] = []

    async def take() -> None:
        groups.extend(await bench.batch(0, 400))

    bench.nursery.start_soon(take)
    await bench.until(lambda: bool(own.requests), 20)
    other = await bench.join(good)
    await bench.until(lambda: bool(groups), 400)
    return groups, other


async def test_what_it_has_not_ended_goes_on_elsewhere(tmp_path, autojump_clock) -> None:
    async with open_with_own(tmp_path / "run") as bench:
        own = await bench.join(slow, who=LOCAL_ENGINE)
        bench.nursery.start_soon(hand_back, own)
        began = trio.current_time()
        groups, other = await with_help(bench, own)
        assert {t.node for g in groups for t in g.trajectories} == {other.peer} and trio.current_time() - began < 5
        assert not bench.head.reports and not bench.head.local_engine.generates
        check_books(bench.head)


async def test_nobody_else_hears_of_it_and_it_pays_nothing(tmp_path, autojump_clock) -> None:
    async with open_with_own(tmp_path / "run") as bench:
        own = await bench.join(good, who=LOCAL_ENGINE)
        other = await bench.join(good)
        await own.say(Terms(50.0))  # the learner's machine has its price in the config
        await trio.sleep(2)
        listed = {m.peer for n in (own, other) for r in n.heard if isinstance(r, Roster) for m in r.members}
        assert own.peer not in listed
        assert own.peer not in bench.head.swarm.exchange.peers and other.peer in bench.head.swarm.exchange.peers
        assert bench.head.status()["pool"]["usd_per_hour"] == 0
        assert len(await bench.batch(0, 60)) == 2


async def test_one_that_does_not_hand_over_loses_its_work_to_others(tmp_path, autojump_clock) -> None:
    async with open_with_own(tmp_path / "run") as bench:
        own = await bench.join(slow, who=LOCAL_ENGINE)
        groups, other = await with_help(bench, own)
        assert {t.node for g in groups for t in g.trajectories} == {other.peer}
        assert any(own.peer in text and "sequences go elsewhere" in text for text in bench.head.reports)
        check_books(bench.head)
