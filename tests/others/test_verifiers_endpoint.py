"""The endpoint before verifiers: its TrainClient, and an installed environment whose rollouts sample from it. All unmodified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trio
import verifiers.v1 as vf
from renderers import DefaultRendererConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from tests.support.endpoint_house import EOS, MODEL, House, open_house
from tests.support.request_twin import logprob_of

KEY = "SHOAL_ENDPOINT_KEY"
"""Variable that verifiers reads the endpoint's key from."""


async def in_asyncio(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """verifiers is asyncio's: in a thread of its own."""
    return await trio.to_thread.run_sync(lambda: asyncio.run(main()))


def train_config(house: House, folder: Path, monkeypatch: pytest.MonkeyPatch) -> vf.TrainClientConfig:
    """As a user would write it: where the endpoint is, and the model's tokenizer."""
    house.tokenizer.save_pretrained(folder)
    monkeypatch.setenv(KEY, house.key)
    return vf.TrainClientConfig(
        base_url=f"{house.endpoint.url}/v1", api_key_var=KEY, renderer=DefaultRendererConfig(), renderer_model_name=str(folder)
    )


def eval_config(house: House, monkeypatch: pytest.MonkeyPatch) -> vf.EvalClientConfig:
    monkeypatch.setenv(KEY, house.key)
    return vf.EvalClientConfig(base_url=f"{house.endpoint.url}/v1", api_key_var=KEY)


async def play(client: Any, **taskset: Any) -> list[vf.Episode]:
    """An episode of each task of the installed environment, as verifiers' own runners play them."""
    config = resolve_env_config({
        "taskset": {"id": "shoal-words-v1", **taskset}, "agent": {"runtime": {"type": "subprocess"}}
    })  # fmt: skip
    env = load_environment(config)
    context = vf.ModelContext(model=MODEL, client=client, sampling=vf.SamplingConfig(temperature=0.7, max_tokens=40))

    async def main() -> list[vf.Episode]:
        async with env.serving():
            return list(await asyncio.gather(*(env.run_episode(task, context) for task in env.taskset)))

    return await in_asyncio(main)


async def test_train_client_gets_the_tokens_that_were_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_house(tmp_path, "tide") as house:
        client_config = train_config(house, tmp_path / "model", monkeypatch)

        async def main() -> vf.Response:
            client = vf.resolve_client(client_config)
            try:
                return await client.get_response(
                    ChatDialect(), {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
                    vf.SamplingConfig(temperature=0.7, max_tokens=40), session_id="one",
                )  # fmt: skip
            finally:
                await client.close()

        response = await in_asyncio(main)
        [ask] = house.twin.asked
        assert response.tokens is not None
        assert response.tokens.prompt_ids == list(ask.prompt_ids) == house.ids("<user>hi</user><assistant>")
        assert response.tokens.completion_ids == [*house.ids("tide"), EOS]
        assert response.tokens.completion_logprobs == [logprob_of(i) for i in range(5)]
        assert (response.message.content, response.finish_reason) == ("tide", "stop")


@pytest.mark.parametrize("kind", ["train", "eval"])
async def test_an_installed_environment_samples_from_it_and_scores(
    kind: str, installed_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_house(tmp_path, "tide") as house:
        train = kind == "train"
        client = train_config(house, tmp_path / "model", monkeypatch) if train else eval_config(house, monkeypatch)
        episodes = await play(client)
        assert [e.errors for e in episodes] == [[], [], []] and all(e.ok for e in episodes)
        rewards = [{name: r.score for name, r in e.traces[0].rewards.items()} for e in episodes]
        assert rewards == [{"right": 1.0, "letters": 1.0}, {"right": 0.0, "letters": 0.25}, {"right": 0.0, "letters": 0.25}]
        assert [e.traces[0].reward for e in episodes] == [1.5, 0.125, 0.125]
        asked = {house.tokenizer.decode(a.prompt_ids) for a in house.twin.asked}
        assert asked == {f"<system>one word</system><user>word {i}</user><assistant>" for i in range(3)}
        if train:
            [branch] = episodes[0].traces[0].branches
            prompt = house.ids("<system>one word</system><user>word 0</user><assistant>")
            assert branch.token_ids == [*prompt, *house.ids("tide"), EOS]
            assert branch.logprobs[-5:] == [logprob_of(i) for i in range(5)]


async def test_turns_and_tools_of_an_installed_environment(
    installed_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_house(tmp_path, "rock") as house:
        episodes = await play(train_config(house, tmp_path / "model", monkeypatch), kind="again", words=["kelp"])
        [trace] = episodes[0].traces
        assert trace.num_turns == 3 and trace.rewards["right"].score == 0
        last = house.tokenizer.decode(house.twin.asked[-1].prompt_ids)
        assert last.endswith("<user>no, again</user><assistant>")
    (tmp_path / "tool").mkdir()
    async with open_house(tmp_path / "tool", '<tool_call>{"name": "look_up", "arguments": {"number": 4}}</tool_call>') as house:
        episodes = await play(eval_config(house, monkeypatch), kind="tool", words=["kelp"])
        assert episodes[0].ok, episodes[0].errors
        assert "look_up" in house.tokenizer.decode(house.twin.asked[0].prompt_ids)
