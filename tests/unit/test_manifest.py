"""Signed manifests piece by piece: any order of parts gives the same whole, and every contradiction is refused."""

from __future__ import annotations

import tracemalloc

import blake3
import msgpack
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.errors import Refusal
from p2p.identity import Identity
from p2p.layout import Layout
from p2p.limits import MAX_CHUNK, MAX_SEGMENT, MAX_SEGMENT_CHUNKS, MAX_TABLE, MAX_TENSORS
from p2p.protocol.messages import decode
from p2p.protocol.versions import Parts
from p2p.protocol.wire import encode
from p2p.version import Version
from p2p.weights.manifest import (
    CODEC,
    DOMAIN,
    MAX_CLOCK_SKEW_S,
    MAX_LIFETIME_S,
    Header,
    Manifest,
    ManifestSigner,
    mid_of,
    open_header,
    open_part,
)

HEAD, OTHER = Identity.from_seed(b"h" * 32), Identity.from_seed(b"o" * 32)
LAYOUT = Layout.build([("a", "float32", (1000,)), ("b", "bfloat16", (3000,)), ("c", "uint8", (17,))])
NOW = 1_800_000_000
VERSION = Version(3, 7)
BASE = {
    "run": "r", "version": VERSION, "kind": "delta", "base": Version(3, 6), "base_digest": b"d" * 32, "codec": CODEC,
    "segment_bytes": 2048, "chunk_bytes": 1024, "created": NOW, "expires": NOW + 1000, "layout": LAYOUT,
}  # fmt: skip


def digest(*parts: object) -> bytes:
    return blake3.blake3(repr(parts).encode()).digest()


def signed(sizes: list[int] | None = None, signer: Identity = HEAD, **changes) -> tuple[ManifestSigner, list[bytes], bytes]:
    """A whole manifest: signer, record parts, seal part."""
    header = Header(**{**BASE, **changes})
    made = ManifestSigner(signer, header)
    segments = header.layout.segments(header.segment_bytes)
    records = []
    for segment in segments:
        size = sizes[segment.index] if sizes else segment.nbytes
        count = -(-size // header.chunk_bytes)
        records.append(made.record(segment.index, size, tuple(digest(segment.index, i) for i in range(count))))
    return made, records, made.seal([b"t" * 16] * len(header.layout.tensors), b"s" * 32)


def opened(part: bytes, **changes) -> Manifest:
    return open_header(part, **{"head_key": HEAD.public_key, "run": "r", "min_epoch": 0, "now": NOW, **changes})


def fresh() -> tuple[Manifest, list[bytes], bytes]:
    made, records, seal = signed()
    return opened(made.header_part), records, seal


def forge(kind: str, fields: list, signer: Identity = HEAD) -> bytes:
    """A part with any body, properly signed."""
    body = msgpack.packb(fields)
    return msgpack.packb([kind, body, signer.sign(DOMAIN[kind], body)])


def refused(call, *args, reason: str, version: Version | None = VERSION) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*args)
    assert reason in caught.value.reason
    assert caught.value.version == version
    return caught.value


@settings(max_examples=150)
@given(st.data())
def test_parts_in_any_order_and_number_make_the_same_whole(data) -> None:
    made, records, seal = signed()
    manifest = opened(made.header_part)
    parts = [*records, seal]
    order = data.draw(st.permutations([*parts, *data.draw(st.lists(st.sampled_from(parts), max_size=6))]))
    learned: list[int] = []
    for i, part in enumerate(order):
        new = manifest.add(part, HEAD.public_key)
        assert not set(new) & set(learned)
        learned += new
        assert manifest.whole == (set(order[: i + 1]) == set(parts))
    assert sorted(learned) == list(range(manifest.seal.chunks))
    assert None not in [manifest.chunk_digest(chunk) for chunk in learned]
    assert manifest.parts() == [made.header_part, *records, seal]
    for chunk in learned:
        segment = manifest.segment_of(chunk)
        assert manifest.part(segment) == records[segment]
        assert manifest.chunk_digest(chunk) == digest(segment, chunk - manifest.chunks_of(segment).start)
    assert manifest.chunk_digest(manifest.seal.chunks) is None


