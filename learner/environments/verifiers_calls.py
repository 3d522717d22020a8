"""An episode as the model calls of somebody else's code: which messages are new, and what an answer looks like there. Pure.

Such code keeps the conversation and sends all of it with each call. What the model sampled stays as it is with us: of a call only
what comes after the model's last turn is taken, and what comes before must be what was said before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from learner.environments.tools import find_calls
from learner.tasks.port import ChatMessage

MODEL = "policy"
"""What the model is called to an environment: it is never the same weights for long."""

_MARKS = {"hermes": "<tool_call>", "llama": "", "fenced": "```"}
"""By tool parser, what a turn's first call begins with: the text before it is the turn's content."""

_ENDS = {"length": "length"}
"""By why an episode is over, what OpenAI's routes call it; a turn that ended by itself is "stop"."""


class WrongCall(Exception):
    """A model call that an episode cannot be continued with; says why."""


class Said(NamedTuple):
    """What counts of a message when two are compared. Everything else, clients add and drop."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...]
    call_id: str


def plain(message: ChatMessage) -> dict[str, Any]:
    """The message with its content as a text, and without what is empty. WrongCall for one that is no text."""
    found = {key: value for key, value in message.items() if value is not None and key not in ("refusal", "annotations", "audio")}
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise WrongCall(f"a {message.get('role')!s:.20} message whose content is no text: models read text only")
    return {**found, "role": str(message.get("role")), "content": content or ""}


def said(message: ChatMessage) -> Said:
    """What counts of a message."""
    message = plain(message)
    calls = [call.get("function") or {} for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    named = tuple((str(call.get("name")), _arguments(call.get("arguments"))) for call in calls)
    return Said(message["role"], message["content"].strip(), named, str(message.get("tool_call_id", "")))


def _arguments(value: Any) -> str:
    try:
        return json.dumps(json.loads(value) if isinstance(value, str) else value, sort_keys=True)
    except (ValueError, RecursionError):
        return str(value)


class Conversation:
    """What was said in an episode so far, as its environment was told."""

    def __init__(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], parser: str) -> None:
        """`messages`: the prompt that the model was given; `tools`: the schemas in it; `parser`: how the model writes calls."""
        self._said = [said(message) for message in messages]
        self._tools, self._parser = list(tools), parser
        self.turns = 0
        """of the model, answered"""

    def heard(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of a call that are new; none in an episode's first. WrongCall where it does not go on from the last."""
        messages = checked_messages(body)
        if list(body.get("tools") or ()) != self._tools:
            raise WrongCall("the call names other tools than the episode's first: the model was told of those")
        spoken = [said(message) for message in messages]
        known = len(self._said)
        for i, (now, before) in enumerate(zip(spoken, self._said, strict=False)):
            if now != before:
                raise WrongCall(f"the call rewrites what was said (message {i + 1}, {before.role}), which is not supported")
        if len(spoken) < known:
            raise WrongCall(f"the call leaves out what was said ({len(spoken)} messages of {known}), which is not supported")
        new = [plain(message) for message in messages[known:]]
        if self.turns and not new:
            raise WrongCall("the call adds nothing to the model's last turn")
        if not self.turns and new:
            raise WrongCall(f"the first call has {len(new)} messages more than the prompt that the model was given")
        if any(message["role"] == "assistant" for message in new):
            raise WrongCall("the call has a turn of the assistant's that the model did not write")
        self._said += spoken[known:]
        return new

    def answer(self, text: str, over: str = "") -> dict[str, Any]:
        """The chat completion for a turn of the model's with this text, which is part of the conversation from here on."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        found = find_calls(text, self._parser, self.turns).calls if self._tools else ()
        if found:
            message["content"] = text.partition(_MARKS[self._parser])[0].rstrip() if _MARKS[self._parser] else ""
            functions = [{"name": call.name, "arguments": json.dumps(dict(call.arguments))} for call in found]
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(found, functions, strict=True)
            ]
        finish = _ENDS.get(over, "tool_calls" if found else "stop")
        self._said.append(said(message))
        self.turns += 1
        return {
            "id": f"turn-{self.turns}", "object": "chat.completion", "created": 0, "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        }  # fmt: skip


def checked_messages(body: Mapping[str, Any]) -> list[ChatMessage]:
    """A call's messages. WrongCall for a call that wants what a turn cannot give."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise WrongCall("the call has no messages")
    if body.get("n") not in (None, 1):
        raise WrongCall(f"the call wants n = {body['n']!s:.20} answers; a turn is one")
    if body.get("tool_choice") not in (None, "auto"):
        raise WrongCall("the call has a tool_choice; the model is free to call a tool or not")
    if body.get("response_format") not in (None, {"type": "text"}):
        raise WrongCall("the call has a response_format; turns are not constrained")
    return messages


def as_events(completion: Mapping[str, Any]) -> bytes:
    """The completion as a stream of one chunk, for a caller that asked for a stream."""
    [choice] = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    chunk = {**completion, "object": "chat.completion.chunk"}
    first = {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    last = {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in (first, last)) + b"data: [DONE]\n\n"
