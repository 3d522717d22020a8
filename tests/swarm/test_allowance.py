"""What owners allow, in a whole swarm: hours that end in mid-generation, giving way, rates, disk, and changes while it runs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from learner.client.messages import CommitStep
from node.agent import Agent, NodeSettings
from node.engine.fake import ScriptedCore, ScriptedSettings
from node.lives import Lives
from p2p.allowance.giving_way import LEAVE_S, OthersUse
from p2p.allowance.hours import LocalTime
from p2p.allowance.keeper import AllowanceKeeper, change_limits, what_holds
from p2p.allowance.limits import NO_LIMITS
from p2p.limits import KIB, MIB
from p2p.membership.admission import make_ticket
from p2p.protocol.rollout import RESTING
from p2p.version import Version
from tests.support.harness import RUN, changed_state, identity, inline, make_state, open_swarm, wall
from tests.support.inline_engine import InlineEngine, open_inline_engine
from tests.swarm.test_head import HEAD, Bench, check_books, open_head
from tests.swarm.test_updates import publish

V1 = Version(1, 1)
RATE = 30 * KIB


class Clock:
    """A host's clock that shows 06:59 until it is set."""

    minute = 6 * 60 + 59

    def __call__(self, unix: float) -> LocalTime:
        return LocalTime("2026-11-25", self.minute)


class Others:
    """What others use, as the test says."""

    seen = OthersUse()

    def sample(self, now: float) -> OthersUse:
        return self.seen


async def live(
    bench: Bench, number: int, directory: Path, made: list[Agent], *, clock: Clock, said: dict[str, object],
    others: Others | None = None, task_status=trio.TASK_STATUS_IGNORED,
) -> None:  # fmt: skip
    """A node with limits under the real head, as `node.service` runs it."""
    who, folder = identity(number), directory / f"node-{number}"
    folder.mkdir()
    keeper = AllowanceKeeper(NO_LIMITS.changed(said), folder, wall=wall, clock=clock, sampler=lambda meter: others or Others())
    ticket = make_ticket(HEAD, RUN, (f"/memory/{HEAD.peer_id}",))
    settings = NodeSettings(ticket=ticket, directory=folder, name=f"n{number}", capacity=4, store_limit=64 * MIB)

    @asynccontextmanager
    async def engine() -> AsyncIterator[InlineEngine]:
        async with open_inline_engine(ScriptedCore(ScriptedSettings(vocab_size=10)), step_s=0.05) as opened:
            yield opened

    @asynccontextmanager
    async def new_agent() -> AsyncIterator[Agent]:
        async with bench.switch.network(who.peer_id, meter=keeper.meter) as network:
            made.append(Agent(settings, who, network, engine, allowance=keeper, wall=wall, in_thread=inline))
            if len(made) == 1:
                task_status.started()
            yield made[-1]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        await Lives(keeper).run(new_agent)
        nursery.cancel_scope.cancel()


def all_tokens(bench: Bench) -> int:
    """Tokens that the head holds, of all members and of what is finished."""
    rollouts = bench.head.rollouts
    held = sum(len(m.completion.ids) for g in rollouts.collector.books.groups.values() for m in g.members)
    return held + sum(len(t.completion_ids) for g in rollouts.buffers.finished.values() for t in g.trajectories)


async def next_step(bench: Bench) -> int:
    """Train on what there is and publish, so that there is work again; tokens of what was trained on."""
    groups = await bench.batch(0, 60)
    bench.head.trainer_requests.on_commit(CommitStep(1, ""))
    state = make_state(1)
    await publish(bench.head, 1, changed_state(state, 2), state)
    return sum(len(t.completion_ids) for g in groups for t in g.trajectories)


