"""Numbers and a stranger's texts as people read them. Shared by every view of a run; must not know what a run is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from p2p.printable import cleaned

MOST_TEXT = 400
"""Characters of one text of a stranger's (a name, a refusal) that are shown: two lines of a wide terminal."""

MOST_PLACES = 8
"""Decimal places of dollars that a person still counts; smaller sums are written with an exponent."""

AS_BLANKS = str.maketrans("\r\n\t", "   ")
"""Characters that become a blank where a text is one line."""

DASH = "–"
"""Stands for a number that is not there."""


def plain_text(text: object, most: int = MOST_TEXT, *, lines: bool = False) -> str:
    """A text that may be a stranger's, safe for a terminal and a page: no control or formatting characters, at most `most`
    characters. `lines`: line ends and tabs stay. Unlike a log line (`p2p.printable`) it keeps its blanks, on which columns and
    code rest, and its marks are Unicode's, which both can show."""
    cut = str(text)[: most + 1]
    clean = cleaned(cut.replace("\r", " ") if lines else cut.translate(AS_BLANKS), "\ufffd", "\n\t" if lines else "")
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def by_name(name: str) -> list[tuple[bool, int, str]]:
    """A sorting key in which people's order of numbers holds: node-2 comes before node-10."""
    parts = [part for part in re.split(r"([0-9]+)", name) if part]
    counts = [int(part) if part.isascii() and part.isdigit() else None for part in parts]  # "²" is a digit, and no number
    return [(count is None, count or 0, part) for count, part in zip(counts, parts, strict=True)]


def short_peer(peer: str) -> str:
    """The end of a peer id: the beginning is the same for all of them."""
    return f"…{peer[-6:]}" if len(peer) > 8 else peer


def milliseconds(seconds: float | None) -> str:
    """A pause: 0.4 ms, 57 ms, 1,240 ms."""
    if seconds is None:
        return DASH
    return f"{1000 * seconds:.1f} ms" if seconds < 0.00995 else f"{1000 * seconds:,.0f} ms"


def dollars(usd: float) -> str:
    """Three digits that matter: $0.000123, $1.23, $1,230."""
    if usd >= 1000 or not usd > 0:
        return f"${usd:,.0f}"
    places = max(0, 2 - math.floor(math.log10(usd)))
    return f"${usd:.{places}f}" if places <= MOST_PLACES else f"${usd:.1e}"


def number(value: float | None, form: str = ".3f") -> str:
    """A number as text; a dash when there is none."""
    return DASH if value is None else format(value, form)


def share(value: float | None) -> str:
    """87 %."""
    return DASH if value is None else f"{value:.0%}".replace("%", " %")


def counted(count: int, one: str, many: str = "") -> str:
    """1 node, 3 nodes."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def joined(parts: Iterable[str], mark: str = ", ") -> str:
    """Those of `parts` that say something."""
    return mark.join(part for part in parts if part)
