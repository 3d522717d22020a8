"""What a trainer needs of the network: the TrainerClient port. Must not know torch, sockets or files.

`learner.client.client.LearnerClient` is the real adapter; tests drive the trainer with an in-memory one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from learner.trajectory import MicroBatch
from p2p.codec.classes import Changes
from p2p.layout import Layout, Segment

BY_NODE = "by_node"
"""Key of a step's log under which a trainer may say what each node's tokens came to: peer id -> [sampled tokens, sum of their
mismatch KL in nats]. It is no metric: the head looks at it and writes it nowhere."""


@dataclass(frozen=True, slots=True)
class ResumeInfo:
    epoch: int
    """this learner's own epoch; spans of a later one do not exist yet"""
    step: int
    """optimizer steps behind the checkpoint (0 on a fresh run)"""
    checkpoint: Path | None
    """the last committed checkpoint folder; None: start from the model itself"""


class EncodedChanges(NamedTuple):
    """What changed in a segment, encoded where it was found."""

    payload: bytes
    """the segment as a delta, by `p2p.codec.encode_segment`"""
    changed: int
    """words"""
    positions: np.ndarray
    """uint32 [changed], in no order"""
    words: np.ndarray
    """uN [changed]: what stands there now"""


class WeightSource(Protocol):
    """Weights that tell what changed in them, so that only that has to be copied to where the client is
    (`learner.trainer.device_weights`)."""

    @property
    def layout(self) -> Layout:
        """The tensor table; always the same."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the tensors that never change: a segment of these alone is given whole once, and then has no changes."""

    def take(self, segment: Segment) -> Changes | EncodedChanges | np.ndarray:
        """What changed in this segment since it was last taken; or its words, uN [n], where that is not known, or more than a
        sparse coding takes."""

    def forget(self) -> None:
        """What was taken so far was not published: the next time every segment is given whole."""


@runtime_checkable
class AnnouncedSource(Protocol):
    """A `WeightSource` that is told beforehand which segments will be taken, so that others can work on the later ones."""

    def begin(self, segments: Sequence[Segment]) -> None:
        """All of these are about to be taken, in this order."""


Weights = Mapping[str, tuple[str, np.ndarray]] | WeightSource
"""name -> (dtype name, unsigned integer bits in the tensor's shape), or where they come from"""


class TrainerClient(Protocol):
    """Calls are made by one thread, in this order: resume, publish, then per step batches, commit, publish, log. Only `commit`
    may come from another thread, and late: for a step that the trainer has left behind, once its checkpoint is on the disk."""

    def resume(self) -> ResumeInfo:
        """Where to go on. Called once, first."""

    def batches(self, step: int) -> Iterator[MicroBatch]:
        """The micro-batches that version `step` consumes, as their groups finish; blocks between them. Ends after the
        one with `last` set."""

    def commit(self, step: int, checkpoint: Path) -> None:
        """`checkpoint` (synced) holds the state after `step` steps: name it, and mark every group consumed by steps
        before `step` as trained on, in one transaction. Commits come in the order of their steps."""

    def due(self, step: int) -> bool:
        """Whether `publish` is to be called after `step` steps."""

    def publish(self, step: int, tensors: Weights, *, wait: bool = True) -> None:
        """The weights after `step` steps. Arrays are only valid during the call. Without `wait` it returns once they are copied,
        and the version goes out beside what follows; the next `publish`, `due` or `finish` waits for it."""

    def discard(self, step: int, group_ids: Sequence[int], reason: str) -> None:
        """Training on these groups of `step` failed, and this trainer stops: whoever resumes must not be given them
        again, or one poisoned group would end every later life of the run."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""

    def finish(self) -> None:
        """Training is complete."""
