"""A trained model as an ordinary Hugging Face folder. Must not know versions or the network.

torch is imported only when there is something to export, so that wrong input is refused without waiting for it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from p2p.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

ATTEMPTS = 5
"""Tries to read the last checkpoint: a running learner deletes one after a few commits, so reading may start again with a
newer."""

KEPT = ("model", "checkpoint_dir", "served_dtype", "lora")
"""Settings of the run that say what its checkpoints hold."""


def export_run(run_dir: Path, out: Path, *, adapter: bool = False) -> dict[str, Any]:
    """The last committed checkpoint of a run, running or not, as a Hugging Face folder at `out` in the served dtype. Of a run
    with `trainer.lora` the adapter is merged into the weights, or with `adapter` it alone is written, as peft has it.

    {"ok": True, "step": N, "folder": path}. `out` appears whole or not at all. UsageError when `run_dir` holds no run,
    nothing is committed yet, the checkpoint is gone, or `out` is there and not an empty folder.
    """
    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} holds no run")
    try:
        settings = json.loads((run_dir / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"{run_dir}/trainer.json cannot be read: this run never started") from None
    if adapter and not (settings.get("lora") or {}).get("rank"):
        raise UsageError(f"the run in {run_dir} trains every weight: it has no adapter to export; leave --adapter out")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder: choose another")
    step, checkpoint = last_commit(run_dir)

    from transformers.utils import logging as progress

    from learner.trainer.adapter.adapted import AdaptedModel
    from learner.trainer.opening import open_trained
    from learner.trainer.reading import read_weights
    from learner.trainer.settings import TrainerConfig

    progress.disable_progress_bar()  # several bars for what takes seconds
    kept = {key: settings[key] for key in KEPT if key in settings}
    trained, tokenizer = open_trained(TrainerConfig(**kept, device="cpu", compute_dtype="float32"))
    for attempt in range(ATTEMPTS):
        try:
            read_weights(checkpoint, trained)
            break
        except FileNotFoundError:
            newer = last_commit(run_dir)
            if newer == (step, checkpoint) or attempt == ATTEMPTS - 1:
                raise UsageError(f"the run's last checkpoint is gone: {checkpoint}") from None
            step, checkpoint = newer
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        if isinstance(trained, AdaptedModel) and adapter:
            trained.save_adapter(aside, settings["model"])
            tokenizer.save_pretrained(aside)
        else:
            model = trained.merged() if isinstance(trained, AdaptedModel) else trained.module
            export_model(model, tokenizer, aside, settings.get("served_dtype", "bfloat16"))
        os.rename(aside, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return {"ok": True, "step": step, "folder": str(out)}


class Commit(NamedTuple):
    """One commit of a run."""

    step: int
    checkpoint: Path
    """its folder"""


def last_commit(run_dir: Path) -> Commit:
    """The newest commit in the run's journal, which is opened read-only, since a learner may be writing it. UsageError when there
    is no journal, or nothing is committed."""
    journal = run_dir / "journal.sqlite"
    if not journal.is_file():
        raise UsageError(f"{run_dir}: nothing is committed yet")
    try:
        db = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True)
        try:
            row = db.execute("SELECT step, checkpoint FROM commits ORDER BY step DESC LIMIT 1").fetchone()
        finally:
            db.close()
    except sqlite3.Error as error:
        raise UsageError(f"cannot read {journal}: {error}") from None
    if row is None:
        raise UsageError(f"{run_dir}: nothing is committed yet")
    checkpoint = Path(row[1])
    # A run directory that was moved has its checkpoints with it.
    moved = run_dir / "checkpoints" / checkpoint.name
    return Commit(int(row[0]), checkpoint if checkpoint.is_dir() else moved)


def export_model(model: nn.Module, tokenizer: Any, folder: Path, dtype: str = "bfloat16") -> Path:
    """save_pretrained of model and tokenizer under `folder`, weights cast to `dtype`; the model itself is unchanged."""
    from learner.trainer.model import served_dtype

    target = served_dtype(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    cast: Any = model if next(model.parameters()).dtype == target else copy.deepcopy(model).to(target)
    cast.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
