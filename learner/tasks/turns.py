"""From an environment's messages to the token ids that follow the model's turn. Pure; must not know nodes, versions or torch.

What the model sampled is never rendered and never tokenised again. A template is rendered with a placeholder in place of the
model's turn, and only what follows the placeholder is taken: the end of the turn, the messages, and the beginning of the next
turn. So a template that changes earlier turns (Qwen3 drops their thinking) changes nothing that was sampled or given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.tasks.port import ChatFormat, ChatMessage, Prompt, Task
from learner.tasks.prompting import decode_completion, encode_prompt, stop_tokens
from p2p.errors import UsageError

ROLES = ("user", "tool", "system")
"""Whom an environment may speak as. Never the assistant: that is the model."""


@dataclass(frozen=True, slots=True)
class TurnRenderer:
    """Makes given tokens of messages, for one tokenizer and one task."""

    tokenizer: Any
    """any Hugging Face tokenizer"""
    stop_ids: Collection[int]
    """the model's own tokens that end a turn; those of `stop` are not among them"""
    chat: bool
    """whether the task's prompts are chat prompts; otherwise messages are texts, which follow as they are"""
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    stop: Sequence[str] = ()
    """strings that end a turn of the model: an environment does not read them"""

    def given(self, messages: Sequence[ChatMessage], sampled: Sequence[int]) -> tuple[int, ...]:
        """Token ids that follow a turn whose sampled ids end as these do. UsageError where the template cannot say it."""
        if not self.chat:
            return self._encode("".join(str(m.get("content", "")) for m in messages))
        ids = self._encode(self._after_turn(messages))
        if not sampled or not ids:
            return ids
        # The turn ended itself: the template's own end of turn would be a second one. What ends it is one token in both places,
        # though not always the same one (<|eom_id|> and <|eot_id|>). A stop string ends no turn for the template, unless it is
        # what the template itself ends it with.
        own = sampled[-1] in self.stop_ids and ids[0] in self.stop_ids
        same = sampled[-1] == ids[0] and sampled[-1] in stop_tokens(self.tokenizer, self.stop)
        return ids[1:] if own or same else ids

    def turn_text(self, sampled: Sequence[int]) -> str:
        """What the model wrote, special tokens stripped, up to the first of the strings that end a turn."""
        return decode_completion(self.tokenizer, sampled, self.stop)

    def _after_turn(self, messages: Sequence[ChatMessage]) -> str:
        mark = "TURN0"
        while any(mark in str(m) for m in messages):
            mark += "0"
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}, *map(dict, messages)]
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True, tools=list(self.chat_format.tools) or None,
                **self.chat_format.options,
            )  # fmt: skip
        except Exception as error:  # jinja's, and whatever a template raises by itself
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise UsageError(f"the chat template cannot render the environment's messages ({roles}): {error}") from None
        _, found, after = str(text).rpartition(mark)
        if not found:
            raise UsageError("the chat template does not print an assistant's turn as it is: it cannot be used with turns")
        return after

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def check_turn_stops(task: Task, tokenizer: Any, stop_ids: Collection[int], prompt: Prompt) -> None:
    """UsageError where a turn of the model would end before it begins: a stop string is the token that each turn of the chat
    template begins with last. `prompt` is one of the task's, `stop_ids` are the model's own."""
    tokens = {token: text for text in task.stop for token in stop_tokens(tokenizer, [text]) if token not in stop_ids}
    if not prompt.chat or not tokens:
        return
    last = encode_prompt(tokenizer, prompt, task.chat_format)[-1:]
    if last and last[0] in tokens:
        raise UsageError(
            f"task.stop: {tokens[last[0]]!r:.80} is one token, and the chat template's beginning of a turn ends with it: each "
            "turn after the first would be over before it began"
        )


def check_messages(messages: Sequence[ChatMessage]) -> str:
    """What is wrong with an environment's messages; "" when nothing is."""
    for message in messages:
        if message.get("role") not in ROLES:
            return f"a message with the role {message.get('role')!r:.40}; an environment has {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"a {message['role']} message without a text as its content"
    return "" if messages else "no message"
