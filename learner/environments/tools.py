"""Tools: the schemas of typed functions, the calls in a model's text, and making them. Must not know tokens or processes."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from learner.environments.environment import Environment, ToolCall, tools_of
from learner.tasks.port import ChatMessage
from p2p.errors import UsageError

MAX_CALLS = 16
"""Tool calls of one turn that are made; further ones are answered with a refusal. Models seldom make more than a few."""

MAX_RESULT = 64_000
"""Characters of a tool's answer that the model is told, some 16,000 tokens; the rest is cut, and said to be."""


class FoundCalls(NamedTuple):
    """The calls in a text."""

    calls: tuple[ToolCall, ...]
    wrong: tuple[str, ...]
    """of each call that cannot be read: what is wrong with it, for the model to read"""


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"```(?:json|tool_call)\s*\n(.*?)```", re.DOTALL)


def _hermes(text: str) -> list[str]:
    return [found.strip() for found in _HERMES.findall(text)]


def _llama(text: str) -> list[str]:
    """Llama 3's: the whole turn is one object, or several with ";" between."""
    bare = text.strip().removeprefix("<|python_tag|>").strip()
    return [part for part in re.split(r";\s*(?=\{)", bare) if part] if bare.startswith("{") else []


def _fenced(text: str) -> list[str]:
    return [found.strip() for found in _FENCE.findall(text)]


PARSERS: dict[str, Callable[[str], list[str]]] = {"hermes": _hermes, "llama": _llama, "fenced": _fenced}
"""Name -> from a turn's text to the JSON texts of its calls. "hermes": `<tool_call>{...}</tool_call>`, as Hermes and Qwen write;
"llama": a turn that is an object, as Llama 3 does; "fenced": code blocks marked json or tool_call."""


def find_calls(text: str, parser: str, turn: int) -> FoundCalls:
    """The tool calls of a model's text. UsageError for a parser that there is not. Never raises for a text."""
    if parser not in PARSERS:
        raise UsageError(f"tool_parser = {parser!r} is not known; known: {', '.join(PARSERS)}")
    calls: list[ToolCall] = []
    wrong: list[str] = []
    for i, found in enumerate(PARSERS[parser](text)):
        if i >= MAX_CALLS:
            wrong.append(f"more than {MAX_CALLS} tool calls in a turn: the others were not made")
            break
        try:
            value = json.loads(found)
        except (ValueError, RecursionError) as error:
            wrong.append(f"the tool call is not JSON: {error!s:.200}")
            continue
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            wrong.append('a tool call is an object {"name": ..., "arguments": {...}}')
            continue
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, dict):
            wrong.append(f"the arguments of {value['name']:.80} are not an object")
            continue
        calls.append(ToolCall(value["name"], arguments, f"c{turn % 10**4:04d}{i:04d}"))  # some templates want nine characters
    return FoundCalls(tuple(calls), tuple(wrong))


def tool_schemas(environment: Environment) -> list[dict[str, Any]]:
    """JSON schemas of its tools, for the chat template. UsageError names a function without types or docstring.

    transformers imports torch for it, so not for the head's process.
    """
    tools = tools_of(environment)
    if not tools:
        return []
    from transformers.utils import get_json_schema

    found = []
    for name, function in tools.items():
        try:
            schema = get_json_schema(function)
        except Exception as error:  # its own errors have no public base
            reason = " ".join(str(error).split())
            raise UsageError(f"tool {name} of {type(environment).__name__} needs types and a docstring: {reason}") from None
        schema["function"].pop("return", None)  # for the model it is noise, and OpenAI's shape has none
        found.append(schema)
    return found


async def call_tool(
    tools: Mapping[str, Callable[..., Any]], call: ToolCall, in_thread: Callable[..., Awaitable[Any]],
    limit: Callable[[ToolCall, BaseException], str] = lambda call, error: "",
) -> ChatMessage:  # fmt: skip
    """The tool's message. Whatever goes wrong in the tool is told to the model. `in_thread(function, **arguments)` runs what is
    not async. `limit(call, error)` hears what it raised, and says which limit of its process that was; "": none."""
    content = await _result(tools, call, in_thread, limit)
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}


async def _result(
    tools: Mapping[str, Callable[..., Any]], call: ToolCall, in_thread: Callable[..., Awaitable[Any]],
    limit: Callable[[ToolCall, BaseException], str],
) -> str:  # fmt: skip
    function = tools.get(call.name)
    if function is None:
        return f"error: there is no tool {call.name:.80}; there are: {', '.join(tools)}"
    try:
        inspect.signature(function).bind(**call.arguments)
    except TypeError as error:
        return f"error: {call.name}: {error!s:.300}"
    try:
        if inspect.iscoroutinefunction(function):
            value = await function(**call.arguments)
        else:
            value = await in_thread(function, **call.arguments)
            if isinstance(value, Awaitable):
                value = await value
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except Exception as error:
        why = limit(call, error)
        return f"error: {type(error).__name__}: {error!s:.300}{f' ({why})' if why else ''}"
    return text if len(text) <= MAX_RESULT else text[:MAX_RESULT] + " [cut]"
