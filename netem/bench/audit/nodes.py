"""Nodes of the bench: the project's own engines, in their processes, asked as an agent asks them. Must not know checks."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import trio

from learner.audit.calibration import NodeArithmetic
from learner.audit.scorer import Claim
from netem.bench.audit.world import MEMBERS, NOW, World
from node.engine.port import Engine
from node.engine.process import CHILD, open_engine_process, register_starter, start_program
from p2p.processes import Process
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version

MOST_RUNNING = 256
"""Sequences that an engine decodes at once."""

IN_FLIGHT = (256, 256, 128, 64, 13)
"""Sequences that a node holds at once, one of these for each batch: what else is in a forward changes how it rounds."""

FEW_IN_FLIGHT = (32, 8)
"""The same of a model that is no small one."""

CHEATING_CHILD = "netem.bench.audit.cheating_child"
"""The program of an engine whose draws are not what they should be."""


class EngineNode:
    """One engine that serves one state of the world after another."""

    def __init__(self, engine: Engine, world: World) -> None:
        self._engine, self._world = engine, world
        self._step = 0
        self._asked = 0
        self._serving = ""

    async def serve(self, state: str) -> None:
        """Install this state, unless it is in place."""
        if state == self._serving:
            return
        if not self._serving:
            await self._engine.load(self._world.model_dir, self._world.state(state, self._step))
        else:
            self._step += 1
            await self._engine.stage(self._world.state(state, self._step))
            await self._engine.commit()
        self._serving = state

    async def make(
        self, first: int, groups: int, *, temperature: float = 1.0, shop: int = 0, end: tuple[int, ...] = ()
    ) -> list[Claim]:  # fmt: skip
        """The completions of the groups from `first` on, with the log probabilities that the engine gave. `end`: tokens that end
        them, beside the world's."""
        world, most = self._world, self._world.most
        keys = [(first + g, m) for g in range(groups) for m in range(MEMBERS)]
        prompts = {first + g: world.prompt(first + g) for g in range(groups)}
        waiting, at_once = list(reversed(range(len(keys)))), _at_once(world, first)
        made: list[tuple[list[int], list[float]]] = [([], []) for _ in keys]
        base, self._asked = self._asked, self._asked + len(keys)
        left = len(keys)

        async def ask(place: int) -> None:
            index, member = keys[place]
            request = Generate(
                str(base + place), prompts[index], most, stop_ids=(*world.stop, *end), seed=world.seed_of(index, member, shop),
                min_version=Version(0, self._step), temperature=temperature,
            )  # fmt: skip
            await self._engine.add(request)

        async with trio.open_nursery() as nursery:
            for _ in range(min(at_once, len(keys))):
                nursery.start_soon(ask, waiting.pop())
            while left:
                for event in await self._engine.events.receive():
                    place = int(event.request_id) - base
                    _take(event, *made[place])
                    if event.finish:
                        left -= 1
                        if waiting:
                            nursery.start_soon(ask, waiting.pop())
        assert all(len(ids) <= most for ids, _ in made)
        return [
            Claim(prompts[index], tuple(ids), tuple(logprobs), world.seed_of(index, member))
            for (index, member), (ids, logprobs) in zip(keys, made, strict=True)
        ]


def _at_once(world: World, first: int) -> int:
    return Random(first).choice(IN_FLIGHT if world.name == "tiny" else FEW_IN_FLIGHT)


def _take(event: TokenEvent, ids: list[int], logprobs: list[float]) -> None:
    if event.finish not in ("", "stop", "length"):
        raise RuntimeError(f"an engine ended a sequence with {event.finish!r}: {event.message}")
    assert event.start == len(ids)
    ids.extend(event.ids)
    logprobs.extend(map(float, event.logprobs))


@asynccontextmanager
async def open_node(kind: NodeArithmetic, world: World, python: str, log: Path, *, top_k: int = 0) -> AsyncIterator[EngineNode]:
    """A node of that engine and type. `python`: of vLLM's environment. With `top_k` it draws of so many tokens alone."""
    settings = {
        "dtype": kind.dtype, "max_running": MOST_RUNNING if world.name == "tiny" else max(FEW_IN_FLIGHT), "threads": 1,
        "max_context": world.context, "log": str(log),
    }  # fmt: skip

    def start(command: list[str], fd: int, environment: dict[str, str]) -> Process:
        if top_k:
            command = [CHEATING_CHILD if word == CHILD else word for word in command]
            environment = environment | {"SHOAL_BENCH_TOP_K": str(top_k)}
        return start_program(command, fd, environment)

    register_starter(start)
    try:
        environment = python if kind.engine == "vllm" else sys.executable
        async with open_engine_process(kind.engine, settings, python=environment) as engine:
            node = EngineNode(engine, world)
            await node.serve(NOW)
            yield node
    finally:
        register_starter(start_program)
