"""SECURITY.md says of every message what is refused of it."""

from __future__ import annotations

import re
from pathlib import Path

from p2p.protocol.messages import decode

PAGE = Path(__file__).parents[2] / "SECURITY.md"


def test_every_message_is_in_the_table() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## What is refused of each message")[2]
    named = {name for row in table.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {kind.__name__ for kind in decode.kinds.values()}
