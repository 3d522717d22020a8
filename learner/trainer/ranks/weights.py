"""The published weights of a sharded model: each rank finds what changed in its part, and encodes the segments that are its own.

Must not know models, versions or the head. Only changes move between ranks, except in an epoch's first version. A segment of the
flat state may lie on several ranks: one of them owns it, is told the others' changes, and hands rank 0 the segment encoded, with
the changes themselves, since the digest of a tensor takes all of its bytes in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from torch import Tensor

from learner.client.port import EncodedChanges
from learner.trainer.model import INT_VIEW, served_dtype
from learner.trainer.ranks.port import Ranks
from p2p.codec import encode_segment
from p2p.codec.classes import Changes
from p2p.layout import WORD, Layout, Segment, TensorSpec


class HeldBytes(NamedTuple):
    """Bytes [start, stop) of the flat state that a rank holds: a part of one tensor."""

    start: int
    stop: int
    tensor: TensorSpec
    rank: int


def held_by(layout: Layout, split: Set[str], count: int) -> list[HeldBytes]:
    """Who holds what of the state, in its order. A tensor that is not `split` is rank 0's to tell."""
    held = []
    for tensor in layout.tensors:
        if tensor.name not in split:
            held.append(HeldBytes(tensor.offset, tensor.stop, tensor, 0))
            continue
        row, size = tensor.nbytes // max(1, tensor.shape[0]), -(-tensor.shape[0] // count)
        for rank in range(count):
            first, last = min(rank * size, tensor.shape[0]), min((rank + 1) * size, tensor.shape[0])
            if last > first and row:
                held.append(HeldBytes(tensor.offset + first * row, tensor.offset + last * row, tensor, rank))
    return held


def owners(segments: Iterable[Segment], held: Sequence[HeldBytes], count: int) -> list[int]:
    """Which rank encodes each segment: the one that holds most of it, of equals the one with the fewest bytes so far."""
    found, given, at = list[int](), [0] * count, 0
    for segment in segments:
        share = [0] * count
        while at and held[at].start > segment.start:
            at -= 1
        while at < len(held) and held[at].stop <= segment.start:
            at += 1
        for piece in held[at:]:
            if piece.start >= segment.stop:
                break
            share[piece.rank] += min(piece.stop, segment.stop) - max(piece.start, segment.start)
        owner = min(range(count), key=lambda rank: (-share[rank], given[rank], rank))
        given[owner] += segment.nbytes
        found.append(owner)
    return found


