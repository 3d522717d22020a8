"""The states of the last few versions, of which one lies in memory: what a delta changed is kept, so that it can be undone.

Pure numpy over a `FlatState`. Between two versions that follow each other lies an `Exchange`: where they differ, and the words of
the one that is not in memory. To cross it is to swap those words with the state's, so the same exchange leads forward and back.
Moving costs what changed, and not the state. Must not know how a version came here, models, or what is done with a state.

Memory: the state, and the exchanges, which together are held below `undo_bytes`: beyond it the oldest versions are given up. An
exchange is never larger than about one state: where much of a segment changed, all of its words are kept, without places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2p.codec import NOTHING_CHANGED, decode_segment
from p2p.errors import Refusal
from p2p.layout import WORD, Layout, Segment
from p2p.version import Version
from p2p.weights.carry import segments_of
from p2p.weights.state import FlatState, state_digest

PLACE = np.dtype(np.uint32)
"""The type of a word's place in its segment: a segment has 2^32 words at the most."""


@dataclass(slots=True)
class _Part:
    """Of one segment: the words of the side that is not in memory."""

    segment: Segment
    places: np.ndarray | None
    """uint32 [n], where they lie in the segment; None: they are all of its words"""
    words: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + (self.places.nbytes if self.places is not None else 0)

    def cross(self, state: FlatState) -> None:
        lie = state.words(self.segment)
        if self.places is None:
            held = lie.copy()
            lie[...] = self.words
        else:
            held = lie[self.places]
            lie[self.places] = self.words
        self.words = held


@dataclass(slots=True)
class _Exchange:
    """Between one version and the next."""

    parts: list[_Part]
    names: frozenset[str]
    """of the tensors with bytes in the segments that changed"""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Known:
    """A version of the window."""

    version: Version
    digest: bytes
    tensor_digests: tuple[bytes, ...]


class _Cut(NamedTuple):
    """How a state is cut."""

    segments: tuple[Segment, ...]
    spans: list[range]
    """of each tensor, the segments that hold bytes of it"""


@dataclass(frozen=True, slots=True)
class ToldState:
    """A version as its manifest tells it."""

    version: Version
    segment_bytes: int
    payload: Callable[[Segment], bytes]
    """of each segment, as it was encoded"""
    tensor_digests: Sequence[bytes]
    """of the seal, in layout order"""
    digest: bytes
    """the state's"""


