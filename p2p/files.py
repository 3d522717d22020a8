"""Writing files so that a reader sees a whole text, or none of it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file at once: a reader, and whoever comes after a crash of this process, finds the old content or the new one.

    `durable`: the content is on the disk before the name points at it, so that a crash of the machine leaves no empty file
    either. That costs an fsync, some milliseconds; that the new name survives as well takes a `sync` of the folder. What the
    next start writes again anyway does without. OSError as the disk says; the old file then stays.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def append_whole(path: Path, content: bytes) -> None:
    """Add to the end of a file, all of `content` or nothing of it: on a full disk what was there stays as it was. OSError as
    the disk says."""
    with open(path, "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):  # of a device, for instance: the first error is the one to tell
                file.truncate(before)
            raise


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk. OSError when that fails."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
