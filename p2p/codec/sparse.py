"""SPARSE: the positions of the changed words as gap bytes, and their zigzag differences.

Sections: gaps; values; then one byte plane for each byte of a word, of the values that did not fit a byte.

A gap is the count of unchanged words before a changed one: as many bytes 255 as 255 goes into it, then the rest (0 to
254). So positions rise strictly by construction, and the stream can never be longer than the segment has words. A value
is zigzag difference - 1 (it is never 0); 255 stands for "too large, see the planes".
"""

from __future__ import annotations

import numpy as np

from p2p.codec.base import Coding
from p2p.codec.planes import Sections, join_planes, pack, split_planes, unzigzag, zigzag
from p2p.errors import Refusal

_ESCAPE = 255

_BLOCK = 1 << 18
"""Gap bytes decoded at once: their positions (8 bytes each) stay in the cache, and a segment that claims that every
word changed costs no more memory than any other."""


class SparseCoding(Coding):
    name, id, needs_base = "sparse", 1, True

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> bytes:
        assert base is not None
        at = np.flatnonzero(new != base)
        gaps = np.diff(at, prepend=-1) - 1
        escapes = gaps // _ESCAPE
        stream = np.full(len(at) + int(escapes.sum()), _ESCAPE, np.uint8)
        stream[np.cumsum(escapes + 1) - 1] = gaps % _ESCAPE
        z = zigzag(new[at], base[at]) - new.dtype.type(1)
        values = np.minimum(z, _ESCAPE).astype(np.uint8)
        return pack([stream, values, *split_planes(z[values == _ESCAPE])])

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> int:
        assert base is not None
        sections = Sections(body)
        gaps = sections.take(len(out))
        if not len(gaps) or gaps[-1] == _ESCAPE:
            raise Refusal("sparse delta has no changed word, or its last gap has no end")
        changed = int(np.count_nonzero(gaps != _ESCAPE))
        values = sections.take_exact(changed)
        count = int(np.count_nonzero(values == _ESCAPE))
        large = join_planes([sections.take_exact(count) for _ in range(out.itemsize)], out.dtype)
        sections.end()
        if int(gaps.sum(dtype=np.uint64)) + changed > len(out):
            raise Refusal(f"sparse delta reaches beyond the {len(out)} words of its segment")
        if count and (int(large.min()) < _ESCAPE or int(large.max()) == np.iinfo(out.dtype).max):
            raise Refusal("sparse delta has a value in a form that its encoder does not use")
        out[:] = base
        stop, done, used = 0, 0, 0  # words passed, changes applied, large values used
        for start in range(0, len(gaps), _BLOCK):
            block = gaps[start : start + _BLOCK]
            is_end = block != _ESCAPE
            reach = stop + np.cumsum(block + is_end.astype(np.uint16), dtype=np.int64)
            stop, at = int(reach[-1]), reach[is_end] - 1
            piece = values[done : done + len(at)]
            z, wide = piece.astype(out.dtype), piece == _ESCAPE
            more = int(np.count_nonzero(wide))
            if more:
                z[wide] = large[used : used + more]
            out[at] += unzigzag(z + out.dtype.type(1))
            done, used = done + len(at), used + more
        return changed
