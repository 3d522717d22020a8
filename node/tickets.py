"""Where a node's ticket comes from: a flag, a file, standard input, the environment. It is a secret: no complaint repeats it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TextIO

from p2p.errors import UsageError
from p2p.membership.admission import FAMILY, Ticket, read_ticket

VARIABLE = "SHOAL_TICKET"
"""The environment variable with a ticket: other users of the machine see command lines, and not this."""

MAX_TICKET = 64 * 1024
"""Characters of a ticket that are read."""

SHOWN = 60
"""Characters of a value that is no ticket and is repeated to the person: as long as most paths. A longer one may be a secret."""


def ticket_of(
    join: str | None, file: Path | None, *, environment: MutableMapping[str, str] = os.environ, stdin: TextIO | None = None
) -> Ticket | None:
    """The ticket of `--join` (a ticket, a file that holds one, or "-"), of `--join-file`, or of SHOAL_TICKET, which is taken out
    of the environment: engines and other children have no use for it. None when nothing is given. UsageError for what is no
    ticket."""
    kept = environment.pop(VARIABLE, "")
    if join is not None and file is not None:
        raise UsageError("--join and --join-file are both given: leave one of them out")
    if join == "-":
        return read_ticket((stdin or sys.stdin).read(MAX_TICKET))
    if join is not None and re.match(rf"{FAMILY}\d", join):
        return read_ticket(join)
    if join is not None:
        return _in_file(Path(join), "--join", f"{_shown(join)} is neither a ticket nor a file that holds one")
    if file is not None:
        return _in_file(file, "--join-file", f"there is no file {_shown(str(file))}")
    return read_ticket(kept) if kept else None


def _in_file(path: Path, flag: str, none: str) -> Ticket:
    try:
        found = path.exists() and not path.is_dir()  # a pipe will do: --join-file <(pass shoal)
    except OSError:  # a pasted text can be too long for a name
        found = False
    if not found:
        raise UsageError(f"{flag}: {none}")
    try:
        with open(path, encoding="utf-8") as opened:
            text = opened.read(MAX_TICKET)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: {path} cannot be read as a ticket: {error}") from None
    return read_ticket(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:8] + "...")
