"""States that versions are told against: the version before, one some versions back, and what the run began with.

What the run began with is mostly a public base model, which a node may have on its disk. It is kept on the learner's, from epoch
to epoch. Of a run that trains an adapter it is the base model with an adapter of zeros, which is what a node makes of its own
copy; every later state then shares the frozen tensors with that file. Must not know messages, or when what is published.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from p2p.files import write_whole
from p2p.layout import Layout, Segment
from p2p.version import Version
from p2p.weights.carry import touched_by
from p2p.weights.state import FlatState, state_digest

log = logging.getLogger("shoal.reference_states")

BEFORE_ALL = Version(0, 0)
"""What a base model counts as that was never published as it is: epochs begin with 1."""

NAME = "first"
"""Name of the files that keep the run's first version: `first.json` and `first.state`."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A state that versions are told against: mostly one that was published."""

    version: Version
    digest: bytes
    state: FlatState
    digests: tuple[bytes, ...] = ()
    """of its tensors"""
    behind: set[int] = field(default_factory=set)
    """the segments in which it may differ from the newest published state"""


class Tracked:
    """The states of one tensor table that are kept, and of each in which segments it differs from the newest. So what is known to
    be the same is not compared again, and memory is used again without being filled anew."""

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self.newest: Reference | None = None
        self.first: Reference | None = None
        """what the run began with"""
        self.opening: Reference | None = None
        """this epoch's newest anchor, while its state is at hand"""
        self.milestone: Reference | None = None
        """what the next cumulative delta of this epoch is told against"""
        self.free: list[Reference] = []
        """states that nothing is told against any more"""
        self.segments: tuple[Segment, ...] = ()
        self.moving = frozenset[int]()
        """the segments that hold tensors which are not frozen"""
        self._shared: frozenset[str] | None = None
        """the tensors that are not frozen, where all states share the rest with the first one's file"""

    def blank(self, layout: Layout, frozen: Collection[str]) -> Reference:
        """A state to be filled: only `state` and `behind` mean anything."""
        if not self.segments:
            self.segments = layout.segments(self._segment_bytes)
            moving = layout.by_name.keys() - set(frozen)
            self.moving = touched_by(layout, self.segments, moving) if frozen else frozenset(range(len(self.segments)))
        if self.free:
            return self.free.pop()
        if self._shared is not None and self.first is not None and self.first.state.path is not None:
            return Reference(BEFORE_ALL, b"", FlatState.private(self.first.state.path, layout), behind=set(self.moving))
        return Reference(BEFORE_ALL, b"", FlatState.in_memory(layout), behind=set(range(len(self.segments))))

    def bring_up(self, to_fill: Reference, indices: Iterable[int]) -> None:
        """Have these segments of `to_fill` as the newest has them, as far as they may differ."""
        newest = self.newest
        for index in indices:
            if newest is not None and index in to_fill.behind:
                segment = self.segments[index]
                np.copyto(to_fill.state.words(segment), newest.state.words(segment))

    def same(self, base: Reference) -> frozenset[int]:
        """The segments in which `base` is known to equal the newest."""
        return frozenset(range(len(self.segments))) - base.behind

    def advance(self, published: Reference, changed: Collection[int]) -> None:
        """`published` is the newest now; it differs from the one before in `changed`. That one's memory is free, unless something
        is told against it."""
        before, self.newest = self.newest, published
        published.behind.clear()
        for one in (before, self.first, self.opening, self.milestone, *self.free):
            if one is not None and one is not published:
                one.behind.update(changed)
        if before is not None:
            self.release(before)

    def release(self, reference: Reference) -> None:
        """Nothing is told against `reference` any more, except what is kept here."""
        kept = (self.newest, self.first, self.opening, self.milestone, *self.free)
        if all(one is None or one.state is not reference.state for one in kept):
            self.free.append(reference)

    def begin(self, folder: Path, published: Reference, frozen: Collection[str], *, again: bool) -> None:
        """`published` is the epoch's first version: find or keep what the run began with. `again`: later cumulative deltas are
        told against `published` too."""
        layout = published.state.layout
        moving = frozenset(layout.by_name.keys() - set(frozen)) if frozen else frozenset()
        first = load_first(folder, layout) or keep_first(folder, published, moving)
        self.newest = published
        if first is not None:
            pairs = zip(layout.tensors, first.digests, published.digests, strict=True)
            differing = {spec.name for spec, one, other in pairs if one != other}
            first.behind.update(touched_by(layout, self.segments, differing))
            if moving and differing <= moving and first.state.path is not None:
                self._shared = moving
                shared = FlatState.private(first.state.path, layout)
                for name in moving:
                    shared.write_tensor(name, published.state.tensor(name))
                self.newest = Reference(published.version, published.digest, shared, published.digests)
        self.first = first
        if first is not None and first.digest == published.digest:
            self.opening = Reference(published.version, first.digest, first.state, first.digests, first.behind)
        elif self._shared is not None:
            self.opening = self.newest
        self.milestone = self.newest if again else None


def load_first(folder: Path, layout: Layout) -> Reference | None:
    """What the run began with, as an earlier epoch kept it in `folder`; None when there is none of this tensor table, or it is
    not whole any more (a logged reason)."""
    try:
        record = json.loads((folder / f"{NAME}.json").read_text())
        version, digest = Version.parse(record["version"]), bytes.fromhex(record["digest"])
        if record["layout"] != layout.digest.hex():
            raise ValueError("it has another tensor table")
        state = FlatState.open(folder / f"{NAME}.state", layout)
        digests = tuple(state.tensor_digests())
        if state_digest(layout, digests) != digest:
            raise ValueError("its bytes do not match its digest")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the run's first version, kept in %s, is of no use: %s", folder, error)
        return None
    return Reference(version, digest, state, digests)


def keep_first(folder: Path, first: Reference, moving: Collection[str] = ()) -> Reference | None:
    """Keep a copy of `first` in `folder`, and return it; `moving` tensors (an adapter's) are zero in the copy, which then is no
    version that was published. A full disk is logged and costs joiners some bytes, nothing else."""
    state = folder / f"{NAME}.state.tmp"
    try:
        copy = FlatState.create(state, first.state.layout, reserve=True)
        for segment in copy.layout.segments():
            copy.populate(segment)
            np.copyto(copy.words(segment), first.state.words(segment))
        for name in moving:
            copy.tensor(name)[...] = 0
        copy.flush()
        digest = copy.digest() if moving else first.digest
        version = first.version if digest == first.digest else BEFORE_ALL
        record = {"version": str(version), "digest": digest.hex(), "layout": first.state.layout.digest.hex()}
        (folder / f"{NAME}.json").unlink(missing_ok=True)  # of another state: the two are one
        os.replace(state, folder / f"{NAME}.state")
        write_whole(folder / f"{NAME}.json", json.dumps(record))
    except OSError as error:
        state.unlink(missing_ok=True)
        log.warning("cannot keep the run's first version in %s: %s (joiners with the base model gain nothing)", folder, error)
    return load_first(folder, first.state.layout)
