"""A real node at work for a real head, in `shoal bench engine`: libp2p links on loopback, the journal on disk, `shoal node` as a
process. What is not real: the trainer (nothing is trained), the tokenizer, and a task whose prompts are random tokens."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import trio

from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.outcomes import Sampling
from netem.bench.engine.models import Model
from netem.bench.real_head import RealHead, open_real_head, until
from netem.processes.children import Children, LoggedProcess
from p2p.errors import ShoalError
from p2p.files import write_whole
from p2p.protocol.descriptor import pack_descriptor
from p2p.protocol.generation import Assign, Tokens
from p2p.weights.state import FlatState

RUN = "bench-engine"
"""Name of the run that the node joins."""

WAIT_S = 300.0
"""Seconds of the longest wait, for the node to serve or for a round's tokens: so long that only a hang reaches it."""

STEPS = 1000
"""More measurements than anybody makes; each is a step's groups."""


class BenchHead:
    """The head, and how long what it hands out takes."""

    def __init__(self, real: RealHead, process: LoggedProcess, count: int) -> None:
        self._head, self._rollouts, self._process, self._count = real.head, real.rollouts, process, count
        self._rounds = self._accepted = 0
        self._first = self._last = 0.0
        take, send = real.rollouts.on_tokens, real.rollouts._send

        def on_tokens(peer: str, message: Tokens) -> int:
            accepted = take(peer, message)
            self._accepted += accepted
            self._last = time.perf_counter()
            return accepted

        def first_send(peer: str, message: object) -> None:
            if isinstance(message, Assign) and not self._first:
                self._first = time.perf_counter()
            send(peer, message)

        real.rollouts.on_tokens = on_tokens  # type: ignore[method-assign]
        real.rollouts._send = first_send

    async def generate(self) -> dict[str, Any]:
        """The next `count` prompts, from the first assignment to the last token that the head accepted."""
        self._rounds += 1
        self._accepted, self._first = 0, 0.0
        before = self._cpu_s()
        want = self._rounds * self._count
        self._rollouts.buffers.stop_at(self._rounds)
        self._rollouts.need_dispatch()
        await until(lambda: len(self._rollouts.buffers.finished) >= want, "every completion", self.check, WAIT_S)
        if self._head.reports:
            raise ShoalError(f"the head refused tokens of the bench's node: {self._head.reports[0]}")
        cpu_s = {name: after - before[name] for name, after in self._cpu_s().items()}
        return {"seconds": self._last - self._first, "tokens": self._accepted, "cpu_s": cpu_s}

    def _cpu_s(self) -> dict[str, float]:
        """Processor seconds so far of the head (this process), the agent and its engine."""
        agent = psutil.Process(self._process.pid)
        engine = agent.children(recursive=True)
        return {name: sum(t.user + t.system for t in (p.cpu_times() for p in of)) for name, of in (
            ("head", [psutil.Process()]), ("agent", [agent]), ("engine", engine),
        )}  # fmt: skip

    def check(self) -> None:
        """ShoalError when the node has ended."""
        if self._process.poll() is not None:
            said = self._process.last_line()
            raise ShoalError(f"the bench's node ended with status {self._process.returncode}: {said}")


@asynccontextmanager
async def open_swarm(
    model: Model, folder: Path, *, engine: str, python: str, count: int, length: int, new: int, running: int, dtype: str
) -> AsyncIterator[BenchHead]:
    """A head and a node that serves the model; nothing is assigned yet."""
    folder.mkdir()  # noqa: ASYNC240
    settings = RolloutSettings(
        max_staleness=STEPS, groups_per_step=count, samples=1, seed=0, sampling=Sampling(new, ()), micro_batch_groups=count
    )
    async with open_real_head(folder, RUN, settings, length=length, vocabulary=model.vocabulary) as real:
        real.rollouts.buffers.stop_at(0)
        await real.start()
        real.head.publisher.offer_descriptor(pack_descriptor(model.folder))
        await real.publish(0, FlatState.open(model.states[0], model.layout), None)
        ticket = folder / "ticket.txt"  # not on a command line, which every user of the machine sees
        write_whole(ticket, real.ticket, private=True)
        arguments = {
            "--join": str(ticket), "--dir": str(folder / "node"), "--engine": engine, "--engine-python": python,
            "--capacity": str(running), "--dtype": dtype,
        }  # fmt: skip
        node = Children(folder).start("node", "node", "--no-listen", *chain.from_iterable(arguments.items()))
        try:
            swarm = BenchHead(real, node, count)
            await until(lambda: any(view.live for view in real.head.node_views()), "the node to serve", swarm.check, WAIT_S)
            yield swarm
        finally:
            node.send(signal.SIGTERM)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(node.wait)
