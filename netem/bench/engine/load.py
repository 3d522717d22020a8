"""An engine's process under steady load, updated in place: what its clients see, and what it says itself. Must not know vLLM."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import trio

from netem.bench.engine.models import CONTEXT, Model, prompts
from node.engine.port import Engine
from p2p.protocol.rollout import Generate
from p2p.version import Version

WARM_TOKENS = 10
"""Of each sequence, before anything is measured."""

SETTLE_S = 0.2
"""Between two updates: the sequences go on meanwhile."""


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds, and bytes of the changed tensors in the state file."""

    pause_s: float
    """the engine's: from its last token under the old weights to where it could make the first under the new ones"""
    apply_s: float
    """the engine's: of it, until the values lie where they are computed with; not their comparison with the file"""
    call_s: float
    """the agent's: from asking for the commit to its answer"""
    stage_s: float
    """the agent's: from asking for the stage to its answer"""
    gap_s: float
    """the longest time without a token of any sequence, from the commit on: with the first step after"""
    first_step_s: float
    """the agent's: from the commit's answer to the first tokens, whose keys and values are computed anew first"""
    bytes: int


class MeasuredUpdates(NamedTuple):
    """What `update` measured."""

    updates: list[UpdateTimes]
    steps: list[float]
    """seconds of ordinary decoding steps before the first update"""


class Client:
    """Takes an engine's tokens, and knows when they came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.arrivals: list[float] = []
        self.tokens = 0
        self._held: set[str] = set()
        self._asked = 0
        self._idle = trio.Event()

    async def listen(self) -> None:
        """For ever, or until the engine is gone."""
        async for events in self.engine.events:
            self.arrivals.append(time.perf_counter())
            for event in events:
                self.tokens += event.count
                if event.finish:
                    self._held.discard(event.request_id)
            if not self._held:
                self._idle.set()

    async def start(self, given: list[tuple[int, ...]], new: int) -> None:
        """These prompts; returns when the engine has them all."""
        self._idle = trio.Event()
        async with trio.open_nursery() as nursery:
            for i, ids in enumerate(given):
                self._asked += 1
                request = Generate(f"r{self._asked}", ids, new, stop_ids=(), seed=i, min_version=Version(0, 0))
                self._held.add(request.request_id)
                nursery.start_soon(self.engine.add, request)

    async def ended(self) -> None:
        await self._idle.wait()

    async def stop(self) -> None:
        await self.engine.abort()
        self._held.clear()


async def generate(client: Client, given: list[tuple[int, ...]], new: int) -> dict[str, Any]:
    """Throughput of the engine through its process."""
    began, before = time.perf_counter(), client.tokens
    await client.start(given, new)
    await client.ended()
    return {"seconds": client.arrivals[-1] - began, "tokens": client.tokens - before}


async def update(
    client: Client, model: Model, names: tuple[str, ...], first: int, count: int, *, sequences: int, length: int, seed: int
) -> MeasuredUpdates:
    """`count` updates of the tensors `names`, to versions from `first` on, under `sequences` sequences."""
    engine = client.engine
    client.arrivals.clear()
    await client.start(prompts(seed, sequences, length, model.vocabulary), CONTEXT - length)
    while len(client.arrivals) < WARM_TOKENS:  # noqa: ASYNC110
        await trio.sleep(0.005)
    arrivals = client.arrivals
    steps = sorted(b - a for a, b in pairwise(arrivals[1:]))
    out = []
    for step in range(first, first + count):
        began = time.perf_counter()
        await engine.stage(model.state(step, names))
        staged, at = time.perf_counter(), len(arrivals)
        result = await engine.commit()
        answered, seen = time.perf_counter(), len(arrivals)
        while len(arrivals) <= seen:  # noqa: ASYNC110
            await trio.sleep(0.001)
        first_step = arrivals[seen] - answered
        await trio.sleep(SETTLE_S)
        near = arrivals[max(0, at - 1) :]
        gap = max(b - a for a, b in pairwise(near)) if len(near) > 1 else first_step
        out.append(
            UpdateTimes(
                pause_s=result.pause_s, apply_s=result.apply_s, call_s=answered - staged, stage_s=staged - began, gap_s=gap,
                first_step_s=first_step, bytes=model.touched(names),
            )
        )
    await client.stop()
    return MeasuredUpdates(out, steps)


def rows(updates: list[UpdateTimes]) -> dict[str, list[float]]:
    """Column by column."""
    return {name: [asdict(u)[name] for u in updates] for name in asdict(updates[0])}
