"""Writing files so that a reader sees a whole text, or none of it; and who holds one."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

PROBED_S = 0.5
"""Seconds that `take_lock` goes on trying: whoever only looks whether a file is held holds it too, for far less than that."""

RETRY_S = 0.02
"""Seconds between two tries of `take_lock`."""


def take_lock(fd: int, wait_s: float = PROBED_S) -> bool:
    """Lock an open file for this process, until it is closed. Whether it could be had: False when another process holds it.
    OSError where files cannot be locked."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(RETRY_S)


def is_locked(fd: int) -> bool:
    """Whether another process holds this open file. Holds it itself for an instant. OSError where files cannot be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def write_whole(path: Path, content: str | bytes | memoryview, *, durable: bool = False, private: bool = False) -> None:
    """Replace a file at once: a reader, and whoever comes after a crash of this process, finds the old content or the new one.
    `private`: none but its owner reads it (mode 0600).

    `durable`: the content is on the disk before the name points at it, so that a crash of the machine leaves no empty file
    either. That costs an fsync, some milliseconds; that the new name survives as well takes a `sync` of the folder. What the
    next start writes again anyway does without. OSError as the disk says; the old file then stays.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb", opener=_open_private if private else None) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_private(path: Path) -> None:
    """Make an empty file that none but its owner reads, or take the others' rights to one that is there. OSError as the disk
    says."""
    os.close(_open_private(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))


def _open_private(path: str, flags: int) -> int:
    fd = os.open(path, flags, 0o600)
    os.fchmod(fd, 0o600)  # it may be there already
    return fd


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
