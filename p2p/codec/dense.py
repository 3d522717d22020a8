"""DENSE: the zigzag step of every word, by the table of its base's class; for segments in which much changed.

    models - 1 (1 byte) | classes - 1 (1)
    for each class that the base has, rising: class (1), model (1)
    for each model: levels of its step tokens (`rans`)
    length of the token words (4) | token words | raw bits of steps (`tokens`)

Words of eight bytes are taken as pairs.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from p2p.codec.classes import CLASSES, classes_of, readable
from p2p.codec.planes import zigzag
from p2p.codec.port import Coding, Encoded, changed
from p2p.codec.rans import BITS, decode, encode, frequencies, levels_of, read_levels, tables_of, write_levels
from p2p.codec.sparse import LENGTH, cut_words, group, narrow
from p2p.codec.tokens import FIRST, RAW_BITS, TOKENS, histogram, raw_bytes, tokens_of, write_raw
from p2p.errors import Refusal

OWN_MODEL = 2000
"""Words: a class with fewer of them shares the model of its neighbour: a model takes bytes of its own, and every word has a step
here, so that many words are needed for a table to pay."""


class DenseCoding(Coding):
    name, id, needs_base = "dense", 6, True

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> Encoded | None:
        """None when the payload would take more bytes than the words themselves."""
        assert base is not None
        whole, (new, base) = (new, base), (narrow(new), narrow(base))
        numbers = zigzag(new, base)
        tokens = tokens_of(numbers)
        changes = int(np.count_nonzero(tokens)) if new is whole[0] else changed(*whole)
        raw = write_raw(numbers, tokens)
        del numbers
        rows = classes_of(base)
        held = histogram(rows)
        used = np.flatnonzero(held)
        model_of = group(held[used], OWN_MODEL)
        head = bytearray([int(model_of[-1]), len(used) - 1])
        for c, model in zip(used.tolist(), model_of.tolist(), strict=True):
            head += bytes([c, model])
        by_class = np.zeros(CLASSES, np.uint8)
        by_class[used] = model_of
        rows = by_class[rows]
        counts = frequencies(tokens, rows, int(model_of[-1]) + 1)[:, :TOKENS]
        levels = levels_of(counts)
        tables = tables_of(levels)
        bits = float((counts * (BITS - np.log2(np.maximum(tables, 1)))).sum())
        if len(raw) + bits / 8 > new.nbytes:
            return None
        head += b"".join(map(write_levels, levels))
        words = encode(tokens, rows, tables)
        return Encoded(b"".join([head, LENGTH.pack(len(words)), words, raw]), changes)

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> None:
        """See `Coding.decode`."""
        assert base is not None
        out, base = narrow(out), narrow(base)
        rows = classes_of(base)
        by_class, models, at = _read_classes(body, np.flatnonzero(histogram(rows)))
        levels = np.empty((models, TOKENS), np.uint8)
        at = read_levels(body, at, levels)
        words, rest = cut_words(body, at)
        tokens = decode(words, by_class[rows], tables_of(levels))
        del rows
        raw = np.frombuffer(rest, np.uint8)
        if len(raw) != raw_bytes(tokens):
            raise Refusal(f"payload has {len(raw)} bytes of raw bits, its steps take {raw_bytes(tokens)}")
        most = np.iinfo(out.dtype).max
        if not _apply(raw, tokens, FIRST, RAW_BITS, most=most, base=readable(base), out=out):
            raise Refusal("dense delta has a step larger than a word, or something in its padding")


def _read_classes(body: memoryview, used: np.ndarray) -> tuple[np.ndarray, int, int]:
    """(uint8 [CLASSES]: the model of each class, how many models, where the list ends). Refusal unless the classes are those of
    the base."""
    at = 2 + 2 * len(used)
    if len(body) < at or body[1] != len(used) - 1:
        raise Refusal("dense delta has other classes than its base")
    pairs = np.frombuffer(body[2:at], np.uint8).reshape(-1, 2)
    steps = np.diff(pairs[:, 1].astype(np.int64), prepend=0)
    if (pairs[:, 0] != used).any() or steps[0] != 0 or ((steps != 0) & (steps != 1)).any() or pairs[-1, 1] != body[0]:
        raise Refusal("dense delta has other classes than its base, or models out of order")
    by_class = np.zeros(CLASSES, np.uint8)
    by_class[used] = pairs[:, 1]
    return by_class, body[0] + 1, at


@njit(nogil=True, cache=True)
def _apply(raw, tokens, first, widths, most, base, out):  # type: ignore[no-untyped-def]
    """False for bytes that no encoder makes. `raw` has exactly the length that the tokens ask for."""
    held = np.uint64(0)
    count, at = 0, 0
    for i in range(len(tokens)):
        token = tokens[i]
        number = np.int64(token)
        if token >= 8:
            width = widths[token]
            while count < width:
                held |= np.uint64(raw[at]) << np.uint64(count)
                at += 1
                count += 8
            number = first[token] + np.int64(held & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
            if number > most:
                return False
            held >>= np.uint64(width)
            count -= width
        out[i] = base[i] + ((number >> 1) ^ -(number & 1))
    return held == 0
