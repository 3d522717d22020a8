"""How a row becomes a prompt: columns, templates, system prompt and examples. Pure; must not know files or tokenizers."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from learner.tasks.port import ChatMessage, listed
from learner.tasks.settings import TaskSettings
from p2p.errors import UsageError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak in a chat: what chat templates know."""


class BadRow(Exception):
    """A row that makes no prompt; the text names the column."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a row asks, without what stands before every prompt."""

    text: str
    """the question; of messages the last one"""
    messages: tuple[ChatMessage, ...] = ()
    """empty: `text` alone"""


class PromptForm:
    """Rows to prompts, as the settings say. UsageError for a template that is none."""

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings
        self._template = template_parts(settings.template)

    def asked(self, row: Mapping[str, Any]) -> Asked:
        """What a row asks. BadRow when it asks nothing."""
        s = self._settings
        if self._template:
            text = "".join(part.literal + (_written(row, part.column) if part.column else "") for part in self._template)
            if not text.strip():
                raise BadRow("the template makes an empty prompt of it")
            return Asked(text)
        column = s.messages or s.prompt
        value = _value(row, column)
        if isinstance(value, str) and not s.messages:
            if not value.strip():
                raise BadRow(f'column "{column}" is empty')
            return Asked(value)
        messages = _messages(value, column)
        if not s.chat:
            raise BadRow(f'column "{column}" has chat messages, and task.chat = false')
        return Asked(str(messages[-1]["content"]), messages)

    def chat(self, asked: Asked) -> tuple[ChatMessage, ...]:
        """The whole chat; () when it is the question as the one user turn."""
        return led(self._settings, asked.messages or ({"role": "user", "content": asked.text},), always=bool(asked.messages))

    def raw(self, asked: Asked) -> str:
        """The whole prompt as bare text: examples are question and answer, with an empty line between."""
        s = self._settings
        shots = [f"{shot.prompt}{shot.answer}" for shot in s.few_shot]
        return "\n\n".join([*([s.system_prompt] if s.system_prompt else []), *shots, asked.text])


def led(settings: TaskSettings, messages: Sequence[ChatMessage], *, always: bool = False) -> tuple[ChatMessage, ...]:
    """`messages` with the system prompt and the examples before them; () where there are none, unless `always`. A system message
    of their own stays the only one."""
    own = tuple(messages[:1]) if messages[0]["role"] in ("system", "developer") else ()
    system = own or (({"role": "system", "content": settings.system_prompt},) if settings.system_prompt else ())
    shots = [
        {"role": role, "content": text}
        for shot in settings.few_shot for role, text in (("user", shot.prompt), ("assistant", shot.answer))
    ]  # fmt: skip
    before = (*system, *shots)
    return (*before, *messages[len(own) :]) if before or always else ()


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """A literal text, and the column after it ("" at the end)."""

    literal: str
    column: str


def template_parts(template: str) -> tuple[TemplatePart, ...]:
    """A template with {column}, read. UsageError, with what to write, where it is none."""
    parts = []
    advice = "a brace itself is written {{ or }}"
    try:
        for literal, column, form, conversion in string.Formatter().parse(template):
            if form or conversion or (column is not None and not column.strip()):
                raise UsageError(f"task.template: {{{column}{(form and ':' + form) or ''}}} is no column's name; {advice}")
            parts.append(TemplatePart(literal, column or ""))
    except ValueError as error:
        raise UsageError(f"task.template: {error}; {advice}") from None
    if template and not any(part.column for part in parts):
        raise UsageError("task.template names no {column}: every prompt would be the same")
    return tuple(parts)


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise BadRow(f'column "{column}" is missing ({listed(row)})')
    if row[column] is None:
        raise BadRow(f'column "{column}" is null')
    return row[column]


def _written(row: Mapping[str, Any], column: str) -> str:
    value = _value(row, column)
    if isinstance(value, (list, dict)):
        raise BadRow(f'column "{column}" is no text or number, and the template names it')
    return str(value)


def _messages(value: Any, column: str) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list):
        raise BadRow(f'column "{column}" is a {type(value).__name__}, neither text nor a list of chat messages')
    if not value:
        raise BadRow(f'column "{column}" is empty')
    for i, message in enumerate(value):
        where = f'column "{column}", message {i + 1}'
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadRow(f"{where}: its role is none of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise BadRow(f"{where}: its content is no text")
    last = value[-1]
    if last["role"] == "assistant":
        raise BadRow(f'column "{column}": the last message is the assistant\'s, so there is nothing to answer')
    if not str(last["content"] or "").strip():
        raise BadRow(f'column "{column}": the last message is empty')
    return tuple(value)