def test_the_header_says_what_was_signed() -> None:
    made, _, _ = signed()
    manifest = opened(made.header_part)
    assert manifest.header == made.header and manifest.mid == made.mid and manifest.version == VERSION
    assert not manifest.whole and manifest.chunk_digest(0) is None


def test_another_key() -> None:
    made, _, _ = signed(signer=OTHER)
    assert refused(opened, made.header_part, reason="manifest header is not signed by the head").fatal
    manifest, _, _ = fresh()
    _, records, seal = signed(signer=OTHER)
    for part in (records[0], seal):
        assert refused(manifest.add, part, HEAD.public_key, reason="is not signed by the head").fatal
    assert not manifest.records and manifest.seal is None


def test_a_part_in_another_role() -> None:
    _, records, _ = signed()
    manifest, _, _ = fresh()
    _, body, signature = msgpack.unpackb(records[0])
    swapped = msgpack.packb(["seal", body, signature])
    refused(manifest.add, swapped, HEAD.public_key, reason="manifest seal is not signed by the head")
    with pytest.raises(Refusal, match="expected a manifest header, got a record"):
        opened(records[0])


@pytest.mark.parametrize(("changes", "options", "reason"), [
    ({}, {"run": "q"}, "manifest is for run r, this is run q"),
    ({}, {"min_epoch": 4}, "manifest of older epoch 3, the run is at epoch 4"),
    ({}, {"now": NOW + 1010}, "manifest expired 10 s ago"),
    ({"created": NOW + MAX_CLOCK_SKEW_S + 60, "expires": NOW + MAX_CLOCK_SKEW_S + 90}, {}, "dated in the future"),
    ({"expires": NOW + MAX_LIFETIME_S + 1}, {}, "lives too long"),
    ({"kind": "gift", "base": None}, {}, "unknown manifest kind 'gift'"),
    ({"codec": "shoal-9"}, {}, "unknown codec 'shoal-9'"),
    ({"base": None}, {}, "delta with base None"),
    ({"kind": "anchor"}, {}, "anchor with base 3.6"),
    ({"base": Version(3, 7)}, {}, "delta with base 3.7"),
    ({"base": Version(4, 0)}, {}, "delta with base 4.0"),
    ({"chunk_bytes": MAX_CHUNK + 1}, {}, "over policy"),
    ({"chunk_bytes": 1023}, {}, "over policy"),
    ({"segment_bytes": MAX_SEGMENT + 1}, {}, "over policy"),
    ({"segment_bytes": 0}, {}, "over policy"),
    ({"segment_bytes": MAX_SEGMENT, "chunk_bytes": MAX_SEGMENT // MAX_SEGMENT_CHUNKS - 1}, {}, "over policy"),
])  # fmt: skip
def test_headers_against_policy(changes, options, reason) -> None:
    made = ManifestSigner(HEAD, Header(**{**BASE, **changes}))
    refused(lambda: opened(made.header_part, **options), reason=reason)


HUGE = Layout.build([("w", "float32", (1 << 30,))])
"""4 GiB of state, in a table of some bytes."""


@pytest.mark.parametrize(("segment_bytes", "chunk_bytes"), [(1024, 1024), (32 * 1024, MAX_CHUNK), (4 << 20, 1024)])
def test_a_small_header_does_not_ask_for_millions_of_pieces(segment_bytes: int, chunk_bytes: int) -> None:
    """Which would take gigabytes, or minutes, before anything else of it is looked at."""
    fields, names = header_fields(), list(Header._fields)
    fields[names.index("segment_bytes")], fields[names.index("chunk_bytes")] = segment_bytes, chunk_bytes
    fields[names.index("layout")] = zstandard.compress(msgpack.packb(HUGE.to_wire()))
    tracemalloc.start()
    refused(lambda: opened(forge("header", fields)), reason="over policy")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


def test_segments_are_counted_as_they_are_cut() -> None:
    tensors = [("a", "float32", (1000,)), ("b", "bfloat16", (77, 3)), ("adapter.c", "bfloat16", (5,)), ("d", "int8", (0,))]
    layout = Layout.build(tensors)
    for target in (1, 64, 100, 1024, 4096, 1 << 40):
        assert layout.count_segments(target) == len(layout.segments(target))


def header_fields() -> list:
    made, _, _ = signed()
    return msgpack.unpackb(msgpack.unpackb(made.header_part)[1])


@pytest.mark.parametrize("index", range(11))
@pytest.mark.parametrize("value", [None, -1, "x", b"", [], {}, [1], [[1]], 2**63, 0.5])
def test_a_header_with_one_strange_field(index, value) -> None:
    fields = header_fields()
    fields[index] = value
    try:
        opened(forge("header", fields))
    except Refusal:
        return
    assert (index, value) in [(4, b""), (8, -1)]  # both are as good as any: no base fits, made long ago


@pytest.mark.parametrize("fields", [[], [1], list(range(10)), list(range(12)), "x", b"x", {}, None, 5])
def test_headers_of_another_shape(fields) -> None:
    body = msgpack.packb(fields)
    with pytest.raises(Refusal) as refusal:
        opened(msgpack.packb(["header", body, HEAD.sign(DOMAIN["header"], body)]))
    assert refusal.value.fatal


@pytest.mark.parametrize("layout", [
    [["a", "float32", [2**39, 2**39]]], [["a", "float99", [1]]], [["b", "uint8", [1]], ["a", "uint8", [1]]],
    [["a", "uint8", [1]], ["a", "uint8", [1]]], [["a", "uint8", [-1]]], [["a", "uint8"]], "x",
])  # fmt: skip
def test_tensor_tables_that_are_none(layout) -> None:
    fields = header_fields()
    fields[10] = zstandard.compress(msgpack.packb(layout))
    refused(opened, forge("header", fields), reason="")
    fields[10] = layout
    refused(opened, forge("header", fields), reason="tensor table is not")


@pytest.mark.parametrize(("table", "reason"), [
    (zstandard.compress(bytes(MAX_TABLE + 1)), f"tensor table claims {MAX_TABLE + 1} bytes"),
    (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(MAX_TABLE + 1)), "tensor table claims -1 bytes"),
    (zstandard.compress(msgpack.packb(LAYOUT.to_wire())) + b"x", "not a zstd frame"),
    (zstandard.compress(msgpack.packb(LAYOUT.to_wire()))[:-1], "not a zstd frame"),
    (zstandard.compress(b"\xc1"), "malformed msgpack"),
    (b"", "not a zstd frame"),
    (msgpack.packb(LAYOUT.to_wire()), "not a zstd frame"),
], ids=["bomb", "silent", "more", "less", "garbage", "empty", "plain"])  # fmt: skip
def test_tensor_tables_that_do_not_decompress(table, reason) -> None:
    fields = header_fields()
    fields[10] = table
    refused(opened, forge("header", fields), reason=reason)


def test_a_header_and_a_seal_of_as_many_tensors_as_there_may_be_fit_a_frame() -> None:
    kinds = ("gate", "up", "down")
    names = [f"model.layers.{i // 384}.mlp.experts.{i % 384 // 3}.{kinds[i % 3]}_proj.weight" for i in range(MAX_TENSORS)]
    layout = Layout.build([(name, "bfloat16", (768, 2048)) for name in names])
    assert len(layout.tensors) == 65_536
    made = ManifestSigner(HEAD, Header(**{**BASE, "layout": layout, "segment_bytes": MAX_SEGMENT, "chunk_bytes": MAX_CHUNK}))
    assert opened(made.header_part).header == made.header
    made._segments = len(layout.segments(MAX_SEGMENT))  # as if all records were made: 32 GiB of them
    seal = made.seal([bytes(range(16))] * len(names), b"s" * 32)
    for part in (made.header_part, seal):
        assert decode(encode(Parts(made.mid, (part,)))).parts == (part,)
    with pytest.raises(ValueError, match="over the limit"):
        ManifestSigner(HEAD, Header(**{**BASE, "layout": Layout.build([(n + "x" * 400, "int8", (1,)) for n in names])}))


def test_the_longest_record_fits_a_frame() -> None:
    layout = Layout.build([("a", "uint8", (MAX_SEGMENT,))])
    chunk = MAX_SEGMENT // MAX_SEGMENT_CHUNKS
    made = ManifestSigner(HEAD, Header(**{**BASE, "layout": layout, "segment_bytes": MAX_SEGMENT, "chunk_bytes": chunk}))
    manifest = opened(made.header_part)
    count = 2 * MAX_SEGMENT_CHUNKS
    part = made.record(0, count * chunk, tuple(digest(i) for i in range(count)))
    assert len(manifest.add(part, HEAD.public_key)) == count
    assert encode(Parts(made.mid, (made.header_part, part)))


@pytest.mark.parametrize("epoch", [float("inf"), float("nan"), 2**64 - 1, -1, [], b"x", None])
def test_what_a_badly_signed_header_claims_to_be(epoch) -> None:
    """Only the refusal looks at it, and must come through it."""
    body = msgpack.packb(["r", [epoch, 1]])
    with pytest.raises(Refusal, match="not signed by the head"):
        open_part(msgpack.packb(["header", body, bytes(64)]), HEAD.public_key)


def test_two_records_for_one_segment() -> None:
    manifest, records, _ = fresh()
    manifest.add(records[0], HEAD.public_key)
    before = manifest.chunk_digest(0)
    other = forge("record", [manifest.mid, 0, 0, 2048, digest("x") + digest("y")])
    found = refused(manifest.add, other, HEAD.public_key, reason="two signed records for segment 0")
    assert not found.fatal  # the neighbour that passed it on did nothing wrong
    assert manifest.chunk_digest(0) == before


def test_two_seals() -> None:
    manifest, _, seal = fresh()
    manifest.add(seal, HEAD.public_key)
    body = msgpack.unpackb(seal)[1]
    fields = msgpack.unpackb(body)
    fields[5] = b"z" * 32
    refused(manifest.add, forge("seal", fields), HEAD.public_key, reason="two signed seals")
    assert manifest.seal.state_digest == b"s" * 32


@pytest.mark.parametrize(("record", "reason"), [
    ([99, 0, 1024, b"d" * 32], "record of segment 99 is out of range"),
    ([2, 3, 1024, b""], "out of range"),
    ([2, 3, 1024, b"d" * 31], "out of range"),
    ([2, 3, 5000, b"d" * 32], "segment 2: 5000 bytes in 1 chunks"),
    ([2, 3, 9000, b"d" * 32 * 9], "segment 2: 9000 bytes in 9 chunks"),
    ([2, 2, 2048, b"d" * 64], "segment 2: chunk numbers overlap"),
    ([2, 0, 2048, b"d" * 64], "segment 2: chunk numbers overlap"),
    ([2, -1, 2048, b"d" * 64], "malformed manifest record"),
    ([-1, 3, 2048, b"d" * 64], "malformed manifest record"),
    (["2", 3, 2048, b"d" * 64], "malformed manifest record"),
    ([2.0, 3, 2048, b"d" * 64], "malformed manifest record"),
    ([2, 3, 2048.0, b"d" * 64], "malformed manifest record"),
    ([2, 3, 2048, "d" * 64], "malformed manifest record"),
    ([True, 3, 2048, b"d" * 64], "malformed manifest record"),
    ([[], 3, 2048, b"d" * 64], "malformed manifest record"),
    ([2, 3, 2048], "malformed manifest record"),
    ([2, 3, 2048, b"d" * 64, 1], "malformed manifest record"),
    ([2, 2**40, 2048, b"d" * 64], "chunks beyond the seal"),
])  # fmt: skip
def test_records_that_do_not_fit(record, reason) -> None:
    manifest, records, seal = fresh()
    for part in records[:2]:
        manifest.add(part, HEAD.public_key)
    manifest.add(seal, HEAD.public_key)
    refused(manifest.add, forge("record", [manifest.mid, *record]), HEAD.public_key, reason=reason)
    for part in records:
        manifest.add(part, HEAD.public_key)
    assert manifest.whole


def test_chunk_numbers_are_bounded_before_there_is_a_seal() -> None:
    """Whoever numbers them keeps account of each, and a bitmap reaches up to the last."""
    manifest, records, seal = fresh()
    far = forge("record", [manifest.mid, 2, 2**40, 2048, b"d" * 64])
    refused(manifest.add, far, HEAD.public_key, reason="segment 2: chunks beyond policy")
    fields = msgpack.unpackb(msgpack.unpackb(seal)[1])
    fields[2] = 2**40
    refused(manifest.add, forge("seal", fields), HEAD.public_key, reason="a seal of 1099511627776 chunks: over policy")
    assert manifest.seal is None and not manifest.records
    for part in [*records, seal]:
        manifest.add(part, HEAD.public_key)
    assert manifest.whole and manifest.max_chunks == manifest.seal.chunks


def test_parts_of_another_manifest() -> None:
    manifest, _, _ = fresh()
    made, records, seal = signed(created=NOW - 1)
    for part, reason in ((records[0], "part of another"), (seal, "part of another"), (made.header_part, "header of another")):
        assert refused(manifest.add, part, HEAD.public_key, reason=reason).fatal


@pytest.mark.parametrize("seal_first", [True, False])
@pytest.mark.parametrize(("index", "value"), [(2, 100), (2, 3), (3, 1), (6, b"r" * 32)])
def test_records_that_do_not_add_up_never_make_a_whole(seal_first, index, value) -> None:
    manifest, records, seal = fresh()
    fields = msgpack.unpackb(msgpack.unpackb(seal)[1])
    fields[index] = value
    wrong = forge("seal", fields)
    caught = []
    for part in [wrong, *records] if seal_first else [*records, wrong]:
        try:
            manifest.add(part, HEAD.public_key)
        except Refusal as refusal:
            caught.append(refusal)
            assert refusal.version == VERSION and not refusal.fatal
        assert not manifest.whole
    assert caught


@pytest.mark.parametrize(("index", "value"), [(1, 1), (4, b"t" * 16), (4, b""), (5, b"s" * 31)])
def test_a_seal_that_does_not_fit_the_header(index, value) -> None:
    manifest, _, seal = fresh()
    fields = msgpack.unpackb(msgpack.unpackb(seal)[1])
    fields[index] = value
    refused(manifest.add, forge("seal", fields), HEAD.public_key, reason="seal does not fit the header")
    fields[index] = 0.5
    refused(manifest.add, forge("seal", fields), HEAD.public_key, reason="malformed manifest seal")


@settings(max_examples=300)
@given(st.binary(max_size=80) | st.builds(msgpack.packb, st.lists(
    st.sampled_from(["header", "record", "seal"]) | st.binary(max_size=70) | st.integers(0, 9)
    | st.lists(st.none(), max_size=1) | st.dictionaries(st.text(max_size=2), st.none(), max_size=1), max_size=4)))
def test_garbage(part) -> None:
    manifest, _, _ = fresh()
    for call in (lambda: opened(part), lambda: manifest.add(part, HEAD.public_key), lambda: open_part(part, HEAD.public_key)):
        with pytest.raises(Refusal):
            call()


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_part_is_refused(data) -> None:
    made, records, seal = signed()
    part = bytearray(data.draw(st.sampled_from([made.header_part, *records, seal])))
    part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    manifest = opened(made.header_part)
    with pytest.raises(Refusal):
        manifest.add(bytes(part), HEAD.public_key)
    assert not manifest.records and manifest.seal is None


def test_the_id_is_that_of_the_signed_bytes() -> None:
    made, _, _ = signed()
    assert made.mid == mid_of(msgpack.unpackb(made.header_part)[1]) and len(made.mid) == 16


def test_the_signer_wants_segments_in_order() -> None:
    made = ManifestSigner(HEAD, Header(**BASE))
    with pytest.raises(ValueError, match="out of order"):
        made.record(1, 100, (b"d" * 32,))
    with pytest.raises(ValueError, match="before the last segment"):
        made.seal([], b"")
