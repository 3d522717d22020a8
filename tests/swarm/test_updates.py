"""What becomes of running sequences when their node gets newer weights: pinned ones, ones that go on, ones that end first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack
import pytest
import trio

from learner.client.messages import Begin, CommitStep, SealVersion, SegmentDone
from learner.head.head import Head
from node.agent import Agent, NodeSettings
from node.engine.fake import ScriptedCore, ScriptedSettings
from p2p.limits import MIB
from p2p.membership.admission import make_ticket
from p2p.protocol.rollout import BEHIND, PAST, UPDATING, Span
from p2p.version import Version
from p2p.weights.encode import encode_version
from p2p.weights.state import FlatState
from tests.support.harness import (
    RUN,
    HeadUnderTest,
    NodeUnderTest,
    Swarm,
    changed_state,
    identity,
    inline,
    make_state,
    open_swarm,
    wall,
)
from tests.support.inline_engine import InlineEngine, open_inline_engine
from tests.swarm.test_head import HEAD, Bench, check_books, open_head

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)


@asynccontextmanager
async def one_node(directory, *, running: int = 64) -> AsyncIterator[tuple[Swarm, HeadUnderTest, NodeUnderTest, FlatState]]:
    """A node that serves 1.1, and the state of that."""
    async with open_swarm(directory) as swarm:
        head = await swarm.start_head()
        node = await swarm.start_node(1, core=ScriptedCore(ScriptedSettings(max_running=running)))
        first = make_state(1)
        await head.until(lambda: node.peer in head.links)
        head.publish(1, first)
        await head.until(lambda: node.peer in head.status and head.status[node.peer].ready)
        yield swarm, head, node, first


async def test_a_pinned_request_is_served_at_that_version_or_not_at_all(tmp_path, autojump_clock) -> None:
    async with one_node(tmp_path) as (_, head, node, first):
        head.ask(node.peer, "early", exact=V2)
        head.ask(node.peer, "pinned", 100, exact=V1)
        head.ask(node.peer, "free", 100)
        done = head.completions
        await head.until(lambda: "free" in done and len(done["free"].ids) >= 20)
        second = changed_state(first, 2)
        head.publish(2, second, base=1, old=first)
        await head.until_installed([node.peer], V2)
        await head.until(lambda: bool(done["free"].finish))
        # The engine let go of it at the commit, with every token that it had made.
        made = len(done["pinned"].ids)
        assert done["pinned"].finish == "interrupt" and 20 <= made < 100
        assert done["pinned"].spans == [Span(V1, 0, made)]
        assert [s.version for s in done["free"].spans] == [V1, V2] and done["free"].finish == "length"
        head.ask(node.peer, "late", exact=V1)
        head.ask(node.peer, "now", exact=V2)
        await head.until(lambda: "now" in done and bool(done["now"].finish))
        assert done["now"].spans == [Span(V2, 0, 20)]
        told = {r.request_id: (r.cause, r.retryable, r.version) for r in head.rejected}
        assert told == {"early": (BEHIND, True, V1), "late": (PAST, True, V2)}
        assert "late" not in done and "early" not in done


async def test_a_sequence_goes_on_under_newer_weights(tmp_path, autojump_clock) -> None:
    async with one_node(tmp_path) as (_, head, node, first):
        head.ask(node.peer, "a", 100)
        await head.until(lambda: "a" in head.completions and len(head.completions["a"].ids) >= 20)
        head.publish(2, changed_state(first, 2), base=1, old=first)
        await head.until_installed([node.peer], V2)
        assert not head.completions["a"].finish
        await head.until(lambda: bool(head.completions["a"].finish))
        done = head.completions["a"]
        assert [s.version for s in done.spans] == [V1, V2]


async def test_what_runs_may_end_before_newer_weights_are_committed(tmp_path, autojump_clock) -> None:
    async with one_node(tmp_path, running=1) as (_, head, node, first):
        done = head.completions
        head.ask(node.peer, "runs", 100, finish_s=60)
        await head.until(lambda: "runs" in done and len(done["runs"].ids) >= 20)
        head.ask(node.peer, "waits", 100, finish_s=60)
        await trio.sleep(0.2)
        head.publish(2, changed_state(first, 2), base=1, old=first)
        # What has not begun is handed back at once: it may begin elsewhere, under any version.
        await head.until(lambda: "waits" in done and done["waits"].finish == "interrupt", 2)
        assert head.status[node.peer].updating and head.status[node.peer].version == V1
        assert done["waits"].ids == [] and not done["runs"].finish
        head.ask(node.peer, "new", finish_s=60)
        head.ask(node.peer, "new to that version", 5, exact=V1, finish_s=60)
        await head.until(lambda: bool(head.rejected))
        assert [(r.request_id, r.cause, r.retryable) for r in head.rejected] == [("new", UPDATING, True)]
        assert V2 not in head.installed[node.peer]
        await head.until_installed([node.peer], V2)
        for name in ("runs", "new to that version"):
            assert done[name].finish == "length" and {s.version for s in done[name].spans} == {V1}
        await head.until(lambda: not head.status[node.peer].updating)
        head.ask(node.peer, "after", finish_s=60)
        await head.until(lambda: "after" in done and bool(done["after"].finish))
        assert done["after"].spans == [Span(V2, 0, 20)]


async def test_requests_for_the_served_version_may_follow_each_other(tmp_path, autojump_clock) -> None:
    async with one_node(tmp_path) as (_, head, node, first):
        done = head.completions
        head.ask(node.peer, "one", 5, exact=V1, finish_s=60)
        await head.until(lambda: "one" in done and bool(done["one"].finish))
        head.publish(2, changed_state(first, 2), base=1, old=first)  # between the two, when nothing runs
        await head.until(lambda: head.status[node.peer].updating)
        for name in ("two", "three"):
            await trio.sleep(0.5)
            head.ask(node.peer, name, 5, exact=V1, finish_s=60)
            await head.until(lambda name=name: name in done and bool(done[name].finish))
        began = trio.current_time()
        await head.until_installed([node.peer], V2)
        assert trio.current_time() - began < 3, "nothing follows"
        assert [{s.version for s in done[name].spans} for name in ("one", "two", "three")] == [{V1}] * 3
        assert head.rejected == []


async def test_a_version_is_not_held_back_for_ever(tmp_path, autojump_clock) -> None:
    async with one_node(tmp_path) as (_, head, node, first):
        done = head.completions
        head.ask(node.peer, "long", 3000, finish_s=5)
        await head.until(lambda: "long" in done and len(done["long"].ids) >= 20)
        head.publish(2, changed_state(first, 2), base=1, old=first)
        began = trio.current_time()
        await head.until_installed([node.peer], V2)
        assert 5 <= trio.current_time() - began < 7
        part = done["long"]
        assert part.finish == "interrupt" and 100 < len(part.ids) < 200 and {s.version for s in part.spans} == {V1}
        head.ask(node.peer, "rest", len(part.ids) + 5, prefix=tuple(part.ids), finish_s=5)
        done["rest"] = type(part)(ids=list(part.ids), logprobs=list(part.logprobs), spans=list(part.spans))
        await head.until(lambda: bool(done["rest"].finish))
        assert done["rest"].spans == [Span(V1, 0, len(part.ids)), Span(V2, len(part.ids), len(part.ids) + 5)]


async def test_an_engine_that_dies_holds_no_version_back(tmp_path, autojump_clock) -> None:
    async with one_node(tmp_path) as (_, head, node, first):
        head.ask(node.peer, "a", 3000, finish_s=600)
        await head.until(lambda: "a" in head.completions)
        second = changed_state(first, 2)
        head.publish(2, second, base=1, old=first)
        await head.until(lambda: head.status[node.peer].updating)
        assert node.engine is not None
        node.engine.kill("the GPU fell off")
        await head.until_installed([node.peer], V2)
        await head.until(lambda: head.status[node.peer].ready and not head.status[node.peer].updating)
        assert node.agent.slot.serving == V2 and node.agent.shadow.digest == second.digest()
        head.ask(node.peer, "b", finish_s=600)
        await head.until(lambda: "b" in head.completions and bool(head.completions["b"].finish))


async def test_a_head_that_goes_holds_no_version_back(tmp_path, autojump_clock) -> None:
    async with one_node(tmp_path) as (swarm, head, node, first):
        head.ask(node.peer, "a", 3000, finish_s=600)
        await head.until(lambda: "a" in head.completions)
        head.publish(2, changed_state(first, 2), base=1, old=first)
        await head.until(lambda: head.status[node.peer].updating)
        await swarm.kill_head()
        with trio.fail_after(60):
            while node.agent.slot.serving != V2:
                await trio.sleep(0.1)
        assert not node.agent.serving.updating


async def publish(head: Head, step: int, state: FlatState, old: FlatState | None) -> None:
    """As the trainer does."""
    kind, base = ("anchor", None) if old is None else ("delta", step - 1)
    begun = head.trainer_requests.on_begin(Begin(step, kind, base, "layout"))
    segment_bytes = head.config.swarm.segment_bytes
    for s in encode_version(state, old, head.store, segment_bytes=segment_bytes, chunk_bytes=begun.chunk_bytes):
        head.publisher.segment(SegmentDone(begun.mid, s.index, s.size, b"".join(s.digests), s.changed, s.words))
    await head.trainer_requests.on_seal(SealVersion(begun.mid, b"".join(state.tensor_digests()), state.digest(), 0.0))


async def agent(
    bench: Bench, number: int, directory, step_s: float, made_agents: list[Agent], *, task_status=trio.TASK_STATUS_IGNORED
) -> None:
    who = identity(number)
    ticket = make_ticket(HEAD, RUN, (f"/memory/{HEAD.peer_id}",))
    async with bench.switch.network(who.peer_id) as network:
        settings = NodeSettings(
            ticket=ticket, directory=directory / f"node-{number}", name=f"n{number}", capacity=4,
            store_limit=64 * MIB,
        )  # fmt: skip

        @asynccontextmanager
        async def engine() -> AsyncIterator[InlineEngine]:
            async with open_inline_engine(ScriptedCore(ScriptedSettings(vocab_size=10)), step_s=step_s) as made:
                yield made

        made_agents.append(Agent(settings, who, network, engine, wall=wall, in_thread=inline))
        task_status.started()
        await made_agents[-1].run()


@pytest.mark.parametrize("finish_s", [0.0, 100.0, 1.0], ids=["continue", "finish", "finish in a short time"])
async def test_both_bounds_hold_whatever_a_new_version_does_to_what_runs(tmp_path, autojump_clock, finish_s) -> None:
    """Real agents under the real head: nothing is lost, nothing too old, and one span a trajectory where that was asked for."""
    steps, staleness = 8, 2
    async with open_head(tmp_path / "run", staleness=staleness, finish_s=finish_s, max_new_tokens=60) as bench:
        head = bench.head
        head.publisher.offer_descriptor(msgpack.packb({"config.json": b"{}"}))
        for number, step_s in ((1, 0.05), (2, 0.15)):
            await bench.nursery.start(agent, bench, number, tmp_path, step_s, [])
        await bench.until(lambda: len(head.nodes) == 2)
        state, spans = make_state(1), list[int]()
        for step in range(steps):
            groups = await bench.batch(step, 300)
            for t in (t for g in groups for t in g.trajectories):
                assert step - t.oldest.step <= staleness  # at consumption
                assert [s.version for s in t.spans] == sorted({s.version for s in t.spans})
                spans.append(len(t.spans))
            old, state = state, changed_state(state, step + 2)
            head.trainer_requests.on_commit(CommitStep(step + 1, ""))
            await publish(head, step + 1, state, old)
        assert head.rollouts.buffers.max_staleness_seen <= staleness
        check_books(head)
        assert not head.status()["trajectories"]["aborted"] and not head.reports
        several = sum(n > 1 for n in spans)
        assert several == 0 if finish_s == 100.0 else several > 0
