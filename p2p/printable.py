"""Texts of strangers, for a terminal, a log or a page. Must not know where they come from.

A name, a reason or a completion may hold escape sequences that move the cursor or retitle the window, and may be as long as a
frame.
"""

from __future__ import annotations

import logging
import unicodedata
from typing import Any

LONGEST = 300
"""Characters of one text that are shown unless told: some lines of a terminal."""


LOG_FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of a log line on stderr and in a file."""

LOGGED = 2000
"""Characters of a log line, or of a complaint: more than any of ours has. What quotes a stranger may be as long as a frame."""

LOGGED_TRACEBACK = 40_000
"""Characters of a traceback in the log: a few hundred calls have room, and its last line may quote what a stranger sent."""


def cleaned(text: str, mark: str = "?", keep: str = "") -> str:
    """`text` with `mark` for each character that a terminal or a browser may obey, or cannot print: control characters, invisible
    ones, those that turn the direction of writing, line breaks. Blanks of all kinds stay, and what is in `keep`. All that cleans
    a text does it by this one; what they make of white space and of length is their own."""
    return "".join(c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else mark for c in text)


def printable(text: str, longest: int = LONGEST) -> str:
    """`text` in one line: white space as single blanks, "?" for what is not printable, and "..." where it was cut. For logs and
    complaints: they may go where there is no Unicode."""
    cut = text[: 4 * longest]  # before the work, which grows with the length
    plain = cleaned(" ".join(cut.split()))
    return plain if len(plain) <= longest and len(cut) == len(text) else plain[: longest - 3] + "..."


class CleanFormatter(logging.Formatter):
    """Log lines quote names and reasons that strangers sent: none may move the cursor, or fill the terminal. A traceback keeps
    its lines and their indentation."""

    def __init__(self, form: str = LOG_FORM) -> None:
        super().__init__(form)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record), LOGGED)

    def formatException(self, ei: Any) -> str:
        return cleaned(super().formatException(ei)[-LOGGED_TRACEBACK:], keep="\n")

    def formatStack(self, stack_info: str) -> str:
        return cleaned(super().formatStack(stack_info)[-LOGGED_TRACEBACK:], keep="\n")
