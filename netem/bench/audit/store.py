"""What nodes claimed and what checking it found, kept in files batch by batch: a bench that was cut off goes on where it was.

Must not know models or engines. A batch is written whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from learner.audit.claims import Claim, prompt_number
from learner.audit.deviations import Deviations
from learner.audit.repeats import SeenTokens
from netem.bench.audit.world import MEMBERS, World
from p2p.errors import UsageError

KEPT = Deviations._fields
"""Columns that a batch's file has of each token."""


class Column(NamedTuple):
    """Tokens of one behaviour of one kind of node."""

    distance: np.ndarray
    claimed: np.ndarray
    recomputed: np.ndarray
    shift: np.ndarray
    again: np.ndarray
    """see `SeenTokens.again`"""
    prompts: np.ndarray
    """float64: `prompt_number` of each token's prompt"""

    @property
    def tokens(self) -> int:
        return len(self.distance)

    @property
    def scored(self) -> Deviations:
        """As the checker found them."""
        return Deviations(self.distance, self.claimed, self.recomputed, self.shift)

    @property
    def repeated(self) -> np.ndarray:
        """bool: those that came in the same context before"""
        return ~np.isnan(self.again)

    def part(self, first: int, stop: int) -> Column:
        return Column(*(values[first:stop] for values in self))


class TokenFiles:
    """The batches of one behaviour: one file each, `first` (a group's number) as its name."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self._world = folder, world

    def batches(self) -> list[Path]:
        return sorted(self.folder.glob("*.npz"))

    @property
    def tokens(self) -> int:
        """Without reading what is in them: the count is part of a name."""
        return sum(int(path.stem.split("-")[1]) for path in self.batches())

    @property
    def next_group(self) -> int:
        """0 where there is none yet."""
        files = self.batches()
        return int(files[-1].stem.split("-")[0]) + int(files[-1].stem.split("-")[2]) if files else 0

    def add(self, first: int, groups: int, claims: Sequence[Claim], found: Sequence[Deviations]) -> None:
        """One more batch."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{first:09d}-{sum(len(c.completion_ids) for c in claims)}-{groups}.npz"
        half = path.with_suffix(".half")
        with open(half, "wb") as file:
            np.savez(
                file, lengths=np.array([len(c.completion_ids) for c in claims], np.int16),
                ids=np.array([t for c in claims for t in c.completion_ids], np.int32),
                claimed=np.concatenate([f.claimed for f in found]).astype(np.float32),
                distance=np.concatenate([f.distance for f in found]).astype(np.float32),
                recomputed=np.concatenate([f.recomputed for f in found]).astype(np.float32),
                shift=np.concatenate([f.shift for f in found]).astype(np.float32),
            )  # fmt: skip
        os.replace(half, path)

    def read(self, most: int | None = None) -> Column:
        """The first `most` tokens, or all. UsageError for a batch of a release that did not keep shifts."""
        parts, tokens, seen = [], 0, SeenTokens()
        for path in self.batches():
            if most is not None and tokens >= most:
                break
            parts.append(column_of(path, self._world, seen))
            tokens += parts[-1].tokens
        if not parts:
            none = np.empty(0, np.float32)
            return Column(none, none, none, none, again=none, prompts=none)
        whole = Column(*(np.concatenate(values) for values in zip(*parts, strict=True)))
        return whole if most is None else whole.part(0, most)


def column_of(path: Path, world: World, seen: SeenTokens) -> Column:
    """A batch of a node that came to what is `seen` before. UsageError for one of a release that did not keep shifts."""
    with np.load(path) as file:
        if lacking := [name for name in KEPT if name not in file]:
            raise UsageError(f"{path} has no {', '.join(lacking)}: an older release made it; take another --folder")
        distance, claimed, recomputed, shift = (file[name] for name in KEPT)
    again, prompts, at = [], [], 0
    for claim in claims_of(path, world):
        length = len(claim.completion_ids)
        place = slice(at, at + length)
        again.append(seen.again(claim.prompt_ids, claim.completion_ids, range(length), claimed[place], recomputed[place]))
        prompts.append(np.full(length, float(prompt_number(claim.prompt_ids))))
        at += length
    return Column(distance, claimed, recomputed, shift, again=np.concatenate(again), prompts=np.concatenate(prompts))


def claims_of(path: Path, world: World) -> list[Claim]:
    """The claims of a batch, as the node made them."""
    first = int(path.stem.split("-")[0])
    with np.load(path) as file:
        lengths, ids, claimed = file["lengths"], file["ids"].tolist(), file["claimed"].tolist()
    out, at = [], 0
    for i, length in enumerate(lengths.tolist()):
        index, member = first + i // MEMBERS, i % MEMBERS
        place = slice(at, at + length)
        out.append(Claim(world.prompt(index), tuple(ids[place]), tuple(claimed[place]), world.seed_of(index, member)))
        at += length
    return out
