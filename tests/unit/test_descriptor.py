"""The model descriptor: plain data files of known names, and nothing else, ever reach the folder."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.errors import Refusal, UsageError
from p2p.limits import MAX_DESCRIPTOR
from p2p.protocol.descriptor import ADAPTER_CONFIG, FILES, TENSOR, descriptor_layout, pack_descriptor, unpack_descriptor


def test_files_survive(tmp_path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    (source / "config.json").write_bytes(b"{}")
    (source / "tokenizer.json").write_bytes(b"\xff" * 100_000)
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "modeling.py").write_bytes(b"import os")
    blob = pack_descriptor(source)
    unpack_descriptor(blob, target)
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "tokenizer.json"]
    assert (target / "tokenizer.json").read_bytes() == b"\xff" * 100_000
    assert descriptor_layout(blob).by_name[TENSOR].nbytes == len(blob)


def test_an_adapter_is_the_runs_own_and_never_the_folders(tmp_path) -> None:
    source = tmp_path / "a"
    source.mkdir()
    (source / "config.json").write_bytes(b"{}")
    (source / ADAPTER_CONFIG).write_bytes(b"somebody's")
    unpack_descriptor(pack_descriptor(source), tmp_path / "plain")
    assert [p.name for p in (tmp_path / "plain").iterdir()] == ["config.json"]
    unpack_descriptor(pack_descriptor(source, b"ours"), tmp_path / "adapted")
    assert (tmp_path / "adapted" / ADAPTER_CONFIG).read_bytes() == b"ours"


def test_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        pack_descriptor(tmp_path)


@pytest.mark.parametrize("name", [
    "../config.json", "../../etc/passwd", "/etc/passwd", "sub/config.json", "config.json/", ".", "", "modeling.py",
    "config.json\0", "CONFIG.JSON", "model.safetensors", "pytorch_model.bin", ".config.json.tmp", 5, None, b"config.json",
])  # fmt: skip
def test_other_names_are_refused_and_nothing_is_written(tmp_path, name) -> None:
    target = tmp_path / "deep" / "model"
    with pytest.raises(Refusal):
        unpack_descriptor(msgpack.packb({"config.json": b"{}", name: b"x"}), target)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blob", [
    b"", b"\xc1", msgpack.packb([]), msgpack.packb({}), msgpack.packb({"tokenizer.json": b""}),
    msgpack.packb({"config.json": "text"}), msgpack.packb({"config.json": None}), msgpack.packb({"config.json": {}}),
    msgpack.packb({"config.json": b""}) + b"x", msgpack.packb({f"f{i}": b"" for i in range(len(FILES) + 2)}),
    b"\x81" * 10_000, msgpack.packb({"config.json": msgpack.ExtType(1, b"x")}), b"\x81\xa1\xff\xc4\x00",
])  # fmt: skip
def test_other_shapes_are_refused(tmp_path, blob) -> None:
    with pytest.raises(Refusal):
        unpack_descriptor(blob, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_arbitrary_bytes(tmp_path_factory, blob) -> None:
    with pytest.raises(Refusal):
        unpack_descriptor(blob, tmp_path_factory.getbasetemp() / "never")
    assert not (tmp_path_factory.getbasetemp() / "never").exists()


def test_too_long(tmp_path) -> None:
    with pytest.raises(Refusal, match="over the limit"):
        unpack_descriptor(bytes(MAX_DESCRIPTOR + 1), tmp_path)


def test_an_existing_file_is_replaced_whole(tmp_path) -> None:
    (tmp_path / "config.json").write_bytes(b"old and longer")
    unpack_descriptor(msgpack.packb({"config.json": b"new"}), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1
