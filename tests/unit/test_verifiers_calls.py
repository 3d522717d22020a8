"""The model calls of somebody else's rollouts as turns: what is new in a call, and what cannot be gone on with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from learner.environments.verifiers_calls import Conversation, WrongCall, as_events, plain

PROMPT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def open_conversation(tools: bool = False) -> Conversation:
    return Conversation(PROMPT, [TOOL] if tools else [], "hermes")


def body(*more: dict[str, Any], tools: bool = False, **options: Any) -> dict[str, Any]:
    return {"messages": [*PROMPT, *more], **({"tools": [TOOL]} if tools else {}), **options}


def test_a_call_is_the_last_one_the_turn_and_what_is_new() -> None:
    conversation = open_conversation()
    assert conversation.heard(body()) == []
    answer = conversation.answer("hello ")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello "} and choice["finish_reason"] == "stop"
    back = {"role": "assistant", "content": [{"type": "text", "text": "hello"}], "refusal": None}  # as a client may send it back
    new = {"role": "user", "content": [{"type": "text", "text": "more"}], "name": None}
    assert conversation.heard(body(back, new)) == [{"role": "user", "content": "more"}]
    assert conversation.answer("bye", "length")["choices"][0]["finish_reason"] == "length"


def test_tool_calls_are_read_from_the_text_and_answered_by_the_environment() -> None:
    conversation = open_conversation(tools=True)
    conversation.heard(body(tools=True))
    [choice] = conversation.answer("I add. " + CALL)["choices"]
    assert choice["message"]["content"] == "I add." and choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1}
    spaced = {**call, "function": {**call["function"], "arguments": '{ "a":1 }'}}  # the same call in other words
    told = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    back = {"role": "assistant", "content": "I add.", "tool_calls": [spaced]}
    assert conversation.heard(body(back, told, tools=True)) == [told]
    events = as_events({"choices": [choice]}).decode().split("\n\n")
    assert json.loads(events[0][6:])["choices"][0]["delta"]["tool_calls"][0]["index"] == 0 and events[2] == "data: [DONE]"


def test_text_that_only_looks_like_a_call_stays_text() -> None:
    conversation = open_conversation(tools=True)
    conversation.heard(body(tools=True))
    text = "<tool_call>{nonsense</tool_call>"
    assert conversation.answer(text)["choices"][0]["message"] == {"role": "assistant", "content": text}
    other = open_conversation()
    other.heard(body())
    assert "tool_calls" not in other.answer(CALL)["choices"][0]["message"], "no tools, no calls"


HELLO, MORE = {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (body(), "leaves out what was said"),
        (body(HELLO), "adds nothing"),
        (body({"role": "assistant", "content": "other"}, MORE), r"rewrites what was said \(message 3, assistant\)"),
        ({"messages": [PROMPT[0], MORE, HELLO, MORE]}, r"message 2, user"),
        (body(HELLO, MORE, HELLO), "the model did not write"),
        (body(HELLO, MORE, tools=True), "other tools"),
        (body(HELLO, MORE, n=2), "n = 2"),
        (body(HELLO, MORE, tool_choice="required"), "tool_choice"),
        (body(HELLO, MORE, response_format={"type": "json_object"}), "response_format"),
        (body(HELLO, {"role": "user", "content": [{"type": "image_url"}]}), "no text"),
        ({"messages": "hi"}, "no messages"),
    ],
)
def test_what_cannot_be_gone_on_with_says_why(call: dict[str, Any], why: str) -> None:
    conversation = open_conversation()
    conversation.heard(body())
    conversation.answer("hello")
    with pytest.raises(WrongCall, match=why):
        conversation.heard(call)


def test_a_first_call_is_the_prompt_that_the_model_was_given() -> None:
    with pytest.raises(WrongCall, match="1 messages more than the prompt"):
        open_conversation().heard(body(MORE))
    assert plain({"role": "user", "content": None}) == {"role": "user", "content": ""}
