"""What stands in for the trainer in `shoal bench head`. Must not know the nodes or what is measured."""

from __future__ import annotations

import numpy as np

from learner.client.messages import CommitStep, NextBatch
from netem.bench.head.board import Board, digest_path
from netem.bench.real_head import RealHead
from p2p.layout import Layout
from p2p.weights.state import FlatState

LAYOUT = Layout.build([("weights", "bfloat16", (256, 128))])
"""The weights: 64 KiB, so small that making and sending them costs next to nothing."""


class Trainer:
    """Takes each step's groups as a trainer does, commits, and publishes a small delta."""

    def __init__(self, real: RealHead, board: Board) -> None:
        self._real, self._board = real, board
        self._state: FlatState | None = None

    async def run(self) -> None:
        """For ever, from step 0 on."""
        step, head = 0, self._real.head
        while True:
            seen, last = 0, False
            while not last:
                groups, last = await self._real.rollouts.buffers.next_groups(step, seen)
                seen += len(groups)
            await head.trainer_requests.on_next(NextBatch(step, seen))
            step += 1
            head.trainer_requests.on_commit(CommitStep(step, ""))
            await self.publish(step)

    async def publish(self, step: int) -> None:
        """Publish random weights as version `step`, and say so on the board."""
        new = FlatState.in_memory(LAYOUT)
        rng = np.random.default_rng(step)
        words = new.tensor("weights")
        words[...] = rng.integers(0, np.iinfo(words.dtype).max, size=words.shape, dtype=words.dtype)
        await self._real.publish(step, new, self._state)
        digest_path(str(self._real.head.run_dir / "board")).write_bytes(new.digest())
        self._state = new
        self._board["epoch"], self._board["step"] = self._real.head.epoch, step
