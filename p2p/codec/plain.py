"""PLAIN: the words as they are, for words that no entropy coder makes smaller. It needs no base."""

from __future__ import annotations

import numpy as np

from p2p.codec.port import Coding, Encoded, changed
from p2p.errors import Refusal


class PlainCoding(Coding):
    name, id, needs_base = "plain", 4, False

    def encode(self, new: np.ndarray, base: np.ndarray | None) -> Encoded:
        return Encoded(new.tobytes(), changed(new, base))

    def decode(self, body: memoryview, base: np.ndarray | None, out: np.ndarray) -> None:
        """See `Coding.decode`."""
        if len(body) != out.nbytes:
            raise Refusal(f"payload holds {len(body)} bytes of words, expected {out.nbytes}")
        out[:] = np.frombuffer(body, out.dtype)
