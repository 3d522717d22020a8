"""Under which versions completions of proven nodes are checked. Pure.

To look at a version costs the auditor the way there, a fill of its model and a forward, for one completion as for fifty. Where
the share of one version's tokens is little, versions are taken in blocks: one of each block is chosen, by a keyed hash, and as
many times more of its completions are checked. The share of all tokens stays what it was. A proven node that begins to cheat is
looked at within less than two blocks. Must not know what a check is, or how one gets to a version.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from p2p.version import Version

ENOUGH_TOKENS = 512
"""Tokens of a version that are worth a look: the mildest cheat that is found where its engine is known took 464 in nine runs of
ten (bench/audit.md)."""

MOST_BLOCK = 10
"""Versions of a block at the most: it bounds after how many versions a proven node is looked at again. With 15 the demo's auditor
saved 6 % more of its processor time (bench/audit.md)."""

REMEMBERED = 128
"""Versions of which it is known whether they were chosen: more than a completion can be behind."""

FADE = 0.8
"""What an earlier version's count of tokens still weighs at the next one."""


class _Look(NamedTuple):
    chosen: bool
    times: int
    """the size of its block"""


@dataclass
class ChosenVersions:
    """`secret`: 16 bytes or more that no node knows."""

    secret: bytes
    _looks: dict[Version, _Look] = field(default_factory=dict, init=False, repr=False)
    _left: int = field(default=0, init=False, repr=False)
    """versions that are still to come in this block"""
    _pick: int = field(default=0, init=False, repr=False)
    """which of the block is chosen, counted from its end"""
    _size: int = field(default=1, init=False, repr=False)
    _made: float = field(default=0.0, init=False, repr=False)
    _passed: int = field(default=0, init=False, repr=False)
    """bytes of differences since the last version that is looked at"""
    _usual: float = field(default=0.0, init=False, repr=False)
    """tokens of proven nodes between two versions, of late"""

    def made(self, tokens: int) -> None:
        """Proven nodes made so many."""
        self._made += tokens

    def published(self, version: Version, share: float, size: int = 0) -> int:
        """A version is out, of which `share` of proven nodes' tokens is to be checked, with `size` bytes of differences to the
        one before. The bytes of all differences since the last version that is looked at, if this one is too; else 0."""
        self._usual = FADE * self._usual + (1 - FADE) * self._made
        self._made = 0.0
        if not self._left:
            self._size = self._left = _block(share, self._usual)
            digest = hashlib.blake2b(f"version {version}".encode(), key=self.secret[:64], digest_size=8).digest()
            self._pick = int.from_bytes(digest) % self._size + 1
        self._looks[version] = _Look(self._left == self._pick, self._size)
        self._left -= 1
        while len(self._looks) > REMEMBERED:
            del self._looks[next(iter(self._looks))]
        self._passed += size
        if not self._looks[version].chosen:
            return 0
        passed, self._passed = self._passed, 0
        return passed

    def times(self, version: Version) -> int:
        """How many times the usual share of its completions is checked; 0: it is not looked at. 1 for a version that was never
        told."""
        look = self._looks.get(version)
        return 1 if look is None else look.times * look.chosen


def _block(share: float, tokens: float) -> int:
    """Versions of a block: as many as it takes for enough tokens, and never so many that more than all are to be checked."""
    if not 0 < share < 1 or not tokens:
        return 1
    return max(1, min(math.ceil(ENOUGH_TOKENS / (share * tokens)), math.floor(1 / share), MOST_BLOCK))
