"""From a request's prompt or messages to token ids. Must not know HTTP or nodes; the tokenizer is any Hugging Face tokenizer.

A long text is tokenized in a thread: a megabyte takes a second, in which the head would do nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import trio

from learner.endpoint.errors import bad_request
from learner.endpoint.schemas import ChatBody, CompletionBody
from learner.tasks.port import ChatFormat
from p2p.errors import ShoalError

SHORT_TEXT = 4096
"""Bytes of a body whose text is tokenized at once, which takes a millisecond: a thread costs a tenth of that, and a wait."""

MOST_THREADS = 2
"""Threads that tokenize at once: more would take the interpreter's lock from the head."""

TEMPLATE_OWN = frozenset((
    "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "tokenizer_kwargs", "add_generation_prompt", "continue_final_message",
    "return_assistant_tokens_mask",
))  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are no variables of a template: a client must not set these, a template
of its own above all."""

Result = TypeVar("Result")


class PromptReader:
    """Tokenizes for one run."""

    def __init__(self, tokenizer: Any, vocab_size: int, chat_format: ChatFormat) -> None:
        self._tokenizer, self._vocab_size, self._format = tokenizer, vocab_size, chat_format
        self._threads = trio.CapacityLimiter(MOST_THREADS)

    async def completion(self, body: CompletionBody, size: int) -> list[tuple[int, ...]]:
        """`size`: bytes of the request. ApiError for what is no prompt."""
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise bad_request("prompt: want a text, a list of token ids, or a list of either", "prompt")
        if all(isinstance(one, str) for one in prompt):
            encode = lambda: [self._encode(text, body.add_special_tokens) for text in prompt]
            return await self._aside(encode, size)
        if all(type(one) is int for one in prompt):
            prompt = [prompt]
        return [self.checked(ids, "prompt") for ids in prompt]

    async def chat(self, body: ChatBody, size: int) -> list[tuple[int, ...]]:
        """The messages under the tokenizer's own chat template. ApiError for messages that it does not take."""
        if not self._tokenizer.chat_template:
            raise bad_request("the model's tokenizer has no chat template: use /v1/completions", "messages")
        if wrong := sorted(TEMPLATE_OWN.intersection(body.chat_template_kwargs)):
            raise bad_request(f"chat_template_kwargs: {wrong[0]} is no variable of a template", "chat_template_kwargs")
        if body.tool_choice not in ("auto", "none"):
            raise bad_request('tool_choice: nodes cannot be made to call a tool; "auto" or "none"', "tool_choice")
        if body.add_generation_prompt and body.continue_final_message:
            raise bad_request("add_generation_prompt and continue_final_message do not go together", "continue_final_message")
        messages = [_message(message, i) for i, message in enumerate(body.messages)]
        tools = [] if body.tool_choice == "none" else body.tools or [dict(tool) for tool in self._format.tools]
        options = {**self._format.options, **body.chat_template_kwargs}

        def render() -> list[tuple[int, ...]]:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message, **options,
            )  # fmt: skip
            return [self._encode(text, body.add_special_tokens)]

        try:
            return await self._aside(render, size)
        except ShoalError:
            raise
        except Exception as error:  # a template is a program, and says what it does not take in its own way
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise bad_request(f"messages: the model's chat template does not take them: {why[:300]}", "messages") from None

    def checked(self, ids: object, param: str) -> tuple[int, ...]:
        """Token ids that the model has. ApiError for anything else."""
        if not isinstance(ids, list) or not ids:
            raise bad_request(f"{param}: an empty prompt", param)
        if not all(type(one) is int and 0 <= one < self._vocab_size for one in ids):
            raise bad_request(f"{param}: want token ids from 0 to {self._vocab_size - 1}", param)
        return tuple(ids)

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        return self.checked(list(self._tokenizer.encode(text, add_special_tokens=special)), "prompt")

    async def _aside(self, work: Callable[[], Result], size: int) -> Result:
        """In a thread when it is long. What a client that left no longer wants is finished there nevertheless."""
        if size <= SHORT_TEXT:
            return work()
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)  # type: ignore[call-arg]


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message as templates take it: its parts of text as one text, and tool calls' arguments as values."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise bad_request(f"{where}: no role", "messages")
    found = {key: value for key, value in message.items() if value is not None}
    content = found.get("content", "")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) and part.get("type") == "text" else {} for part in content]
        texts = [text for part in parts if isinstance(text := part.get("text"), str)]
        if len(texts) < len(parts):
            raise bad_request(f"{where}: only parts of text are taken", "messages")
        content = "".join(texts)
    if not isinstance(content, str):
        raise bad_request(f"{where}: content is neither a text nor parts of text", "messages")
    calls = found.get("tool_calls", [])
    if not isinstance(calls, list):
        raise bad_request(f"{where}: tool_calls is no list", "messages")
    if calls:
        found["tool_calls"] = [_tool_call(call, where) for call in calls]
    return {**found, "content": content}


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise bad_request(f"{where}: a tool call without a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # what the model wrote was no JSON: the template shows it as it was
    return {**call, "function": {**function, "arguments": arguments}}
