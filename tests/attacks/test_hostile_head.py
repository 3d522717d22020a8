"""A hostile learner's descriptor against a node's engine: what of it is read, run and built. Tokenizers and templates are data
that a node keeps and never opens; numbers of config.json are checked before anything is made by them."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from time import process_time
from typing import Any

import msgpack
import pytest

from node.engine.port import StateFile
from node.engine.settings import TransformersSettings
from node.engine.transformers import TransformersCore
from p2p.errors import Refusal
from p2p.limits import MAX_DESCRIPTOR
from p2p.protocol.descriptor import unpack_descriptor
from p2p.protocol.rollout import Generate
from p2p.version import Version
from tests.support.engine_world import World, build_world

MOST_S, MOST_KIB = 5.0, 200 << 10
"""Seconds of a core until a hostile configuration is refused, and the memory that it may take: a model of its size would take at
least ten times as much."""

EVIL = "open('/tmp/shoal-was-here', 'w').write('run')"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"), lambda: TransformersCore(TransformersSettings(device="cpu")))


def hostile(world: World, folder: Path, config: dict[str, Any], **files: bytes) -> Path:
    """The world's descriptor with other values in its config.json, as a node unpacks it."""
    told = json.loads((world.folder / "config.json").read_text()) | config
    unpack_descriptor(msgpack.packb({"config.json": json.dumps(told).encode(), **files}), folder)
    return folder


@pytest.mark.parametrize("config", [
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": 60_000}, {"num_hidden_layers": 400}, {"hidden_size": 1 << 24},
    {"hidden_size": 1 << 20}, {"vocab_size": 10**9}, {"vocab_size": 1 << 24}, {"intermediate_size": 1 << 24},
    {"num_attention_heads": 10**8}, {"head_dim": 1 << 22}, {"model_type": "mixtral", "num_local_experts": 10**7},
    {"model_type": "gpt2", "n_positions": 1 << 24, "n_layer": 2, "n_embd": 32, "n_head": 2},
    {"model_type": "qwen3_moe", "num_experts": 60_000, "moe_intermediate_size": 1 << 14},
    {"layer_types": ["full_attention"] * 60_000, "num_hidden_layers": 60_000}, {"num_hidden_layers": True, "hidden_size": 10**30},
    {"text_config": {"num_hidden_layers": 10**9}}, {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"},
    {"max_position_embeddings": 0}, {"num_hidden_layers": -5, "hidden_size": -1}, {"head_dim": 0}, {"vocab_size": "many"},
], ids=str)  # fmt: skip
def test_a_configuration_of_another_model(world: World, tmp_path: Path, config: dict[str, Any]) -> None:
    folder = hostile(world, tmp_path / "model", config)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, process_time()
    with pytest.raises(Exception) as refused:
        world.make().load(folder, world.states[Version(0, 0)])
    took, grown = process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert took < MOST_S and grown < MOST_KIB, f"{took:.1f} s, {grown} KiB, {refused.value!r:.200}"
    assert not isinstance(refused.value, MemoryError)


def test_a_configuration_that_nests_without_end(world: World, tmp_path: Path) -> None:
    deep = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    unpack_descriptor(msgpack.packb({"config.json": deep}), tmp_path / "model")
    with pytest.raises((Refusal, RecursionError, ValueError)):
        world.make().load(tmp_path / "model", world.states[Version(0, 0)])


OPENED: list[str] = []
"""Files that this process opened, while a test looks."""

LOOKING: list[Path] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if LOOKING and event == "open" and isinstance(args[0], (str, bytes, Path)) and str(LOOKING[0]) in str(args[0]):
        OPENED.append(Path(str(args[0])).name)


sys.addaudithook(_hook)


def test_tokenizer_and_template_are_never_opened(world: World, tmp_path: Path) -> None:
    """Whatever they are: an engine works on token ids. They are there for whoever looks at a node's folder."""
    endless = b"{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    escape = b"{{ ''.__class__.__mro__[1].__subclasses__() }}"
    told = json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "chat_template": EVIL})
    folder = hostile(world, tmp_path / "model", {}, **{
        "tokenizer.json": b"[" * (1 << 20), "tokenizer_config.json": told.encode(), "chat_template.jinja": endless + escape,
        "tokenizer.model": b"\xff" * (1 << 20), "vocab.json": b"{" * 1000, "merges.txt": b"a" * (1 << 20),
        "added_tokens.json": b'{"a": 99999999999}', "special_tokens_map.json": b"[]",
    })  # fmt: skip
    core = world.make()
    OPENED.clear()
    LOOKING.append(folder)
    try:
        core.load(folder, world.states[Version(0, 0)])
        core.add(Generate("1", (1, 2, 3), 4, (), 7, Version(0, 0)))
        made = 0
        while core.has_work():
            made += sum(e.count for e in core.step())
    finally:
        LOOKING.clear()
    assert made == 4 and set(OPENED) <= {"config.json", "generation_config.json", "adapter_config.json"}, OPENED
    assert not Path("/tmp/shoal-was-here").exists()


def test_code_and_weights_never_reach_the_folder(tmp_path: Path) -> None:
    for name in ("evil.py", "configuration_evil.py", "pytorch_model.bin", "../evil.json", "model.safetensors", "a/config.json"):
        with pytest.raises(Refusal, match="not one of the files"):
            unpack_descriptor(msgpack.packb({"config.json": b"{}", name: b"import os"}), tmp_path / "model")
    with pytest.raises(Refusal, match="over the limit"):
        unpack_descriptor(bytes(MAX_DESCRIPTOR + 1), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_state_of_other_tensors_is_refused(world: World, tmp_path: Path) -> None:
    folder = hostile(world, tmp_path / "model", {"hidden_size": 64})
    with pytest.raises(Refusal, match="values, and the state"):
        world.make().load(folder, world.states[Version(0, 0)])
    small = hostile(world, tmp_path / "small", {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    with pytest.raises(Refusal, match="unexpected"):
        world.make().load(small, StateFile(world.states[Version(0, 0)].path, world.states[Version(0, 0)].layout, Version(0, 0)))
