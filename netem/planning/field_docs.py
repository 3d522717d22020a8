"""docs/costs.md's tables of every key of a scenario and every column of a fleet, from the fields themselves. Pure.

    python -m netem.planning.field_docs docs/costs.md      # writes them anew, between the two marks
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Union, get_args, get_origin

from pydantic.fields import FieldInfo

from learner.config_docs import REQUIRED, type_in_words
from learner.section import Section
from netem.planning.cost_scenario import File
from netem.planning.keys import inner_of
from netem.planning.priced_fleet import GPUS, NodeKind

BEGIN = "<!-- Made by `python -m netem.planning.field_docs docs/costs.md`, from the fields in netem/planning. -->"
"""First line of what is made."""

END = "<!-- End of what is made. -->"
"""Last line of what is made."""


def markdown() -> str:
    """The tables, with both marks."""
    gpus = f"Columns of FLEET.csv, and keys of `[[fleet.nodes]]`. GPUs: {', '.join(GPUS)}."
    lines = [BEGIN, "", "### A fleet's columns", "", gpus, ""]
    lines += [*_table(NodeKind), "", "### A scenario's keys", "", "#### Top level", "", *_table(File), ""]
    for name, info in File.model_fields.items():
        inner = inner_of(info)
        if inner is not None:
            head = f"[[{name}]]" if get_origin(info.annotation) is list else f"[{name}]"
            lines += [f"#### {head}", "", _words(inner.__doc__), "", *_table(inner), ""]
    return "\n".join([*lines, END])


def written_anew(page: str) -> str:
    """The page with the tables as they are now. ValueError where the marks are not there."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError("the page has no marks to write between")
    return before + markdown() + after


def _table(kind: type[Section]) -> Iterator[str]:
    yield "| Key | Type | Default | What it is |"
    yield "|---|---|---|---|"
    for name, info in kind.model_fields.items():
        if inner_of(info) is None:
            default = REQUIRED if info.is_required() else f"`{json.dumps(info.get_default(call_default_factory=True))}`"
            cells = (f"`{name}`", _type(info), "none" if default == "`null`" else default, _words(info.description))
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(info: FieldInfo) -> str:
    kind = info.annotation
    if get_origin(kind) in (Union, UnionType):  # a key that may be left out
        kind = next(one for one in get_args(kind) if one is not NoneType)
    return type_in_words(kind, info.metadata)


def _words(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(written_anew(page.read_text(encoding="utf-8")), encoding="utf-8")
