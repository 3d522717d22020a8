"""Checkpoints of a sharded model: each rank writes its parts, and any number of ranks reads them (torch.distributed.checkpoint).

The folder is as `learner.trainer.checkpoints.checkpoint` has it, whole or absent, on a disk that all ranks share; its tensors are
safetensors files, no pickle. Must not know the ledger or the network.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Shard

from learner.trainer.checkpoints.forms import TENSORS
from learner.trainer.checkpoints.writing import CheckpointFailed
from learner.trainer.optimizers.restore import restore
from learner.trainer.ranks.port import Ranks
from learner.trainer.ranks.sharding import ShardedModel
from learner.trainer.trained import Trained
from p2p.errors import UsageError
from p2p.files import sync

FORMAT = 1
"""Number of the folder's form, written to meta.json as "sharded"."""

OF_OPTIMIZER = "optimizer/"
"""Before the name of an optimizer's tensor: optimizer/KEY/PARAMETER."""


def save_sharded(
    root: Path, step: int, trained: ShardedModel, optimizer: torch.optim.Optimizer, *, epoch: int, config: Mapping[str, Any]
) -> Path:
    """Every rank writes its part of `root`/step_N; its path, when all of it is on the disk. CheckpointFailed on every rank where
    one of them cannot write."""
    ranks = trained.ranks
    final, temp = root / f"step_{step}", root / f".step_{step}.tmp"
    with _by_all(ranks, step, root):
        if ranks.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temp, ignore_errors=True)
            (temp / TENSORS).mkdir(parents=True)
    found = _optimizer_state(trained, optimizer)
    tensors = dict(_placed(trained, dict(trained.named_state()))) | found.tensors
    try:
        with _by_all(ranks, step, root):
            with _quiet():
                writer = HuggingFaceStorageWriter(str(temp / TENSORS), save_distributed=True)
                dcp.save(tensors, storage_writer=writer, process_group=ranks.control)
            for file in sorted((temp / TENSORS).iterdir())[ranks.rank :: ranks.count]:
                sync(file)
        with _by_all(ranks, step, root):
            if ranks.rank == 0:
                save_file({"cpu": torch.get_rng_state()}, temp / "rng.safetensors")
                meta = {
                    "format": 1, "sharded": FORMAT, "step": step, "epoch": epoch, "config": dict(config), "ranks": ranks.count,
                    "param_groups": optimizer.state_dict()["param_groups"], "scalars": found.scalars, "moments": found.moments,
                }  # fmt: skip
                (temp / "meta.json").write_text(json.dumps(meta, indent=1))
                for file in [temp / "rng.safetensors", temp / "meta.json", temp / TENSORS, temp]:
                    sync(file)
                if final.exists():
                    shutil.rmtree(final)
                os.rename(temp, final)
                sync(root)
    except CheckpointFailed:
        if ranks.rank == 0:  # what is there of it takes the room that is wanting
            shutil.rmtree(temp, ignore_errors=True)
        raise
    return final


@contextmanager
def _by_all(ranks: Ranks, step: int, root: Path) -> Iterator[None]:
    """Ranks leave it together: where one of them cannot write, each with CheckpointFailed."""
    failed = None
    try:
        yield
    except (dcp.CheckpointException, SafetensorError, OSError) as error:
        why = (isinstance(error, OSError) and error.strerror) or _reason(error)
        failed = CheckpointFailed(
            f"cannot write the checkpoint of step {step} to {root}: {why}; make room there and resume, at most so much is "
            "trained again"
        )
    ranks.agree(failed)


