"""From an environment's messages to the token ids that follow the model's turn. Pure; must not know nodes, versions or torch.

What the model sampled is never rendered and never tokenised again. A template is rendered with a placeholder in place of the
model's turn, and only what follows the placeholder is taken: the end of the turn, the messages, and the beginning of the next
turn. So a template that changes earlier turns (Qwen3 drops their thinking) changes nothing that was sampled or given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from learner.tasks.port import ChatFormat, ChatMessage
from p2p.errors import UsageError

ROLES = ("user", "tool", "system")
"""Whom an environment may speak as. Never the assistant: that is the model."""


@dataclass(frozen=True, slots=True)
class TurnRenderer:
    """Makes given tokens of messages, for one tokenizer and one task."""

    tokenizer: Any
    """any Hugging Face tokenizer"""
    stop_ids: Collection[int]
    """tokens that end a turn of the model"""
    chat: bool
    """whether the task's prompts are chat prompts; otherwise messages are texts, which follow as they are"""
    chat_format: ChatFormat = field(default_factory=ChatFormat)

    def given(self, messages: Sequence[ChatMessage], sampled: Sequence[int]) -> tuple[int, ...]:
        """Token ids that follow a turn whose sampled ids end as these do. UsageError where the template cannot say it."""
        if not self.chat:
            return self._encode("".join(str(m.get("content", "")) for m in messages))
        ids = self._encode(self._after_turn(messages))
        ended = bool(sampled) and sampled[-1] in self.stop_ids
        # The turn ended itself: the template's own end of turn would be a second one. What ends it is one token in both places,
        # though not always the same one (<|eom_id|> and <|eot_id|>).
        return ids[1:] if ended and ids and ids[0] in self.stop_ids else ids

    def turn_text(self, sampled: Sequence[int]) -> str:
        """What the model wrote, special tokens stripped."""
        return str(self.tokenizer.decode(list(sampled), skip_special_tokens=True, clean_up_tokenization_spaces=False))

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


def check_messages(messages: Sequence[ChatMessage]) -> str:
    """What is wrong with an environment's messages; "" when nothing is."""
    for message in messages:
        if message.get("role") not in ROLES:
            return f"a message with the role {message.get('role')!r:.40}; an environment has {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"a {message['role']} message without a text as its content"
    return "" if messages else "no message"
