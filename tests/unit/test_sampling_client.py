"""The trainer's client of the endpoint, in a thread, before a served endpoint over a twin of the nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from learner.client.connection import HeadGone
from learner.client.sampling import NotSampled, Sampled, SamplingClient
from learner.config import build_config, dump_toml
from learner.endpoint.keys import ADDRESS_FILE
from p2p.errors import UsageError
from p2p.protocol.rollout import Span
from p2p.version import Version
from tests.support.endpoint_house import EOS, House, open_house
from tests.support.request_twin import logprob_of


def write_config(run_dir: Path, **endpoint: Any) -> None:
    """As the learner leaves it in the run directory."""
    settings = {"run_dir": str(run_dir), "model": "m", "endpoint": {"listen": "127.0.0.1:0"} | endpoint}
    (run_dir / "config.toml").write_text(dump_toml(build_config(settings, "test").model_dump(exclude_none=True)))


async def in_thread(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return await trio.to_thread.run_sync(partial(call, *arguments, **named))


async def connected(run_dir: Path) -> SamplingClient:
    write_config(run_dir)
    found: SamplingClient = await in_thread(SamplingClient.connect, run_dir, timeout=5.0)
    return found


def ask(house: House, count: int = 2) -> list[list[int]]:
    return [house.ids(f"prompt {i}") for i in range(count)]


async def test_one_sequence_a_prompt_in_their_order(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        house.twin.answer = lambda asked: [*asked.prompt_ids[-2:], EOS]
        house.twin.versions = [Version(1, 3), Version(1, 4)]
        house.twin.batch = 2
        client = await connected(tmp_path)
        prompts = ask(house, 40)
        found = await in_thread(client.sample, prompts, max_tokens=9, temperature=0.5, top_p=0.9, min_step=3, seed=7)
        spans = (Span(Version(1, 3), 0, 2), Span(Version(1, 4), 2, 3))
        logprobs = tuple(logprob_of(i) for i in range(3))
        assert found == [Sampled((*prompt[-2:], EOS), logprobs, spans, "stop") for prompt in prompts]
        asked = {one.prompt_ids: one for one in house.twin.asked}
        assert {(one.max_new_tokens, one.temperature, one.top_p, one.min_version) for one in asked.values()} == {
            (9, 0.5, 0.9, Version(1, 3))
        }
        assert len({one.seed for one in asked.values()}) == 40
        before, house.twin.asked = asked, []
        await in_thread(client.sample, prompts, max_tokens=9, seed=7)
        assert {one.prompt_ids: one.seed for one in house.twin.asked} == {ids: one.seed for ids, one in before.items()}
        assert {one.min_version for one in house.twin.asked} == {None}
        house.twin.asked = []
        await in_thread(client.sample, prompts, max_tokens=9, seed=8)
        assert not {one.seed for one in house.twin.asked} & {one.seed for one in before.values()}
        assert await in_thread(client.sample, [], max_tokens=9) == []


async def test_what_is_full_or_not_published_yet_is_asked_again(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house:
        client = await connected(tmp_path)
        house.twin.most, house.twin.pause_s = 1, 0.05
        found = await in_thread(client.sample, ask(house, 3), max_tokens=9)
        assert [len(one.ids) for one in found] == [6, 6, 6] and house.twin.refused
        published = house.published.pop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(in_thread, client.sample, ask(house, 1), max_tokens=9))
            await trio.sleep(0.1)
            house.published.append(published)


async def test_what_cannot_be_had_ends_the_call_and_cancels_the_rest(tmp_path: Path) -> None:
    async with open_house(tmp_path, "x" * 400, stop=False) as house:
        client = await connected(tmp_path)
        with pytest.raises(NotSampled, match=r"409: no node serves version 1\.9"):
            await in_thread(client.sample, ask(house), max_tokens=9, min_step=9)
        with pytest.raises(NotSampled, match=r"400.*top_p"):
            await in_thread(client.sample, ask(house), max_tokens=9, top_p=2.0)
        house.twin.pause_s = 0.02
        bad = house.ids("bad")

        def answer(asked: Any) -> list[int]:
            if list(asked.prompt_ids) == bad:
                raise ValueError("no")
            return house.ids("x" * 400)

        house.twin.answer, house.twin.cancelled = answer, 0
        with pytest.raises(NotSampled, match="500"):
            await in_thread(client.sample, [*ask(house, 5), bad], max_tokens=400)
        await house.settled()
        assert house.twin.cancelled >= 5 and house.twin.finished == 0


async def test_an_endpoint_that_goes_is_told_as_such(tmp_path: Path) -> None:
    async def fail(client: SamplingClient) -> None:
        with pytest.raises(HeadGone, match="gone"):
            await in_thread(client.sample, [[1], [2]], max_tokens=400)

    async with trio.open_nursery() as outside:
        async with open_house(tmp_path, "x" * 400, stop=False) as house:
            house.twin.pause_s = 0.02
            client = await connected(tmp_path)
            outside.start_soon(fail, client)
            while house.twin.active < 2:
                await trio.sleep(0.01)
    await fail(client)


async def test_who_cannot_connect_is_told_why(tmp_path: Path) -> None:
    connect = partial(in_thread, SamplingClient.connect, tmp_path, timeout=0.2)
    with pytest.raises(HeadGone, match=r"config\.toml"):
        await connect()
    write_config(tmp_path, listen="")
    with pytest.raises(UsageError, match=r"has no endpoint.*endpoint\.listen"):
        await connect()
    write_config(tmp_path)
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"url": "http://127.0.0.1:1"}))
    with pytest.raises(HeadGone, match="no endpoint answers"):
        await connect()
    async with open_house(tmp_path):
        (tmp_path / "endpoint.key").write_text("another-key-of-long-ago")
        with pytest.raises(UsageError, match="does not take this key"):
            await connect()
