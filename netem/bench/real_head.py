"""A real head for a bench: libp2p on loopback, the journal on disk, and no trainer but whoever calls `publish`. Its prompts are
random tokens, and no completion is worth anything.

Must not know what is measured, nor who the nodes are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import trio

from learner.client.messages import Begin, SealVersion, SegmentDone
from learner.config import build_config
from learner.head.head import Head
from learner.journal.journal import Journal
from learner.rollouts.controller import Rollouts
from learner.rollouts.group_spec import RolloutSettings
from learner.service import calm_gc
from learner.tasks.port import Prompt, Score, Task
from p2p.errors import ShoalError
from p2p.identity import Identity
from p2p.membership.admission import make_ticket
from p2p.weights.encode import encode_version
from p2p.weights.state import FlatState

EVERYBODY_TRUSTED: Mapping[str, Any] = {"trusted": ["*"]}
"""For what measures a head at work, and not how strangers become proven."""

LOOK_S = 0.02
"""Seconds between two looks at what is waited for."""


class Numbered(Task):
    """Prompt number i is the text of i."""

    name = "numbered"

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, str(index), None)

    def score(self, prompt: Prompt, completion: str) -> Score:
        return Score(0.0, False)


class RandomPrompts:
    """Makes `length` random tokens of a prompt's number."""

    chat_template = None

    def __init__(self, length: int, vocabulary: int) -> None:
        self._length, self._vocabulary = length, vocabulary

    def encode(self, text: str, **_: Any) -> list[int]:
        return random_prompt(int(text), self._length, self._vocabulary)

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


def random_prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    """Random tokens, the same for a seed everywhere."""
    ids: list[int] = np.random.default_rng(seed).integers(0, vocabulary, length).tolist()
    return ids


async def until(ready: Callable[[], bool], what: str, check: Callable[[], None], wait_s: float) -> None:
    """Wait until `ready()` is true. ShoalError, naming `what`, after `wait_s` seconds; `check`, called at each look, may raise
    another before."""
    deadline = trio.current_time() + wait_s
    while not ready():
        check()
        if trio.current_time() > deadline:
            raise ShoalError(f"waited {wait_s:.0f} s for {what}")
        await trio.sleep(LOOK_S)


@dataclass(frozen=True, slots=True)
class RealHead:
    """A head that does not run until `start`."""

    head: Head
    rollouts: Rollouts
    nursery: trio.Nursery
    """cancelled when the head is closed"""
    ticket: str
    """with which nodes join"""

    async def start(self) -> None:
        """Run the head; returns when it takes nodes."""
        calm_gc()
        await self.nursery.start(self.head.run)

    async def publish(self, step: int, state: FlatState, base: FlatState | None) -> None:
        """Publish `state` as version `step`, as a trainer does: a delta on `base`, which was version `step - 1`, or whole."""
        head, requests = self.head, self.head.trainer_requests
        (head.run_dir / "layout").write_bytes(msgpack.packb(state.layout.to_wire()))
        kind = Begin(step, "anchor", None, "layout") if base is None else Begin(step, "delta", step - 1, "layout")
        begun = requests.on_begin(kind)
        segment_bytes = head.config.swarm.segment_bytes
        for s in encode_version(state, base, head.store, segment_bytes=segment_bytes, chunk_bytes=begun.chunk_bytes):
            digests = b"".join(s.digests)
            head.publisher.segment(SegmentDone(begun.mid, s.index, s.size, digests, changed=s.changed, words=s.words))
        await requests.on_seal(SealVersion(begun.mid, b"".join(state.tensor_digests()), state.digest(), 0.0))


@asynccontextmanager
async def open_real_head(
    folder: Path, run: str, settings: RolloutSettings, *, length: int, vocabulary: int,
    standing: Mapping[str, Any] = EVERYBODY_TRUSTED,
) -> AsyncIterator[RealHead]:  # fmt: skip
    """A head whose run is called `run`, with its files in `folder`. `length`: of a prompt; `vocabulary`: token ids are below
    it; `standing`: that section of its configuration."""
    from p2p.channel.libp2p import open_libp2p_network

    values = {"run_dir": str(folder), "model": "none", "external_trainer": True, "standing": dict(standing)}
    config = build_config(values, "bench")
    identity = Identity.from_seed(f"head of {run}".encode().ljust(32, b"."))
    with Journal.open(folder / "journal.sqlite", run) as journal:
        async with open_libp2p_network(identity, ["/ip4/127.0.0.1/tcp/0"]) as network, trio.open_nursery() as nursery:
            head = Head(
                config=config, run=run, run_dir=folder, identity=identity, network=network, journal=journal,
                open_rollouts=lambda head: Rollouts(
                    settings, journal, Numbered(), RandomPrompts(length, vocabulary), vocabulary, epoch=head.epoch,
                    send=head.send, nodes=head.node_views, report=head.report, conduct=head.trust,
                ),
            )  # fmt: skip
            yield RealHead(head, head.rollouts, nursery, make_ticket(identity, run, tuple(network.addresses)).encode())
            nursery.cancel_scope.cancel()
