"""Versions as the trainer's process publishes them: what is compared with what, encoded, stored and told to the head.

Must not know the other calls of a trainer, or torch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
from msgspec.structs import replace

from learner.client import messages
from learner.client.beside import Beside
from learner.client.connection import HeadConnection
from learner.client.port import AnnouncedSource, EncodedChanges, Weights, WeightSource
from learner.client.reference_states import Reference, Tracked
from learner.client.whole_states import keep_whole
from p2p.codec.classes import Changes, apply
from p2p.files import write_whole
from p2p.layout import Layout
from p2p.version import Version
from p2p.weights.carry import digests_after
from p2p.weights.encode import NOTHING_FOUND, Payload, encode_version
from p2p.weights.state import FlatState, state_digest
from p2p.weights.store import ChunkFolder

log = logging.getLogger("shoal.trainer")

ANCHOR_SHARE = 1 / 8
"""A joiner who has nothing takes an anchor, and what changed since. Only when that is more than this share of an anchor's bytes
is a new anchor made: it costs the learner an encoding of everything, and each joiner as many bytes."""


class _Taken(NamedTuple):
    """Weights that are to be published."""

    step: int
    to_fill: Reference
    """its state has them"""
    changes: Mapping[int, Changes | Payload]
    """segment's index -> what changed against the newest version, where it was told"""
    same: frozenset[int]
    """the segments that are known to equal the newest version's"""
    frozen: frozenset[str]
    source: WeightSource | None
    """where they came from, if that tells its changes"""


