"""What stands in for tokenizer and trainer in `shoal bench head`. Must not know the nodes or what is measured."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from learner.client.messages import Begin, CommitStep, NextBatch, SealVersion, SegmentDone
from learner.head.head import Head
from netem.bench.head.simulated_nodes import Board, digest_path
from p2p.layout import Layout
from p2p.limits import KIB
from p2p.weights.encode import encode_version
from p2p.weights.state import FlatState

LAYOUT = Layout.build([("weights", "bfloat16", (256, 128))])


class FakeTokenizer:
    """Stands in for a model's: prompts are 64 tokens, completions no text."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(range(1, 65))

    def decode(self, ids: Any, **_: Any) -> str:
        return "x"


class Trainer:
    """Takes each step's groups as a trainer does, commits, and publishes a small delta."""

    def __init__(self, head: Head, board: Board) -> None:
        self._head, self._board = head, board
        self._state = FlatState.in_memory(LAYOUT)
        (head.run_dir / "layout").write_bytes(msgpack.packb(LAYOUT.to_wire()))

    async def run(self) -> None:
        step = 0
        while True:
            seen, last = 0, False
            while not last:
                groups, last = await self._head.rollouts.buffers.next_groups(step, seen)
                seen += len(groups)
            await self._head.trainer_requests.on_next(NextBatch(step, seen))
            step += 1
            self._head.trainer_requests.on_commit(CommitStep(step, ""))
            await self.publish(step)

    async def publish(self, step: int) -> None:
        head, new = self._head, FlatState.in_memory(LAYOUT)
        rng = np.random.default_rng(step)
        words = new.tensor("weights")
        words[...] = rng.integers(0, np.iinfo(words.dtype).max, size=words.shape, dtype=words.dtype)
        begun = head.trainer_requests.on_begin(Begin(step, "delta" if step else "anchor", step - 1 if step else None, "layout"))
        base = self._state if step else None
        for s in encode_version(new, base, head.store, segment_bytes=64 * KIB, chunk_bytes=begun.chunk_bytes):
            head.publisher.segment(SegmentDone(begun.mid, s.index, s.size, b"".join(s.digests), s.changed, s.words))
        digest_path(str(head.run_dir / "board")).write_bytes(new.digest())
        head.trainer_requests.on_seal(SealVersion(begun.mid, b"".join(new.tensor_digests()), new.digest(), 0.0))
        self._state = new
        self._board["epoch"], self._board["step"] = head.epoch, step
