"""What a state has in common with the one before it, so that neither its words nor its digests are worked out again. Pure.

Must not know versions, codings or peers. A segment counts as changed unless it is known to hold its base's very bits (an empty
delta). A tensor none of whose segments changed has its base's digest. One with a part in a changed segment (the last of a few
changed tensors, beside a large one that is never trained) is compared there, where that is less than hashing all of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import numpy as np

from p2p.layout import Layout, Segment, TensorSpec
from p2p.weights.state import FlatState

COMPARE_BELOW = 0.5
"""Share of a tensor's bytes in changed segments below which these are compared with the base: comparing reads two states, hashing
one."""


def segments_of(layout: Layout, segments: Sequence[Segment]) -> list[range]:
    """For each tensor of `layout`, the indices of the `segments` (its cut, in order) that hold bytes of it."""
    spans, at = [], 0
    for spec in layout.tensors:  # both lie in order
        if not spec.nbytes:
            spans.append(range(0))
            continue
        while segments[at].stop <= spec.offset:
            at += 1
        last = at
        while segments[last].stop < spec.stop:
            last += 1
        spans.append(range(at, last + 1))
    return spans


def touched_by(layout: Layout, segments: Sequence[Segment], names: Container[str]) -> frozenset[int]:
    """The indices of the segments that hold a byte of one of these tensors."""
    spans = zip(layout.tensors, segments_of(layout, segments), strict=True)
    return frozenset(index for spec, span in spans if spec.name in names for index in span)


def unchanged(spec: TensorSpec, parts: Iterable[Segment], new: FlatState, base: FlatState) -> bool:
    """Whether the tensor has in `new` the bits of `base`. `parts`: those of its segments that are not known to be the same; they
    are compared, unless that is more work than hashing the tensor (then: False)."""
    ranges = [(max(spec.offset, part.start), min(spec.stop, part.stop)) for part in parts]
    if not ranges:
        return True
    if sum(stop - start for start, stop in ranges) > COMPARE_BELOW * spec.nbytes:
        return False
    return all(np.array_equal(new.bytes[start:stop], base.bytes[start:stop]) for start, stop in ranges)


def digests_after(
    new: FlatState, base: FlatState, digests: Sequence[bytes], segments: Sequence[Segment], changed: Container[int]
) -> list[bytes]:
    """`new.tensor_digests()`, where `base` has `digests`, and all segments (the cut of both) that are not `changed` hold the same
    bits in both."""
    layout, out = new.layout, []
    for i, (spec, span) in enumerate(zip(layout.tensors, segments_of(layout, segments), strict=True)):
        parts = [segments[index] for index in span if index in changed]
        out.append(digests[i] if unchanged(spec, parts, new, base) else new.tensor_digest(i))
    return out
