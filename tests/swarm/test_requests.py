"""Requests beside training, on a mock clock: a real head, real agents over the scripted engine, and nodes by hand."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from statistics import fmean

import pytest
import trio
import trio.lowlevel

from learner.client.messages import CommitStep
from learner.requests.port import Ask, Busy, Made, NoSuchVersion
from node.engine.fake import scripted_token
from p2p.errors import ShoalError
from p2p.protocol.generation import Abort, GenerateRequest, Interrupt, Tokens
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version
from tests.support.harness import changed_state, make_state
from tests.swarm.test_head import Bench, Node, check_books, good, open_head, silent
from tests.swarm.test_updates import agent, publish

ASK = Ask(request_class="serving", prompt_ids=(1, 2, 3), max_new_tokens=60, stop_ids=(), seed=5)


@asynccontextmanager
async def open_agents(tmp_path, count: int = 2) -> AsyncIterator[tuple[Bench, list]]:
    """A head and real agents that generate for training."""
    async with open_head(tmp_path / "run", max_new_tokens=60) as bench:
        bench.head.publisher.offer_descriptor(b"\x81\xabconfig.json\xc4\x02{}")
        agents: list = []
        for number in range(1, count + 1):
            await bench.nursery.start(agent, bench, number, tmp_path, 0.05, agents)
        await bench.until(lambda: len(bench.head.nodes) == count and all(n.tokens for n in bench.head.nodes.values()))
        yield bench, agents


async def read(bench: Bench, ask: Ask, seen: Callable[[list[Made]], None] = lambda made: None) -> list[Made]:
    made: list[Made] = []
    with trio.fail_after(120):
        async with bench.head.requests.sample(ask) as tokens:
            async for one in tokens:
                made.append(one)
                seen(made)
    return made


def script(ask: Ask, version: Version) -> list[tuple[int, float]]:
    return [
        tuple(scripted_token(ask.prompt_ids, ask.seed, i, version, 10)) for i in range(ask.max_new_tokens)
    ]  # type: ignore[misc]


def flat(made: list[Made]) -> list[tuple[int, float]]:
    return [pair for one in made for pair in zip(one.ids, one.logprobs, strict=True)]


async def test_a_node_that_goes_in_mid_sequence_is_only_a_pause(tmp_path, autojump_clock) -> None:
    async with open_agents(tmp_path) as (bench, agents):
        by_peer = {a.swarm.me: a for a in agents}
        gone: list[str] = []

        def kill(made: list[Made]) -> None:
            if not gone and len(flat(made)) >= 20:
                gone.extend(p for p in by_peer if bench.head.requests.load(p))
                bench.switch.kill(gone[0])

        made = await read(bench, ASK, kill)
        assert gone and flat(made) == script(ASK, bench.version)
        assert [m.finish for m in made if m.finish] == ["length"] and made[-1].finish
        status = {name: count["serving"] for name, count in bench.head.status()["requests"].items()}
        assert status["ended"] == 1 and status["moved"] == 1 and status["tokens"] == 60 and not status["running"]
        assert not bench.head.reports
        check_books(bench.head)


async def step(bench: Bench) -> None:
    """The trainer takes a step and publishes it."""
    await bench.batch(0, 60)
    bench.head.trainer_requests.on_commit(CommitStep(1, ""))
    await publish(bench.head, 1, changed_state(make_state(1), 2), make_state(1))


def by_hand(bench: Bench, node: Node) -> list[GenerateRequest]:
    """Requests beside training that a node was given."""
    return [r for r in node.requests if bench.head.requests.owns("", r.request_id)]


async def test_training_keeps_its_share_and_a_thousand_wait(tmp_path, autojump_clock) -> None:
    most: list[int] = []
    training: list[int] = []
    rng = random.Random(1)

    async def slow(node: Node, request: GenerateRequest) -> None:
        nursery.start_soon(later, node, request)

    async def later(node: Node, request: GenerateRequest) -> None:
        await trio.sleep(rng.uniform(0.5, 1.5))
        await node.finish(request)

    async def ask(bench: Bench) -> None:
        with suppress(Busy):
            await read(bench, replace(ASK, stop_ids=(0,)))

    async with open_head(tmp_path / "run", groups_per_step=2000) as bench, trio.open_nursery() as nursery:
        nodes = [await bench.join(slow, capacity=20) for _ in range(2)]
        collector, book = bench.head.rollouts.collector, bench.head.requests.book
        await bench.until(lambda: all(collector.load(n.peer) >= 20 for n in nodes))
        for _ in range(1000):
            nursery.start_soon(ask, bench)
        await trio.sleep(0.01)
        for _ in range(100):
            await trio.sleep(0.05)
            most.append(book.holding("serving"))
            training.append(sum(collector.load(n.peer) for n in nodes))
        # Of 40 places 4 are for serving; the others stay full, with what lies ready beyond them.
        assert max(most) == 4 and fmean(training) >= 36 and book.waits("serving") > 900
        assert book.counts["serving"]["ended"] >= 12
        while book.waits("serving") < 1024:
            nursery.start_soon(ask, bench)
            await trio.lowlevel.checkpoint()
        with pytest.raises(Busy):
            async with bench.head.requests.sample(ASK):
                pass
        assert bench.head.status()["requests"]["busy"]["serving"] >= 1 and not bench.head.reports
        nursery.cancel_scope.cancel()
    assert not list(book.held()) and not book.waits("serving")  # all have left


async def test_who_leaves_frees_the_place_at_the_node(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", groups_per_step=50) as bench:
        node = await bench.join(silent)
        await bench.until(lambda: bool(node.requests))
        requests = bench.head.requests
        async with requests.sample(ASK):
            await bench.until(lambda: len(by_hand(bench, node)) == 1)
            async with requests.sample(ASK):
                await trio.sleep(2)
                assert len(by_hand(bench, node)) == 1 and requests.book.waits("serving") == 1  # one place of four
            async with requests.sample(ASK) as last:
                pass
        first = by_hand(bench, node)[0].request_id
        await bench.until(lambda: any(isinstance(m, Abort) and m.request_ids == (first,) for m in node.heard))
        async with requests.sample(ASK):
            await bench.until(lambda: len(by_hand(bench, node)) == 2)
        with pytest.raises(ShoalError):
            await last.__anext__()
        status = {name: count["serving"] for name, count in bench.head.status()["requests"].items()}
        assert status["cancelled"] == 4 and status["running"] == status["waiting"] == 0


async def test_while_training_has_nothing_to_do_requests_have_all_places_and_give_them_back(tmp_path, autojump_clock) -> None:
    held_long = trio.Event()

    async def serve(node: Node, request: GenerateRequest) -> None:
        if request.request_id[0] != "s" and not held_long.is_set():
            await good(node, request)

    async def hand_back(node: Node) -> None:
        done = 0
        while True:
            await trio.sleep(0.1)
            for message in node.heard[done:]:
                done += 1
                for name in message.request_ids if isinstance(message, Interrupt) else ():
                    await node.say(Tokens((TokenEvent.of(name, 0, (), (), node.version, "interrupt"),)))

    async def ask() -> None:
        await read(bench, ASK)

    async with open_head(tmp_path / "run", groups_per_step=20) as bench, trio.open_nursery() as nursery:
        node = await bench.join(serve, capacity=20)
        nursery.start_soon(hand_back, node)
        await bench.until(lambda: bench.head.rollouts.held_back)
        book = bench.head.requests.book
        for _ in range(30):
            nursery.start_soon(ask)
        await bench.until(lambda: book.holding("serving") == 20)
        held_long.set()
        await step(bench)  # training may begin more groups now
        node.digest = changed_state(make_state(1), 2).digest()
        node.version = Version(1, 1)
        await bench.until(lambda: book.holding("serving") == 2 and bench.head.rollouts.collector.load(node.peer) >= 18)
        assert trio.current_time() < 60 and not bench.head.reports
        nursery.cancel_scope.cancel()


async def test_a_liar_is_passed_over_and_a_slow_reader_holds_nobody_up(tmp_path, autojump_clock) -> None:
    async def lie(node: Node, request: GenerateRequest) -> None:
        if request.request_id[0] == "s":
            await node.say(Tokens((TokenEvent.of(request.request_id, 0, (1, 99), (-1.0, -1.0), node.version),)))
        else:
            await good(node, request)

    async with open_head(tmp_path / "run") as bench:
        bad = await bench.join(lie)
        async with bench.head.requests.sample(replace(ASK, stop_ids=(0,))) as tokens:
            await bench.until(lambda: bool(bench.head.reports))
            await bench.join(good)
            await bench.until(lambda: bench.head.status()["requests"]["ended"]["serving"] == 1)
            await bench.batch(0, 60)  # training goes on, whoever reads or not
            made = [one async for one in tokens]
        assert flat(made) == [(1, -1.0), (0, -1.0)] and made[-1].finish == "stop"
        assert all("a token id outside the vocabulary" in r and bad.peer in r for r in bench.head.reports)


async def test_evaluation_of_one_version_ends_under_it_on_few_nodes(tmp_path, autojump_clock) -> None:
    async with open_agents(tmp_path) as (bench, _):
        head, first = bench.head, bench.version
        ask = replace(ASK, request_class="evaluation", max_new_tokens=300, exact_version=first)
        made: list[Made] = []
        asked: list[NoSuchVersion] = []

        async def evaluate() -> None:
            made.extend(await read(bench, ask))

        bench.nursery.start_soon(evaluate)
        await bench.until(lambda: head.requests.book.holding("evaluation") == 1)
        (holder,) = (p for p in head.nodes if head.requests.load(p))
        await step(bench)
        newer = Version(first.epoch, 1)
        await bench.until(lambda: any(n.version == newer for n in head.nodes.values()))
        assert head.nodes[holder].version == first and head.nodes[holder].updating and not made
        again = await read(bench, replace(ask, max_new_tokens=5, seed=6))  # the node that holds back takes it still
        assert {m.version for m in again} == {first}
        await bench.until(lambda: bool(made))
        assert {m.version for m in made} == {first} and flat(made) == script(ask, first)
        await bench.until(lambda: head.nodes[holder].version == newer)
        for exact in (first, Version(first.epoch, 9)):
            with pytest.raises(NoSuchVersion) as raised:
                async with head.requests.sample(replace(ask, exact_version=exact)):
                    pass
            asked.append(raised.value)
        assert [error.later for error in asked] == [False, True]


async def test_what_outlasts_the_hold_has_no_version_any_more(tmp_path, autojump_clock) -> None:
    async with open_agents(tmp_path) as (bench, _):
        head, first = bench.head, bench.version
        ask = replace(ASK, request_class="evaluation", max_new_tokens=3000, exact_version=first)
        seen: list[Made] = []

        async def evaluate() -> None:
            with pytest.raises(NoSuchVersion, match="any more"):
                async with head.requests.sample(ask) as tokens:
                    async for one in tokens:
                        seen.append(one)
            ended.set()

        ended = trio.Event()
        bench.nursery.start_soon(evaluate)
        await bench.until(lambda: bool(seen))
        await step(bench)
        began = trio.current_time()
        with trio.fail_after(100):
            await ended.wait()
        assert 55 < trio.current_time() - began < 70
        assert {m.version for m in seen} == {first} and flat(seen) == script(ask, first)[: len(flat(seen))]
        assert not head.reports
