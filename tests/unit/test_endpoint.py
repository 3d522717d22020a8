"""The endpoint's routes over a twin of what samples: forms, versions, refusals, the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from learner.endpoint.keys import KEY_FILE, endpoint_key
from learner.endpoint.sampling import seed_of
from learner.endpoint.settings import EndpointSection, is_loopback, read_listen
from learner.tasks.port import ChatFormat
from p2p.errors import ShoalError, UsageError
from p2p.version import Version
from tests.support.endpoint_house import EOS, MODEL, open_house
from tests.support.request_twin import logprob_of

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
HI = [{"role": "user", "content": "hi"}]


def error(answer: httpx.Response) -> dict[str, Any]:
    """Of an answer that says no: OpenAI's form, one line."""
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"} and "\n" not in found["message"]
    return dict(found)


async def test_a_completion_has_text_tokens_and_log_probabilities(tmp_path: Path) -> None:
    async with open_house(tmp_path, "hé!") as house, house.client() as client:
        wanted = house.ids("hé!")
        for prompt in ("ab", house.ids("ab"), [house.ids("ab")], ["ab"]):
            answer = await client.post(COMPLETIONS, json={"prompt": prompt, "logprobs": 0, "return_token_ids": True, "seed": 7})
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["text"] == "hé!" and choice["finish_reason"] == "stop" and choice["stop_reason"] is None
            assert choice["token_ids"] == [*wanted, EOS] and choice["prompt_token_ids"] == house.ids("ab")
            assert choice["logprobs"]["token_logprobs"] == [logprob_of(i) for i in range(5)]
            assert choice["logprobs"]["tokens"][0] == "h" and choice["logprobs"]["text_offset"][:2] == [0, 1]
            assert choice["weight_versions"] == [{"version": "1.4", "start": 0, "end": 5}]
            assert answer.json()["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
        ask = house.twin.asked[0]
        assert (ask.prompt_ids, ask.max_new_tokens, ask.stop_ids, ask.seed) == (tuple(house.ids("ab")), 16, (EOS,), 7)
        assert (ask.request_class, ask.temperature, ask.top_p) == ("serving", 1.0, 1.0)


async def test_several_choices_have_seeds_of_their_own_and_prompts_are_in_order(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house, house.client() as client:
        house.twin.answer = lambda ask: [*ask.prompt_ids, EOS]
        answer = (await client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2, "seed": 5})).json()
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
        assert {ask.seed for ask in house.twin.asked} == {seed_of(5, i) for i in range(4)}
        assert seed_of(5, 0) == 5 and len({seed_of(5, i) for i in range(100)}) == 100
        assert all(0 <= seed_of(seed, i) < 2**63 for seed in (-(2**63), -1, 2**63 - 1) for i in range(3))
        assert answer["usage"]["prompt_tokens"] == 2


