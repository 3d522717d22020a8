"""A set of chunk numbers in one bit each, for what every peer is said to hold. Must not know what a chunk is.

A set of ints takes 8 MiB at 10^5 chunks, and there is one per neighbour and manifest; this takes 12 KiB, and nothing once
it is known to be full.
"""

from __future__ import annotations

from collections.abc import Iterable


class ChunkSet:
    """Chunk numbers from 0. As long as its highest member, so who adds numbers from outside bounds them first."""

    __slots__ = ("_bits", "_count", "_full")

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0
        self._full = 0
        """all chunks below this number are in and no others; `_bits` is empty then. 0: see `_bits`"""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, chunk: int) -> bool:
        if self._full:
            return chunk < self._full
        byte = chunk >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (chunk & 7) & 1)

    def add(self, chunk: int) -> None:
        if chunk in self:
            return
        self._expand()
        byte = chunk >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << (chunk & 7)
        self._count += 1

    def discard(self, chunk: int) -> None:
        if chunk in self:
            self._expand()
            self._bits[chunk >> 3] &= ~(1 << (chunk & 7))
            self._count -= 1

    def compact(self, total: int) -> None:
        """Let go of the bits when all `total` chunks are in."""
        if self._count == total and not self._full and self.lowest_outside(total) is None:
            self._full, self._bits = total, bytearray()

    def lowest_outside(self, total: int) -> int | None:
        """The lowest number below `total` that is not in."""
        return _lowest(((1 << total) - 1) & ~self._number())

    def lowest_not_in(self, other: ChunkSet, but: Iterable[int] = ()) -> int | None:
        """The lowest member that `other` lacks, and none of `but`; a few microseconds at 10^5 chunks."""
        if not self._count:
            return None
        bits = self._number() & ~other._number()
        for chunk in but:
            bits &= ~(1 << chunk)
        return _lowest(bits)

    def _number(self) -> int:
        return (1 << self._full) - 1 if self._full else int.from_bytes(self._bits, "little")

    def _expand(self) -> None:
        if self._full:
            self._bits = bytearray(((1 << self._full) - 1).to_bytes((self._full + 7) >> 3, "little"))
            self._full = 0


def _lowest(bits: int) -> int | None:
    return (bits & -bits).bit_length() - 1 if bits else None
