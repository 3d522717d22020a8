"""The codecs of other systems, as small functions over the same words: encode to bytes, decode to words.

Each is written after its description (PULSE/grail v3.1, the XOR form of slime and verl, SparrowRL's LEB128) with numpy and
zstandard, as its authors do; zipnn is the program itself. Must not know Shoal's codec, nor how anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod

import numpy as np
import zstandard

from netem.bench.codec.model_updates import ModelUpdate
from p2p.errors import ShoalError


@dataclass(frozen=True, slots=True)
class OtherCodec:
    """One codec, as its two functions."""

    encode: Callable[[ModelUpdate], bytes]
    decode: Callable[[bytes, ModelUpdate], np.ndarray]
    """the words of `new` from the payload; it may read only `old` and the shapes of the update"""


# --- PULSE -----------------------------------------------------------------------------------------------------------------


def pulse_encode(update: ModelUpdate) -> bytes:
    """Per tensor: changed places by row and column, row gaps in u8, column gaps within a row in u16 (i32 where that is too
    small), raw new values; all tensors in one zstd-1 frame behind a JSON header (grail's v3.1 form)."""
    parts, header = [], []
    for start, shape in _tensors(update.shapes):
        size, columns = prod(shape), shape[-1] if shape else 1
        old, new = update.old[start : start + size], update.new[start : start + size]
        at = np.flatnonzero(old != new)
        rows, cols = at // columns, at % columns
        row_gaps = np.diff(rows, prepend=0)
        col_gaps = np.where(row_gaps > 0, cols, np.diff(cols, prepend=0))
        rows_out = row_gaps.astype(np.uint8 if not len(at) or row_gaps.max() < 256 else np.int32)
        cols_out = col_gaps.astype(np.uint16 if not len(at) or col_gaps.max() < 65536 else np.int32)
        parts += [rows_out.tobytes(), cols_out.tobytes(), new[at].tobytes()]
        header.append([len(at), rows_out.dtype.str, cols_out.dtype.str])
    text = json.dumps(header).encode()
    return zstandard.ZstdCompressor(level=1).compress(len(text).to_bytes(4, "little") + text + b"".join(parts))


def pulse_decode(payload: bytes, update: ModelUpdate) -> np.ndarray:
    """The new words (uN [values]) from what `pulse_encode` made and `update.old`."""
    data = memoryview(zstandard.ZstdDecompressor().decompress(payload))
    at = 4 + int.from_bytes(data[:4], "little")
    header, out = json.loads(bytes(data[4:at])), update.old.copy()
    for (start, shape), (count, row_type, col_type) in zip(_tensors(update.shapes), header, strict=True):
        found = []
        for dtype in (row_type, col_type, update.old.dtype.str):
            found.append(np.frombuffer(data, dtype, count, at))
            at += found[-1].nbytes
        row_gaps, col_gaps, values = found
        rows = np.cumsum(row_gaps, dtype=np.int64)
        sums = np.cumsum(col_gaps, dtype=np.int64)
        # Sums start anew with each row: what had been summed before the row's first place is taken off.
        begins = np.flatnonzero(row_gaps > 0)
        before = np.zeros(count, np.int64)
        if len(begins):
            off = sums[begins] - col_gaps[begins]
            before[begins] = np.diff(off, prepend=0)
        cols = sums - np.cumsum(before)
        out[start + rows * (shape[-1] if shape else 1) + cols] = values
    return out


# --- XOR and LEB128 --------------------------------------------------------------------------------------------------------


def xor_encode(update: ModelUpdate) -> bytes:
    """Changed places as u16 gaps (0xFFFF: that many unchanged words and no change), XOR of the words, zstd-1."""
    at = np.flatnonzero(update.old != update.new)
    gaps = np.diff(at, prepend=-1) - 1
    escapes = gaps // 0xFFFF
    stream = np.full(len(at) + int(escapes.sum()), 0xFFFF, np.uint16)
    stream[np.cumsum(escapes + 1) - 1] = gaps % 0xFFFF
    body = len(stream).to_bytes(8, "little") + stream.tobytes() + (update.old[at] ^ update.new[at]).tobytes()
    return zstandard.ZstdCompressor(level=1).compress(body)


def xor_decode(payload: bytes, update: ModelUpdate) -> np.ndarray:
    """The new words (uN [values]) from what `xor_encode` made and `update.old`."""
    data = zstandard.ZstdDecompressor().decompress(payload)
    stream = np.frombuffer(data, np.uint16, int.from_bytes(data[:8], "little"), 8)
    ends = stream != 0xFFFF
    at = (np.cumsum(stream + ends.astype(np.int64)))[ends] - 1
    out = update.old.copy()
    out[at] ^= np.frombuffer(data, out.dtype, len(at), 8 + stream.nbytes)
    return out


def leb128_encode(update: ModelUpdate) -> bytes:
    """Gaps as LEB128 (seven bits a byte, lowest first), raw new values; no entropy coding."""
    at = np.flatnonzero(update.old != update.new)
    gaps = np.diff(at, prepend=-1) - 1
    width = np.maximum(1, -(-np.frexp(gaps.astype(np.float64))[1] // 7))
    stops = np.cumsum(width)
    out = np.empty(int(stops[-1]) if len(at) else 0, np.uint8)
    for k in range(int(width.max(initial=0))):
        has = width > k
        more = (width > k + 1)[has].astype(np.uint8) << 7
        out[(stops - width + k)[has]] = (gaps[has] >> (7 * k)).astype(np.uint8) & 127 | more
    return len(out).to_bytes(8, "little") + out.tobytes() + update.new[at].tobytes()


def leb128_decode(payload: bytes, update: ModelUpdate) -> np.ndarray:
    """The new words (uN [values]) from what `leb128_encode` made and `update.old`."""
    size = int.from_bytes(payload[:8], "little")
    stream = np.frombuffer(payload, np.uint8, size, 8)
    last = stream < 128
    number: np.ndarray = np.cumsum(last) - last  # which gap a byte belongs to
    first = np.flatnonzero(np.concatenate([[True], last[:-1]])) if size else np.empty(0, np.int64)
    place = np.arange(size) - first[number] if size else number
    gaps = np.zeros(int(last.sum()), np.int64)
    np.add.at(gaps, number, (stream & 127).astype(np.int64) << (7 * place))
    at = np.cumsum(gaps + 1) - 1
    out = update.old.copy()
    out[at] = np.frombuffer(payload, out.dtype, len(at), 8 + size)
    return out


# --- the whole state -------------------------------------------------------------------------------------------------------


def full_encode(update: ModelUpdate) -> bytes:
    return update.new.tobytes()


def full_decode(payload: bytes, update: ModelUpdate) -> np.ndarray:
    return np.frombuffer(payload, update.old.dtype).copy()


def zipnn_encode(update: ModelUpdate) -> bytes:
    return bytes(_zipnn().compress(bytearray(update.new.tobytes())))


def zipnn_decode(payload: bytes, update: ModelUpdate) -> np.ndarray:
    return np.frombuffer(bytes(_zipnn().decompress(bytearray(payload))), update.old.dtype)


def _zipnn():  # type: ignore[no-untyped-def]
    from zipnn import ZipNN

    return ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)


OTHER_CODECS = {
    "pulse": OtherCodec(pulse_encode, pulse_decode), "xor": OtherCodec(xor_encode, xor_decode),
    "leb128": OtherCodec(leb128_encode, leb128_decode), "full": OtherCodec(full_encode, full_decode),
    "zipnn": OtherCodec(zipnn_encode, zipnn_decode),
}  # fmt: skip


def missing(name: str) -> str | None:
    """Why the codec cannot be measured on this machine; None when it can."""
    if name == "zipnn" and find_spec("zipnn") is None:
        return "zipnn comes with pip install 'shoal[bench]'"
    return None


def check(name: str, payload: bytes, update: ModelUpdate) -> None:
    """ShoalError when the codec does not decode to the words that it encoded: then its size means nothing."""
    if not np.array_equal(OTHER_CODECS[name].decode(payload, update), update.new):
        raise ShoalError(f"{name} did not decode to what it encoded ({update.name})")


def _tensors(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """(index of its first word, shape) of each tensor."""
    sizes = [prod(shape) for shape in shapes]
    return [(sum(sizes[:i]), shape) for i, shape in enumerate(shapes)]
