"""Which rank runs which forward. Pure; must not know torch.

Every rank sees all of a step's groups and cuts them alike, so that nobody has to be told. Forwards run in rounds, one a rank:
what is gathered and summed over ranks in a forward is so for all at once. A rank without rows runs an empty forward.
"""

from __future__ import annotations

from collections.abc import Iterator

from learner.trainer.packing import ForwardRow, Packer, cut_forwards, fill_forwards

LARGER = 1.05
"""Where the rows that are left do not go into one forward a rank, the next try's forwards are so much larger."""


class Rounds:
    """The forwards of one rank. Their cut depends on the sequence of forwards alone, as the packer's does on that of groups."""

    def __init__(self, packer: Packer, rank: int, count: int) -> None:
        self._packer, self._rank, self._count = packer, rank, count
        self._waiting: list[list[ForwardRow]] = []

    def add(self, packs: list[list[ForwardRow]]) -> Iterator[list[ForwardRow]]:
        """This rank's forward of each whole round that there is now."""
        self._waiting += packs
        while len(self._waiting) >= self._count:
            now, self._waiting = self._waiting[: self._count], self._waiting[self._count :]
            yield now[self._rank]

    def flush(self, packs: list[list[ForwardRow]]) -> Iterator[list[ForwardRow]]:
        """The same with what is left, cut anew so that all ranks have about the same share; [] where this one has none."""
        yield from self.add(packs)
        left, self._waiting = [row for pack in self._waiting for row in pack], []
        if left:
            parts = self._even(left)
            yield parts[self._rank] if self._rank < len(parts) else []

    def _even(self, rows: list[ForwardRow]) -> list[list[ForwardRow]]:
        packer = self._packer
        budget = -(-packer.tokens(rows) // self._count)
        while True:
            parts = list(cut_forwards(rows, budget) if packer.padded else fill_forwards(rows, budget, packer.share_prompts))
            if len(parts) <= self._count:
                return parts
            budget = max(budget + 1, int(budget * LARGER))