async def test_a_chat_goes_through_the_template_with_tools_and_the_tasks_options(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
    task = ChatFormat(options={"loud": True}, tools=(tool,))
    async with open_house(tmp_path, chat_format=task) as house, house.client() as client:
        async def prompt(**more: Any) -> str:
            answer = await client.post(CHAT, json={"messages": HI, **more})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
            return str(house.tokenizer.decode(house.twin.asked[-1].prompt_ids))

        assert await prompt(tool_choice="none") == "<user>hi</user><assistant>!"
        assert '"name": "now"' in await prompt()
        other = {"type": "function", "function": {"name": "other"}}
        assert '"name": "other"' in await prompt(tools=[other])
        assert (await prompt(tool_choice="none", chat_template_kwargs={"loud": False})).endswith("<assistant>")
        assert house.twin.asked[-1].max_new_tokens == 500 - len(house.twin.asked[-1].prompt_ids)
        parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
        assert await prompt(messages=parts, tool_choice="none") == "<user>hi</user><assistant>!"


async def test_tokens_in_tokens_out_names_versions(tmp_path: Path) -> None:
    async with open_house(tmp_path, "abcdefgh") as house, house.client() as client:
        house.twin.versions = [Version(1, 4), Version(1, 5)]
        body = {
            "request_id": "mine", "model": MODEL, "token_ids": house.ids("ab"), "cache_salt": "x", "priority": 3,
            "sampling_params": {
                "max_tokens": 7, "logprobs": 1, "stop_token_ids": [EOS], "skip_special_tokens": False, "top_k": -1, "min_p": 0.0,
                "routed_experts_prompt_start": 4, "temperature": 0,
            },
        }  # fmt: skip
        answer = (await client.post(GENERATE, json=body)).json()
        (choice,) = answer["choices"]
        assert answer["request_id"] == "mine" and choice["token_ids"] == house.ids("abcdefg")
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [
            {"version": "1.4", "start": 0, "end": 3}, {"version": "1.5", "start": 3, "end": 7},
        ]  # fmt: skip
        first = choice["logprobs"]["content"][0]
        assert (first["token_id"], first["token"]) == (house.ids("a")[0], f"token_id:{house.ids('a')[0]}")
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == [logprob_of(i) for i in range(7)]
        assert house.twin.asked[0].temperature == 0


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line:
                found.append(line.removeprefix("data: "))
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


async def test_streams_split_no_character_and_say_in_the_end_what_was_used(tmp_path: Path) -> None:
    text = "añ€𝄞 done"
    async with open_house(tmp_path, text) as house, house.client() as client:
        house.twin.batch = 1
        more = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        found = await events(client, CHAT, {"messages": HI, **more})
        assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert found[0]["prompt_token_ids"] == list(house.twin.asked[0].prompt_ids)
        assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == len(house.ids(text)) + 1
        choices = [one["choices"][0] for one in found[1:-1]]
        pieces = [choice["delta"].get("content", "") for choice in choices]
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
        assert [i for c in choices for i in c["token_ids"]] == [*house.ids(text), EOS]
        told = [one["logprob"] for choice in choices for one in choice["logprobs"]["content"]]
        assert told == [logprob_of(i) for i in range(len(house.ids(text)) + 1)]
        assert [c["finish_reason"] for c in choices][-2:] == [None, "stop"]
        assert choices[-1]["weight_versions"] == [{"version": "1.4", "start": 0, "end": len(house.ids(text)) + 1}]
        assert found[1]["choices"][0]["logprobs"]["content"][0]["bytes"] == [ord("a")]
        found = await events(client, COMPLETIONS, {"prompt": "x", "n": 2, "max_tokens": 40})
        for index in (0, 1):
            rows = [c for one in found for c in one["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in rows) == text and rows[-1]["finish_reason"] == "stop"
        found = await events(client, GENERATE, {"token_ids": [65], "sampling_params": {"max_tokens": 40}})
        assert [i for one in found for i in one["choices"][0]["token_ids"]] == [*house.ids(text), EOS]


async def test_a_stop_string_cuts_the_text_and_cancels_the_sequence(tmp_path: Path) -> None:
    async with open_house(tmp_path, "one\n\ntwo" + "x" * 300) as house, house.client() as client:
        for stream in (False, True):
            body = {"prompt": "a", "max_tokens": 400, "stop": ["\n\n", "never"], "return_token_ids": True}
            if stream:
                rows = [one["choices"][0] for one in await events(client, COMPLETIONS, body)]
            else:
                rows = (await client.post(COMPLETIONS, json=body)).json()["choices"]
            assert "".join(row["text"] for row in rows) == "one"
            assert [i for row in rows for i in row["token_ids"]] == house.ids("one\n\n")
            assert (rows[-1]["finish_reason"], rows[-1]["stop_reason"]) == ("stop", "\n\n")
        await trio.testing.wait_all_tasks_blocked()
        assert house.twin.cancelled == 2 and house.twin.active == 0


@pytest.mark.parametrize(
    ("headers", "status", "asked"),
    [
        ({"X-Shoal-Min-Version": "1.4"}, 200, (Version(1, 4), None)),
        ({"X-Shoal-Min-Version": "3"}, 200, (Version(1, 3), None)),
        ({"X-Shoal-Exact-Version": "4"}, 200, (None, Version(1, 4))),
        ({"X-Shoal-Min-Version": "1.9"}, 409, None),
        ({"X-Shoal-Exact-Version": "1.5"}, 409, None),
        ({"X-Shoal-Exact-Version": "1.2"}, 409, None),
        ({"X-Shoal-Exact-Version": "1.2", "X-Shoal-Min-Version": "1.3"}, 400, None),
        ({"X-Shoal-Min-Version": "latest"}, 400, None),
        ({"X-Shoal-Min-Version": "1.2.3"}, 400, None),
        ({"X-Shoal-Min-Version": "9" * 4000}, 400, None),
        ({"X-Shoal-Min-Version": "-1"}, 400, None),
    ],
)
async def test_versions_are_asked_for_in_headers(tmp_path: Path, headers: dict[str, str], status: int, asked: Any) -> None:
    async with open_house(tmp_path) as house, house.client(**headers) as client:
        for stream in (False, True):
            answer = await client.post(CHAT, json={"messages": HI, "stream": stream})
            assert answer.status_code == status, answer.text
            if status == 200:
                assert (house.twin.asked[-1].min_version, house.twin.asked[-1].exact_version) == asked
            else:
                assert error(answer)["type"] == "invalid_request_error"
            never = headers.get("X-Shoal-Exact-Version") == "1.2"  # no node will ever serve it again
            assert ("retry-after" in answer.headers) == (status == 409 and not never)


async def test_full_not_ready_and_broken_each_have_their_status(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house, house.client() as client:
        for stream in (False, True):
            body = {"messages": HI, "stream": stream}
            house.twin.most = 0
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == 429 and answer.headers["retry-after"] and "wait already" in error(answer)["message"]
            house.twin.most = 100
            house.published.clear()
            answer = await client.post(CHAT, json=body)
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert (await client.get("/health")).status_code == 503 and (await client.get("/liveness")).status_code == 200
            house.published.append(Version(1, 4))
            assert (await client.get("/health")).status_code == 200
        house.twin.broken = ShoalError("the last node refuses it")
        answer = await client.post(CHAT, json={"messages": HI, "n": 3})
        assert answer.status_code == 500 and error(answer)["message"] == "the last node refuses it"
        async with client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as cut:
            lines = [line async for line in cut.aiter_lines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "the last node refuses it"
        house.twin.broken = RuntimeError("a bug")
        answer = await client.post(CHAT, json={"messages": HI})
        assert answer.status_code == 500 and "a bug" not in answer.text
        house.twin.broken = None
        assert (await client.post(CHAT, json={"messages": HI})).status_code == 200
        assert house.twin.active == 0


async def test_a_request_that_takes_too_long_ends(tmp_path: Path) -> None:
    async with open_house(tmp_path, request_s=0.2) as house, house.client() as client:
        house.twin.pause_s = 30
        answer = await client.post(CHAT, json={"messages": HI})
        assert answer.status_code == 504 and "endpoint.request_s" in error(answer)["message"]
        with pytest.raises(httpx.RemoteProtocolError):
            await events(client, CHAT, {"messages": HI})
        await house.settled()


BAD = [
    (COMPLETIONS, b"{", "invalid_json", None),
    (COMPLETIONS, b"[1]", "invalid_json", None),
    (COMPLETIONS, b"\xff\xfe", "invalid_json", None),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "invalid_json", None),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', "invalid_json", None),
    (COMPLETIONS, b"[" * 100_000, "invalid_json", None),
    (CHAT, b'{"messages": ' + b'{"a":' * 50_000, "invalid_json", None),
    (COMPLETIONS, {}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": ""}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": []}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [1, True]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [257]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "invalid_value", "prompt"),
    (COMPLETIONS, {"prompt": "a" * 490}, "context_length_exceeded", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 500}, "context_length_exceeded", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**40}, "context_length_exceeded", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "invalid_value", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 10**9}, "invalid_value", "n"),
    (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "invalid_value", "n"),
    (COMPLETIONS, {"prompt": "a", "n": "2"}, "invalid_value", "n"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "invalid_value", "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "invalid_value", "top_p"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "invalid_value", "seed"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "invalid_value", "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": 5}, "invalid_value", "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 33}, "invalid_value", "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * 1001}, "invalid_value", "stop"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 5}, "invalid_value", "logprobs"),
    (COMPLETIONS, {"prompt": "a", "top_k": 20}, "unsupported_parameter", "top_k"),
    (COMPLETIONS, {"prompt": "a", "echo": True}, "unsupported_parameter", "echo"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 0.5}, "unsupported_parameter", "presence_penalty"),
    (COMPLETIONS, {"prompt": "a", "temprature": 0.5}, "unknown_parameter", "temprature"),
    (CHAT, {"messages": []}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "forbidden", "content": "a"}]}, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": [5]}]}, "invalid_value", "messages"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, "unknown_parameter", "chat_template"),
    (CHAT, {"messages": HI} | {f"k{i}": 1 for i in range(100_000)}, "unknown_parameter", "k0"),
    (CHAT, {"messages": ["a"] * 100_000}, "invalid_value", "messages.0"),
    (GENERATE, {"token_ids": ["a"] * 100_000}, "invalid_value", "token_ids.0"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "invalid_value", "chat_template_kwargs"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "invalid_value", "tool_choice"),
    (CHAT, {"messages": HI, "continue_final_message": True}, "invalid_value", "continue_final_message"),
    (GENERATE, {"token_ids": []}, "invalid_value", "token_ids"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "unsupported_parameter", "sampling_params.min_p"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"best": 1}}, "unknown_parameter", "sampling_params.best"),
    (GENERATE, {"token_ids": [1], "features": {"mm_hashes": {}}}, "unsupported_parameter", "features"),
]  # fmt: skip
"""Route, body, code, parameter."""


