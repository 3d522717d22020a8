"""Strings that end a sequence, whatever tokens they come in: where they cut it. Pure.

Nodes know stop tokens and no strings, and a stranger need not be believed that a string ended something. So whoever gathers the
tokens looks for the strings, keeps what there is up to the token that completes the first of them, and has the node stop. Must
not know groups, requests, or who holds what.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from learner.tasks.prompting import decode_completion
from p2p.errors import UsageError
from p2p.protocol.rollout import TokenEvent

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, all at once."""

UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character."""

SPARE = 4
"""Characters before the longest string that are looked at with it: some tokenizers drop a blank where a text begins, and a text
that begins in the middle of a character has up to three signs for its bytes."""

TOKENS = 8
"""Tokens before the new ones that are decoded at first; twice as many until their text is as long as the longest string."""


def check_stop_strings(tokenizer: Any, strings: Sequence[object]) -> None:
    """UsageError for each that can end nothing: it is no text, or no completion's text holds it, as special tokens are left out
    there. One that is a single token is fine: tokens end a completion whatever their text. `tokenizer`: any of Hugging Face's."""
    problems = []

    def text(of: str) -> tuple[int, str]:
        ids = tokenizer.encode(of, add_special_tokens=False)
        return len(ids), decode_completion(tokenizer, ids)

    for one in strings:
        if not isinstance(one, str) or not one:
            problems.append(f"task.stop: {one!r:.80} is no text, or empty")
            continue
        tokens, found = text(one)
        if tokens != 1 and one not in found and one not in text("x" + one)[1]:  # some drop a blank where a text begins
            problems.append(
                f"task.stop: {one!r:.80} would never be found: the text of its tokens is {found!r:.80}. Special tokens have no "
                "text: give one alone, or the string without it"
            )
    if problems:
        raise UsageError(*problems)


class StopStrings:
    """Looks for the first of some strings in a sequence's text, as its tokens come."""

    def __init__(self, decode: Decode, strings: Sequence[str]) -> None:
        """ValueError when there is none, or an empty one."""
        if not strings or not all(strings):
            raise ValueError(f"stop strings, none of them empty; there are {list(strings)!r:.100}")
        self.strings = tuple(strings)
        self._decode = decode
        self._longest = max(map(len, strings)) + SPARE
        self._lasts = {one[-1] for one in strings} | {UNFINISHED}
        self._known: dict[int, bool] = {}
        """token -> whether a string may end with it"""

    def may_end(self, ids: Sequence[int]) -> bool:
        """Whether one of these tokens may complete a string. Nearly always not, and a look-up each says so."""
        known = self._known
        for token in ids:
            may = known.get(token)
            if may is None:  # twice: alone, it may lose the blank that it begins with
                text = self._decode((token, token))
                may = known[token] = not self._lasts.isdisjoint(text)
            if may:
                return True
        return False

    def end(self, ids: Sequence[int], start: int, held: int) -> int | None:
        """How many of `ids`, where the text of those from `start` on is complete with the first string in it; None where none
        is. `held`: so many of them were looked at before, and had none."""
        if held >= len(ids) or not self.may_end(ids[held:]):
            return None
        first = self._far_enough(ids, start, held)

        def complete(end: int) -> bool:
            text = self._decode(ids[first:end])
            return any(one in text for one in self.strings)

        if not complete(len(ids)):
            return None
        # A text that has a string keeps it: so a node that sends thousands of tokens at once costs some ten looks.
        return bisect_left(range(len(ids)), True, lo=held + 1, key=complete)

    def ended(self, ids: Sequence[int], start: int) -> bool:
        """Whether the last of these tokens completed a string. Those before it had none."""
        return self.end(ids, start, len(ids) - 1) is not None if len(ids) > start else False

    def cut(self, event: TokenEvent, ids: Sequence[int], start: int) -> TokenEvent:
        """An event that goes on with `ids`, whose text counts from `start` on: without what comes after the first string, and
        then without a finish of its own."""
        held, new = len(ids), event.ids
        if not self.may_end(new):
            return event
        first = self._far_enough(ids, start, held)
        end = self.end([*ids[first:], *new], 0, held - first)
        if end is None:
            return event
        size = 4 * (end - (held - first))
        return replace(
            event, packed_ids=event.packed_ids[:size], packed_logprobs=event.packed_logprobs[:size], finish="", message=""
        )

    def _far_enough(self, ids: Sequence[int], start: int, held: int) -> int:
        """From where on the text up to `held` is as long as a string can be."""
        tokens = TOKENS
        while held - tokens > start:
            if len(self._decode(ids[held - tokens : held])) >= self._longest:
                return held - tokens
            tokens *= 2
        return start
