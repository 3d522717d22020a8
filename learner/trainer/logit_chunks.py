"""Of how many tokens logits exist at once. Pure values; must not know torch."""

from __future__ import annotations

from typing import NamedTuple


class LogitChunk(NamedTuple):
    """The logits that exist at once, in float32. Two such blocks exist at a time, and two more for a moment in the backward of a
    model with a softcap."""

    size: int
    """bytes at most"""
    tokens: int
    """tokens at most"""

    def tokens_of(self, vocabulary: int) -> int:
        """Tokens of a chunk of so many words; 1 at least."""
        return max(1, min(self.tokens, self.size // (4 * vocabulary)))

    def bytes_of(self, vocabulary: int, tokens: int) -> int:
        """What a chunk's logits take of a forward of `tokens` tokens."""
        return min(self.size, 4 * vocabulary * min(self.tokens, tokens))


ON_PROCESSOR = LogitChunk(64 << 20, 256)
"""More tokens bring nothing there, and of a small vocabulary so many tokens' logits fit into a cache. Of 2,358 tokens and 8,192
words the logits took 144 ms, forward and backward, in place of 220 (bench/trainer.md)."""

ON_GPU = LogitChunk(640 << 20, 2048)
"""The whole projection is read for each chunk, and its gradient read and written: of 0.5B a step on an H100 took 1.7 s with
64 MiB, 1.4 with 256 MiB and 1.2 with 640 MiB (bench/trainer.md). The bound in tokens is for small vocabularies, and was not
measured."""


def chunk_on(device: str) -> LogitChunk:
    """On a device ("cpu", "cuda")."""
    return ON_GPU if device == "cuda" else ON_PROCESSOR