async def test_a_node_whose_hours_end_loses_no_token_and_comes_back_by_itself(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", max_new_tokens=60) as bench:
        head, clock, agents, steady = bench.head, Clock(), list[Agent](), list[Agent]()
        head.publisher.offer_descriptor(b"\x81\xabconfig.json\xc4\x02{}")
        await bench.nursery.start(lambda **k: live(bench, 1, tmp_path, agents, clock=clock, said={"between": "22:00-07:00"}, **k))
        await bench.nursery.start(lambda **k: live(bench, 2, tmp_path, steady, clock=Clock(), said={}, **k))
        collector = head.rollouts.collector
        await bench.until(lambda: len(head.nodes) == 2 and all(n.tokens and collector.working(p) for p, n in head.nodes.items()))
        peer = agents[0].swarm.me
        assert head.nodes[peer].describe()["limits"] == "22:00-07:00"
        clock.minute = 7 * 60  # it is seven in the morning
        await bench.until(lambda: peer not in head.nodes)
        assert not agents[0].serving.assigned and agents[0].made == agents[0].serving.tokens > 0
        assert head.gone[peer]["reason"] == "closed by the peer: out of hours until 22:00 (its clock)"
        assert what_holds(tmp_path / "node-1") == "out of hours until 22:00 (its clock)"
        await trio.sleep(3)
        assert peer not in head.nodes and len(agents) == 1
        clock.minute = 22 * 60
        await bench.until(lambda: peer in head.nodes and head.nodes[peer].ready, 30)
        trained = await next_step(bench)
        await bench.until(lambda: head.nodes[peer].tokens > 0)
        for one in (agents[1], steady[0]):
            one.stop("enough")
        await bench.until(lambda: not head.nodes)
        made = sum(a.made for a in (*agents, *steady))
        assert len(agents) == 2 and made == sum(collector.tokens_by_node.values())
        assert made == trained + all_tokens(bench), "not one token was lost, or made twice"
        check_books(head)


async def test_a_node_that_gives_way_hands_back_keeps_its_link_and_takes_work_again(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", max_new_tokens=60) as bench:
        head, others, agents, steady = bench.head, Others(), list[Agent](), list[Agent]()
        head.publisher.offer_descriptor(b"\x81\xabconfig.json\xc4\x02{}")
        await bench.nursery.start(
            lambda **k: live(bench, 1, tmp_path, agents, clock=Clock(), said={"yield": True}, others=others, **k)
        )
        await bench.nursery.start(lambda **k: live(bench, 2, tmp_path, steady, clock=Clock(), said={}, **k))
        collector = head.rollouts.collector
        await bench.until(lambda: len(head.nodes) == 2 and all(n.tokens and collector.working(p) for p, n in head.nodes.items()))
        peer = agents[0].swarm.me
        others.seen = OthersUse(gpu=0.9)
        await bench.until(lambda: bool(head.nodes[peer].rests), 10)
        await bench.until(lambda: not collector.working(peer) and not agents[0].serving.assigned, 10)
        row = head.describe(head.nodes[peer])
        assert row["alive"] and row["rests"] == "gives way: others use the GPU"
        assert not head.nodes[peer].serves(head.epoch, head.now())
        before = head.nodes[peer].tokens
        await trio.sleep(5)
        assert head.nodes[peer].tokens == before and not collector.working(peer)
        others.seen = OthersUse(gpu=0.0)
        await trio.sleep(LEAVE_S + 3)
        assert head.nodes[peer].rests == ""
        trained = await next_step(bench)
        await bench.until(lambda: head.nodes[peer].tokens > before)
        for one in (agents[0], steady[0]):
            one.stop("enough")
        await bench.until(lambda: not head.nodes)
        assert sum(a.made for a in (*agents, *steady)) == sum(collector.tokens_by_node.values()) == trained + all_tokens(bench)


async def test_who_rests_says_so_to_a_request_that_was_under_way(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        others = Others()
        node = await swarm.start_node(1, limits=NO_LIMITS.changed({"yield": True}), sampler=lambda meter: others)
        await head.until(lambda: node.peer in head.links)
        head.publish(1, make_state(1))
        await head.until(lambda: node.peer in head.status and head.status[node.peer].ready)
        others.seen = OthersUse(cpu=0.8)
        await head.until(lambda: bool(head.status[node.peer].owner.rests), 10)
        head.ask(node.peer, "late", 5)
        await head.until(lambda: bool(head.rejected), 5)
        assert [(r.cause, r.retryable, r.reason) for r in head.rejected] == [
            (RESTING, True, "gives way: others use the processor"),
        ]  # fmt: skip


class Wire:
    """Bytes that went from and to hosts of a switch, over time."""

    def __init__(self, switch) -> None:
        self._switch, self.seen = switch, list[tuple[float, dict[tuple[str, str], int]]]()

    async def run(self) -> None:
        while True:
            self.seen.append((trio.current_time(), dict(self._switch.bytes_moved)))
            await trio.sleep(0.1)

    def worst(self, peer: str, side: int, since: float) -> float:
        """The most bytes a second in any ten seconds that left `peer` (side 0), or that others sent it (1)."""
        totals = [(t, sum(n for pair, n in moved.items() if pair[side] == peer)) for t, moved in self.seen if t >= since]
        span = 100
        return max((b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(totals, totals[span:], strict=False))


async def publish_for(head, seconds: float) -> None:
    """New versions, each as soon as the last is everywhere, for so long."""
    state, step, ends = make_state(1), 1, trio.current_time() + seconds
    head.publish(1, state)
    while trio.current_time() < ends:
        peers = list(head.links)
        with trio.move_on_at(ends):
            await head.until_installed(peers, Version(1, step), 1e6)
            await trio.sleep(1)
            old, state, step = state, changed_state(state, step + 1), step + 1
            head.publish(step, state, base=step - 1, old=old)


@pytest.mark.parametrize("what", ["max_up_mbit", "max_down_mbit"])
async def test_a_rate_is_kept_within_five_percent_over_every_ten_seconds(tmp_path, autojump_clock, what) -> None:
    """Three nodes get version after version; one is limited. Its bytes on the wire, control traffic included."""
    async with open_swarm(tmp_path, rate=4 * MIB) as swarm:
        head = await swarm.start_head()
        limits = NO_LIMITS.changed({what: RATE / 125_000})
        limited = await swarm.start_node(1, limits=limits)
        others = [await swarm.start_node(number) for number in (2, 3)]
        await swarm.meshed([limited, *others])
        wire = Wire(swarm.switch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.run)
            await publish_for(head, 45)
            nursery.cancel_scope.cancel()
        side = what == "max_down_mbit"
        assert wire.worst(limited.peer, side, 3.0) <= 1.05 * RATE
        if side:
            assert wire.worst(limited.peer, 1, 3.0) >= 0.6 * RATE, "it was the limit that held"
        else:
            assert wire.worst(others[0].peer, 0, 3.0) > wire.worst(limited.peer, 0, 3.0), "the others relay more"
        told = head.swarm.exchange.bounds.get(limited.peer)
        assert told == (None if side else pytest.approx(RATE)), "the source's plan knows of it"


async def test_a_rate_that_is_changed_while_it_runs_holds_soon(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path, rate=4 * MIB) as swarm:
        head = await swarm.start_head()
        nodes = [await swarm.start_node(number) for number in (1, 2, 3)]
        await swarm.meshed(nodes)
        wire = Wire(swarm.switch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.run)
            nursery.start_soon(publish_for, head, 1e6)
            await trio.sleep(15)
            free = wire.worst(nodes[0].peer, 0, 2.0)
            assert free > 1.5 * RATE
            change_limits(tmp_path / "node-1", {"max_up_mbit": RATE / 125_000})
            changed = trio.current_time()
            await trio.sleep(30)
            assert wire.worst(nodes[0].peer, 0, changed + 2.5) <= 1.05 * RATE
            assert head.status[nodes[0].peer].owner.limits == f"up {RATE / 125_000:g} Mbit/s"
            change_limits(tmp_path / "node-1", {"max_up_mbit": 0})
            lifted = trio.current_time()
            await trio.sleep(30)
            assert wire.worst(nodes[0].peer, 0, lifted + 5) > 1.5 * RATE and not head.status[nodes[0].peer].owner.limits
            nursery.cancel_scope.cancel()


async def test_a_version_that_does_not_fit_is_refused_in_one_line_and_taken_once_it_may(tmp_path, autojump_clock, caplog) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        node = await swarm.start_node(1, limits=NO_LIMITS.changed({"max_disk": 0.06}))
        await head.until(lambda: node.peer in head.links)
        head.publish(1, make_state(1))
        await trio.sleep(30)
        said = [r.getMessage() for r in caplog.records if "is not taken" in r.getMessage()]
        assert len(said) == 1 and "--max-disk allows 0.06 GB" in said[0] and "\n" not in said[0]
        assert V1 not in head.installed.get(node.peer, {}) and not head.refusals and not head.reports
        change_limits(tmp_path / "node-1", {"max_disk": 1})
        await head.until_installed([node.peer], V1, 30)


async def test_a_day_s_bytes_hold_across_restarts_and_the_next_day_begins_anew(tmp_path, autojump_clock, caplog) -> None:
    caplog.set_level(logging.INFO, "shoal")
    day = ["2026-11-25"]

    def keeper() -> AllowanceKeeper:
        limits = NO_LIMITS.changed({"quota_gb_per_day": 0.001})
        return AllowanceKeeper(limits, tmp_path, wall=wall, clock=lambda unix: LocalTime(day[0], 600))

    first = keeper()
    first.meter.sent += 600_000
    first.look()
    first.meter.received += 200_000
    first.look()
    assert first.permission.relays is None and first.meter.counts
    await trio.sleep(10)
    first.look()
    second = keeper()
    second.meter.sent += 150_000
    second.look()
    assert second.permission.relays == 0 and "quota nearly used" in second.permission.keeps and not second.permission.rests
    second.meter.sent += 50_000
    changed = second.changed
    second.look()
    assert second.permission.rests == "quota used until midnight (its clock)" and changed.is_set()
    third = keeper()
    assert third.permission.rests, "nor after one more restart"
    day[0] = "2026-11-26"
    third.look()
    assert not third.permission.rests and third.permission.relays is None
    assert "nothing is relayed: quota nearly used" in caplog.text
