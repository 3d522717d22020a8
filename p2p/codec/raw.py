"""RAW: the words themselves in compressed byte planes; needs no base, so it carries anchors.

Words of two bytes and more are first rotated left by one bit: that puts a bf16's or fp32's whole exponent into one
byte (about 2.6 bits of entropy in trained weights) and the sign beside the incompressible mantissa.
"""

from __future__ import annotations

import numpy as np

from p2p.codec.planes import join_planes, pack, split_planes, unpack
from p2p.codec.port import Coding, Encoded, changed


class RawCoding(Coding):
    name, id, needs_base = "raw", 3, False

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> Encoded:
        bits = 8 * new.itemsize
        return Encoded(pack(split_planes(new if bits == 8 else (new << 1) | (new >> (bits - 1)))), changed(new, base))

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> None:
        """See `Coding.decode`."""
        words, bits = join_planes(unpack(body, out.itemsize, len(out)), out.dtype), 8 * out.itemsize
        out[:] = words if bits == 8 else (words >> 1) | (words << (bits - 1))
