"""Which codings there are, and which of them a segment gets. Must not know how each works."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from p2p.codec.base import Coding
from p2p.codec.dense import DenseCoding
from p2p.codec.empty import EmptyCoding
from p2p.codec.plain import PlainCoding
from p2p.codec.raw import RawCoding
from p2p.codec.sparse import SparseCoding
from p2p.errors import Refusal
from p2p.layout import WORD

EMPTY, SPARSE, DENSE, RAW, PLAIN = EmptyCoding(), SparseCoding(), DenseCoding(), RawCoding(), PlainCoding()

CODINGS: dict[int, Coding] = {coding.id: coding for coding in (EMPTY, SPARSE, DENSE, RAW, PLAIN)}

SPARSE_BELOW = 0.5
"""Share of changed words up to which SPARSE is tried."""

DENSE_ABOVE = 0.1
"""Share of changed words from which DENSE and RAW are tried: both cost a pass over every word."""


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """How a payload was coded, and how many words differ from the base (without a base: all of them)."""

    coding: str
    changed: int


def encode_segment(new: np.ndarray, base: np.ndarray | None) -> bytes:
    """The smallest of the codings that may win, as one payload: coding id, body.

    `new` and `base` are uN [n] words of one dtype; without a base the result is an anchor's. Deterministic.
    """
    _check(new, base)
    if base is None:
        candidates: list[Coding] = [RAW]
    else:
        changed = int(np.count_nonzero(new != base))
        share = changed / max(len(new), 1)
        candidates = [] if changed else [EMPTY]
        if changed and share <= SPARSE_BELOW:
            candidates.append(SPARSE)
        if share >= DENSE_ABOVE:
            candidates += [DENSE, RAW]
    payload = min((bytes([c.id]) + c.encode(new, base) for c in candidates), key=len)
    return payload if len(payload) <= new.nbytes else bytes([PLAIN.id]) + PLAIN.encode(new, base)


def decode_segment(payload: bytes | memoryview, base: np.ndarray | None, out: np.ndarray) -> SegmentInfo:
    """Fill `out` (uN [n]) from a payload and the base it was made against.

    Refusal, and nothing else, on any payload that is not whole and well-formed; then `out` holds anything, `base` is
    untouched. Working memory is a small multiple of `out`, whatever the payload claims. ValueError when the arrays
    themselves do not fit together.
    """
    _check(out, base)
    body = memoryview(payload)
    if not len(body):
        raise Refusal("empty payload")
    coding = CODINGS.get(body[0])
    if coding is None:
        raise Refusal(f"unknown coding {body[0]}")
    if coding.needs_base and base is None:
        raise Refusal(f"coding {coding.name} needs a base, and there is none")
    return SegmentInfo(coding.name, coding.decode(body[1:], base, out))


def _check(words: np.ndarray, base: np.ndarray | None) -> None:
    if words.ndim != 1 or words.dtype not in WORD.values():
        raise ValueError(f"want one-dimensional unsigned words, got {words.dtype} with {words.ndim} dimensions")
    if base is not None and (base.shape != words.shape or base.dtype != words.dtype):
        raise ValueError(f"base is {base.dtype} {base.shape}, words are {words.dtype} {words.shape}")
    if base is not None and np.may_share_memory(words, base) and len(words):
        raise ValueError("base and words share memory")
