"""What the head keeps for the status page, as much of it as its page may be long. Must not know what it says."""

from __future__ import annotations

from typing import Any

MAX_GONE, MAX_ROWS = 256, 4096
"""Rows of nodes that went last, and of nodes that are here. At 700 bytes a row the page stays below 4 MB."""

MAX_REPORTS = 100
"""Reports that are kept; the page shows the last ten."""


class Latest(dict[str, dict[str, Any]]):
    """Rows by name, those that were put in last: at most `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, name: str, row: dict[str, Any]) -> None:
        self.pop(name, None)
        while len(self) >= self._most:
            del self[next(iter(self))]
        super().__setitem__(name, row)
