"""How a model's state lies in one flat run of bytes: the tensor table, and its cut into segments.

Must not know torch, files or peers. A tensor is a name, a dtype name, a shape and a byte range; values are only ever
bit patterns (unsigned words of 1, 2, 4 or 8 bytes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import blake3
import msgspec
import numpy as np
from msgspec import Meta

from p2p.errors import Refusal
from p2p.limits import DEFAULT_SEGMENT, MAX_SEGMENT, MAX_STATE, MAX_TENSOR_NAME, MAX_TENSORS

ALIGN = 64
"""Every tensor starts on a cache line, which also aligns every word size."""

ITEMSIZE: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per value of each dtype (torch's names, without the "torch." prefix)."""

WORD: dict[int, np.dtype] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}
"""The integer view through which values of that many bytes are compared and coded."""

ADAPTER = "adapter."
"""How the names of an adapter's tensors begin: `adapter.<module path>.lora_A` [r, in] and `.lora_B` [out, r]. In a layout that
has such tensors they alone change from version to version; all others are the frozen base model's."""

_Name = Annotated[str, Meta(min_length=1, max_length=MAX_TENSOR_NAME)]
_Shape = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**40)], ...], Meta(max_length=8)]
_Table = Annotated[list[tuple[_Name, str, _Shape]], Meta(max_length=MAX_TENSORS)]
"""The wire form of a layout: name, dtype and shape of each tensor."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the state: Hugging Face name, dtype name, shape, and its byte offset in the flat state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes [start, stop) of the flat state, all of one word size; the unit of encoding, decodable on its own."""

    index: int
    start: int
    stop: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _goes_with(one: TensorSpec, other: TensorSpec) -> bool:
    return one.itemsize == other.itemsize and one.name.startswith(ADAPTER) == other.name.startswith(ADAPTER)


class _Run(NamedTuple):
    start: int
    stop: int
    itemsize: int


def _in_bounds(target: int) -> int:
    return min(max(target, ALIGN), MAX_SEGMENT) // ALIGN * ALIGN


@dataclass(frozen=True)
class Layout:
    """The tensor table. Tensors are sorted by (word size, name), laid end to end, each start aligned to ALIGN."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def build(cls, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Layout:
        """From (name, dtype, shape). ValueError on an unknown dtype or a name given twice."""
        entries = sorted(((ITEMSIZE.get(d, 0), n, d, tuple(int(x) for x in s)) for n, d, s in tensors))
        seen: set[str] = set()
        specs, offset = [], 0
        for itemsize, name, dtype, shape in entries:
            if not itemsize:
                raise ValueError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(ITEMSIZE)}")
            if name in seen:
                raise ValueError(f"tensor {name!r} appears twice")
            seen.add(name)
            spec = TensorSpec(name, dtype, shape, offset)
            specs.append(spec)
            offset = -(-spec.stop // ALIGN) * ALIGN
        return cls(tuple(specs))

    @cached_property
    def nbytes(self) -> int:
        """Length of the flat state, padding included."""
        return -(-self.tensors[-1].stop // ALIGN) * ALIGN if self.tensors else 0

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 (32 bytes) of the wire form."""
        return blake3.blake3(msgspec.msgpack.encode(self.to_wire())).digest()

    def segments(self, target: int = DEFAULT_SEGMENT) -> tuple[Segment, ...]:
        """Cut the flat state into segments of about `target` bytes, never mixing word sizes, nor an adapter with its base."""
        return tuple(self._cut(_in_bounds(target)))

    def count_segments(self, target: int = DEFAULT_SEGMENT) -> int:
        """How many `segments` would make: by arithmetic alone, since a stranger's header may ask for millions."""
        return sum(-(-(run.stop - run.start) // _in_bounds(target)) for run in self._runs())

    def _cut(self, target: int) -> Iterator[Segment]:
        index = 0
        for run in self._runs():
            for at in range(run.start, run.stop, target):
                yield Segment(index, at, min(at + target, run.stop), run.itemsize)
                index += 1

    def _runs(self) -> Iterator[_Run]:
        """The stretches that a segment may not reach across."""
        i = 0
        while i < len(self.tensors):
            j = i
            while j < len(self.tensors) and _goes_with(self.tensors[j], self.tensors[i]):
                j += 1
            stop = self.tensors[j].offset if j < len(self.tensors) else self.nbytes
            yield _Run(self.tensors[i].offset, stop, self.tensors[i].itemsize)
            i = j

    @cached_property
    def adapter(self) -> frozenset[str]:
        """The tensors that belong to an adapter; empty where the whole model is trained."""
        return frozenset(t.name for t in self.tensors if t.name.startswith(ADAPTER))

    def touched(self, start: int, stop: int) -> list[str]:
        """Names of the tensors that share a byte with [start, stop)."""
        return [t.name for t in self.tensors if t.offset < stop and t.stop > start]

    def to_wire(self) -> list[Any]:
        return [[t.name, t.dtype, list(t.shape)] for t in self.tensors]

    @classmethod
    def from_wire(cls, wire: Any) -> Layout:
        """Parse and check what a peer sent; Refusal on anything malformed or over the limits."""
        try:
            layout = cls.build(msgspec.convert(wire, _Table))
        except (ValueError, RecursionError) as error:
            raise Refusal(f"malformed tensor table: {error}") from None
        if layout.nbytes > MAX_STATE:
            raise Refusal(f"state of {layout.nbytes} bytes is over the limit of {MAX_STATE}")
        if layout.to_wire() != wire:
            raise Refusal("tensor table is not in its canonical order")
        return layout
