"""What a database file holds, read and changed beside the program that has it open: as another program would."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def read_rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    """What `query` finds in the file, which is opened for reading only."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
        return db.execute(query).fetchall()


def run_script(path: Path, script: str) -> None:
    """Statements on the file. sqlite3.IntegrityError when its own rules forbid one."""
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript(script)
