"""The folders of nodes: where one keeps its key, weights and chunks, and which one a node takes that was told of none.

One process to a folder, by a lock: two would overwrite each other's state. Without --dir a node takes a folder of its run that is
free: one that it had before, if it gives the same name, else one that no name was given to, else a new one (RUN, RUN-2, RUN-3).
Must not know what is kept there.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from p2p.errors import ShoalError, UsageError
from p2p.files import PROBED_S, is_locked, take_lock, write_whole

LOCK = "lock"
"""The file in a node's folder that its process holds locked, and which says which process that is."""

RECORD = "node.json"
"""The file in a node's folder with the name that the node was given; "" where it was given none."""

LEAVE_S = 60.0
"""Seconds that a node may take to leave: longer than it takes to hand over (`agent.DRAIN_S`) and to end its engine."""

MAX_RUN = 64
"""Characters of a run's id that names a folder. Ids have 16; a ticket may say what it likes."""

MAX_BESIDE = 1000
"""Folders of one run that a node looks through for a free one: more nodes than one machine runs."""


def default_folder(run: str) -> Path:
    """The first folder for nodes of `run`. UsageError when its id, which comes from a ticket, cannot name one."""
    if not (run.isascii() and run.isalnum() and len(run) <= MAX_RUN):
        raise UsageError(f"the ticket's run {run[:MAX_RUN]!r} cannot name a folder: give this node its --dir")
    return nodes_root() / run


def nodes_root() -> Path:
    """Where all default folders lie."""
    return Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")) / "shoal" / "nodes"


@contextmanager
def hold_folder(folder: Path) -> Iterator[Path]:
    """Have `folder` for this process, until the block ends. UsageError when it cannot be used, or another node runs there."""
    with _opened(folder) as file:
        if not _lock(file, PROBED_S):
            raise UsageError(f"another node runs in {folder}: give this one its own --dir")
        yield folder


@contextmanager
def hold_free_folder(first: Path, name: str) -> Iterator[Path]:
    """Have a folder beside `first`, or it, for this process: one that no other node holds, see above. UsageError when none can
    be used."""
    for folder in _choices(first, name):
        with _opened(folder) as file:
            # Not waited for, there are others; and while it was not ours, another node may have come, named it and gone.
            if _lock(file, 0.0) and _name_in(folder) in ("", name):
                write_whole(folder / RECORD, json.dumps({"name": name}))
                yield folder
                return
    raise UsageError(f"no folder is free beside {first}: give this node its own --dir")


def running_beside(first: Path, name: str = "") -> list[Path]:
    """The folders beside `first`, and it, in which nodes run; only those that were given `name`, if it is not ""."""
    return [folder for folder in _existing(first) if _is_held(folder) and name in ("", _name_in(folder))]


def _existing(first: Path) -> list[Path]:
    """`first`, FIRST-2 and so on that are there, in this order."""
    numbered = []
    with suppress(OSError):
        for path in filter(Path.is_dir, first.parent.iterdir()):
            number = path.name.removeprefix(f"{first.name}-")
            if path == first:
                numbered.append((1, path))
            elif number != path.name and number.isdigit():
                numbered.append((int(number), path))
    return [path for _, path in sorted(numbered)]


def _choices(first: Path, name: str) -> Iterator[Path]:
    there = {folder: _name_in(folder) for folder in _existing(first)}
    yield from (folder for folder, its in there.items() if its == name)
    if name:
        yield from (folder for folder, its in there.items() if its == "")
    if first not in there:  # if it is a file, whoever opens it says so
        yield first
    for number in range(2, MAX_BESIDE + 1):
        folder = first.with_name(f"{first.name}-{number}")
        if not folder.exists():
            yield folder


def _name_in(folder: Path) -> str:
    try:
        return str(json.loads((folder / RECORD).read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextmanager
def _opened(folder: Path) -> Iterator[IO[str]]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a")  # not "w": whoever is refused must not wipe out who runs
    except OSError as error:
        raise UsageError(f"cannot use {folder}: {error.strerror}") from None
    with file:
        yield file


def _lock(file: IO[str], wait_s: float) -> bool:
    """Lock it, and write into it which process has. Whether it could be had; UsageError where files cannot be locked."""
    try:
        if not take_lock(file.fileno(), wait_s):
            return False
    except OSError as error:
        raise UsageError(f"cannot lock {file.name}: {error.strerror}") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return True


def _is_held(folder: Path) -> bool:
    try:
        with open(folder / LOCK) as file:
            return is_locked(file.fileno())
    except OSError:
        return False


def check_running(directory: Path) -> None:
    """UsageError unless a node runs in `directory`."""
    if not _is_held(directory):
        raise UsageError(f"no node runs in {directory}")


def drain_node(directory: Path, wait_s: float = LEAVE_S) -> dict[str, Any]:
    """Have the node that runs in `directory` hand over and leave; returns when it is gone. UsageError when none runs there,
    ShoalError when it is still there after `wait_s` seconds."""
    path = directory / LOCK
    try:
        with open(path) as file:
            if not is_locked(file.fileno()):
                raise UsageError(f"no node runs in {directory}")
            began, pid = time.monotonic(), int(file.read())
            os.kill(pid, signal.SIGTERM)
            while is_locked(file.fileno()):
                if time.monotonic() - began > wait_s:
                    raise ShoalError(f"the node in {directory} (pid {pid}) has not left within {wait_s:.0f} s")
                time.sleep(0.05)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"no node runs in {directory}: it is not a node's directory") from None
    except ProcessLookupError:
        raise UsageError(f"no node runs in {directory}: it left just now") from None
    except ValueError:
        raise UsageError(f"{path} names no process: the node there is just starting, or is of another version") from None
    except PermissionError:
        raise UsageError(f"the node in {directory} is another user's") from None
    return {"pid": pid, "directory": str(directory), "seconds": time.monotonic() - began}