class Publications:
    """What this epoch published, and the states that the next versions are told against. One thread calls it; another one encodes
    and talks to the head, and what both use is the caller's alone once `settle` has returned."""

    def __init__(self, connection: HeadConnection, run_dir: Path, start: messages.Start) -> None:
        self._connection, self.run_dir, self._start = connection, run_dir, start
        # The head decides what is dropped: this side only adds.
        self._store = ChunkFolder(run_dir / "versions" / "chunks")
        self._states = Tracked(start.segment_bytes)
        self._beside = Beside("publish")
        self._source: WeightSource | None = None
        """where what was published last came from, if it told its changes"""
        self._publications = 0
        self._anchor_bytes = 0
        """of the newest anchor"""
        self.stages: dict[str, float] = {}
        """seconds of the last publication: "copy" of the weights, "encode" and "digest" of what all nodes get"""

    @property
    def newest(self) -> Reference | None:
        """The version published last."""
        return self._states.newest

    def publish(self, step: int, tensors: Weights, *, wait: bool = True) -> None:
        """`LearnerClient.publish`."""
        self.settle()
        taken = self._taken(step, tensors)
        if wait:
            self._send_out(taken)
        else:
            self._beside.start(partial(self._send_out, taken))

    def settle(self) -> None:
        """Wait until what is being published is out. Raises what kept it from that."""
        self._beside.settle()

    def _taken(self, step: int, tensors: Weights) -> _Taken:
        """A copy of the weights: the arrays that they came in are not read after this."""
        if isinstance(tensors, Mapping):
            layout = Layout.build([(name, dtype, bits.shape) for name, (dtype, bits) in tensors.items()])
        else:
            layout = tensors.layout
        base = self.newest
        if base is not None and step <= base.version.step:
            raise ValueError(f"step {step} cannot be published after step {base.version.step}")
        if base is not None and base.state.layout.digest != layout.digest:
            raise ValueError("the tensor table changed within an epoch")
        started = time.perf_counter()
        frozen = _frozen(tensors, layout)
        to_fill = self._states.blank(layout, frozen)
        source, self._source = self._source, None  # until this one is out
        known = base is not None and (isinstance(tensors, Mapping) or source is tensors)
        same = frozenset(range(len(self._states.segments))) - self._states.moving if known else frozenset()
        changes: dict[int, Changes | Payload] = {}
        if isinstance(tensors, Mapping):
            if frozen and known:  # the segments of both kinds, too: they are written to in part
                self._states.bring_up(to_fill, range(len(self._states.segments)))
            for name, (_, bits) in tensors.items():
                if not known or name not in frozen:
                    to_fill.state.write_tensor(name, bits)
        else:
            if source is not tensors:  # what it knows is not what was published last
                tensors.forget()
            self._states.bring_up(to_fill, same)
            changes = self._take(tensors, to_fill.state, base, same)
        self.stages = {"copy": time.perf_counter() - started}
        return _Taken(step, to_fill, changes, same, frozen=frozen, source=None if isinstance(tensors, Mapping) else tensors)

    def _send_out(self, taken: _Taken) -> None:
        """Compare, encode, and tell the head: of `taken`, and of the versions beside it for those who were away."""
        states, state, base = self._states, taken.to_fill.state, self.newest
        if base is None:
            sent = self._send_version(taken.step, "anchor", state, None)
            self._anchor_bytes = sent.size
            states.begin(self.run_dir / "versions", sent.reference, taken.frozen, again=self._start.squash_every > 1)
            self._send_cumulative(states.first, {})
        else:
            sent = self._send_version(taken.step, "delta", state, base, changes=taken.changes, same=taken.same)
            told = {base.version: sent.size}
            milestone = states.milestone
            states.advance(sent.reference, sent.changed)
            self._publications += 1
            if milestone is not None and self._publications % self._start.squash_every == 0:
                self._send_cumulative(milestone, told)
                states.milestone = states.newest
                states.release(milestone)
            if self._publications % self._start.anchor_every == 0:
                self._send_cumulative(states.first, told)
                self._send_anchor(told)
            if sent.keep_whole:
                self._keep_whole(sent.reference)
        self._source = taken.source

    def _keep_whole(self, newest: Reference) -> None:
        try:
            keep_whole(self.run_dir, newest.version, newest.state.bytes)
        except OSError as error:  # it saves time, and nothing else
            log.warning("the state of version %s is not kept whole: %s", newest.version, error.strerror)

    def _send_anchor(self, told: dict[Version, int]) -> None:
        """The newest version whole, unless the newest anchor and what changed since is nearly as little for who has nothing."""
        states, newest = self._states, self.newest
        assert newest is not None
        if states.opening is not None:
            self._send_cumulative(states.opening, told)
            if told.get(states.opening.version, 0) <= ANCHOR_SHARE * self._anchor_bytes:
                return
        self._anchor_bytes = self._send_version(newest.version.step, "anchor", newest.state, None, digests=newest.digests).size
        opening, states.opening = states.opening, None
        if opening is not None:
            states.release(opening)

    def _send_cumulative(self, base: Reference | None, told: dict[Version, int]) -> None:
        """The newest version again, against `base`; not if that has the same bits, or the version was `told` against it already
        (then: with how many bytes)."""
        newest = self.newest
        assert newest is not None
        if base is not None and base.digest != newest.digest and base.version not in told:
            same = self._states.same(base)
            sent = self._send_version(
                newest.version.step, "cumulative", newest.state, base, same=same, digests=newest.digests
            )  # fmt: skip
            told[base.version] = sent.size
            base.behind.intersection_update(sent.changed)

    def _take(
        self, source: WeightSource, state: FlatState, base: Reference | None, same: frozenset[int]
    ) -> dict[int, Changes | Payload]:
        """Bring `state` to what `source` has now, but for the segments that are the `same`; what changed against `base`, of the
        segments whose changes it told."""
        changes: dict[int, Changes | Payload] = {}
        segments = [segment for segment in self._states.segments if segment.index not in same]
        if isinstance(source, AnnouncedSource):
            source.begin(segments)
        for segment in segments:
            found, words = source.take(segment), state.words(segment)
            if isinstance(found, np.ndarray):
                words[...] = found
            elif isinstance(found, EncodedChanges) and base is not None:
                words[...] = base.state.words(segment)
                words[found.positions] = found.words
                changes[segment.index] = Payload(found.payload, found.changed)
            elif isinstance(found, EncodedChanges):
                raise ValueError(f"segment {segment.index}: changes, and nothing was published before")
            elif base is None or not apply(base.state.words(segment), found, words):
                raise ValueError(f"segment {segment.index}: changes that do not fit what was published before")
            else:
                changes[segment.index] = found
        return changes

    def _send_version(
        self, step: int, kind: str, state: FlatState, base: Reference | None, *,
        changes: Mapping[int, Changes | Payload] = NOTHING_FOUND,
        same: frozenset[int] = frozenset(), digests: tuple[bytes, ...] = (),
    ) -> _Sent:  # fmt: skip
        """`same`: segments that are known to equal the base's. `digests`: of the state's tensors, where they are known."""
        started = time.perf_counter()
        folder = self.run_dir / "versions"
        table = folder / f"layout-{state.layout.digest.hex()[:16]}.msgpack"
        if not table.exists():
            write_whole(table, msgpack.packb(state.layout.to_wire()))
        begin = messages.Begin(step, kind, None, str(table.relative_to(self.run_dir)))
        if base is not None:
            begin = replace(begin, base=base.version.step, base_epoch=base.version.epoch, base_digest=base.digest)
        begun = self._connection.ask(begin, messages.Begun)
        segments = encode_version(
            state, base.state if base else None, self._store, segment_bytes=self._start.segment_bytes,
            chunk_bytes=begun.chunk_bytes, threads=len(os.sched_getaffinity(0)), changes=changes, same=same,
        )  # fmt: skip
        size, changed = 0, set[int]()
        for s in segments:
            joined = b"".join(s.digests)
            self._connection.tell(
                messages.SegmentDone(begun.mid, s.index, size=s.size, digests=joined, changed=s.changed, words=s.words)
            )
            size += s.size
            if s.changed:
                changed.add(s.index)
        self.stages.setdefault("encode", time.perf_counter() - started)
        if not digests:
            digests = tuple(
                digests_after(state, base.state, base.digests, self._states.segments, changed)
                if base is not None else state.tensor_digests()
            )  # fmt: skip
        spent = time.perf_counter() - started
        self.stages.setdefault("digest", spent - self.stages["encode"])
        digest = state_digest(state.layout, digests)
        sealed = self._connection.ask(messages.SealVersion(begun.mid, b"".join(digests), digest, spent), messages.Ok)
        version = Version(self._start.epoch, step)
        return _Sent(Reference(version, digest, state, digests), size, frozenset(changed), sealed.keep_whole)


class _Sent(NamedTuple):
    """A manifest that is sealed."""

    reference: Reference
    size: int
    """bytes of its payloads"""
    changed: frozenset[int]
    """the segments that differ from the base"""
    keep_whole: bool
    """the head would have its state lie whole"""


def _frozen(tensors: Weights, layout: Layout) -> frozenset[str]:
    """The tensors that never change after the epoch's first version: what the source says; where an adapter is among them, all
    others."""
    if not isinstance(tensors, Mapping):
        return frozenset(getattr(tensors, "frozen", ()))
    return frozenset(layout.by_name.keys() - layout.adapter) if layout.adapter else frozenset()
