"""Requests beside training, on a mock clock: a real head, real agents over the scripted engine, and nodes by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from learner.requests.port import Ask, Made
from node.engine.fake import scripted_token
from p2p.version import Version
from tests.swarm.test_drain import unheard  # noqa: F401
from tests.swarm.test_head import Bench, check_books, open_head
from tests.swarm.test_updates import agent

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
        status = bench.head.status()["requests"]["serving"]
        assert status["ended"] == 1 and status["moved"] == 1 and status["tokens"] == 60 and not status["running"]
        assert not bench.head.reports
        check_books(bench.head)