async def test_what_cannot_be_had_is_refused_in_one_line(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house, house.client() as client:
        for path, body, code, param in BAD:
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            answer = await client.post(path, **sent)
            found = error(answer)
            assert (answer.status_code, found["code"], found["param"]) == (400, code, param), (body, found)
            assert len(found["message"]) < 1200
        assert house.twin.asked == []
        assert house.endpoint.status()["refused"] == len(BAD)


async def test_fields_that_change_nothing_are_ignored(tmp_path: Path) -> None:
    async with open_house(tmp_path) as house, house.client() as client:
        body = {
            "messages": HI, "user": "me", "metadata": {"a": "b"}, "store": False, "top_k": -1, "presence_penalty": 0,
            "repetition_penalty": 1.0, "stop": None, "seed": None, "max_tokens": None, "response_format": {"type": "text"},
            "parallel_tool_calls": True, "logit_bias": {}, "min_p": 0.0, "tools": None, "best_of": None, "model": MODEL,
        }  # fmt: skip
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert house.twin.asked[-1].max_new_tokens == 500 - len(house.twin.asked[-1].prompt_ids)


async def test_who_may_ask(tmp_path: Path) -> None:
    async with open_house(tmp_path, hosts=["shoal.example.org"]) as house, house.client() as client:
        for key in ("", "Bearer", "Bearer x", f"Basic {house.key}", f"Bearer {house.key}x", "Bearer é"):
            answer = await client.post(CHAT, json={"messages": HI}, headers={"Authorization": key.encode("latin-1")})  # type: ignore[dict-item]
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer" and house.key not in answer.text
            answer = await client.get("/v1/models", headers={"Authorization": key.encode("latin-1")})  # type: ignore[dict-item]
            assert answer.status_code == 401
        for host, status in (("evil.example.org", 421), ("shoal.example.org:80", 200), ("localhost:1", 200), ("127.0.0.1", 200)):
            assert (await client.get("/v1/models", headers={"Host": host})).status_code == status
            assert (await client.get("/health", headers={"Host": host})).status_code == status
        assert (await client.get("/v1/other")).status_code == 404
        assert (await client.get(CHAT)).status_code == 405
        assert (await client.post("/v1/models", json={})).status_code == 405
        assert (await client.post(CHAT, json={"messages": HI, "model": "other"})).status_code == 404
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == (MODEL, 500)
        assert (await client.get(f"/v1/models/{MODEL}")).json() == card
        assert (await client.get("/v1/models/other")).status_code == 404


async def test_a_client_that_leaves_cancels_its_sequences(tmp_path: Path) -> None:
    async with open_house(tmp_path, "x" * 400, stop=False) as house, house.client() as client:
        house.twin.pause_s = 0.05
        for stream in (False, True):
            with trio.move_on_after(0.3):
                await client.post(CHAT, json={"messages": HI, "n": 3, "stream": stream})
        async with client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break
        await client.aclose()
        await house.settled()
        assert house.twin.cancelled == 7 and house.endpoint.status()["left"] == 3


async def test_a_long_prompt_is_tokenized_in_a_thread_and_is_the_same(tmp_path: Path) -> None:
    async with open_house(tmp_path, max_model_len=20_000) as house, house.client() as client:
        text = "a€" * 4000
        assert (await client.post(COMPLETIONS, json={"prompt": text})).status_code == 200
        assert list(house.twin.asked[-1].prompt_ids) == house.ids(text)
        assert (await client.post(CHAT, json={"messages": [{"role": "user", "content": text}]})).status_code == 200


def test_the_key_is_made_once_and_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = endpoint_key(tmp_path, "")
    file = tmp_path / KEY_FILE
    assert len(key) >= 40 and file.stat().st_mode & 0o777 == 0o600
    assert endpoint_key(tmp_path, "") == key
    file.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        endpoint_key(tmp_path, "")
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(UsageError, match="holds no key"):
        endpoint_key(tmp_path, "")
    assert endpoint_key(tmp_path, "KEY", {"KEY": "a" * 20}) == "a" * 20
    for value in ({}, {"KEY": "short"}, {"KEY": "with blanks in it, long"}, {"KEY": "é" * 20}):
        with pytest.raises(UsageError, match="environment variable KEY"):
            endpoint_key(tmp_path, "KEY", value)


@pytest.mark.parametrize(
    "text", ["7463", ":7463", "host:1", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-1", "::1:x"]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ADDRESS:PORT"):
        EndpointSection(listen=text)


def test_addresses() -> None:
    assert read_listen("127.0.0.1:7463") == ("127.0.0.1", 7463)
    assert read_listen("localhost:0") == ("127.0.0.1", 0)
    assert read_listen("[::1]:80") == ("::1", 80)
    assert is_loopback("[::1]:80") and not is_loopback("0.0.0.0:80")
