"""A safetensors file, written from tensors a piece at a time: while it is written the trainer may take away a tensor's memory.

Must not know steps, folders' names or optimizers. The safetensors library reads these files; its own writer wants all tensors
whole, and to itself, for as long as it writes.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE = 4 << 20
"""Bytes that are written at once, and so the most that `Readers.let_go` waits for: some milliseconds of copying into the page
cache."""

DEVICE_PIECE = 64 << 20
"""The same where bytes come from a GPU: smaller copies do not fill its link."""

SYNC_BYTES = 256 << 20
"""Bytes after which the disk is waited for, so that the system never holds more of a checkpoint than that in memory."""

SMALL = 64 << 10
"""Bytes up to which a tensor is copied at once: there are thousands of them, and all together are nothing."""

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What safetensors calls torch's types."""


class Reader:
    """The bytes of one tensor, from where it lives. It must not change until it was read, or `Readers.let_go` has copied what
    was not."""

    def __init__(self, tensor: Tensor) -> None:
        value = tensor.detach()
        self.dtype, self.shape, self.size = value.dtype, tuple(value.shape), value.numel() * value.element_size()
        if not value.is_contiguous() or self.size <= SMALL:
            value = value.to("cpu", copy=True).contiguous()
        self._rest = value.reshape(-1).view(torch.uint8)

    def next(self) -> Tensor:
        """The next bytes, on the host; none at the end."""
        size = PIECE if self._rest.device.type == "cpu" else DEVICE_PIECE
        piece, self._rest = self._rest[:size].to("cpu"), self._rest[size:]
        if not len(self._rest):
            self._rest = torch.empty(0, dtype=torch.uint8)  # the memory is not held any more
        return piece

    def copy_rest(self) -> None:
        """What was not read yet is of its own from here on, on the host."""
        self._rest = self._rest.to("cpu", copy=True)


class Readers:
    """Tensors that are being written by one thread, while another one may want to change them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.of = {name: Reader(tensor) for name, tensor in tensors.items()}
        self._turn, self._wanted, self._theirs = threading.Lock(), False, threading.Event()
        device = next((t.device for t in tensors.values() if t.is_cuda), None)
        self._stream = None if device is None else torch.cuda.Stream(device)
        if self._stream is not None:  # reads come after what changed the tensors, and beside what follows
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def let_go(self) -> None:
        """The tensors may change once this returns: what was not read is copied to the host, 0 bytes where all was. Later calls
        do nothing."""
        if self._theirs.is_set():
            return
        self._wanted = True  # a lock alone is not fair: the writer would have it again before we wake
        try:
            with self._turn:
                for reader in self.of.values():
                    reader.copy_rest()
        finally:
            self._theirs.set()

    def write(self, file: int, name: str) -> None:
        """All bytes of one tensor."""
        reader, left = self.of[name], self.of[name].size
        while left:
            if self._wanted:
                self._theirs.wait()
            with self._turn, torch.cuda.stream(self._stream):
                piece = memoryview(reader.next().numpy())
                while piece:
                    done = os.write(file, piece)
                    piece, left = piece[done:], left - done


def write_tensors(path: Path, tensors: Mapping[str, Tensor] | Readers) -> None:
    """Write and sync a safetensors file. OSError as the disk says, ValueError for a type that the format does not have."""
    readers = tensors if isinstance(tensors, Readers) else Readers(tensors)
    # As the format's own writer has it: the largest items first, so that each tensor is aligned.
    names = sorted(readers.of, key=lambda name: (-readers.of[name].dtype.itemsize, name))
    header, at = dict[str, Any](), 0
    for name in names:
        reader = readers.of[name]
        if reader.dtype not in DTYPES:
            raise ValueError(f"{name}: safetensors has no type for {reader.dtype}")
        header[name] = {"dtype": DTYPES[reader.dtype], "shape": reader.shape, "data_offsets": (at, at + reader.size)}
        at += reader.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        os.write(file, len(text).to_bytes(8, "little") + text)
        unsynced = 0
        for name in names:
            readers.write(file, name)
            unsynced += readers.of[name].size
            if unsynced >= SYNC_BYTES:
                os.fdatasync(file)
                unsynced = 0
        os.fsync(file)
    finally:
        os.close(file)
