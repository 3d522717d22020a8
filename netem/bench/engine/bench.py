"""`shoal bench engine`: does a node cost what vLLM costs? Ours and vLLM's own in turns, in one run.

Three questions. What a weight update costs those who wait for tokens, beside vLLM's own pause and resume with no update between.
How that grows with the model. How many tokens a second a node makes, real links and a real head included, beside vLLM's own
offline batch. Everything that is compared is alive all the time, one at a time is asked, and turns alternate: the machine is
shared, so medians with quartiles of the same minutes. What is not asked is held still. Every engine has one thread.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import trio

from netem.bench.engine.load import Client, generate, rows, update
from netem.bench.engine.models import CONTEXT, SHAPES, Model, make_model, prompts
from netem.bench.engine.programs import VllmProgram, open_vllm_program
from netem.bench.engine.real_swarm import open_swarm
from node.engine.environment import missing, survey
from node.engine.process import open_engine_process
from p2p.errors import ShoalError, UsageError
from p2p.termination import run_terminable

PAUSE_FACTOR, SHARE, APPLY_GBPS = 1.5, 0.9, 1.0
"""What a vLLM node is to reach: pauses of at most so many times vLLM's own, beside the apply; so much of its throughput; so many
GB of touched state a second."""

IN_FLIGHT = 32
"""Sequences in flight while an update is measured."""

SEQUENCES = {"270m": 8, "0.6b": 4, "1.2b": 2}
"""Model -> sequences in flight where IN_FLIGHT would take minutes to prefill on a processor."""

VLLM_PROGRAMS = (("offline", "offline", False), ("spread", "offline", True), ("core", "core", False))
"""Name of a row of throughput, kind of its process (`vllm_alone`), whether vLLM may spread over several processes."""

NEW_TOKENS, NEW_TOKENS_LARGE, LARGE = 512, 64, 20_000_000
"""Made for each prompt, unless told: fewer by models of so many parameters, which take that long for a token."""

Spread = dict[str, float]


@dataclass(frozen=True, slots=True)
class EngineBench:
    """`throughput` and `sizes` name shapes of `models.SHAPES`. `count` prompts of `length` tokens, `new` made for each, at most
    `running` at once."""

    engine: str = "vllm"
    python: str = sys.executable
    rounds: int = 5
    pauses: int = 5
    """in each round"""
    throughput: tuple[str, ...] = ("0.45m", "57m")
    sizes: tuple[str, ...] = ("0.45m", "2m", "10m", "57m")
    count: int = 64
    length: int = 40
    new: int = 0
    """0: by the model's size"""
    running: int = 32
    dtype: str = "float32"
    pause_model: str = "0.45m"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0], "n": 1}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "n": len(values)}


