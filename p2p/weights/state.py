"""A whole state of weights as flat bytes under a `Layout`, in memory or in a file, and its digests.

Must not know versions, codings, peers or torch. Values are bit patterns; the bytes between tensors are always zero, so
that equal states are equal byte for byte.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import blake3
import numpy as np
import xxhash

from p2p.files import sync
from p2p.layout import WORD, Layout, Segment, TensorSpec

MADV_POPULATE_WRITE = 23
"""The number of an madvise request of Linux (5.14), for which Python's mmap has no name."""

DIGEST = 16
"""Bytes of a tensor digest (xxh3-128): fast, and only ever over bytes that BLAKE3 authenticated."""


def state_digest(layout: Layout, tensor_digests: Iterable[bytes]) -> bytes:
    """BLAKE3 (32 bytes) over the layout's digest and every tensor's digest, in layout order.

    ValueError unless there is exactly one digest of DIGEST bytes for every tensor of the layout.
    """
    digests = list(tensor_digests)
    if len(digests) != len(layout.tensors) or any(len(d) != DIGEST for d in digests):
        raise ValueError(f"want {len(layout.tensors)} tensor digests of {DIGEST} bytes, got {len(digests)}")
    return blake3.blake3(layout.digest + b"".join(digests)).digest()


class FlatState:
    """The bytes of one state. `bytes` is uint8 [layout.nbytes]; views handed out keep the memory alive after `close`.

    Several threads may read; several may write disjoint segments.
    """

    def __init__(self, layout: Layout, data: np.ndarray, mapping: np.memmap | None = None, path: Path | None = None):
        self.layout, self.path = layout, path
        self.bytes: np.ndarray = data
        self.mapping = mapping

    @classmethod
    def in_memory(cls, layout: Layout) -> FlatState:
        """All zero, in memory, writable."""
        return cls(layout, np.zeros(layout.nbytes, np.uint8))

    @classmethod
    def create(cls, path: Path, layout: Layout, *, reserve: bool = False) -> FlatState:
        """A new all-zero file, mapped writable. A file of that name is emptied first.

        `reserve` allocates its disk space now, so that a full disk is an OSError (ENOSPC) here instead of a SIGBUS at a
        later write; the file is removed again on that error. Without it the file is sparse.
        """
        path = Path(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if reserve and layout.nbytes:
                os.posix_fallocate(fd, 0, layout.nbytes)
            os.ftruncate(fd, layout.nbytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return cls.open(path, layout, writable=True)

    @classmethod
    def open(cls, path: Path, layout: Layout, *, writable: bool = False) -> FlatState:
        """Map an existing file. ValueError when its size is not the layout's; OSError when it cannot be opened."""
        path = Path(path)
        size = path.stat().st_size
        if size != layout.nbytes:
            raise ValueError(f"{path} has {size} bytes, its layout says {layout.nbytes}")
        if not size:  # an empty file cannot be mapped
            return cls(layout, np.zeros(0, np.uint8), path=path)
        mapping = np.memmap(path, np.uint8, mode="r+" if writable else "r", shape=(size,))
        return cls(layout, mapping.view(np.ndarray), mapping, path)

    @classmethod
    def private(cls, path: Path, layout: Layout) -> FlatState:
        """Map an existing file; what is written to this state stays in memory, page by page, and all else is the file's, shared
        with whoever maps it. Nobody may write to the file meanwhile. Errors as `open`."""
        if Path(path).stat().st_size != layout.nbytes:
            raise ValueError(f"{path} is not of the {layout.nbytes} bytes that its layout says")
        if not layout.nbytes:
            return cls.in_memory(layout)
        mapping = np.memmap(path, np.uint8, mode="c", shape=(layout.nbytes,))
        return cls(layout, mapping.view(np.ndarray), mapping)

    def words(self, segment: Segment) -> np.ndarray:
        """uN [segment.nbytes / N]: the segment's words, as a view."""
        return self.bytes[segment.start : segment.stop].view(WORD[segment.itemsize])

    def populate(self, segment: Segment) -> None:
        """Have the kernel make all pages of `segment` now, where this is a mapped file: one by one, as they are first written to,
        it takes six times as long. Does nothing where the kernel cannot do it (before Linux 5.14)."""
        if self.mapping is None:
            return
        first = segment.start // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):
            self.mapping._mmap.madvise(MADV_POPULATE_WRITE, first, segment.stop - first)  # type: ignore[attr-defined]

    def tensor(self, name: str) -> np.ndarray:
        """uN [shape]: one tensor's bit patterns, as a view. KeyError when there is no such tensor."""
        spec = self.layout.by_name[name]
        return self._raw(spec).view(WORD[spec.itemsize]).reshape(spec.shape)

    def write_tensor(self, name: str, bits: np.ndarray) -> None:
        """Copy `bits` (any dtype of the tensor's item size, the tensor's shape) in. ValueError when they do not fit."""
        spec, view = self.layout.by_name[name], self.tensor(name)
        if bits.shape != spec.shape or bits.dtype.itemsize != spec.itemsize:
            raise ValueError(
                f"tensor {name!r} is {spec.dtype} {spec.shape}: cannot take {bits.dtype} {tuple(bits.shape)}"
            )
        view[...] = np.ascontiguousarray(bits).view(WORD[spec.itemsize]).reshape(spec.shape)

    def tensor_digest(self, index: int) -> bytes:
        """xxh3-128 (16 bytes) of the bytes of `layout.tensors[index]`."""
        return xxhash.xxh3_128_digest(self._raw(self.layout.tensors[index]).data)

    def tensor_digests(self) -> list[bytes]:
        """xxh3-128 of every tensor's bytes, in layout order."""
        return [self.tensor_digest(i) for i in range(len(self.layout.tensors))]

    def digest(self) -> bytes:
        """This state's digest: `state_digest` of its tensors' digests."""
        return state_digest(self.layout, self.tensor_digests())

    def padding_is_zero(self) -> bool:
        """Whether every byte that belongs to no tensor is zero."""
        return not any(self.bytes[start:stop].any() for start, stop in self._padding())

    def flush(self) -> None:
        """Force a mapped file's bytes to disk (msync, fsync). OSError when that fails; nothing to do in memory."""
        if self.mapping is None or self.path is None or self.mapping.mode == "r":
            return
        self.mapping.flush()
        sync(self.path)

    def close(self) -> None:
        """Let go of the bytes without flushing. Idempotent; the mapping ends with the last view of it."""
        self.bytes = np.zeros(0, np.uint8)
        self.mapping = None

    def _raw(self, spec: TensorSpec) -> np.ndarray:
        return self.bytes[spec.offset : spec.stop]

    def _padding(self) -> Iterator[tuple[int, int]]:
        tensors = self.layout.tensors
        for i, spec in enumerate(tensors):
            stop = tensors[i + 1].offset if i + 1 < len(tensors) else self.layout.nbytes
            if spec.stop < stop:
                yield spec.stop, stop
