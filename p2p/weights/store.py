"""Chunks on disk, named by their BLAKE3 digest. Bounded; must not know manifests, peers or versions.

On the learner two processes share the folder (the trainer writes, the head reads), so a chunk appears under its name only
when it is whole.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import blake3

from p2p.errors import Refusal, ShoalError
from p2p.limits import GIB, MAX_CHUNK

log = logging.getLogger("shoal.weights")

CHUNK_NAME = re.compile("[0-9a-f]{64}")
CHUNK_FOLDER = re.compile("[0-9a-f]{2}")
TEMPORARY = "tmp-"

LEFTOVER_S = 60.0
"""Seconds: a temporary file older than this was left by a crash; the other process may still be writing a younger one."""

SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of reading that are about this process or machine, not about the file: the reader may try again later."""


def _write_file(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)


def _read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def delete_chunks(files: Iterable[str]) -> None:
    """Delete the files of chunks. Thousands take a busy disk a minute and more, so who has links to keep does it in a thread."""
    for file in files:
        try:
            os.unlink(file)
        except FileNotFoundError:
            continue
        except OSError as error:  # a dying disk: the chunk is not to be had any more, whether or not its name is
            log.error("chunk %s cannot be deleted: %s", os.path.basename(file)[:16], error)


def clear_chunks(root: Path) -> None:
    """Drop every chunk in a folder, where there is one. It may be a link to a folder on another disk: then only what bears a
    chunk's name goes, there as here. What cannot be dropped stays, without a word."""
    if not root.is_dir():
        return
    for folder in [d for d in os.scandir(root) if CHUNK_FOLDER.fullmatch(d.name) and d.is_dir(follow_symlinks=False)]:
        with suppress(OSError):
            for entry in list(os.scandir(folder.path)):
                if CHUNK_NAME.fullmatch(entry.name) or entry.name.startswith(TEMPORARY):
                    os.unlink(entry.path)
            os.rmdir(folder.path)


