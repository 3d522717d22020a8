"""`python -m netem.bench.capacity.paced RUN_DIR JSON`: a trainer that takes as long as it is told and changes as much as it
is told.

It learns nothing: what is measured is who waits for whom. Everything else of a run is real.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learner.client.client import LearnerClient


@dataclass(frozen=True, slots=True)
class Paced:
    steps: int
    train_s: float
    """of a step whose groups are all there"""
    values: int
    """of the state, two bytes each"""
    changed: float
    """share of them, a step"""


def pace(run_dir: Path, settings: Paced) -> None:
    """Train for ever so long, and no longer."""
    rng = np.random.default_rng(0)
    state = rng.integers(0x3F00, 0x3F80, settings.values, dtype=np.uint16)
    tensors = {"weights": ("bfloat16", state)}
    client = LearnerClient.connect(run_dir)
    step = client.resume().step
    client.publish(step, tensors)
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    while step < settings.steps:
        owed = time.perf_counter()
        for batch in client.batches(step):
            # Behind: at once; ahead, because it waited for the batch: from now on.
            owed = max(owed, time.perf_counter()) + settings.train_s * len(batch.groups) / batch.total
            time.sleep(max(0.0, owed - time.perf_counter()))
        step += 1
        client.commit(step, folder)
        if client.due(step):
            state[rng.integers(0, settings.values, int(settings.changed * settings.values))] ^= 1
            client.publish(step, tensors)
        client.log(step, {})
    client.finish()


if __name__ == "__main__":
    pace(Path(sys.argv[1]), Paced(**json.loads(sys.argv[2])))
