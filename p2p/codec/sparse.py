"""SPARSE: where words changed, as ranks within the class of their base, and by how much, as zigzag steps.

    models - 1 (1 byte) | classes - 1 (1)
    for each class, rising: class (1), model (1), changes (varint, not 0)
    for each model: levels of its gap tokens, levels of its step tokens (`rans`)
    length of the token words (4) | token words | raw bits of gaps and steps (`change_stream`)

Changes are in the order of classes and, within a class, of positions (`classes`). A step is (new - base) in the words' own
arithmetic. Words of eight bytes are taken as pairs.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from p2p.codec.change_stream import read, tokens_of, write
from p2p.codec.classes import CLASSES, Changes, apply, find
from p2p.codec.port import Coding, Encoded, changed
from p2p.codec.rans import levels_of, read_levels, tables_of, write_levels
from p2p.codec.tokens import TOKENS
from p2p.errors import Refusal

MOST = 0.12
"""Share of changed words above which DENSE is as small as this coding, and faster."""

OWN_MODEL = 300
"""Changes: a class with fewer of them shares the model of its neighbour, since a model takes some 25 bytes."""

LENGTH = struct.Struct("<I")
"""How the length of the token words is written, in bytes."""


class SparseCoding(Coding):
    name, id, needs_base = "sparse", 7, True

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> Encoded | None:
        """None when more than MOST of the words changed; an empty body and 0 when no word did."""
        assert base is not None
        words, of = narrow(new), narrow(base)
        changes = find(words, of, room(len(words)))
        if changes is None:
            return None
        return Encoded(pack(changes), len(changes.ranks) if words is new else changed(new, base))

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> None:
        """See `Coding.decode`."""
        assert base is not None
        words, of = narrow(out), narrow(base)
        changes = unpack(body, len(words), words.dtype)
        if not apply(of, changes, words):
            raise Refusal(f"sparse delta reaches beyond the {len(words)} words of its segment")


def room(words: int) -> int:
    """The most changes that a segment of `words` words may have. It bounds what a receiver allocates."""
    return int(MOST * words) + 1


def narrow(words: np.ndarray) -> np.ndarray:
    """The same memory as words of at most 4 bytes: uint64 [n] becomes uint32 [2n], anything else stays."""
    return words.view("<u4") if words.itemsize == 8 else words


def pack(changes: Changes) -> bytes:
    """The body for these changes; b"" when there are none."""
    if not len(changes.ranks):
        return b""
    used = np.flatnonzero(changes.counts)
    counts = changes.counts[used]
    model_of = group(counts, OWN_MODEL)
    head = bytearray([int(model_of[-1]), len(used) - 1])
    for c, model, count in zip(used.tolist(), model_of.tolist(), counts.tolist(), strict=True):
        head += bytes([c, model]) + _varint(count)
    tokens = tokens_of(counts, model_of, changes.ranks, changes.steps)
    levels = levels_of(tokens.counts)
    head += b"".join(map(write_levels, levels))
    words, raw = write(counts, model_of, changes.ranks, steps=changes.steps, tokens=tokens, tables=tables_of(levels))
    return b"".join([head, LENGTH.pack(len(words)), words, raw])


class WordsAndRaw(NamedTuple):
    """The two ends of a body."""

    words: memoryview
    """the words of the entropy coder"""
    raw: memoryview
    """the raw bits, up to the end of the body"""


def cut_words(body: memoryview, at: int) -> WordsAndRaw:
    """Cut a body where its head ends, at `at`: the length, so many bytes of token words, raw bits. Refusal when the length itself
    is cut short; a length beyond the end gives what there is, which the entropy decoder refuses."""
    if at + LENGTH.size > len(body):
        raise Refusal("payload ends before its token words")
    (length,) = LENGTH.unpack_from(body, at)
    start = at + LENGTH.size
    return WordsAndRaw(body[start : start + length], body[start + length :])


def unpack(body: memoryview, words: int, dtype: np.dtype) -> Changes:
    """The changes that `pack` was given, of a segment of `words` words of `dtype`. Refusal on a body that `pack` does not
    make."""
    counts, model_of, tables, at = _read_head(body, words)
    stream, raw = cut_words(body, at)
    ranks, steps = read(stream, raw, counts[counts > 0], models=model_of, tables=tables, below=words, dtype=dtype)
    return Changes(counts, ranks, steps)


def group(counts: np.ndarray, least: int) -> np.ndarray:
    """int64 [classes]: the model of each class, from `counts` (int64 [classes]). Neighbours share a model until it has `least`;
    classes at the end that have less join the last model."""
    models, model, held = [], 0, 0
    left = int(counts.sum())
    for count in counts.tolist():
        if held >= least and left >= least:
            model, held = model + 1, 0
        models.append(model)
        held, left = held + count, left - count
    return np.array(models)


def _read_head(body: memoryview, words: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(int64 [CLASSES]: changes of each class, the model of each class that has changes, the models' tables, where the head
    ends)"""
    if len(body) < 2:
        raise Refusal("sparse delta is cut short")
    counts, model_of = np.zeros(CLASSES, np.int64), [0]
    at, left, last = 2, room(words), -1
    for k in range(body[1] + 1):
        if at + 2 > len(body):
            raise Refusal("sparse delta ends in its list of classes")
        c, model = body[at], body[at + 1]
        if c <= last or not 0 <= model - model_of[-1] <= min(k, 1):
            raise Refusal("sparse delta has classes or models out of order")
        at, last = at + 2, c
        count, at = _read_varint(body, at)
        counts[c] = count
        left -= count
        if not count or left < 0:
            raise Refusal(f"sparse delta has no change in a class, or in all more than {room(words)}, of {words} words")
        model_of.append(model)
    if model_of[-1] != body[0]:
        raise Refusal(f"sparse delta has {body[0] + 1} models, and its classes use {model_of[-1] + 1}")
    levels = np.empty((2 * (body[0] + 1), TOKENS), np.uint8)
    at = read_levels(body, at, levels)
    return counts, np.array(model_of[1:]), tables_of(levels), at


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _read_varint(body: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for place in range(0, 35, 7):
        if at >= len(body):
            break
        number |= (body[at] & 127) << place
        at += 1
        if body[at - 1] < 128:
            return number, at
    raise Refusal("sparse delta has a number that does not end")
