"""Texts of strangers, for a terminal, a log or a page. Must not know where they come from.

A name, a reason or a completion may hold escape sequences that move the cursor or retitle the window, and may be as long as a
frame.
"""

from __future__ import annotations

LONGEST = 300
"""Characters of one text that are shown unless told: some lines of a terminal."""


def printable(text: str, longest: int = LONGEST) -> str:
    """`text` in one line: white space as single blanks, "?" for what is not printable, and "..." where it was cut."""
    cut = text[: 4 * longest]  # before the work, which grows with the length
    plain = "".join(c if c.isprintable() else "?" for c in " ".join(cut.split()))
    return plain if len(plain) <= longest and len(cut) == len(text) else plain[: longest - 3] + "..."
