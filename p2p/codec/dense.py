"""DENSE: the zigzag difference of every word in compressed byte planes; for segments where much changed a little."""

from __future__ import annotations

import numpy as np

from p2p.codec.base import Coding
from p2p.codec.planes import Sections, join_planes, pack, split_planes, unzigzag, zigzag


class DenseCoding(Coding):
    name, id, needs_base = "dense", 2, True

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> bytes:
        assert base is not None
        return pack(split_planes(zigzag(new, base)))

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> int:
        assert base is not None
        sections = Sections(body)
        planes = [sections.take_exact(len(out)) for _ in range(out.itemsize)]
        sections.end()
        z = join_planes(planes, out.dtype)
        np.add(base, unzigzag(z), out=out)
        return int(np.count_nonzero(z))
