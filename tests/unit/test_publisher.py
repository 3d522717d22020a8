"""The size of a run's chunks follows what its versions turn out to have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest

from learner.client.messages import Begin, SealVersion, SegmentDone
from learner.publish.publisher import FIRST_DELTA, Publisher
from p2p.identity import Identity
from p2p.layout import Layout
from p2p.limits import KIB, MIB
from p2p.version import Version
from p2p.weights.encode import chunk_bytes_for
from p2p.weights.state import state_digest

LAYOUT = Layout.build([("w", "bfloat16", (4 * MIB,))])
"""One segment."""


def publisher(folder: Path, chunk_bytes: int, uplink: float = 0.0, *, nodes: int = 0, layout: Layout = LAYOUT) -> Publisher:
    """Over an exchange that takes everything, and an uplink of so many bytes/s, to so many nodes."""
    (folder / "layout").write_bytes(msgpack.packb(layout.to_wire()))
    nothing = SimpleNamespace(
        offer=lambda part, announce: None, extend=lambda mid, part, announce: None, transfers={}, links=range(nodes),
        uplink_rate=uplink, store=SimpleNamespace(pin=lambda digests: None),
    )  # fmt: skip
    return Publisher(
        Identity.from_seed(bytes(32)), "run", folder, nothing, epoch=1, segment_bytes=8 * MIB, chunk_bytes=chunk_bytes,  # type: ignore[arg-type]
        now=lambda: 0.0, wall=lambda: 1e9,
    )  # fmt: skip


def publish(made: Publisher, step: int, base: int | None, size: int) -> int:
    """One version of `size` bytes; what its chunks were to have."""
    begun = made.begin(Begin(step, "anchor" if base is None else "delta", base, "layout"))
    mid, chunk_bytes = begun.mid, begun.chunk_bytes
    made.segment(SegmentDone(mid, 0, size, b"".join(i.to_bytes(32, "big") for i in range(-(-size // chunk_bytes))), 1, 1))
    digests = [step.to_bytes(16, "big")]
    made.seal(SealVersion(mid, b"".join(digests), state_digest(LAYOUT, digests), 0.0))
    return chunk_bytes


def test_chunks_fit_the_last_version_of_their_kind(tmp_path: Path) -> None:
    made = publisher(tmp_path, 0)
    first, usual = chunk_bytes_for(LAYOUT.nbytes // FIRST_DELTA), chunk_bytes_for(9 * MIB)
    assert first < usual
    assert publish(made, 1, None, 5 * MIB) == chunk_bytes_for(LAYOUT.nbytes)
    assert publish(made, 2, 1, 9 * MIB) == first
    assert publish(made, 3, 2, 100) == usual
    assert publish(made, 4, 3, 100) == first
    assert publish(made, 5, None, 5 * MIB) == chunk_bytes_for(5 * MIB)


def test_chunks_are_as_the_configuration_says(tmp_path: Path) -> None:
    made = publisher(tmp_path, 20_000)
    assert {publish(made, 1, None, MIB), publish(made, 2, 1, MIB)} == {20_000}


def test_chunks_are_larger_where_the_uplink_is_fast(tmp_path) -> None:
    made = publisher(tmp_path, 0, uplink=6e7)
    publish(made, 1, None, 5 * MIB)
    publish(made, 2, 1, 4 * MIB)
    assert publish(made, 3, 2, 4 * MIB) == chunk_bytes_for(4 * MIB, 6e7) > chunk_bytes_for(4 * MIB)


def test_a_small_version_for_many_nodes_is_in_smaller_chunks(tmp_path) -> None:
    made = publisher(tmp_path, 0, nodes=20)
    publish(made, 1, None, 5 * MIB)
    publish(made, 2, 1, MIB)
    assert publish(made, 3, 2, MIB) == chunk_bytes_for(MIB, nodes=20) < chunk_bytes_for(MIB)


@pytest.mark.parametrize("nodes", [1, 40])
def test_of_a_very_large_state_little_may_change(tmp_path, nodes) -> None:
    """64 GiB in chunks of 16 KiB would be more of them than a header may have: no small delta of a 32B model was published."""
    large = Layout.build([(f"w{i}", "bfloat16", (8, 128 * MIB)) for i in range(32)])
    made = publisher(tmp_path, 0, nodes=nodes, layout=large)
    made._sizes["delta"], made._digests[Version(1, 1)] = MIB, bytes(16)  # as after a small one: to make it takes 64 GiB
    begun = made.begin(Begin(2, "delta", 1, "layout"))
    assert 32 * KIB <= begun.chunk_bytes < 65 * KIB
