"""The head's side of publishing: it signs versions that the trainer encodes, offers them to the swarm, keeps those joiners need.

Must not know rollouts, rewards or torch. The trainer computes digests, the head signs; the chunks are already in the
store, which both share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgpack
import numpy as np

from learner.client.messages import Begin, Begun, SealVersion, SegmentDone
from learner.publish.published import Published, PublishedVersions
from p2p.errors import ShoalError, UsageError
from p2p.forgetting import forget_oldest
from p2p.identity import Identity
from p2p.layout import Layout
from p2p.limits import MAX_CHUNK, MAX_CHUNKS, MAX_SEGMENT, MAX_SEGMENTS
from p2p.protocol.descriptor import TENSOR, descriptor_layout
from p2p.protocol.versions import Catalog, CatalogEntry
from p2p.swarm import Swarm
from p2p.version import Version
from p2p.weights.encode import LEAST_CHUNK, chunk_bytes_for, encode_version
from p2p.weights.manifest import CODEC, DELTAS, MAX_LIFETIME_S, Header, ManifestSigner, most_chunks
from p2p.weights.state import FlatState, state_digest

log = logging.getLogger("shoal.publisher")

LIFETIME_S = 30 * 24 * 3600
"""Seconds until a version's manifest expires: longer than a run is paused, short enough that a copied chunk cache becomes
useless. The model descriptor is signed once an epoch and every joiner needs it, so it expires after MAX_LIFETIME_S."""

STRAGGLER_STEPS = 64
"""Optimizer steps: manifests are not kept for a node that is further behind than this; it will fetch an anchor."""

DIGESTS = 4096
"""Versions whose state digest is remembered, to check the digests that nodes report: 32 bytes each, far beyond any straggler."""

FIRST_DELTA = 32
"""The size of a run's first delta is guessed as the state's size divided by this: RL at small learning rates changes a few
percent of the weights."""


class Publisher:
    """Signs and offers one epoch's versions. `now` counts seconds for statistics, `wall` reads the Unix time for signatures."""

    def __init__(
        self,
        identity: Identity,
        run: str,
        run_dir: Path,
        swarm: Swarm,
        *,
        epoch: int,
        segment_bytes: int,
        chunk_bytes: int,
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._identity, self._run, self._run_dir, self._swarm = identity, run, run_dir, swarm
        self.epoch, self.segment_bytes, self.chunk_bytes = epoch, segment_bytes, chunk_bytes
        self._now, self._wall = now, wall
        self.published = PublishedVersions(lambda p: p.mid not in self._kept)
        self.current: Version | None = None
        self._kept: dict[bytes, tuple[ManifestSigner, Published]] = {}
        """manifests that joiners may ask for, by their id"""
        self._layouts: dict[str, Layout] = {}
        self._digests: dict[Version, bytes] = {}
        self._sizes: dict[str, int] = {}
        """kind -> bytes of the last version of it"""

    # --- making ------------------------------------------------------------------------------------------------------

    def offer_descriptor(self, blob: bytes) -> None:
        """Make the model descriptor available to joiners."""
        layout = descriptor_layout(blob)
        state = FlatState.in_memory(layout)
        state.write_tensor(TENSOR, np.frombuffer(blob, np.uint8))
        begun = self._open("descriptor", Version(self.epoch, 0), None, b"", layout)
        for s in encode_version(
            state, None, self._swarm.store, segment_bytes=self.segment_bytes, chunk_bytes=begun.chunk_bytes
        ):
            self._segment(begun.mid, s.index, s.size, s.digests)
        tensor_digests = state.tensor_digests()
        self._seal(begun.mid, tensor_digests, state_digest(layout, tensor_digests))

    def begin(self, message: Begin) -> Begun:
        """Sign and offer the header of a version that the trainer is about to encode. ShoalError for a delta against a version
        that was not published in this epoch."""
        version = Version(self.epoch, message.step)
        base_digest = message.base_digest
        epoch = message.base_epoch or (0 if base_digest else self.epoch)
        base = None if message.base is None else Version(epoch, message.base)
        if message.kind == "delta":
            found = None if base is None else self._digests.get(base)
            if found is None or base_digest not in (b"", found):
                raise ShoalError(f"version {version} is a delta against {base}, which was not published in this epoch")
            base_digest = found
        return self._open(message.kind, version, base, base_digest, self._layout(message.layout_file))

    def _chunk_bytes(self, kind: str, layout: Layout) -> int:
        """Bytes of a chunk. The header leaves before anything is encoded, so the size is guessed: that of the last version of its
        kind."""
        if self.chunk_bytes:
            return self.chunk_bytes
        guess = layout.nbytes // FIRST_DELTA if kind in DELTAS else layout.nbytes
        segments, least = layout.count_segments(self.segment_bytes), LEAST_CHUNK
        while True:
            size = chunk_bytes_for(self._sizes.get(kind, guess), self._swarm.uplink_rate, len(self._swarm.links), least)
            # However little changes in a large state, its chunks stay within what a header may say.
            if size > MAX_CHUNK // 2 or most_chunks(layout.nbytes, segments, size) <= MAX_CHUNKS:
                return size
            least *= 2

    def segment(self, message: SegmentDone) -> None:
        """Sign and offer the record of a segment whose chunks the trainer has stored. ShoalError for a manifest that was not
        begun."""
        digests = tuple(message.digests[i : i + 32] for i in range(0, len(message.digests), 32))
        published = self._segment(message.mid, message.index, message.size, digests)
        published.changed += message.changed
        published.words += message.words

    def seal(self, message: SealVersion) -> Published:
        """Sign and offer the seal of a version; from here on it is the current one. ShoalError when it was published before with
        another state."""
        digests = [message.tensor_digests[i : i + 16] for i in range(0, len(message.tensor_digests), 16)]
        published = self._seal(message.mid, digests, message.state_digest)
        published.encode_s = message.encode_s
        known = self._digests.setdefault(published.version, message.state_digest)
        while len(self._digests) > DIGESTS:
            del self._digests[next(iter(self._digests))]
        if known != message.state_digest:
            raise ShoalError(f"version {published.version} was published with two different states")
        if self.current is None or published.version > self.current:
            self.current = published.version
        return published

    def _open(self, kind: str, version: Version, base: Version | None, base_digest: bytes, layout: Layout) -> Begun:
        created, chunk_bytes = int(self._wall()), self._chunk_bytes(kind, layout)
        segments = layout.count_segments(self.segment_bytes)
        if segments > MAX_SEGMENTS or most_chunks(layout.nbytes, segments, chunk_bytes) > MAX_CHUNKS:
            raise UsageError(
                f"swarm.segment_bytes = {self.segment_bytes} and chunks of {chunk_bytes} bytes cut {layout.nbytes} bytes into "
                f"too many pieces (at most {MAX_SEGMENTS} segments and {MAX_CHUNKS} chunks): set larger ones"
            )
        header = Header(
            run=self._run, version=version, kind=kind, base=base, base_digest=base_digest, codec=CODEC,
            segment_bytes=min(self.segment_bytes, MAX_SEGMENT), chunk_bytes=chunk_bytes, created=created,
            expires=created + (MAX_LIFETIME_S if kind == "descriptor" else LIFETIME_S), layout=layout,
        )  # fmt: skip
        signer = ManifestSigner(self._identity, header)
        published = Published(signer.mid, kind, version, base, began=self._now(), base_digest=base_digest)
        self._kept[signer.mid] = signer, published
        if kind != "descriptor":
            self.published.add(published)
        self._swarm.offer(signer.header_part, announce=published.announced)
        return Begun(signer.mid, header.chunk_bytes)

    def _segment(self, mid: bytes, index: int, size: int, digests: tuple[bytes, ...]) -> Published:
        signer, published = self._begun(mid)
        self._swarm.extend(mid, signer.record(index, size, digests), announce=published.announced)
        published.size += size
        return published

    def _seal(self, mid: bytes, tensor_digests: list[bytes], digest: bytes) -> Published:
        signer, published = self._begun(mid)
        published.state_digest = digest
        self._swarm.extend(mid, signer.seal(tensor_digests, digest), announce=published.announced)
        published.sealed = self._now()
        self._sizes[published.kind] = published.size
        if published.kind != "descriptor":
            self.published.seal(published)
        return published

    def _begun(self, mid: bytes) -> tuple[ManifestSigner, Published]:
        if mid not in self._kept:
            raise ShoalError(f"no manifest {mid.hex()[:12]} was begun")
        return self._kept[mid]

    def _layout(self, file: str) -> Layout:
        layout = self._layouts.get(file)
        if layout is None:
            path = (self._run_dir / file).resolve()
            if not path.is_relative_to(self._run_dir.resolve()):
                raise ShoalError(f"tensor table {file} is outside the run directory")
            layout = self._layouts[file] = Layout.from_wire(msgpack.unpackb(path.read_bytes()))
        return layout

    # --- keeping -----------------------------------------------------------------------------------------------------

    def catalog(self) -> Catalog | None:
        """The manifests that a joiner may fetch; None before the epoch's first version is sealed."""
        if self.current is None:
            return None
        entries = [
            CatalogEntry(
                p.mid, p.kind, p.version,
                base=p.base, base_digest=p.base_digest, state_digest=p.state_digest, size=p.size if p.sealed else 0,
            )
            for _, p in self._kept.values()
            if p.kind == "delta" or p.sealed
        ]  # fmt: skip
        return Catalog(self.current, tuple(entries))

    def state_digest(self, version: Version) -> bytes | None:
        return self._digests.get(version)

    @property
    def kept_bytes(self) -> int:
        """Of all that can be had of what was published: nobody needs more for one version."""
        return sum(published.size for _, published in self._kept.values())

    def installed(self, peer: str, version: Version, peer_bytes: int) -> float | None:
        """`peer` reports that it serves `version`, with `peer_bytes` of it from other nodes. Returns the seconds from the
        version's header to this report; None for a version that is no longer recent, and for one of which it said so before."""
        published = self.published.find(version)
        if published is None or peer in published.installed:
            return None
        published.peer_bytes += peer_bytes
        took = published.installed.setdefault(peer, self._now() - published.began)
        forget_oldest(published.installed)
        return took

    def count_traffic(self) -> None:
        """Update `Published.sent` of every manifest that is kept."""
        for mid, (_, published) in self._kept.items():
            transfer = self._swarm.transfers.get(mid)
            if transfer is not None:
                published.sent = transfer.traffic.sent

    def prune(self, readers: Iterable[Version]) -> list[str]:
        """Drop manifests that nobody can need: older than every reader, and than the newest version that a joiner reaches: an
        anchor, or a cumulative delta against the newest anchor, which is kept then.

        `readers` are the versions that live nodes hold, or, for one that is catching up, the oldest it was offered. Returns the
        files of the chunks that went with them: the caller deletes them before another version is encoded.
        """
        sealed = [p for _, p in self._kept.values() if p.sealed]
        anchor = max((p for p in sealed if p.kind == "anchor"), key=lambda p: p.version, default=None)
        if anchor is None or self.current is None:
            return []
        squashed = (p.version for p in sealed if p.kind == "cumulative" and p.base_digest == anchor.state_digest)
        near = [v for v in readers if v.epoch == self.epoch and self.current.step - v.step <= STRAGGLER_STEPS]
        keep_from = min([max([anchor.version, *squashed]), *near])
        self.count_traffic()
        gone: list[str] = []
        for mid, (_, published) in list(self._kept.items()):
            if published.kind == "descriptor" or published.version >= keep_from or mid not in self._swarm.transfers:
                continue
            if published is anchor:
                continue
            gone += self._swarm.store.give_up(self._swarm.forget(mid))
            del self._kept[mid]
        return gone
