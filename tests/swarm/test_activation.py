"""Nodes with prices: told to work, to wait, to sleep and to wake, on a mock clock; real agents, and a real head."""

from __future__ import annotations

import json

import numpy as np
import trio

from learner.client.messages import CommitStep, Due
from p2p.protocol.generation import Interrupt, Tokens
from p2p.protocol.prices import Activate, Terms
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version
from tests.support.harness import changed_state, make_state, open_swarm
from tests.swarm.test_head import Node, check_books, good, open_head


async def test_a_node_that_sleeps_takes_no_versions_and_catches_up_when_it_wakes(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        one, two = await swarm.start_nodes(2)
        state = make_state(0)
        head.publish(0, state)
        await head.until_installed([one.peer, two.peer], Version(1, 0))
        head.links[two.peer].post(Activate("asleep", "not needed"))
        await trio.sleep(1)
        before = two.agent.swarm.exchange.sent_bytes
        for step in range(1, 4):
            old, state = state, changed_state(state, step)
            head.publish(step, state, base=step - 1, old=old)
            await head.until_installed([one.peer], Version(1, step))
        await trio.sleep(10)
        assert head.installed[two.peer].keys() == {Version(1, 0)} and head.status[two.peer].version == Version(1, 0)
        assert two.agent.swarm.exchange.sent_bytes == before and not head.reports
        head.links[two.peer].post(Activate("active", "needed again"))
        await head.until_installed([two.peer], Version(1, 3))
        old, state = state, changed_state(state, 4)
        head.publish(4, state, base=3, old=old)
        await head.until_installed([one.peer, two.peer], Version(1, 4))
        assert two.agent.shadow.digest == state.digest()


async def test_who_sleeps_when_the_learner_is_started_anew_is_awake(tmp_path, autojump_clock) -> None:
    """The next head knows nothing of it: it says anew who sleeps."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        [node] = await swarm.start_nodes(1)
        head.publish(0, make_state(0))
        await head.until_installed([node.peer], Version(1, 0))
        head.links[node.peer].post(Activate("asleep", "not needed"))
        await trio.sleep(1)
        await swarm.kill_head()
        head = await swarm.start_head(2)
        head.publish(0, make_state(1))
        await head.until_installed([node.peer], Version(2, 0))


async def slow(node: Node, request) -> None:
    """It never ends, but it hands back what it is asked for."""


def orders(node: Node) -> list[tuple[str, str]]:
    return [(m.state, m.why) for m in node.heard if isinstance(m, Activate)]


async def hand_back(node: Node) -> None:
    done = 0
    while not node.closed:
        await trio.sleep(0.1)
        while done < len(node.heard):
            message, done = node.heard[done], done + 1
            for request_id in message.request_ids if isinstance(message, Interrupt) else ():
                event = TokenEvent.of(request_id, 0, (), np.zeros(0), node.version, "interrupt")
                await node.say(Tokens((event,)))


async def test_a_spent_budget_stops_what_costs_loses_nothing_and_a_larger_one_goes_on(tmp_path, autojump_clock) -> None:
    dear = {"max_usd_per_hour": 0.0, "budget_usd": 30.0, "prices": {"ticket:*": [3600.0]}}  # a dollar a second
    async with open_head(tmp_path / "run", activation=dear) as bench:
        node = await bench.join(slow)
        await node.say(Terms(0.0))  # whatever it says
        bench.nursery.start_soon(hand_back, node)
        await bench.until(lambda: bool(node.requests), 20)
        await bench.until(lambda: orders(node)[-1][0] != "active")
        assert orders(node)[:2][-1] == ("active", "at first all generate, to learn what a step takes")
        assert "budget of $30.00" in orders(node)[-1][1]
        await bench.until(lambda: not bench.head.rollouts.collector.load(node.peer))
        asked = len(node.requests)
        await trio.sleep(30)
        status = bench.head.status()
        assert len(node.requests) == asked and "budget of $30.00" in status["pool"]["blocked"]
        assert 5 < status["pool"]["spent_usd"] <= 30 and status["trajectories"]["aborted"] == {}
        check_books(bench.head)
        bench.head.keeper.keep()
    spent = json.loads((tmp_path / "run" / "bill.json").read_text())["usd"]
    async with open_head(tmp_path / "run", activation=dear | {"budget_usd": 1000.0}) as bench:
        node = await bench.join(good)
        await node.say(Terms(1.0))
        assert len(await bench.batch(0, 60)) == 2
        assert bench.head.status()["pool"]["spent_usd"] > spent
        check_books(bench.head)


async def test_what_costs_nothing_needs_no_order(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        node = await bench.join(good)
        await node.say(Terms(0.0))
        assert len(await bench.batch(0, 60)) == 2 and not orders(node)
        assert bench.head.status()["pool"]["spent_usd"] == 0


async def test_the_trainer_is_told_when_a_version_is_due(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", staleness=2, publish_every=2) as bench:
        await bench.join(good)
        for step in range(3):
            await bench.batch(step, 60)
            bench.head.trainer_requests.on_commit(CommitStep(step + 1, str(tmp_path)))
        head = bench.head
        requests = head.trainer_requests
        assert [requests.on_due(Due(step)).due for step in (1, 2, 3, requests.steps)] == [False, True, True, True]


async def test_prices_that_are_none_are_refused(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        node = await bench.join(good)
        await node.say(Terms(-1.0))
        await bench.until(lambda: node.closed)
        assert any("no prices" in text and node.peer in text for text in bench.head.reports)
