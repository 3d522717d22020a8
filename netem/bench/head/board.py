"""What the head's process and the process of its simulated nodes share: what is asked, a page of memory, and tokens that tell
their age."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 1 << 31
"""Token ids are below this: as many as a stamp needs."""

TICKS_PER_S = 100_000
"""Of a token's stamp: 10 us, and six hours until it would not fit a token id."""


@dataclass(frozen=True, slots=True)
class HeadBench:
    """`sequences`: at once on each node, which together make `rate` tokens/s. `length`: mean completion, tokens; what a node gets
    first is a part of one, so that ends are spread from the beginning."""

    nodes: int = 1000
    rate: float = 50.0
    seconds: float = 20.0
    sequences: int = 4
    length: float = 400.0
    flush_s: float = 0.25
    """how long tokens wait for company (0 sends every decoding step, as an agent without batching)"""
    settle: float = 3.0
    """seconds between the end of the fast start and the measurement"""


class Board:
    """int64 words that both processes see."""

    WORDS = ("phase", "epoch", "step", "joined", "busy", "made", "sent", "messages", "late_us", "cpu_us")
    RUN, STOP = 0, 1

    def __init__(self, path: Path, *, create: bool = False) -> None:
        mode: Any = "w+" if create else "r+"
        self._words = np.memmap(path, dtype=np.int64, mode=mode, shape=(len(self.WORDS),))

    def __getitem__(self, word: str) -> int:
        return int(self._words[self.WORDS.index(word)])

    def __setitem__(self, word: str, value: int) -> None:
        self._words[self.WORDS.index(word)] = value


def stamp(at: float, origin: float) -> int:
    """The id of a token made at monotonic time `at`; 0 is the stop token's."""
    return 1 + max(0, int((at - origin) * TICKS_PER_S)) % (VOCABULARY - 1)


def age_s(ids: np.ndarray, now: float, origin: float) -> np.ndarray:
    """Seconds since these tokens (uint32 ids) were made."""
    return (now - origin) - (ids.astype(np.float64) - 1) / TICKS_PER_S


def digest_path(board: str) -> Path:
    """Where the head's side writes the digest that nodes must report."""
    return Path(board + ".digest")
