"""What a verb of the command line is, for those who add some, and what was meant by a misspelt word. The frame around them is
`shoal.py`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

Run = Callable[[argparse.Namespace], dict[str, Any]]
"""Does what the verb says, and returns the object that --json prints."""


NEAR = 0.6
"""Share of two words that must be alike for one to be taken for the other (difflib's ratio, and its default): "lerner" is 0.92 of
"learner", "jion" 0.75 of "join", "stats" 0.91 of "status"."""


class AddVerb(Protocol):
    """Adds the verb `name` to the subparsers `under`, with the flags that every verb takes."""

    def __call__(self, name: str, run: Run, help: str, under: Any) -> argparse.ArgumentParser: ...


def meant(word: str, known: Iterable[str], near: float = NEAR) -> str:
    """The one of `known` that a person who typed `word` may have meant; "" when none is near."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=near)
    swapped = [one for one in found if sorted(one) == sorted(word)]  # "jion" is as near to "json" as to "join"
    return (swapped or found or [""])[0]


def nearest(word: str, known: Iterable[str]) -> str:
    """What a person who typed `word` may have meant, as the end of a complaint: "; did you mean 'X'?", or "" when nothing in
    `known` is near."""
    found = meant(word, known)
    return f"; did you mean {found!r}?" if found else ""
