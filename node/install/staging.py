"""One version on its way into the shadow: decoded segment by segment, then checked as a whole against its seal.

What a version leaves as it was costs nothing: a segment that did not change is not written where the file has its bytes already,
and a tensor of such segments keeps the digest that it was verified with. Must not know how a shadow records what it holds, nor
peers, manifests, engines' workings or trio.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from node.engine.port import StateFile
from p2p.codec import NOTHING_CHANGED, decode_segment
from p2p.errors import Refusal
from p2p.layout import Segment
from p2p.version import Version
from p2p.weights.carry import segments_of, unchanged
from p2p.weights.state import FlatState, state_digest


@dataclass(frozen=True, slots=True)
class HeldState:
    """A whole state on disk: slot "a" or "b", its version, digests and mapping."""

    slot: str
    version: Version
    digest: bytes
    tensor_digests: tuple[bytes, ...]
    state: FlatState


class Staging:
    """One version on its way in. Made by `Shadow.begin`; invisible to everyone until `Shadow.commit`."""

    def __init__(
        self, slot: str, version: Version, state: FlatState, kind: str, held: HeldState | None, segment_bytes: int,
        behind: frozenset[int] | None = None,
    ) -> None:
        """`state` is the new file, writable; `held` what the shadow holds now, which a delta is decoded from. `behind`: the
        segments in which the file may differ from the held state (an older version lies there); None: it holds nothing yet."""
        self.slot, self.version, self.state = slot, version, state
        self.is_delta, self.segment_bytes = kind != "anchor", segment_bytes
        self.segments: tuple[Segment, ...] = state.layout.segments(segment_bytes)
        self.held: HeldState | None = None
        """the finished state, once `finish` has accepted it"""
        self.over = False
        """committed, discarded, or dropped by a later `begin`"""
        self.changed: set[int] = set()
        """the segments written so far that are not known to equal the base's"""
        assert state.path is not None
        self._path: Path = state.path
        self._base, self._reference = None if kind == "anchor" else held, held
        self._behind = behind
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._written: set[int] = set()
        self._digests: list[bytes | None] = [None] * len(state.layout.tensors)
        # Tensors of each segment, and how many segments each still waits for: a tensor is hashed while it is hot.
        self._tensors_of: list[list[int]] = [[] for _ in self.segments]
        self._spans = segments_of(state.layout, self.segments)
        self._waiting_for = [len(span) for span in self._spans]
        for i, span in enumerate(self._spans):
            if not span:
                self._digests[i] = state.tensor_digest(i)
            for index in span:
                self._tensors_of[index].append(i)

    def write(self, segment: Segment, payload: bytes | memoryview) -> None:
        """Decode one segment, from the base, into the new file. Any order, each just once, from any thread.

        Refusal on a segment that is not of this staging's cut, was written before, does not decode, or when the staging
        is over. A payload that did not decode may be replaced by another try.
        """
        index = segment.index
        with self._lock:
            if self.over or self.held:
                raise Refusal(f"segment {index}: staging is over", version=self.version)
            if not 0 <= index < len(self.segments) or self.segments[index] != segment:
                raise Refusal(f"segment {index} is not one of this version's", version=self.version)
            if index in self._begun:
                raise Refusal(f"segment {index} came twice", version=self.version)
            self._begun.add(index)
            # Taken under the lock: `discard` closes the state, and a view keeps its memory alive.
            state, out = self.state, self.state.words(segment)
            source = FlatState(state.layout, state.bytes, state.mapping)
        same = self._base is not None and payload == NOTHING_CHANGED
        done = same and self._behind is not None and index not in self._behind
        try:
            if not done:
                source.populate(segment)
                base = self._base.state.words(segment) if self._base else None
                decode_segment(payload, base, out)
            done = True
        except Refusal as error:
            raise Refusal(f"segment {index}: {error.reason}", version=self.version, fatal=error.fatal) from None
        finally:
            if not done:
                with self._lock:
                    self._begun.discard(index)
                    # A part of it may have been written: another try must not take the file's bytes for the held state's.
                    if self._behind is not None:
                        self._behind |= {index}
        with self._lock:
            self._written.add(index)
            if not same:
                self.changed.add(index)
            complete = []
            for i in self._tensors_of[index]:
                self._waiting_for[i] -= 1
                if not self._waiting_for[i]:
                    complete.append(i)
        for i in complete:
            self._digests[i] = self._digest(i, source)

    def _digest(self, i: int, source: FlatState) -> bytes:
        """The digest of tensor i, all of whose segments are there. One that the base was verified with is taken over where
        nothing of the tensor changed: these bytes, or those that they were copied from, were hashed then."""
        if self._base is not None:
            with self._lock:
                parts = [self.segments[index] for index in self._spans[i] if index in self.changed]
            if unchanged(source.layout.tensors[i], parts, source, self._base.state):
                return self._base.tensor_digests[i]
        return source.tensor_digest(i)

    def finish(self, tensor_digests: Sequence[bytes], digest: bytes) -> StateFile:
        """Check the whole against the seal: every segment there, padding zero, every tensor's digest (xxh3-128, layout
        order), and their combination `digest` (32 bytes). Call it after every `write` has returned.

        Returns the new file, ready for an engine to stage, with the names of the tensors that differ from the held
        version (None: unknown, all). Refusal says what is missing or names the first tensor that differs.
        """
        layout = self.state.layout
        if self.over:
            raise Refusal("staging is over", version=self.version)
        missing = [s.index for s in self.segments if s.index not in self._written]
        if missing:
            counts = f"{len(missing)} of {len(self.segments)} segments missing"
            raise Refusal(f"{counts}, the first is {missing[0]}", version=self.version)
        if len(tensor_digests) != len(layout.tensors):
            raise Refusal(
                f"seal has {len(tensor_digests)} tensor digests for {len(layout.tensors)} tensors", version=self.version
            )
        for spec, want, have in zip(layout.tensors, tensor_digests, self._digests, strict=True):
            if want != have:
                raise Refusal(f"tensor {spec.name!r} differs from its digest in the seal", version=self.version)
        if not self.state.padding_is_zero():
            raise Refusal("bytes between tensors are not zero", version=self.version)
        if state_digest(layout, tensor_digests) != digest:
            raise Refusal("state digest is not that of the seal", version=self.version)
        self.held = HeldState(self.slot, self.version, digest, tuple(tensor_digests), self.state)
        return StateFile(self._path, layout, self.version, self._changed(self.held))

    def discard(self) -> None:
        """Give up: the file goes, the held version stays. Idempotent; does nothing after a commit."""
        with self._lock:
            if self.over:
                return
            self.over, self.held = True, None
            self._path.unlink(missing_ok=True)
            self.state.close()

    def close(self) -> None:
        """The shadow has taken the file over: refuse everything from here on, and let go of the writable mapping."""
        with self._lock:
            self.over = True
            self.state.close()

    def _changed(self, new: HeldState) -> tuple[str, ...] | None:
        old = self._reference
        if old is None or old.state.layout != new.state.layout:
            return None
        pairs = zip(new.state.layout.tensors, old.tensor_digests, new.tensor_digests, strict=True)
        return tuple(spec.name for spec, before, after in pairs if before != after)