class ChunkFolder:
    """A folder of chunks, without an account of which chunks are in it: for a process that only adds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._text = str(root)

    def path(self, digest: bytes) -> Path:
        return Path(self._where(digest))

    def _where(self, digest: bytes) -> str:
        """`path` as text, which is faster: handling a chunk is a few such calls, and Path took most of their time."""
        name = digest.hex()
        return f"{self._text}/{name[:2]}/{name}"

    def read(self, digest: bytes) -> bytes:
        """What lies there under this digest, unchecked. OSError as the disk says."""
        with open(self._where(digest), "rb", buffering=0) as file:
            return file.read()

    def put_trusted(self, digest: bytes, data: bytes) -> None:
        """Keep `data`, which this process has just hashed itself to `digest`. OSError as the disk says."""
        if not os.path.exists(self._where(digest)):
            self._write(digest, data)

    def _write(self, digest: bytes, data: bytes) -> None:
        path = self._where(digest)
        folder, name = os.path.split(path)
        temporary = f"{folder}/{TEMPORARY}{os.getpid()}-{name[:16]}"
        try:
            try:
                _write_file(temporary, data)
            except FileNotFoundError:
                os.makedirs(folder, exist_ok=True)
                _write_file(temporary, data)
            os.replace(temporary, path)
        except BaseException:  # a full disk must not fill up with halves that nobody counts
            Path(temporary).unlink(missing_ok=True)
            raise


class ChunkStore(ChunkFolder):
    """A folder of chunks, at most `limit` bytes. Pinned chunks are never evicted; of the others the one that was
    written or unpinned longest ago goes first."""

    def __init__(self, root: Path, limit: int = 64 * GIB) -> None:
        super().__init__(root)
        self.limit = limit
        self._sizes: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}
        self._loose: dict[bytes, None] = {}
        """chunks held and not pinned, in the order in which they may go"""
        self.total = 0
        found = []
        for folder in (d for d in os.scandir(root) if d.is_dir()):
            for entry in os.scandir(folder.path):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue  # the other process dropped it just now
                if CHUNK_NAME.fullmatch(entry.name):
                    found.append((stat.st_mtime, entry.name, stat.st_size))
                elif entry.name.startswith(TEMPORARY) and time.time() - stat.st_mtime > LEFTOVER_S:
                    Path(entry.path).unlink(missing_ok=True)
        for _, name, size in sorted(found):
            self._note(bytes.fromhex(name), size)

    def put(self, digest: bytes, data: bytes) -> None:
        """Keep `data` if it hashes to `digest`. Refusal when it does not, or is longer than MAX_CHUNK; ShoalError when
        the store is full of pinned chunks."""
        if len(data) > MAX_CHUNK:
            raise Refusal(f"chunk of {len(data)} bytes is over the limit of {MAX_CHUNK}", fatal=True)
        if blake3.blake3(data).digest() != digest:
            raise Refusal(f"chunk does not hash to {digest.hex()[:16]}", fatal=True)
        self.put_trusted(digest, data)

    def put_trusted(self, digest: bytes, data: bytes) -> None:
        """Keep `data`, which this process has just hashed itself to `digest`. ShoalError when the store is full of pinned
        chunks."""
        if digest in self._sizes and os.path.exists(self._where(digest)):  # the other process may have dropped it
            return
        self._make_room(len(data))
        self._write(digest, data)
        self._note(digest, len(data))

    def get(self, digest: bytes) -> bytes | None:
        """The chunk, verified again as it is read (a disk may rot); None when it is not held or cannot be read any
        more. OSError only of SHORTAGE."""
        try:
            data = _read_file(self._where(digest))
        except FileNotFoundError:
            self._forget(digest)
            return None
        except OSError as error:
            if error.errno in SHORTAGE:
                raise
            log.error("chunk %s cannot be read: %s", digest.hex()[:16], error)
            self._remove(digest)
            return None
        if blake3.blake3(data).digest() != digest:
            self._remove(digest)
            return None
        return data

    def has(self, digest: bytes) -> bool:
        """Whether the chunk is on disk. A chunk that the other process wrote is noticed, and counted, here."""
        if digest in self._sizes:
            return True
        try:  # the trainer, another process, may have written it
            self._note(digest, os.stat(self._where(digest)).st_size)
        except FileNotFoundError:
            return False
        return True

    def pin(self, digests: Iterable[bytes]) -> None:
        """Put one pin on each of `digests`, held or not: a pinned chunk is never evicted."""
        for digest in digests:
            self._pins[digest] = self._pins.get(digest, 0) + 1
            self._loose.pop(digest, None)

    def unpin(self, digests: Iterable[bytes]) -> None:
        """Take one pin off each of `digests`; a chunk without a pin may be evicted."""
        for digest in digests:
            left = self._pins.get(digest, 0) - 1
            if left > 0:
                self._pins[digest] = left
            elif self._pins.pop(digest, None) is not None and digest in self._sizes:
                self._loose[digest] = None

    def drop(self, digests: Iterable[bytes]) -> None:
        """Delete those of `digests` that nobody pinned."""
        delete_chunks(self.give_up(digests))

    def give_up(self, digests: Iterable[bytes]) -> list[str]:
        """Those of `digests` that nobody pinned are held no more: their files, which the caller deletes (`delete_chunks`) before
        anybody writes such a chunk again."""
        gone = [digest for digest in digests if digest not in self._pins]
        for digest in gone:
            self._forget(digest)
        return [self._where(digest) for digest in gone]

    def set_limit(self, limit: int) -> None:
        """Hold at most so many bytes from now on: the oldest that nobody pinned go."""
        self.limit = limit
        while self.total > limit and self._loose:
            self._remove(next(iter(self._loose)))

    def _make_room(self, size: int) -> None:
        while self.total + size > self.limit:
            oldest = next(iter(self._loose), None)
            if oldest is None:
                raise ShoalError(f"chunk store {self.root} is full: {self.total} of {self.limit} bytes, all of them pinned")
            self._remove(oldest)

    def _remove(self, digest: bytes) -> None:
        delete_chunks([self._where(digest)])
        self._forget(digest)

    def _note(self, digest: bytes, size: int) -> None:
        if digest not in self._sizes:
            self._sizes[digest] = size
            self.total += size
            if digest not in self._pins:
                self._loose[digest] = None

    def _forget(self, digest: bytes) -> None:
        self.total -= self._sizes.pop(digest, 0)
        self._loose.pop(digest, None)
