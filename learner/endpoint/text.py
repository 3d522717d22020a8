"""From tokens as they come to text as it is sent: no split characters, stop strings cut. Pure; the tokenizer is a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, all at once."""

UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character (yet)."""

MOST_WAITING = 3
"""Tokens that are held back for a character that is not whole: one of UTF-8 has four bytes at most, so the fourth token ends it,
or it never becomes one."""

LOOK_BACK = 6
"""Tokens before the new ones that are decoded with them: some tokenizers write a token differently at the beginning of a text,
and a special token among them may leave no text."""


class IncrementalText:
    """The text of a sequence, piece by piece; the pieces together are what `decode` makes of the whole."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: tuple[int, ...] = ()
        self._told = 0
        """tokens at the window's beginning whose text was given out"""

    def add(self, ids: Sequence[int]) -> str:
        """The text that these tokens add. A character that is not whole yet comes with a later token."""
        self._window += tuple(ids)
        end = len(self._window)
        least = max(self._told, end - MOST_WAITING)
        while end > least and self._decode(self._window[self._told : end]).endswith(UNFINISHED):
            end -= 1
        return self._tell(end)

    def end(self) -> str:
        """The rest, whole or not."""
        return self._tell(len(self._window))

    def _tell(self, end: int) -> str:
        if end <= self._told:
            return ""
        before = self._decode(self._window[: self._told])
        text = self._decode(self._window[:end])[len(before) :]
        start = max(0, end - LOOK_BACK)
        self._window, self._told = self._window[start:], end - start
        return text


class CutText(NamedTuple):
    """Text that may be sent, and the stop string that ended it; "" when none did."""

    text: str
    stop: str


class StopCut:
    """Ends a text at the first stop string in it. Text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""

    def add(self, text: str) -> CutText:
        """What may be sent now. After a stop string nothing more may be added."""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            return CutText(self._held[: at + len(stop) if self._include else at], stop)
        keep = self._beginnings()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return CutText(text, "")

    def end(self) -> str:
        """What was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return text

    def _beginnings(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for size in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


class TextPiece(NamedTuple):
    """What some tokens became."""

    text: str
    """may be sent now"""
    used: int
    """how many of the tokens belong to the sequence: fewer than there were where a stop string ended it"""
    stop: str
    """the stop string; "" when none came"""


class SequenceText:
    """A sequence's text as a client reads it."""

    def __init__(self, decode: Decode, stops: Sequence[str] = (), *, include: bool = False) -> None:
        self._text = IncrementalText(decode)
        self._cut = StopCut(stops, include=include)

    def add(self, ids: Sequence[int]) -> TextPiece:
        """All at once, and token by token only where a stop string is in it: to know which token ended it."""
        text, cut = copy(self._text), copy(self._cut)
        sent = self._cut.add(self._text.add(ids))
        if not sent.stop:
            return TextPiece(sent.text, len(ids), "")
        parts = []
        for used, token in enumerate(ids, 1):
            one = cut.add(text.add((token,)))
            parts.append(one.text)
            if one.stop:
                return TextPiece("".join(parts), used, one.stop)
        return TextPiece(sent.text, len(ids), sent.stop)

    def end(self) -> TextPiece:
        """The sequence is over: what was held back, in which a stop string may still be."""
        sent = self._cut.add(self._text.end())
        return TextPiece(sent.text if sent.stop else sent.text + self._cut.end(), 0, sent.stop)
