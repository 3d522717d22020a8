"""In which order rows are drawn: a shuffle of its own for each epoch, and of several sources each its share. Pure.

Everything is worked out from numbers, nothing is kept, so that problem 10**9 is as quick as problem 0, and the same in every
process for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from p2p.errors import UsageError

ROUNDS = 4
"""Rounds of the Feistel network that shuffles: with four it cannot be told from a random order (Luby and Rackoff 1988)."""

BLOCK = 1000
"""Problems in which every source has exactly its share: weights are rounded to thousandths."""


class Place(NamedTuple):
    """A problem's row."""

    source: int
    row: int


class Order:
    """Of sources with so many rows and such weights, which row is problem `index`."""

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]) -> None:
        self._seed, self._sizes, self._slots = seed, tuple(sizes), slots(weights)

    def place(self, index: int) -> Place:
        """The row of problem `index`."""
        if len(self._sizes) == 1:
            return Place(0, self._row(0, index))
        block, position = divmod(index, BLOCK)
        slot = shuffled(position, BLOCK, (self._seed, "block", block))
        source = 0
        while slot >= self._slots[source]:
            slot -= self._slots[source]
            source += 1
        return Place(source, self._row(source, block * self._slots[source] + slot))

    def _row(self, source: int, drawn: int) -> int:
        """The row that is drawn from a source when so many were drawn before."""
        epoch, position = divmod(drawn, self._sizes[source])
        return shuffled(position, self._sizes[source], (self._seed, "epoch", source, epoch))


def slots(weights: Sequence[float]) -> tuple[int, ...]:
    """How many of BLOCK problems each source has. UsageError for a weight too small for one."""
    if len(weights) == 1:
        return (BLOCK,)
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))[: BLOCK - sum(whole)]:
        whole[i] += 1
    if 0 in whole:
        raise UsageError(f"task.data: weight {weights[whole.index(0)]:g} is less than a thousandth of all weights together")
    return tuple(whole)


def shuffled(position: int, size: int, key: tuple[object, ...]) -> int:
    """Where `position` goes in the shuffle of range(size) that `key` names."""
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    name = "/".join(map(str, key)).encode()
    while True:  # out of range: shuffle on until it is back, which keeps it one to one
        position = _feistel(position, bits, name)
        if position < size:
            return position


def _feistel(value: int, bits: int, key: bytes) -> int:
    """One to one on numbers of twice `bits` bits."""
    left, right = value >> bits, value & ((1 << bits) - 1)
    for number in range(ROUNDS):
        text = b"%d/%d/%s" % (number, right, key)
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        left, right = right, left ^ (drawn & ((1 << bits) - 1))
    return left << bits | right
