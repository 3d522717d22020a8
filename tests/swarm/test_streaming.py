"""Tokens on their way from a real agent to the head: few messages, little lost when a node dies, nothing when it leaves."""

from __future__ import annotations

from node.engine.fake import ScriptedCore, ScriptedSettings
from node.serving.batcher import FLUSH_S, FLUSH_TOKENS
from p2p.protocol.generation import Abort
from tests.support.harness import NodeUnderTest, SwarmUnderTest, make_state, open_swarm

STEP_S = 0.05
"""the harness's engine: twenty tokens a second of every sequence"""


async def working(swarm: SwarmUnderTest, names: list[str]) -> NodeUnderTest:
    """A node that is in the middle of these sequences."""
    await swarm.start_head()
    published = swarm.head.publish(0, make_state(1))
    node = await swarm.start_node(1, core=ScriptedCore(ScriptedSettings()))
    await swarm.head.until_installed([node.peer], published.version)
    await swarm.head.until(lambda: (s := swarm.head.status.get(node.peer)) is not None and s.ready)
    for name in names:
        swarm.head.ask(node.peer, name, tokens=1000)
    await swarm.head.until(lambda: all(len(arrived(swarm, name)) >= 50 for name in names))
    return node


def arrived(swarm: SwarmUnderTest, name: str) -> list[int]:
    completion = swarm.head.completions.get(name)
    return completion.ids if completion is not None else []


async def test_a_killed_node_loses_at_most_what_was_not_flushed(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        node = await working(swarm, ["a", "b", "c"])
        rows = {name: row for name, row in node.engine.core.held.items()}
        await swarm.kill(node)
        made = {name: list(row.ids) for name, row in rows.items()}
        # At twenty tokens a second the time decides and not the number: the flush, the link's latency, one step.
        most = int((FLUSH_S + 0.1) / STEP_S) + 1
        assert most < FLUSH_TOKENS
        for name, ids in made.items():
            got = arrived(swarm, name)
            assert got == ids[: len(got)] and len(got) >= 50
            assert len(ids) - len(got) <= most


async def test_a_node_that_leaves_in_order_loses_nothing(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        node = await working(swarm, ["a", "b"])
        rows = dict(node.engine.core.held)
        node.agent.stop("a person stopped it")
        before = {name: len(row.ids) for name, row in rows.items()}
        await swarm.head.until(lambda: node.peer not in swarm.head.links)
        for name, count in before.items():
            assert len(arrived(swarm, name)) >= count - 1  # the step under way at that very moment


async def test_an_engine_that_dies_takes_no_token_with_it_that_it_sent(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        node = await working(swarm, ["a"])
        row = node.engine.core.held["a"]
        node.engine.kill("out of memory")
        await swarm.head.until(lambda: bool(swarm.head.rejected))
        assert arrived(swarm, "a") == list(row.ids)
        (rejected,) = swarm.head.rejected
        assert rejected.request_id == "a" and not rejected.retryable


async def test_aborted_sequences_send_nothing_more(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        node = await working(swarm, ["a", "b"])
        swarm.head.links[node.peer].post(Abort(("a",)))
        await swarm.head.until(lambda: "a" not in node.agent.serving.assigned)
        count = len(arrived(swarm, "a"))
        target = len(arrived(swarm, "b")) + 60
        await swarm.head.until(lambda: len(arrived(swarm, "b")) >= target)
        assert len(arrived(swarm, "a")) - count <= int((FLUSH_S + 0.1) / STEP_S) + 1


async def test_many_steps_are_one_message(tmp_path, autojump_clock, monkeypatch) -> None:
    async with open_swarm(tmp_path) as swarm:
        node = await working(swarm, ["a", "b", "c", "d"])
        channel = swarm.head.links[node.peer].control
        receive, received = channel.receive, []

        async def noted() -> bytes:
            received.append(await receive())
            return received[-1]

        monkeypatch.setattr(channel, "receive", noted)
        tokens = node.agent.serving.tokens
        await swarm.head.until(lambda: node.agent.serving.tokens >= tokens + 400)  # 100 steps, 5 s
        # Four a second, a status each second, and one more of each at the edges.
        assert 5 / FLUSH_S < len(received) <= 5 / FLUSH_S + 5 + 3