def bench_engine(bench: EngineBench, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench engine --json` prints. UsageError where the engine cannot run or numbers make no sense; ShoalError when a
    process of it ends."""
    b = bench
    if b.engine not in ("vllm", "transformers"):
        raise UsageError(f"no engine {b.engine!r} to measure; there are vllm and transformers")
    if min(b.rounds, b.pauses, b.count, b.length) < 1 or b.running < IN_FLIGHT or not 0 <= b.new <= CONTEXT - b.length:
        raise UsageError(
            f"numbers must be 1 or more, sequences at once {IN_FLIGHT}, and a prompt with its completion at most {CONTEXT} tokens"
        )
    for name in filter(None, (*b.throughput, *b.sizes, b.pause_model)):
        if name not in SHAPES:
            raise UsageError(f"no model {name!r}; there are {', '.join(SHAPES)}")
    if why := missing(b.engine, survey(b.python)):
        raise UsageError(f"the {b.engine} engine cannot run: {why} (see: shoal doctor)")
    began = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shoal-engine-", dir=folder) as name:
        result = run_terminable(_Bench(b, Path(name), say).run)
    result |= {"load_before": began, "load_after": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
    result |= {"machine": platform.machine(), "engine": b.engine, "dtype": b.dtype}
    result["ok"] = all(result["holds"].values())
    return result


class _Bench:
    def __init__(self, bench: EngineBench, folder: Path, say: Callable[[str], None]) -> None:
        self.bench, self.folder, self.say = bench, folder, say
        self._seed = 1 << 20
        self._models: dict[str, Model] = {}

    async def run(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if self.bench.pause_model:
            result["pause"] = await self._pause(self._model(self.bench.pause_model))
        result["sizes"] = [await self._size(self._model(name)) for name in self.bench.sizes]
        result["throughput"] = [await self._throughput(self._model(name)) for name in self.bench.throughput]
        return result | {"holds": verdicts(result)}

    def _model(self, name: str) -> Model:
        if name not in self._models:
            whole = self.bench.engine == "vllm" and name in (*self.bench.throughput, self.bench.pause_model)
            self.say(f"making {name}")
            place = self.folder / name
            place.mkdir()
            self._models[name] = make_model(name, place, self.bench.running, whole=whole, dtype=self.bench.dtype)
        return self._models[name]

    def _prompts(self, count: int) -> int:
        """The seed of prompts that nobody had."""
        self._seed += count
        return self._seed

    def _settings(self, model: Model) -> dict[str, Any]:
        """Of an engine of ours."""
        kind: dict[str, Any] = {"kv_bytes": model.kv_bytes, "graphs": "none"} if self.bench.engine == "vllm" else {}
        log = str(self.folder / "engine.log")
        return {"dtype": self.bench.dtype, "max_running": self.bench.running, "threads": 1, "log": log, **kind}

    async def _vllm(self, stack: AsyncExitStack, name: str, model: Model, kind: str, processes: bool) -> VllmProgram:
        """A process of vLLM's own, for as long as `stack` is open; what it says goes to NAME.log. `processes`: whether vLLM may
        spread over several."""
        b = self.bench
        settings = {
            "whole": str(model.whole), "folder": str(model.folder), "state": str(model.states[0]), "dtype": b.dtype,
            "layout": model.layout.to_wire(), "running": b.running, "context": CONTEXT, "kv_bytes": model.kv_bytes, "threads": 1,
            "processes": processes,
        }  # fmt: skip
        return await stack.enter_async_context(open_vllm_program(kind, settings, b.python, self.folder / f"{name}.log"))

    # --- pauses ------------------------------------------------------------------------------------------------------

    async def _pause(self, model: Model) -> dict[str, Any]:
        """vLLM's own pause and resume, and our updates of everything, in turns, each under its own 32 sequences."""
        b = self.bench
        theirs: dict[str, list[float]] = {}
        ours: dict[str, list[float]] = {}
        async with AsyncExitStack() as stack:
            client = await self._engine(stack, model)
            program = await self._vllm(stack, "async", model, "async", processes=True) if b.engine == "vllm" else None
            step, everything = 1, model.some(1)
            for turn in range(b.rounds + 1):
                seed = self._prompts(IN_FLIGHT)
                if program is not None:
                    answer = await program.ask(
                        seed=seed, count=IN_FLIGHT, length=b.length, new=CONTEXT - b.length, vocabulary=model.vocabulary,
                        pauses=b.pauses,
                    )  # fmt: skip
                    _extend(theirs, answer if turn else {})
                updates, _ = await update(
                    client, model, everything, step, b.pauses, sequences=IN_FLIGHT, length=b.length, seed=seed
                )
                step += b.pauses
                _extend(ours, rows(updates) if turn else {})  # the first turn warms both
            self.say(f"pauses of {model.name}: {b.rounds} turns each")
        return {
            "model": model.name, "parameters": model.parameters, "sequences": IN_FLIGHT,
            "vllm": {name: spread(values) for name, values in theirs.items()},
            "ours": {name: spread(values) for name, values in ours.items()},
            "apply_gbps": spread([n / s / 1e9 for n, s in zip(ours["bytes"], ours["apply_s"], strict=True)]),
        }  # fmt: skip

    async def _engine(self, stack: AsyncExitStack, model: Model) -> Client:
        b = self.bench
        engine = await stack.enter_async_context(open_engine_process(b.engine, self._settings(model), python=b.python))
        await engine.load(model.folder, model.state(0))
        client = Client(engine)
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(client.listen)
        return client

    async def _size(self, model: Model) -> dict[str, Any]:
        """Updates of everything and of a tenth, in turns, under one load each."""
        b, sequences = self.bench, SEQUENCES.get(model.name, IN_FLIGHT)
        found: dict[str, dict[str, list[float]]] = {"all": {}, "tenth": {}}
        steps: list[float] = []
        rounds, each = (b.rounds, b.pauses) if model.name not in SEQUENCES else (2, 2)
        async with AsyncExitStack() as stack:
            client = await self._engine(stack, model)
            step = 1
            for turn in range(rounds + 1):
                for share, names in (("all", model.some(1)), ("tenth", model.some(0.1))):
                    updates, ordinary = await update(
                        client, model, names, step, each, sequences=sequences, length=b.length, seed=self._prompts(sequences)
                    )
                    step += each
                    _extend(found[share], rows(updates) if turn else {})
                    steps += ordinary
        out: dict[str, Any] = {
            "model": model.name, "parameters": model.parameters, "sequences": sequences, "step_s": spread(steps),
            "state_bytes": model.layout.nbytes,
        }  # fmt: skip
        for share, columns in found.items():
            out[share] = {name: spread(values) for name, values in columns.items()}
            out[share]["apply_gbps"] = spread([n / s / 1e9 for n, s in zip(columns["bytes"], columns["apply_s"], strict=True)])
        median = out["all"]["pause_s"]["median"]
        self.say(f"{model.name}: an update of everything pauses for {median * 1e3:.1f} ms")
        return out

    # --- throughput --------------------------------------------------------------------------------------------------

    async def _throughput(self, model: Model) -> dict[str, Any]:
        b, new = self.bench, self.bench.new or (NEW_TOKENS if model.parameters < LARGE else NEW_TOKENS_LARGE)
        made: dict[str, list[float]] = {}
        cpu: dict[str, list[float]] = {}
        async with AsyncExitStack() as stack:
            swarm = await stack.enter_async_context(open_swarm(
                model, self.folder / f"{model.name}-run", engine=b.engine, python=b.python, count=b.count, length=b.length,
                new=new, running=b.running, dtype=b.dtype,
            ))  # fmt: skip
            client = await self._engine(stack, model)
            makers: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
                "process": lambda **ask: generate(client, prompts(ask["seed"], b.count, b.length, model.vocabulary), new),
                "node": lambda **ask: swarm.generate(),
            }
            if b.engine == "vllm":
                for name, kind, processes in VLLM_PROGRAMS:
                    program = await self._vllm(stack, name, model, kind, processes)
                    makers[name] = partial(program.ask, logprobs=True)
                    if kind == "offline":
                        makers[f"{name}_plain"] = partial(program.ask, logprobs=False)
            names = list(makers)
            for turn in range(b.rounds + 1):
                # Prompts of the node's turn are those of its numbers; the others get the same.
                ask = {"seed": turn * b.count, "count": b.count, "length": b.length, "new": new, "vocabulary": model.vocabulary}
                rates: dict[str, float] = {}
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    answer = await makers[name](**ask)
                    if answer["tokens"] != b.count * new:
                        raise ShoalError(f"{name} made {answer['tokens']} tokens of {b.count * new}")
                    rates[name] = answer["tokens"] / answer["seconds"]
                    used = answer.get("cpu_s", {})  # the node's alone
                    _extend(cpu, {of: [seconds / answer["seconds"]] for of, seconds in used.items()} if turn else {})
                _extend(made, {name: [rate] for name, rate in rates.items()} if turn else {})
                self.say(f"{model.name}: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))
        return {
            "model": model.name, "parameters": model.parameters, "prompts": b.count, "length": b.length, "new": new,
            "running": b.running, "tokens_per_s": {name: spread(values) for name, values in made.items()},
            "cpu": {name: spread(values) for name, values in cpu.items()}, "node_share": node_share(made),
        }  # fmt: skip


def node_share(made: dict[str, list[float]]) -> Spread | None:
    """The node's part, turn by turn, of what vLLM makes with log probabilities in the better of its layouts."""
    theirs = [made[name] for name in ("offline", "spread") if name in made]
    if not theirs:
        return None
    best = max(theirs, key=statistics.median)
    return spread([ours / vllm for ours, vllm in zip(made["node"], best, strict=True)])


def _extend(into: dict[str, list[float]], more: dict[str, list[float]]) -> None:
    for name, values in more.items():
        into.setdefault(name, []).extend(values)


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    """Which of the targets hold, where vLLM's own was measured beside. Medians; the node's share turn by turn."""
    out: dict[str, bool] = {}
    if (pause := result.get("pause")) and pause["vllm"]:
        ours = pause["ours"]
        bound = PAUSE_FACTOR * pause["vllm"]["call_s"]["median"] + ours["apply_s"]["median"]
        out["pause"] = ours["pause_s"]["median"] <= bound
        out["apply"] = pause["apply_gbps"]["median"] >= APPLY_GBPS
    for row in result.get("throughput", []):
        if row["node_share"]:
            out[f"throughput {row['model']}"] = row["node_share"]["median"] >= SHARE
    return out
