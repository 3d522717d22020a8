"""Ranks over torch.distributed, started by torchrun: bytes and numbers over gloo, on the host, whatever the model is on.

Must not know models, groups or the head.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from learner.trainer.ranks.port import RankFailed
from p2p.errors import ShoalError

COLLECTIVE_S = 600.0
"""Seconds until a rank that waits for the others within a forward, a backward or a publication gives up: many times the longest
forward. A rank that dies is noticed at once, by its closed connection and by torchrun."""

PATIENCE_S = 30 * 24 * 3600.0
"""Seconds that ranks wait for what rank 0 tells them: it waits for rollouts itself, and says when the head is gone."""


def among_ranks() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class TorchRanks:
    """Implements `learner.trainer.ranks.port.Ranks`."""

    def __init__(self, device: torch.device) -> None:
        """Join the ranks that torchrun's environment names, and wait for all of them."""
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        with _reached():
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=COLLECTIVE_S))
            self._patient = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=PATIENCE_S))
            self.control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=COLLECTIVE_S))
            """what a checkpoint is agreed on over"""
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
            self.mesh: DeviceMesh = init_device_mesh(device.type, (self.count,))
        self.sent = 0
        """bytes that this rank sent to single others (`send`)"""
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []

    def close(self) -> None:
        dist.destroy_process_group()

    def share(self, data: bytes) -> bytes:
        """`Ranks.share`."""
        with _reached():
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, group=self._patient)
            block = _block(data) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            if len(block):
                dist.broadcast(block, 0, group=self._patient)
        return data if self.rank == 0 else block.numpy().tobytes()

    def all_told(self, data: bytes) -> list[bytes]:
        """`Ranks.all_told`."""
        with _reached():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self.control)
            longest = max(int(size) for size in sizes)
            if not longest:
                return [b""] * self.count
            own = torch.zeros(longest, dtype=torch.uint8)
            own[: len(data)] = _block(data)
            blocks = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(blocks, own, group=self.control)
        return [block.numpy()[: int(size)].tobytes() for block, size in zip(blocks, sizes, strict=True)]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """`Ranks.total`."""
        values = torch.tensor(list(numbers), dtype=torch.float64)
        with _reached():
            dist.all_reduce(values, group=self.control)
        return values.tolist()

    def agree(self, error: ShoalError | ValueError | None) -> None:
        """`Ranks.agree`."""
        if not self.total([error is not None])[0]:
            return
        told = self.all_told(b"" if error is None else _packed(error))
        raise _unpacked(next(data for data in told if data)) from error

    def send(self, data: bytes, to: int) -> None:
        """Returns at once; `settle` waits."""
        size, block = torch.tensor([len(data)]), _block(data)
        self.sent += len(data)
        with _reached():
            self._under_way.append((_work(dist.isend(size, to, group=self.control)), size))
            if len(data):
                self._under_way.append((_work(dist.isend(block, to, group=self.control)), block))

    def settle(self) -> None:
        """Wait until everything that was sent has arrived."""
        with _reached():
            for work, _ in self._under_way:
                work.wait()
        self._under_way = []

    def receive(self, rank: int) -> bytes:
        """`Ranks.receive`."""
        with _reached():
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank, group=self.control)
            block = torch.empty(int(size), dtype=torch.uint8)
            if len(block):
                dist.recv(block, rank, group=self.control)
        return block.numpy().tobytes()


_KINDS: dict[str, Callable[[str], ShoalError | ValueError]] = {}
"""name -> an error that ranks tell each other; others become a RankFailed"""


def tell_as(kind: type[ShoalError] | type[ValueError]) -> None:
    """Have `agree` raise errors of this kind as such on every rank."""
    _KINDS[kind.__name__] = kind


tell_as(ValueError)


def is_of_others(error: RuntimeError) -> bool:
    """Whether it says that another rank is gone or silent: what gloo and NCCL raise within a forward or a backward."""
    return isinstance(error, dist.DistError) or any(name in str(error) for name in ("gloo", "NCCL", "Connection closed"))


def _packed(error: Exception) -> bytes:
    return f"{type(error).__name__}\n{error}".encode()


def _unpacked(data: bytes) -> ShoalError | ValueError:
    name, _, text = data.decode().partition("\n")
    return _KINDS[name](text) if name in _KINDS else RankFailed(f"{name}: {text}")


def _block(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # every rank is in the group
    return work


@contextmanager
def _reached() -> Iterator[None]:
    """Around what takes the other ranks: their end is an error of its own."""
    try:
        yield
    except RuntimeError as error:  # DistError is one, and so is what gloo raises
        raise RankFailed(f"another rank is gone, or silent: {str(error).partition(chr(10))[0]}") from error
