"""Checkpoints: model, optimizer, RNG and step in a folder step_N that is whole or absent, even after a power cut.

Must not know the ledger or the network. No pickle: tensors are safetensors, the rest is JSON. The folder is written
under a temporary name, every file synced, then renamed, then its parent synced: when `save_checkpoint` returns, a
transaction of the journal may name the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from learner.trainer.model import named_state
from p2p.errors import UsageError
from p2p.files import sync

FORMAT = 1
"""Number of the folder's form, written to meta.json: a checkpoint with another number is refused."""


def save_checkpoint(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    epoch: int,
    config: Mapping[str, Any],
) -> Path:
    """Write `root`/step_N and return its path. A step_N left by a crash between save and commit is replaced."""
    root.mkdir(parents=True, exist_ok=True)
    final, temp = root / f"step_{step}", root / f".step_{step}.tmp"
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir()
    save_file({n: t.detach().cpu().contiguous() for n, t in named_state(model)}, temp / "model.safetensors")
    tensors, groups = _flatten(optimizer)
    save_file(tensors, temp / "optimizer.safetensors")
    save_file(_rng_state(), temp / "rng.safetensors")
    meta = {"format": FORMAT, "step": step, "epoch": epoch, "config": dict(config), "param_groups": groups}
    (temp / "meta.json").write_text(json.dumps(meta, indent=1))
    for file in temp.iterdir():
        sync(file)
    sync(temp)
    if final.exists():
        shutil.rmtree(final)
    os.rename(temp, final)
    sync(root)
    return final


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put everything back as it was saved, bit for bit; the step that it is of. UsageError when the folder does not fit this
    model."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        tensors = load_file(path / "optimizer.safetensors")
        rng = load_file(path / "rng.safetensors")
        if meta.get("format") != FORMAT:
            raise UsageError(f"checkpoint {path} has format {meta.get('format')}, this program reads {FORMAT}")
        load_weights(path, model)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read checkpoint {path}: {error}") from error
    optimizer.load_state_dict(_unflatten(tensors, meta["param_groups"]))
    torch.set_rng_state(rng["cpu"])
    if torch.cuda.is_available() and "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return int(meta["step"])


def load_weights(path: Path, model: nn.Module) -> None:
    """The weights of a checkpoint into a model. FileNotFoundError when it is gone, UsageError when it is of another model."""
    state = load_file(path / "model.safetensors")
    ours = dict(named_state(model))
    if ours.keys() != state.keys():
        odd = sorted(ours.keys() ^ state.keys())
        raise UsageError(f"checkpoint {path} is of another model: {odd[0]} and {len(odd) - 1} more do not match")
    with torch.no_grad():
        for name, tensor in ours.items():
            if tensor.shape != state[name].shape:
                raise UsageError(f"checkpoint {path}: {name} is {tuple(state[name].shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(state[name])


def prune_checkpoints(root: Path, keep: int, committed: int) -> list[Path]:
    """Delete all but the `keep` newest step folders up to step `committed`, which the last commit names, and any
    half-written one; returns what went. A folder past it is what a crash left between its save and its commit."""
    steps = {int(p.name.removeprefix("step_")): p for p in root.glob("step_*") if p.name.removeprefix("step_").isdigit()}
    kept = sorted(step for step in steps if step <= committed)[-max(keep, 1) :]
    gone = [steps[step] for step in sorted(steps) if step not in kept] + sorted(root.glob(".step_*.tmp"))
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return gone


def _flatten(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    state = optimizer.state_dict()
    tensors = {
        f"{index}.{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for index, entries in state["state"].items()
        for key, value in entries.items()
    }
    return tensors, state["param_groups"]


def _unflatten(tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    # JSON has no tuples, and optimizers compare and unpack betas as one.
    restored = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in groups]
    return {"state": state, "param_groups": restored}


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
