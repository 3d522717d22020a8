"""Random damage to valid inputs. Pure: all chance comes from the given generator."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

TELLING = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc0", b"\xc1", b"\x90", b"\x9f", b"\xdc\xff\xff", b"\xdd\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3" + b"\x80" + b"\0" * 7,
    b"\xcb\x7f\xf8" + b"\0" * 6, b"\xca\x7f\x80\0\0", b"\xdf\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\x01\x00\x00\x00", b"\xce\x00\x01\x00\x00",
)  # fmt: skip
"""Pieces that decoders trip over: lengths that are not there, largest and smallest numbers, NaN."""


def mutate(seeds: Sequence[bytes], chance: Random, most: int = 1 << 16) -> bytes:
    """One of `seeds` after a few random changes, at most `most` bytes."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at, kind = chance.randrange(len(data) + 1), chance.randrange(8)
        if kind == 0 and data:
            data[at - 1] ^= 1 << chance.randrange(8)
        elif kind == 1 and data:
            data[at - 1] = chance.randrange(256)
        elif kind == 2:
            piece = chance.choice(TELLING)
            data[at : at + len(piece)] = piece
        elif kind == 3:
            data[at:at] = chance.choice(TELLING)
        elif kind == 4:
            del data[at : at + chance.choice((1, 1, 2, 4, 16, 1 << 20))]
        elif kind == 5:
            piece = data[at : at + chance.choice((1, 4, 16, 64))]
            data[at:at] = piece * chance.choice((1, 2, 50))
        elif kind == 6:
            other = chance.choice(seeds)
            begin = chance.randrange(len(other) + 1)
            data[at : at + chance.choice((1, 8, 64))] = other[begin : begin + chance.choice((1, 8, 64, 1 << 20))]
        else:
            data[at:at] = chance.randbytes(chance.choice((1, 2, 8, 32)))
    return bytes(data[:most])
