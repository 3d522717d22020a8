"""Checkpoints beside training: taken between two steps, written and committed while the next ones run.

Must not know files' forms (`checkpoint`) or the network. The rule (docs/design/recovery.md): one checkpoint is written at a time,
and the next one is not begun before it is committed. So memory never holds more than one copy. An optimizer step waits as well,
where without a commit more steps would be taken again after a crash than was asked for.

No process is forked to write, though its memory would be copied on write for nothing: torch, numpy, the encoder and this module
have threads, whose locks a fork copies as they are held, and CUDA does not survive one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from learner.client.beside import Beside
from learner.trainer.checkpoints.checkpoint import Snapshot, prune_checkpoints, take_snapshot, write_snapshot
from learner.trainer.trained import Trained
from p2p.errors import ShoalError


class CheckpointFailed(ShoalError):
    """A checkpoint could not be written. What was committed before stands."""


class Checkpoints:
    """Writes to `root`, keeps the newest `keep`. `commit(step, folder)` is called from the writing thread, in the order of steps,
    once a folder is whole and synced."""

    def __init__(
        self,
        root: Path,
        trained: Trained,
        optimizer: torch.optim.Optimizer,
        commit: Callable[[int, Path], None],
        *,
        epoch: int,
        config: Mapping[str, Any],
        keep: int,
        committed: int,
    ) -> None:
        self._root, self._trained, self._optimizer, self._commit = root, trained, optimizer, commit
        self._epoch, self._config, self._keep = epoch, config, keep
        self.committed = committed
        """step of the last commit"""
        self.write_s = 0.0
        """seconds from taking the last committed checkpoint until its commit"""
        self.waited_s = 0.0
        """seconds that training has waited for checkpoints"""
        self._beside = Beside("checkpoint")
        self._snapshot: Snapshot | None = None
        """what is being written"""
        # Here, and not in the trainer's loop: whatever takes an optimizer step, also several of them, must not tear a snapshot.
        optimizer.register_step_pre_hook(self._let_go)

    def begin(self, step: int) -> None:
        """Write a checkpoint of everything as it is now, after `step` steps. Waits until the one before is committed, and raises
        what kept it from that: CheckpointFailed, or what `commit` raised."""
        began = time.perf_counter()
        self.settle()
        self._snapshot = take_snapshot(step, self._trained, self._optimizer, epoch=self._epoch, config=self._config)
        self._beside.start(partial(self._write, self._snapshot))
        self.waited_s += time.perf_counter() - began

    def make_room(self, step: int, most: int) -> None:
        """Before step `step` is taken: wait for what is being written, if more than `most` steps would not be committed then.
        Raises as `begin`."""
        if step - self.committed > most:
            began = time.perf_counter()
            self.settle()
            self.waited_s += time.perf_counter() - began

    def check(self) -> None:
        """Raise what went wrong, if something did; never waits."""
        self._beside.check()

    def settle(self) -> None:
        """Wait until what was begun is committed; raises as `begin`."""
        self._beside.settle()

    def _write(self, snapshot: Snapshot) -> None:
        began = time.perf_counter()
        try:
            folder = write_snapshot(self._root, snapshot)
        except OSError as error:
            why = f"cannot write the checkpoint of step {snapshot.step} to {self._root}: {error.strerror or error}"
            raise CheckpointFailed(f"{why}; make room there and resume, at most so much is trained again") from error
        finally:
            self._snapshot = None
        self._commit(snapshot.step, folder)
        self.committed, self.write_s = snapshot.step, time.perf_counter() - began
        prune_checkpoints(self._root, self._keep, snapshot.step)

    def _let_go(self, *_: object) -> None:
        """Before an optimizer step."""
        snapshot = self._snapshot
        if snapshot is not None:
            began = time.perf_counter()
            snapshot.let_go()
            self.waited_s += time.perf_counter() - began