class StateWindow:
    """States of at most `keep` versions, that of `at` in memory. `undo_bytes` bounds what is kept of the others; 0: no bound."""

    def __init__(self, keep: int, undo_bytes: int = 0) -> None:
        if keep < 1:
            raise ValueError(f"a window of {keep} versions")
        self._keep, self._undo_bytes = keep, undo_bytes
        self._known: list[_Known] = []
        """oldest first"""
        self._between: list[_Exchange] = []
        """of each version and the next"""
        self._at = 0
        self.state: FlatState | None = None
        self._stale: set[str] = set()
        self._cut: _Cut | None = None
        self._cut_by = (b"", 0)
        self.given_up = 0
        """versions that left the window before `keep` newer ones were there, because of `undo_bytes`"""

    @property
    def versions(self) -> tuple[Version, ...]:
        """Oldest first."""
        return tuple(known.version for known in self._known)

    @property
    def newest(self) -> Version | None:
        return self._known[-1].version if self._known else None

    @property
    def newest_digest(self) -> bytes | None:
        """The newest state's digest: the base that the next delta must name."""
        return self._known[-1].digest if self._known else None

    @property
    def at(self) -> Version | None:
        """Whose state is in memory."""
        return self._known[self._at].version if self._known else None

    @property
    def undo(self) -> int:
        """Bytes that are kept beside the state."""
        return sum(exchange.nbytes for exchange in self._between)

    def begin(self, told: ToldState, layout: Layout) -> None:
        """The window is this whole state (an anchor) alone. Refusal when what `payload` gives does not decode or has other
        digests; the window is empty then."""
        version = told.version
        self._known, self._between, self._at = [], [], 0
        state = self.state
        if state is None or state.layout.digest != layout.digest:
            state = FlatState.in_memory(layout)
        self.state = None
        for segment in layout.segments(told.segment_bytes):
            _decode(version, segment, told.payload(segment), None, state.words(segment))
        found = state.tensor_digests()
        _check(told, layout, found)
        self.state, self._stale = state, set(layout.by_name)
        self._known = [_Known(version, told.digest, tuple(found))]

    def follow(self, told: ToldState, base_digest: bytes) -> None:
        """Go on with the difference to the newest version, and stand at `version`. Refusal, and the window stands at the version
        that was the newest, when that is not the difference's base, or what comes of it has other digests."""
        if not self._known or self.state is None or base_digest != self._known[-1].digest:
            raise Refusal(f"unknown base: it is told against {base_digest.hex()[:16]}", version=told.version)
        state = self.state
        self._go_on(told, lambda segment: _changed(told.version, segment, told.payload(segment), state))

    def jump(self, told: ToldState, data: np.ndarray) -> None:
        """Go on to a newer version whose state is `data` (uint8 [bytes]), whatever lies between, and stand there. Refusal as from
        `follow`."""
        if not self._known or self.state is None:
            raise Refusal("no whole state was taken before", version=told.version)
        if data.shape != self.state.bytes.shape:
            raise Refusal(f"a state of {len(data)} bytes, {len(self.state.bytes)} are its layout's", version=told.version)
        state = self.state
        self._go_on(told, lambda s: _part(s, state.words(s), data[s.start : s.stop].view(WORD[s.itemsize])))

    def _go_on(self, told: ToldState, changed_in: Callable[[Segment], _Part | None]) -> None:
        version, state = told.version, self.state
        assert state is not None
        if version <= self._known[-1].version:
            raise Refusal(f"not newer than version {self._known[-1].version}", version=version)
        self.move(self._known[-1].version)
        before = self._known[-1]
        segments, spans = self._cut_of(state.layout, told.segment_bytes)
        exchange = _Exchange([], frozenset())
        try:
            for segment in segments:
                part = changed_in(segment)
                if part is not None:
                    part.cross(state)
                    exchange.parts.append(part)
            changed = frozenset(part.segment.index for part in exchange.parts)
            found = [state.tensor_digest(i) if changed.intersection(span) else before.tensor_digests[i]
                     for i, span in enumerate(spans)]  # fmt: skip
            _check(told, state.layout, found)
        except BaseException:
            for part in reversed(exchange.parts):
                part.cross(state)
            raise
        tensors = zip(state.layout.tensors, spans, strict=True)
        exchange.names = frozenset(spec.name for spec, span in tensors if changed.intersection(span))
        self._between.append(exchange)
        self._known.append(_Known(version, told.digest, tuple(found)))
        self._at = len(self._known) - 1
        self._stale |= exchange.names
        self._bound()

    def _cut_of(self, layout: Layout, segment_bytes: int) -> _Cut:
        """Of a layout, once: versions that follow each other are cut alike."""
        if self._cut is None or self._cut_by != (layout.digest, segment_bytes):
            segments = layout.segments(segment_bytes)
            self._cut, self._cut_by = _Cut(segments, segments_of(layout, segments)), (layout.digest, segment_bytes)
        return self._cut

    def move(self, version: Version) -> None:
        """Have the state of `version` in memory. KeyError when it is not in the window."""
        wanted = next((i for i, known in enumerate(self._known) if known.version == version), None)
        if wanted is None or self.state is None:
            raise KeyError(f"version {version} is not held")
        while self._at != wanted:
            back = wanted < self._at
            exchange = self._between[self._at - 1 if back else self._at]
            for part in exchange.parts:
                part.cross(self.state)
            self._stale |= exchange.names
            self._at += -1 if back else 1

    def take_stale(self) -> set[str]:
        """The tensors that may have changed in memory since the last call: whoever has copies makes them anew."""
        stale, self._stale = self._stale, set()
        return stale

    def digest(self, version: Version) -> bytes:
        """The digest of a state of the window, as its seal has it. KeyError when it is not in the window."""
        for known in self._known:
            if known.version == version:
                return known.digest
        raise KeyError(f"version {version} is not held")

    def _bound(self) -> None:
        """Give the oldest up. The state in memory is the newest here, so what leads to the oldest is needed for it alone."""
        over = bool(self._undo_bytes) and self.undo > self._undo_bytes
        while self._between and (len(self._known) > self._keep or over):
            self.given_up += len(self._known) <= self._keep
            del self._known[0], self._between[0]
            self._at -= 1
            over = bool(self._undo_bytes) and self.undo > self._undo_bytes


def _decode(version: Version, segment: Segment, payload: bytes, base: np.ndarray | None, out: np.ndarray) -> None:
    try:
        decode_segment(payload, base, out)
    except Refusal as error:
        raise Refusal(f"segment {segment.index}: {error.reason}", version=version) from None


def _changed(version: Version, segment: Segment, payload: bytes, state: FlatState) -> _Part | None:
    """What crossing leads to the segment's new words; None when nothing changed."""
    if payload == NOTHING_CHANGED:
        return None
    held = state.words(segment)
    new = np.empty_like(held)
    _decode(version, segment, payload, held, new)
    return _part(segment, held, new)


def _part(segment: Segment, held: np.ndarray, new: np.ndarray) -> _Part | None:
    differ = new != held
    count = int(np.count_nonzero(differ))
    if not count:
        return None
    if count * (PLACE.itemsize + held.itemsize) >= held.nbytes:
        return _Part(segment, None, new)
    places = np.flatnonzero(differ)
    return _Part(segment, places.astype(PLACE), new[places])


def _check(told: ToldState, layout: Layout, found: Sequence[bytes]) -> None:
    """Refusal unless these are the digests of the seal."""
    version, wanted = told.version, told.tensor_digests
    if len(wanted) != len(layout.tensors):
        raise Refusal(f"seal has {len(wanted)} tensor digests for {len(layout.tensors)} tensors", version=version)
    for spec, have, want in zip(layout.tensors, found, wanted, strict=True):
        if have != want:
            raise Refusal(f"tensor {spec.name!r} differs from its digest in the seal", version=version)
    if state_digest(layout, found) != told.digest:
        raise Refusal("state digest is not that of the seal", version=version)
