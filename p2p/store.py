"""Chunks on disk, named by their BLAKE3 digest. Bounded; must not know manifests, peers or versions.

Shared by two processes on the learner (the trainer writes, the head reads), so a chunk appears under its name only
when it is whole.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import blake3

from p2p.errors import Refusal, ShoalError
from p2p.limits import GIB, MAX_CHUNK

CHUNK_NAME = re.compile("[0-9a-f]{64}")
TEMPORARY = "tmp-"

LEFTOVER_S = 60.0
"""A temporary file older than this is a crash's; a younger one may be the other process's, at work on it now."""


class ChunkStore:
    """A folder of chunks, at most `limit` bytes. Pinned chunks are never evicted; of the others the oldest goes
    first."""

    def __init__(self, root: Path, limit: int = 64 * GIB) -> None:
        self.root, self.limit = root, limit
        root.mkdir(parents=True, exist_ok=True)
        self._sizes: dict[bytes, int] = {}
        self._pins: dict[bytes, int] = {}
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

    def path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.root / name[:2] / name

    def put(self, digest: bytes, data: bytes) -> None:
        """Keep `data` if it hashes to `digest`. Refusal when it does not, or is longer than MAX_CHUNK; ShoalError when
        the store is full of pinned chunks."""
        if len(data) > MAX_CHUNK:
            raise Refusal(f"chunk of {len(data)} bytes is over the limit of {MAX_CHUNK}", fatal=True)
        if blake3.blake3(data).digest() != digest:
            raise Refusal(f"chunk does not hash to {digest.hex()[:16]}", fatal=True)
        self.put_trusted(digest, data)

    def put_trusted(self, digest: bytes, data: bytes) -> None:
        """As put, for bytes that this process has just hashed itself."""
        path = self.path(digest)
        if digest in self._sizes and path.exists():  # the other process may have dropped it
            return
        self._make_room(len(data))
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name[:16]}")
        temporary.write_bytes(data)
        os.replace(temporary, path)
        self._note(digest, len(data))

    def get(self, digest: bytes) -> bytes | None:
        """The chunk, verified again as it is read (a disk may rot); None when it is not held."""
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            self._forget(digest)
            return None
        if blake3.blake3(data).digest() != digest:
            self.path(digest).unlink(missing_ok=True)
            self._forget(digest)
            return None
        return data

    def has(self, digest: bytes) -> bool:
        if digest in self._sizes:
            return True
        try:  # the trainer, another process, may have written it
            self._note(digest, self.path(digest).stat().st_size)
        except FileNotFoundError:
            return False
        return True

    def pin(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._pins[digest] = self._pins.get(digest, 0) + 1

    def unpin(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            left = self._pins.get(digest, 0) - 1
            if left > 0:
                self._pins[digest] = left
            else:
                self._pins.pop(digest, None)

    def drop(self, digests: Iterable[bytes]) -> None:
        """Delete those of `digests` that nobody pinned."""
        for digest in digests:
            if digest not in self._pins:
                self.path(digest).unlink(missing_ok=True)
                self._forget(digest)

    def _make_room(self, size: int) -> None:
        if self.total + size <= self.limit:
            return
        for digest in [d for d in self._sizes if d not in self._pins]:
            self.drop([digest])
            if self.total + size <= self.limit:
                return
        raise ShoalError(f"chunk store {self.root} is full: {self.total} of {self.limit} bytes, all of them pinned")

    def _note(self, digest: bytes, size: int) -> None:
        if digest not in self._sizes:
            self._sizes[digest] = size
            self.total += size

    def _forget(self, digest: bytes) -> None:
        self.total -= self._sizes.pop(digest, 0)
