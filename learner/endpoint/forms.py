"""The forms of answers: OpenAI's completions and chat completions, and vLLM's tokens, whole and in parts. Pure.

Beyond OpenAI's fields there are vLLM's `token_ids`, `prompt_token_ids` and `weight_versions`, where token ids are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from learner.endpoint.choices import Choice, Delta
from learner.endpoint.text import UNFINISHED

TokenText = Callable[[int], str]
"""The text of one token by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """What an answer says beside its choices."""

    id: str
    model: str
    created: int
    """Unix time"""
    prompts: Sequence[tuple[int, ...]]
    """one a choice"""
    logprobs: bool
    token_ids: bool
    usage: bool
    """tell the usage at the end of a stream"""
    tokens_as_ids: bool = False
    """name a token "token_id:17" where its text would stand"""

    def used(self, choices: Sequence[Choice], n: int) -> dict[str, int]:
        """OpenAI's usage. A prompt counts once, however many choices (`n`) it has."""
        prompt, made = sum(len(one) for one in self.prompts[::n]), sum(len(choice.ids) for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


class AnswerForm(Protocol):
    """One route's form."""

    def whole(self, choices: Sequence[Choice], n: int) -> dict[str, Any]:
        """The answer all at once."""

    def opening(self) -> Iterator[dict[str, Any]]:
        """Parts of a stream before the first token."""

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A part of a stream. `choice` has everything up to it, `delta` included."""

    def closing(self, choices: Sequence[Choice], n: int) -> Iterator[dict[str, Any]]:
        """Parts of a stream after the last token."""


class CompletionForm:
    """/v1/completions."""

    def __init__(self, facts: AnswerFacts, token_text: TokenText) -> None:
        self._facts, self._token_text = facts, token_text
        self._offsets = [0] * len(facts.prompts)
        """characters of each choice's tokens that were told: the log probabilities have them"""

    def whole(self, choices: Sequence[Choice], n: int) -> dict[str, Any]:
        """Text, token ids and log probabilities of each choice."""
        rows = [self._choice(c, Delta(c.index, c.text, tuple(c.ids), tuple(c.logprobs), c.finish), first=True) for c in choices]
        return self._frame(rows) | {"usage": self._facts.used(choices, n)}

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self._frame([self._choice(choice, delta, first=len(delta.ids) == len(choice.ids))])

    def closing(self, choices: Sequence[Choice], n: int) -> Iterator[dict[str, Any]]:
        if self._facts.usage:
            yield self._frame([]) | {"usage": self._facts.used(choices, n)}

    def _frame(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        f = self._facts
        return {"id": f.id, "object": "text_completion", "created": f.created, "model": f.model, "choices": rows}

    def _choice(self, choice: Choice, delta: Delta, *, first: bool) -> dict[str, Any]:
        row: dict[str, Any] = {
            "index": delta.choice, "text": delta.text, "logprobs": self._logprobs(delta) if self._facts.logprobs else None,
            "finish_reason": delta.finish or None, "stop_reason": choice.stop_reason,
        }  # fmt: skip
        if self._facts.token_ids:
            row |= _token_ids(choice, delta)
            if first:
                row["prompt_token_ids"] = list(self._facts.prompts[delta.choice])
        return row

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        names = [_name(self._facts, self._token_text, token) for token in delta.ids]
        offsets = []
        for token in delta.ids:
            offsets.append(self._offsets[delta.choice])
            self._offsets[delta.choice] += len(self._token_text(token))
        return {
            "tokens": names, "token_logprobs": list(delta.logprobs), "text_offset": offsets,
            "top_logprobs": [{name: value} for name, value in zip(names, delta.logprobs, strict=True)],
        }  # fmt: skip


class ChatForm:
    """/v1/chat/completions."""

    def __init__(self, facts: AnswerFacts, token_text: TokenText, *, top: bool) -> None:
        """`top`: the token that was drawn is named among the most likely ones too."""
        self._facts, self._token_text, self._top = facts, token_text, top

    def whole(self, choices: Sequence[Choice], n: int) -> dict[str, Any]:
        """Text, token ids and log probabilities of each choice."""
        rows = []
        for c in choices:
            delta = Delta(c.index, c.text, tuple(c.ids), tuple(c.logprobs), c.finish)
            rows.append(self._choice(c, delta) | {"message": {"role": "assistant", "content": c.text, "refusal": None}})
        more = {"usage": self._facts.used(choices, n)}
        return self._frame("chat.completion", rows) | more | self._prompt()

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._facts.prompts)):
            row = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield self._frame("chat.completion.chunk", [row]) | (self._prompt() if index == 0 else {})

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        row = self._choice(choice, delta) | {"delta": {"content": delta.text} if delta.text else {}}
        return self._frame("chat.completion.chunk", [row])

    def closing(self, choices: Sequence[Choice], n: int) -> Iterator[dict[str, Any]]:
        if self._facts.usage:
            yield self._frame("chat.completion.chunk", []) | {"usage": self._facts.used(choices, n)}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._facts.prompts[0])} if self._facts.token_ids else {}

    def _frame(self, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        f = self._facts
        return {"id": f.id, "object": kind, "created": f.created, "model": f.model, "choices": rows}

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        row: dict[str, Any] = {
            "index": delta.choice, "logprobs": {"content": self._logprobs(delta)} if self._facts.logprobs else None,
            "finish_reason": delta.finish or None, "stop_reason": choice.stop_reason,
        }  # fmt: skip
        return row | (_token_ids(choice, delta) if self._facts.token_ids else {})

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        found = []
        for token, value in zip(delta.ids, delta.logprobs, strict=True):
            text = self._token_text(token)
            whole = UNFINISHED not in text  # a part of a character has no text of its own
            row = {
                "token": _name(self._facts, self._token_text, token), "logprob": value,
                "bytes": list(text.encode()) if whole else None,
            }  # fmt: skip
            found.append(row | {"top_logprobs": [dict(row)] if self._top else []})
        return found


class GenerateForm:
    """/inference/v1/generate: token ids and no text. A token is named both ways that there are: `token_id`, and `token` as
    "token_id:17", which older vLLM has and renderers ask for."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = facts

    def whole(self, choices: Sequence[Choice], n: int) -> dict[str, Any]:
        """Text, token ids and log probabilities of each choice."""
        rows = [self._choice(c, Delta(c.index, "", tuple(c.ids), tuple(c.logprobs), c.finish)) for c in choices]
        f = self._facts
        more = {"model": f.model, "created": f.created, "usage": f.used(choices, n)}
        return self._frame(rows) | more | self._prompt()

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def part(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        first = len(delta.ids) == len(choice.ids) and choice.index == 0
        return self._frame([self._choice(choice, delta)]) | (self._prompt() if first else {})

    def closing(self, choices: Sequence[Choice], n: int) -> Iterator[dict[str, Any]]:
        if self._facts.usage:
            yield self._frame([]) | {"usage": self._facts.used(choices, n)}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._facts.prompts[0])} if self._facts.token_ids else {}

    def _frame(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"request_id": self._facts.id, "choices": rows}

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        content: list[dict[str, Any]] = [
            {"token_id": token, "token": f"token_id:{token}", "logprob": value, "rank": None, "bytes": None, "top_logprobs": []}
            for token, value in zip(delta.ids, delta.logprobs, strict=True)
        ]
        return {
            "index": delta.choice, "logprobs": {"content": content} if self._facts.logprobs else None,
            "finish_reason": delta.finish or None, "stop_reason": choice.stop_reason, **_token_ids(choice, delta),
        }  # fmt: skip


def _token_ids(choice: Choice, delta: Delta) -> dict[str, Any]:
    """Token ids; and at the end the versions of all of them."""
    spans = [{"version": str(span.version), "start": span.start, "end": span.end} for span in choice.spans]
    return {"token_ids": list(delta.ids), "weight_versions": spans if delta.finish else None}


def _name(facts: AnswerFacts, token_text: TokenText, token: int) -> str:
    return f"token_id:{token}" if facts.tokens_as_ids else token_text(token)
