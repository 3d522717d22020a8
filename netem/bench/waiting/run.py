"""`python -m netem.bench.waiting.run JSON`: our trainer, whole, on random groups that are there at once; a checkpoint each step.

In place of the head stands a connection of a few lines: versions are really compared, encoded and stored, commits really follow
synced folders, and nobody generates. So what a step takes is the trainer's own time. The last line of its output is JSON.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from learner.client.client import LearnerClient
from learner.client.connection import HeadConnection
from learner.client.messages import Begin, Begun, Due, IsDue, Resume, Start
from learner.trainer import opening, trainer
from learner.trainer.model import LoadedModel
from learner.trainer.settings import TrainerConfig
from learner.trajectory import Group, MicroBatch, Trajectory
from netem.bench.engine.models import SHAPES
from p2p.limits import DEFAULT_SEGMENT
from p2p.protocol.rollout import Span
from p2p.version import Version
from p2p.weights.encode import chunk_bytes_for

GROUP = 4
"""Rows of a group."""

PROMPT = 0.25
"""Share of a row that is prompt."""


@dataclass(frozen=True, slots=True)
class WaitingRun:
    """`beside`: checkpoints and versions go on beside training."""

    folder: str
    model: str
    steps: int
    rows: int
    tokens: int
    checkpoint_beside: bool
    publish_beside: bool
    threads: int = 0


class Line(HeadConnection):
    """Answers as a head that is content."""

    def __init__(self) -> None:
        super().__init__(socket.socket(socket.AF_UNIX))

    def ask(self, request: Any, expect: Any) -> Any:
        """What the trainer wants to hear."""
        match request:
            case Resume():
                return Start(1, 0, "", segment_bytes=DEFAULT_SEGMENT, anchor_every=1000, squash_every=0)
            case Begin():
                return Begun(b"m" * 32, chunk_bytes_for(1 << 24))
            case Due():
                return IsDue(True)
        return expect()

    def tell(self, message: object) -> None:
        pass


class Feeding(LearnerClient):
    """Hands out random groups, and keeps what is logged."""

    def __init__(self, run: WaitingRun) -> None:
        super().__init__(Line(), Path(run.folder))
        self._run, self.lines = run, list[dict[str, float]]()

    def batches(self, step: int) -> Iterator[MicroBatch]:
        groups = tuple(random_group(self._run, step, i) for i in range(self._run.rows // GROUP))
        yield MicroBatch(step, groups, True, len(groups))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the step's numbers, and tell of progress."""
        line = {**metrics, **{f"stage/{name}": s for name, s in self.stages.items()}}
        self.lines.append(line)
        told = {name: round(value, 3) for name, value in line.items() if name.startswith(("time/", "stage/"))}
        print(step, os.getloadavg()[0], json.dumps(told), file=sys.stderr, flush=True)


def random_group(run: WaitingRun, step: int, number: int) -> Group:
    """Random tokens, a log probability as of a model that knows nothing, and rewards that differ."""
    vocabulary = SHAPES[run.model].vocabulary
    rng = np.random.default_rng((step, number))
    prompt = int(run.tokens * PROMPT)
    length = run.tokens - prompt
    ids = tuple(int(i) for i in rng.integers(3, vocabulary, prompt))
    rows = tuple(
        Trajectory(
            prompt_ids=ids, completion_ids=tuple(int(i) for i in rng.integers(3, vocabulary, length)),
            logprobs=(-math.log(vocabulary),) * length, spans=(Span(Version(1, step), 0, length),), reward=float(member % 2),
            finish="stop", node="node", seed=member,
        )
        for member in range(GROUP)
    )  # fmt: skip
    return Group(1000 * step + number, number, rows)


def main(run: WaitingRun) -> dict[str, Any]:
    """Train, and say what each step took."""
    shape = SHAPES[run.model]
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2, head_dim=shape.width, intermediate_size=shape.inner, tie_word_embeddings=True,
        max_position_embeddings=run.tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    opening.load_model = lambda *_: LoadedModel(model, None)
    (Path(run.folder) / "versions").mkdir()
    client = Feeding(run)
    trainer.run_trainer(client, TrainerConfig(
        model=run.model, checkpoint_dir=str(Path(run.folder) / "checkpoints"), steps=run.steps, lr=1e-6, device="cpu",
        max_new_tokens=run.tokens, checkpoint_beside=run.checkpoint_beside, publish_beside=run.publish_beside,
        threads=run.threads, checkpoint_keep=1,
    ))  # fmt: skip
    saved = sum(file.stat().st_size for file in (Path(run.folder) / "checkpoints").rglob("*.*") if file.is_file())
    return asdict(run) | {
        "parameters": sum(p.numel() for p in model.parameters()), "checkpoint_bytes": saved, "lines": client.lines,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "load": os.getloadavg()[0],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(WaitingRun(**json.loads(sys.argv[1])))))
