"""The table of codings by id, and the choice of one for each segment. Must not know how a coding works."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p2p.codec.classes import Changes
from p2p.codec.dense import DenseCoding
from p2p.codec.empty import EmptyCoding
from p2p.codec.plain import PlainCoding
from p2p.codec.port import Coding, Encoded
from p2p.codec.raw import RawCoding
from p2p.codec.sparse import SparseCoding, pack
from p2p.errors import Refusal
from p2p.layout import WORD

EMPTY, SPARSE, DENSE, RAW, PLAIN = EmptyCoding(), SparseCoding(), DenseCoding(), RawCoding(), PlainCoding()

CODINGS: dict[int, Coding] = {coding.id: coding for coding in (EMPTY, SPARSE, DENSE, RAW, PLAIN)}

WARMED = (1, 2, 4)
"""Bytes of the words for which `warm` compiles the loops, and all that there are: words of eight bytes go as pairs of four."""

NOTHING_CHANGED = bytes([EMPTY.id])
"""The payload of a segment that equals its base."""

RAW_FROM = 0.5
"""RAW is tried as well when the smallest payload so far takes this share of the words' own bytes. Trained
bf16 weights take RAW about two thirds of them, so a payload below this share is the smaller one."""


class SegmentPayload(NamedTuple):
    """One segment as it travels."""

    payload: bytes
    """the coding's id (1 byte), then its body"""
    changed: int
    """words that differ from the base; without a base, all of them"""


def encode_segment(new: np.ndarray, base: np.ndarray | None, changes: Changes | None = None) -> SegmentPayload:
    """The smallest payload among the codings that may win.

    `new` and `base` are uN [n] words of one dtype; without a base the result is an anchor's. `changes` (words of 1, 2 or 4 bytes
    only) are what `classes.find` would give, when they were found elsewhere already: the payload is the same, without the search.
    Deterministic. ValueError when the arrays do not fit together.
    """
    _check(new, base)
    candidates: list[tuple[Coding, Encoded | None]] = []
    if base is not None:
        found = SPARSE.encode(new, base) if changes is None else Encoded(pack(changes), len(changes.ranks))
        candidates.append((SPARSE, found))
        if candidates[0][1] == (b"", 0):
            return SegmentPayload(NOTHING_CHANGED, 0)
        if candidates[0][1] is None:
            candidates = [(DENSE, DENSE.encode(new, base))]
    smallest = min((len(found.body) for _, found in candidates if found is not None), default=new.nbytes)
    if smallest >= RAW_FROM * new.nbytes:
        candidates.append((RAW, RAW.encode(new, base)))
    coding, best = min(((coding, found) for coding, found in candidates if found is not None), key=lambda c: len(c[1].body))
    payload = bytes([coding.id]) + best.body
    return SegmentPayload(payload if len(payload) <= new.nbytes else bytes([PLAIN.id]) + new.tobytes(), best.changed)


def decode_segment(payload: bytes | memoryview, base: np.ndarray | None, out: np.ndarray) -> None:
    """Fill `out` (uN [n]) from a payload and the base it was made against.

    Refusal, and nothing else, on any payload that is not whole and well-formed; then `out` holds anything, `base` is
    untouched. Working memory is a small multiple of `out`, whatever the payload claims. ValueError when the arrays
    themselves do not fit together.
    """
    _check(out, base)
    body = memoryview(payload).toreadonly()  # as bytes are: to numba a writable one is of another type, compiled anew
    if not len(body):
        raise Refusal("empty payload")
    coding = CODINGS.get(body[0])
    if coding is None:
        raise Refusal(f"unknown coding {body[0]}")
    if coding.needs_base and base is None:
        raise Refusal(f"coding {coding.name} needs a base, and there is none")
    coding.decode(body[1:], base, out)


def warm() -> None:
    """Compile the loops over words, or load them from the cache beside the code, for words of every size.

    Nothing is compiled later, whatever comes: the learner's header says of which sizes a state's words are. Call it before the
    process has deadlines to meet: compiling holds up every thread, for some twenty seconds the first time.
    """
    for size in WARMED:
        base = np.arange(5000).astype(WORD[size])
        few, all_ = base.copy(), base + WORD[size].type(1)
        few[::100] += WORD[size].type(100)
        for new in (few, all_):
            decode_segment(encode_segment(new, base)[0], base, np.empty_like(base))


def _check(words: np.ndarray, base: np.ndarray | None) -> None:
    if words.ndim != 1 or words.dtype not in WORD.values():
        raise ValueError(f"want one-dimensional unsigned words, got {words.dtype} with {words.ndim} dimensions")
    if base is not None and (base.shape != words.shape or base.dtype != words.dtype):
        raise ValueError(f"base is {base.dtype} {base.shape}, words are {words.dtype} {words.shape}")
    if base is not None and np.may_share_memory(words, base) and len(words):
        raise ValueError("base and words share memory")
