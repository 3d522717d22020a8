"""EMPTY: nothing changed. The body is empty."""

from __future__ import annotations

import numpy as np

from p2p.codec.port import Coding, Encoded
from p2p.errors import Refusal


class EmptyCoding(Coding):
    name, id, needs_base = "empty", 0, True

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> Encoded:
        return Encoded(b"", 0)

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> None:
        """See `Coding.decode`."""
        if len(body):
            raise Refusal(f"{len(body)} bytes after an empty delta")
        out[:] = base