def load_sharded_checkpoint(path: Path, trained: Trained, optimizer: torch.optim.Optimizer) -> int:
    """Put everything back, with as many ranks as there are now (or in one process); the step that it is of. UsageError when the
    folder does not fit this model."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        rng = load_file(path / "rng.safetensors")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read checkpoint {path}: {error}") from error
    if meta.get("sharded") != FORMAT:
        raise UsageError(f"checkpoint {path} has format {meta.get('sharded')}, this program reads {FORMAT}")
    parameters = dict(trained.parameters())
    moments: dict[str, dict[str, Tensor]] = {}
    for name, keys in meta["moments"].items():
        if name not in parameters:
            raise UsageError(f"checkpoint {path} is of another model: it trains {name}")
        moments[name] = {key: torch.empty_like(parameters[name], dtype=getattr(torch, of)).detach() for key, of in keys.items()}
    wanted = {name: tensor.detach() for name, tensor in trained.named_state()}
    _read(path, trained, wanted, {
        f"{OF_OPTIMIZER}{key}/{name}": (name, tensor) for name, keys in moments.items() for key, tensor in keys.items()
    })  # fmt: skip
    numbers = _numbers(meta["param_groups"])
    state = {
        number: {**moments.get(name, {}), **{key: torch.tensor(value) for key, value in meta["scalars"].get(name, {}).items()}}
        for name, number in numbers.items()
    }
    try:
        restore(optimizer, {n: s for n, s in state.items() if s}, meta["param_groups"], list(parameters))
    except UsageError as error:
        raise UsageError(f"checkpoint {path}: {error}") from error
    torch.set_rng_state(rng["cpu"])
    return int(meta["step"])


def load_sharded_weights(path: Path, trained: Trained) -> None:
    """The weights alone. FileNotFoundError when the folder is gone, UsageError when it is of another model."""
    if not (path / "meta.json").is_file():
        raise FileNotFoundError(path)
    _read(path, trained, {name: tensor.detach() for name, tensor in trained.named_state()}, {})


def _read(path: Path, trained: Trained, weights: dict[str, Tensor], moments: dict[str, tuple[str, Tensor]]) -> None:
    """Fill `weights` by name, and `moments`: name in the file -> (parameter, tensor)."""
    wanted = weights | {key: tensor for key, (_, tensor) in moments.items()}
    of = {key: name for key, (name, _) in moments.items()}
    sharded = isinstance(trained, ShardedModel)
    placed = dict(_placed(trained, wanted, of)) if isinstance(trained, ShardedModel) else wanted
    more: dict[str, Any] = {"process_group": trained.ranks.control} if isinstance(trained, ShardedModel) else {"no_dist": True}
    try:
        with _quiet():
            dcp.load(placed, storage_reader=HuggingFaceStorageReader(str(path / TENSORS)), **more)
    except FileNotFoundError:
        raise
    except (dcp.CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
        what = "its parts" if sharded else "it"
        raise UsageError(f"checkpoint {path} is of another model, or {what} cannot be read: {_reason(error)}") from error
    if isinstance(trained, ShardedModel):
        trained.changed()


class _OptimizerState(NamedTuple):
    tensors: dict[str, Tensor]
    scalars: dict[str, dict[str, float]]
    """parameter -> key -> value"""
    moments: dict[str, dict[str, str]]
    """parameter -> key -> dtype, of tensors of the parameter's shape"""


def _optimizer_state(trained: ShardedModel, optimizer: torch.optim.Optimizer) -> _OptimizerState:
    scalars: dict[str, dict[str, float]] = {}
    moments: dict[str, dict[str, str]] = {}
    local: dict[str, Tensor] = {}
    of: dict[str, str] = {}
    for name, parameter in trained.parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                scalars.setdefault(name, {})[key] = float(value)
            elif value.shape == parameter.shape:
                moments.setdefault(name, {})[key] = str(value.dtype).removeprefix("torch.")
                local[f"{OF_OPTIMIZER}{key}/{name}"] = value.detach()
                of[f"{OF_OPTIMIZER}{key}/{name}"] = name
            else:
                what = f"{type(optimizer).__name__} keeps a state that cannot be cut among ranks ({key})"
                raise UsageError(f"trainer.devices: {what}")
    return _OptimizerState(dict(_placed(trained, local, of)), scalars, moments)


def _placed(
    trained: ShardedModel, local: Mapping[str, Tensor], of: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """This rank's parts as parts of the whole; `of`: whose part a tensor is like, where that is not its name."""
    shapes, split = trained.shapes, trained.split
    for key, tensor in local.items():
        name = (of or {}).get(key, key)
        if name not in split:
            yield key, tensor
            continue
        shape = torch.Size(shapes[name])
        stride = torch.empty(shape, device="meta").stride()
        yield key, DTensor.from_local(tensor, trained.ranks.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _numbers(groups: list[dict[str, Any]]) -> dict[str, int]:
    """Parameter -> its number in a saved optimizer's groups."""
    return {name: at for group in groups for name, at in zip(group["param_names"], group["params"], strict=True)}


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """The library warns of what is wanted here: a load without a process group, plain tensors on rank 0 alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
