"""Checkpoints: model, optimizer, RNG and step in a folder step_N that is whole or absent, even after a power cut.

Must not know the ledger or the network. No pickle: tensors are safetensors, the rest is JSON. The folder is written
under a temporary name, every file synced, then renamed, then its parent synced: when `write_snapshot` returns, a
transaction of the journal may name the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.trainer.checkpoints.tensor_file import Readers, write_tensors
from learner.trainer.optimizers.restore import restore
from learner.trainer.trained import Trained
from p2p.errors import UsageError
from p2p.files import sync

FORMAT = 1
"""Number of the folder's form, written to meta.json: a checkpoint with another number is refused."""


class Snapshot(NamedTuple):
    """What a checkpoint is written from. Parameters and optimizer states are read where they are, as they are written: they must
    stay as they are until then, or until `let_go`."""

    step: int
    model: Readers
    optimizer: Readers
    rng: dict[str, Tensor]
    meta: dict[str, Any]

    def let_go(self) -> None:
        """Parameters and optimizer states may change from here on: what is not written yet is copied to the host."""
        self.model.let_go()
        self.optimizer.let_go()


def take_snapshot(
    step: int, trained: Trained, optimizer: torch.optim.Optimizer, *, epoch: int, config: Mapping[str, Any]
) -> Snapshot:
    """Everything as it is after `step` steps. Cheap: what only an optimizer step changes is not copied."""
    updated = {id(parameter) for _, parameter in trained.parameters()}
    model = {name: t if id(t) in updated else t.detach().clone() for name, t in trained.named_state()}
    state = _flatten(optimizer)
    meta = {
        "format": FORMAT, "step": step, "epoch": epoch, "config": dict(config), "param_groups": state.groups,
        "values": state.values,
    }  # fmt: skip
    # By JSON at once: the optimizer changes its groups in place.
    return Snapshot(step, Readers(model), Readers(state.tensors), _rng_state(), json.loads(json.dumps(meta)))


def save_checkpoint(
    root: Path,
    step: int,
    trained: Trained,
    optimizer: torch.optim.Optimizer,
    *,
    epoch: int,
    config: Mapping[str, Any],
) -> Path:
    """Write `root`/step_N and return its path. A step_N left by a crash between save and commit is replaced."""
    return write_snapshot(root, take_snapshot(step, trained, optimizer, epoch=epoch, config=config))


def write_snapshot(root: Path, snapshot: Snapshot) -> Path:
    """Write `root`/step_N, whole and synced, and return its path; OSError as the disk says, and then nothing of it is left."""
    root.mkdir(parents=True, exist_ok=True)
    final, temp = root / f"step_{snapshot.step}", root / f".step_{snapshot.step}.tmp"
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir()
    try:
        write_tensors(temp / "model.safetensors", snapshot.model)
        write_tensors(temp / "optimizer.safetensors", snapshot.optimizer)
        write_tensors(temp / "rng.safetensors", snapshot.rng)
        (temp / "meta.json").write_text(json.dumps(snapshot.meta, indent=1))
        sync(temp / "meta.json")
        sync(temp)
    except OSError:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    if final.exists():
        shutil.rmtree(final)
    os.rename(temp, final)
    sync(root)
    return final


def load_checkpoint(path: Path, trained: Trained, optimizer: torch.optim.Optimizer) -> int:
    """Put everything back as it was saved, bit for bit; the step that it is of. UsageError when the folder does not fit this
    model."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        tensors = load_file(path / "optimizer.safetensors")
        rng = load_file(path / "rng.safetensors")
        if meta.get("format") != FORMAT:
            raise UsageError(f"checkpoint {path} has format {meta.get('format')}, this program reads {FORMAT}")
        load_weights(path, trained)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read checkpoint {path}: {error}") from error
    try:
        state = _unflatten({**tensors, **meta.get("values", {})})
        restore(optimizer, state, meta["param_groups"], [name for name, _ in trained.parameters()])
    except UsageError as error:
        raise UsageError(f"checkpoint {path}: {error}") from None
    torch.set_rng_state(rng["cpu"])
    if torch.cuda.is_available() and "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return int(meta["step"])


def load_weights(path: Path, trained: Trained) -> None:
    """A checkpoint's weights into what is trained. FileNotFoundError when it is gone, UsageError when it is of another model."""
    state = load_file(path / "model.safetensors")
    ours = dict(trained.named_state())
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


class _State(NamedTuple):
    """An optimizer's state. Names are "index.key"."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    """what is no tensor and no number, as JSON has it"""
    groups: list[dict[str, Any]]


def _flatten(optimizer: torch.optim.Optimizer) -> _State:
    state = optimizer.state_dict()
    entries = {f"{index}.{key}": value for index, of in state["state"].items() for key, value in of.items()}
    tensors = {name: torch.as_tensor(value) for name, value in entries.items() if isinstance(value, (Tensor, int, float))}
    return _State(tensors, {name: value for name, value in entries.items() if name not in tensors}, state["param_groups"])


def _unflatten(entries: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for name, value in entries.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    return state


def _rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