class RankedWeights:
    """A `learner.client.port.WeightSource` on rank 0; the others `serve` it meanwhile."""

    frozen: frozenset[str] = frozenset()

    def __init__(
        self, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, split: Set[str], frozen: frozenset[str],
        ranks: Ranks, dtype: str,
    ) -> None:  # fmt: skip
        """`tensors`: this rank's parts; `frozen`: names of those that never change."""
        target = served_dtype(dtype)
        self._tensors, self._ranks, self.frozen = tensors, ranks, frozen
        self._dtypes = {n: target if t.is_floating_point() else t.dtype for n, t in tensors.items()}
        self.layout = Layout.build([(n, str(self._dtypes[n]).removeprefix("torch."), shapes[n]) for n in tensors])
        self._held = held_by(self.layout, split, ranks.count)
        self._last: dict[int, Tensor] = {}
        """offset -> the bits of a part of this rank's as they were last taken, where the weights are"""
        self._owned: dict[int, np.ndarray] = {}
        """segment -> its words as they were last taken, of this rank's segments"""
        self._anew = True
        self._coming: Iterator[Any] = iter(())

    # --- rank 0 ------------------------------------------------------------------------------------------------------

    def begin(self, segments: Sequence[Segment]) -> None:
        """All of these are about to be taken, in this order."""
        table = [[s.index, s.start, s.stop, s.itemsize] for s in segments]
        self._ranks.share(msgpack.packb([self._anew, table]))
        self._coming, self._anew = self._exchange(segments, self._anew), False

    def take(self, segment: Segment) -> Changes | EncodedChanges | np.ndarray:
        """The next of the segments that were begun."""
        index, found = next(self._coming)
        if index != segment.index:
            raise ValueError(f"segment {segment.index} is taken out of turn: {index} is the next")
        return found

    def forget(self) -> None:
        self._anew = True

    def dismiss(self) -> None:
        """Everything was taken: the others go on."""
        if next(self._coming, None) is not None:
            raise ValueError("not all segments were taken")
        self._ranks.share(msgpack.packb([]))

    # --- the others --------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Give what rank 0 takes, until it dismisses them."""
        while told := msgpack.unpackb(self._ranks.share(b"")):
            anew, table = told
            for _ in self._exchange([Segment(*row) for row in table], anew):
                raise AssertionError("rank 0 alone is given what is taken")

    # --- all of them -------------------------------------------------------------------------------------------------

    def _exchange(self, segments: Sequence[Segment], anew: bool) -> Iterator[tuple[int, EncodedChanges | np.ndarray]]:
        """On rank 0: (index, what changed or all words) of each segment."""
        ranks = self._ranks
        if anew:
            self._last, self._owned = {}, {}
        owner = owners(segments, self._held, ranks.count)
        parts: list[list[_Piece]] = [[] for _ in range(ranks.count)]
        for piece in self._pieces(segments):
            parts[owner[piece.segment]].append(piece)
        for to in range(ranks.count):
            if to != ranks.rank:
                ranks.send(msgpack.packb(parts[to]), to)
        for of in range(ranks.count):
            if of != ranks.rank:
                parts[ranks.rank] += [_Piece(*row) for row in msgpack.unpackb(ranks.receive(of))]
        mine: dict[int, list[_Piece]] = {}
        for piece in parts[ranks.rank]:
            mine.setdefault(piece.segment, []).append(piece)
        kept: dict[int, EncodedChanges | np.ndarray] = {}
        for at, segment in enumerate(segments):
            if owner[at] == ranks.rank:
                found = self._encoded(segment, mine.pop(at, []))
                if ranks.rank == 0:
                    kept[at] = found
                else:
                    ranks.send(_packed(found), 0)
        if ranks.rank == 0:
            for at, segment in enumerate(segments):
                found = kept.pop(at) if at in kept else _unpacked(ranks.receive(owner[at]), segment)
                yield segment.index, found
        ranks.settle()

    @torch.no_grad()
    def _pieces(self, segments: Sequence[Segment]) -> Iterator[_Piece]:
        """What changed in this rank's parts, or all of them where they were not taken before."""
        at = 0
        for held in self._held:
            if held.rank != self._ranks.rank or (held.tensor.name in self.frozen and held.start in self._last):
                continue
            name, size = held.tensor.name, held.tensor.itemsize
            bits = self._tensors[name].detach().reshape(-1).to(self._dtypes[name], copy=True).view(INT_VIEW[size])
            old, self._last[held.start] = self._last.get(held.start), bits
            if name in self.frozen:
                self._last[held.start] = bits[:0]  # that it was taken is enough
            while segments[at].stop <= held.start:
                at += 1
            for number in range(at, len(segments)):
                segment = segments[number]
                if segment.start >= held.stop:
                    break
                first, last = max(segment.start, held.start), min(segment.stop, held.stop)
                begin, here = (first - segment.start) // size, slice((first - held.start) // size, (last - held.start) // size)
                if old is None:
                    yield _Piece(number, begin, b"", bits[here].cpu().numpy().tobytes())
                    continue
                where = torch.nonzero(bits[here] != old[here]).squeeze(1)
                if len(where):
                    positions = (where + begin).cpu().numpy().astype(np.uint32)
                    yield _Piece(number, begin, positions.tobytes(), bits[here][where].cpu().numpy().tobytes())

    def _encoded(self, segment: Segment, pieces: Sequence[_Piece]) -> EncodedChanges | np.ndarray:
        """A segment of this rank's, from the pieces that all ranks gave."""
        word = WORD[segment.itemsize]
        base = self._owned.get(segment.index)
        new = np.zeros(segment.nbytes // segment.itemsize, word) if base is None else base.copy()
        positions = [np.empty(0, np.uint32)]
        for piece in pieces:
            words = np.frombuffer(piece.words, word)
            where = np.frombuffer(piece.positions, np.uint32) if piece.positions else np.arange(len(words), dtype=np.uint32)
            positions.append(where if piece.positions else where + np.uint32(piece.begin))
            new[positions[-1]] = words
        self._owned[segment.index] = new
        if base is None:
            return new
        payload, changed = encode_segment(new, base)
        changes = np.concatenate(positions)
        return EncodedChanges(payload, changed, changes, new[changes])


class _Piece(NamedTuple):
    """What one rank tells of one segment."""

    segment: int
    """its place among those that are taken"""
    begin: int
    """the first word of the rank's part in it"""
    positions: bytes
    """uint32, of changed words in the segment; empty: all words from `begin` on"""
    words: bytes


def _packed(found: EncodedChanges | np.ndarray) -> bytes:
    if isinstance(found, np.ndarray):
        return msgpack.packb([b"", -1, b"", found.tobytes()])
    return msgpack.packb([found.payload, found.changed, found.positions.tobytes(), found.words.tobytes()])


def _unpacked(data: bytes, segment: Segment) -> EncodedChanges | np.ndarray:
    payload, changed, positions, words = msgpack.unpackb(data)
    values = np.frombuffer(words, WORD[segment.itemsize])
    return values if changed < 0 else EncodedChanges(payload, changed, np.frombuffer(positions, np.uint32), values)
