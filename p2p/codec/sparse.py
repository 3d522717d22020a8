"""SPARSE: where words changed, as ranks within the class of their base, and by how much, as zigzag steps.

    models - 1 (1 byte) | classes - 1 (1)
    for each class, rising: class (1), model (1), changes (varint, not 0)
    for each model: levels of its gap tokens, levels of its step tokens (`rans`)
    length of the token words (4) | token words | raw bits of gaps and steps (`stream`)

Changes are in the order of classes, and of positions within one (`classes`). A step is (new - base) in the words' own
arithmetic. Words of eight bytes are taken as pairs.
"""

from __future__ import annotations

import struct

import numpy as np

from p2p.codec.change_stream import read, tokens_of, write
from p2p.codec.classes import CLASSES, Changes, apply, find
from p2p.codec.port import Coding, changed
from p2p.codec.rans import levels_of, read_levels, tables_of, write_levels
from p2p.codec.tokens import TOKENS
from p2p.errors import Refusal

MOST = 0.12
"""Share of changed words beyond which DENSE is as small and faster."""

OWN_MODEL = 300
"""A class with fewer changes shares the model of its neighbour: a model takes some 25 bytes."""

_LENGTH = struct.Struct("<I")


class SparseCoding(Coding):
    name, id, needs_base = "sparse", 7, True

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> tuple[bytes, int] | None:
        """None when more than MOST changed; nothing at all and 0 when nothing did."""
        assert base is not None
        words, of = narrow(new), narrow(base)
        changes = find(words, of, room(len(words)))
        if changes is None:
            return None
        return pack(changes), len(changes.ranks) if words is new else changed(new, base)

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> int:
        assert base is not None
        words, of = narrow(out), narrow(base)
        changes = unpack(body, len(words), words.dtype)
        if not apply(of, changes, words):
            raise Refusal(f"sparse delta reaches beyond the {len(words)} words of its segment")
        return len(changes.ranks) if words is out else changed(out, base)


def room(words: int) -> int:
    """The most changes that a segment of so many words may have. What a receiver allocates follows from it."""
    return int(MOST * words) + 1


def narrow(words: np.ndarray) -> np.ndarray:
    return words.view("<u4") if words.itemsize == 8 else words


def pack(changes: Changes) -> bytes:
    """The body for these changes; nothing when there are none."""
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
    words, raw = write(counts, model_of, changes.ranks, changes.steps, tokens, tables_of(levels))
    return b"".join([head, _LENGTH.pack(len(words)), words, raw])


def unpack(body: memoryview, words: int, dtype: np.dtype) -> Changes:
    """What `pack` was given, of a segment of so many words. Refusal on anything that it does not make."""
    counts, model_of, tables, at = _read_head(body, words)
    if at + _LENGTH.size > len(body):
        raise Refusal("payload ends before its token words")
    (length,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    stop = min(at + length, len(body))
    ranks, steps = read(body[at:stop], body[stop:], counts[counts > 0], model_of, tables, words, dtype)
    return Changes(counts, ranks, steps)


def group(counts: np.ndarray, least: int) -> np.ndarray:
    """The model of each class, from its count: neighbours share one until it has `least`; what is left over joins the last."""
    models, model, held = [], 0, 0
    left = int(counts.sum())
    for count in counts.tolist():
        if held >= least and left >= least:
            model, held = model + 1, 0
        models.append(model)
        held, left = held + count, left - count
    return np.array(models)


def _read_head(body: memoryview, words: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(int64 [CLASSES]: changes, the model of each class that has any, the models' tables, where the head ends)"""
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
