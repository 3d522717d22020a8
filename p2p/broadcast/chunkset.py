"""A set of chunk numbers in one bit each, for what every peer is said to hold. Must not know what a chunk is.

A set of ints takes 8 MiB at 10^5 chunks, and there is one per neighbour and manifest; this takes 12 KiB, and nothing once
it is known to be full. The bits are one Python int, so that news of many chunks costs one operation, not one a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class ChunkSet:
    """Chunk numbers from 0. As long as its highest member, so who adds numbers from outside bounds them first."""

    __slots__ = ("_bits", "_count", "_full")

    def __init__(self, bits: int = 0) -> None:
        self._bits = bits
        self._count = bits.bit_count()
        self._full = 0
        """all chunks below this number are in and no others; `_bits` is 0 then. 0: see `_bits`"""

    def __len__(self) -> int:
        return self._count

    def __contains__(self, chunk: int) -> bool:
        if self._full:
            return chunk < self._full
        return self._bits >> chunk & 1 == 1

    @property
    def bits(self) -> int:
        """Bit i is set for chunk i."""
        return (1 << self._full) - 1 if self._full else self._bits

    def add(self, chunk: int) -> None:
        if chunk not in self:
            self._bits, self._full = self.bits | 1 << chunk, 0
            self._count += 1

    def add_bits(self, bits: int) -> int:
        """Add all of these; returns those that are new."""
        have = self.bits
        new = bits & ~have
        if new:
            self._bits, self._full = have | new, 0
            self._count += new.bit_count()
        return new

    def discard(self, chunk: int) -> None:
        if chunk in self:
            self._bits, self._full = self.bits & ~(1 << chunk), 0
            self._count -= 1

    def compact(self, total: int) -> None:
        """Let go of the bits when all `total` chunks are in."""
        if self._count == total and not self._full and self._bits.bit_length() == total:
            self._full, self._bits = total, 0

    def lowest_not_in(self, other: ChunkSet, but: Iterable[int] = ()) -> int | None:
        """The lowest member that `other` lacks, and none of `but`; a few microseconds at 10^5 chunks."""
        if not self._count:
            return None
        bits = self.bits & ~other.bits
        for chunk in but:
            bits &= ~(1 << chunk)
        return (bits & -bits).bit_length() - 1 if bits else None


class BitView:
    """The members of a number's bits, to be looked up one by one: a shift of the number would copy it each time."""

    __slots__ = ("_bytes",)

    def __init__(self, bits: int) -> None:
        self._bytes = bits.to_bytes((bits.bit_length() + 7) >> 3, "little")

    def __contains__(self, chunk: int) -> bool:
        place = chunk >> 3
        return place < len(self._bytes) and self._bytes[place] >> (chunk & 7) & 1 == 1


def bits_of(chunks: Iterable[int]) -> int:
    """The bits of these chunk numbers."""
    out = bytearray()
    for chunk in chunks:
        byte = chunk >> 3
        if byte >= len(out):
            out.extend(bytes(byte + 1 - len(out)))
        out[byte] |= 1 << (chunk & 7)
    return int.from_bytes(out, "little")


def chunks_of(bits: int) -> Iterator[int]:
    """The chunk numbers of these bits, ascending."""
    if bits.bit_count() > 64:  # taking them off one by one copies what is left each time
        for place, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) >> 3, "little")):
            while byte:
                yield 8 * place + (byte & -byte).bit_length() - 1
                byte &= byte - 1
        return
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
