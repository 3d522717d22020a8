"""A node that is told to leave hands over every token that it made, and nothing comes to it any more."""

from __future__ import annotations

import pytest
import trio

from node.agent import DRAIN_S
from p2p.protocol.rollout import DRAINING
from tests.support.harness import changed_state, make_state, open_swarm
from tests.swarm.test_head import check_books, open_head
from tests.swarm.test_updates import agent, one_node


async def test_who_leaves_hands_over_and_takes_nothing_new(tmp_path, autojump_clock) -> None:
    async with one_node(tmp_path, running=2) as (_, head, node, _state):
        for name in "abc":
            head.ask(node.peer, name, 3000)
        done = head.completions
        await head.until(lambda: "a" in done and len(done["a"].ids) >= 20)
        node.agent.stop("the cloud wants it back")
        await head.until(lambda: bool(head.byes), 1)
        head.ask(node.peer, "late", 5)
        began = trio.current_time()
        await head.until(lambda: node.peer not in head.links, 5)
        assert trio.current_time() - began < 1  # no wait for a time
        assert [(b.reason, b.done, b.draining) for _, b in head.byes] == [
            ("the cloud wants it back", False, True), ("the cloud wants it back", False, False),
        ]  # fmt: skip
        assert {name: done[name].finish for name in "abc"} == dict.fromkeys("abc", "interrupt") and not done["c"].ids
        assert node.agent.made == node.agent.serving.tokens == sum(len(c.ids) for c in done.values()) >= 40
        if head.rejected:  # it may have left before the request came
            assert [(r.request_id, r.cause, r.retryable) for r in head.rejected] == [("late", DRAINING, True)]


async def unheard(*_: object) -> None:
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("what", ["no engine yet", "dead engine", "head is gone", "silent head", "update waits"])
async def test_who_leaves_does_so_in_any_state(tmp_path, autojump_clock, monkeypatch, what) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        node = await swarm.start_node(1)
        await head.until(lambda: node.peer in head.links)
        state = make_state(1)
        if what != "no engine yet":
            head.publish(1, state)
            await head.until(lambda: node.peer in head.status and head.status[node.peer].ready)
            head.ask(node.peer, "a", 3000, finish_s=600)
            await head.until(lambda: "a" in head.completions)
        if what == "dead engine":
            assert node.engine is not None
            node.engine.kill("it broke")
        elif what == "head is gone":
            await swarm.kill_head()
        elif what == "silent head":
            monkeypatch.setattr(head, "on_message", unheard)
        elif what == "update waits":
            head.publish(2, changed_state(state, 2), base=1, old=state)
            await head.until(lambda: head.status[node.peer].updating)
        began = trio.current_time()
        node.agent.stop("a person")
        with trio.fail_after(DRAIN_S + 5):
            while swarm.switch.host(node.peer) is not None:
                await trio.sleep(0.05)
        assert trio.current_time() - began < (DRAIN_S + 2 if what == "silent head" else 3)
        if what == "update waits":
            assert head.completions["a"].finish == "interrupt"


async def test_others_go_on_at_once_from_the_last_token(tmp_path, autojump_clock) -> None:
    """Under the real head: not one token is made twice."""
    async with open_head(tmp_path / "run", max_new_tokens=60) as bench:
        head = bench.head
        head.publisher.offer_descriptor(b"\x81\xabconfig.json\xc4\x02{}")
        agents: list = []
        for number in (1, 2):
            await bench.nursery.start(agent, bench, number, tmp_path, 0.05, agents)
        collector = head.rollouts.collector
        await bench.until(lambda: len(head.nodes) == 2 and all(n.tokens and collector.working(p) for p, n in head.nodes.items()))
        agents[0].stop("preempted")
        peer = agents[0].swarm.me
        await bench.until(lambda: peer not in head.nodes)
        groups = await bench.batch(0, 60)
        agents[1].stop("enough")
        await bench.until(lambda: not head.nodes)
        # Tokens of all members, which nothing reports one by one.
        held = sum(len(m.completion.ids) for g in collector.books.groups.values() for m in g.members)
        finished = sum(len(t.completion_ids) for g in head.rollouts.buffers.finished.values() for t in g.trajectories)
        assert len(groups) == 2 and [a.made for a in agents] == [a.serving.tokens for a in agents]
        assert sum(a.made for a in agents) == held + finished
        assert collector.tokens_by_node == {a.swarm.me: a.made for a in agents}
        check_books(head)
