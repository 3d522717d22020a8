"""The model descriptor: what a node needs, besides weights, to build the engine. Files in, one blob out, and back.

Travels like an anchor (kind "descriptor"): one uint8 tensor named "descriptor". Only plain data files are taken: never
code, never weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from p2p.errors import Refusal, UsageError
from p2p.files import write_whole
from p2p.layout import Layout
from p2p.limits import MAX_DESCRIPTOR
from p2p.protocol.wire import MALFORMED, encode_struct

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""The only names a descriptor may take from a folder: data that transformers reads without running it."""

ADAPTER_CONFIG = "adapter_config.json"
"""The one other name that a descriptor may hold: what a run trains in place of every weight, as peft writes it. Never from the
model's folder, whose own adapter the run has nothing to do with."""

TENSOR = "descriptor"
"""Name of the one tensor that a descriptor travels as."""

_read = msgspec.msgpack.Decoder(Annotated[dict[str, bytes], msgspec.Meta(max_length=len(FILES) + 1)]).decode


def pack_descriptor(folder: Path, adapter: bytes = b"") -> bytes:
    """The descriptor of the model in `folder`; `adapter`: ADAPTER_CONFIG's content, of a run that trains one. UsageError without
    a config.json or over MAX_DESCRIPTOR."""
    files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
    if "config.json" not in files:
        raise UsageError(f"{folder} holds no config.json: not a Hugging Face model folder")
    if adapter:
        files[ADAPTER_CONFIG] = adapter
    blob = encode_struct(files)
    if len(blob) > MAX_DESCRIPTOR:
        raise UsageError(f"config and tokenizer in {folder} are {len(blob)} bytes, over the limit of {MAX_DESCRIPTOR}")
    return blob


def unpack_descriptor(blob: bytes, folder: Path) -> None:
    """Write the files of a descriptor into `folder`. Refusal on anything but known names with byte contents."""
    if len(blob) > MAX_DESCRIPTOR:
        raise Refusal(f"descriptor of {len(blob)} bytes is over the limit of {MAX_DESCRIPTOR}")
    try:
        files = _read(blob)
    except MALFORMED as error:
        raise Refusal(f"malformed descriptor: {error}") from None
    if "config.json" not in files:
        raise Refusal("descriptor holds no config.json")
    for name in files.keys() - {*FILES, ADAPTER_CONFIG}:
        raise Refusal(f"descriptor holds {name!r}, which is not one of the files a model may bring")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_whole(folder / name, data)


def descriptor_layout(blob: bytes) -> Layout:
    """The layout of the blob as a state of one uint8 tensor, TENSOR."""
    return Layout.build([(TENSOR, "uint8", (len(blob),))])
