"""`shoal bench endpoint`: a thousand clients at once before a run that trains, of whom many leave early.

A real learner and real nodes over loopback. Training alone and training beside the clients take turns, so that a neighbour on the
machine falls on both. What the clients may take is `requests.serving_share` of the nodes' places; the rest must stay training's.
Afterwards nothing of them may be left: no connection, no sequence in the learner's books or at a node, no open file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import psutil
import trio

from netem.bench.beside.clients import Crowd, CrowdTally, ask_all, percentile
from netem.bench.beside.served_run import ServedRun
from netem.processes.children import wait_for
from p2p.errors import UsageError
from p2p.termination import run_terminable

LOOK_S = 0.5
"""Seconds between two looks at the status page."""

SETTLE_S = 60.0
"""Seconds until everything of the clients must be gone: an abort takes a round trip, a closed socket less."""

QUIET_S = 3.0
"""Seconds in which no node may make a token for a client that is gone; it gathers tokens for a quarter of one."""

WARM_STEPS = 2
"""Steps before anything is measured: nodes have work then, and the first broadcast is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointBench:
    """`seconds` are those of training alone before and after each round of clients."""

    clients: int = 1000
    leave: float = 0.3
    nodes: int = 2
    capacity: int = 16
    share: float = 0.25
    tokens: int = 16
    seconds: float = 30.0
    rounds: int = 2

    def __post_init__(self) -> None:
        if min(self.clients, self.nodes, self.capacity, self.tokens, self.rounds) < 1 or not self.seconds > 0:
            raise UsageError("clients, nodes, capacity, tokens, seconds, rounds: above 0")
        if not (0 <= self.leave < 1 and 0 < self.share <= 0.5):
            raise UsageError("leave: from 0 to below 1; share: above 0, at most 0.5")


class RunLook(NamedTuple):
    """The run at a moment."""

    at: float
    training: int
    """tokens accepted for training"""
    serving: int
    step: int
    waiting: int
    """clients' sequences that wait for a node"""
    running: int
    """clients' sequences that nodes hold"""


def take_look(run: ServedRun) -> RunLook:
    """What the status page says now."""
    status = run.wait("a status", run.status)
    requests = status["requests"]
    beside = sum(requests["tokens"].values())
    return RunLook(
        at=time.monotonic(), training=sum(n["tokens"] for n in status["nodes"]) - beside, serving=requests["tokens"]["serving"],
        step=status["step"], waiting=requests["waiting"]["serving"], running=requests["running"]["serving"],
    )  # fmt: skip


class Resources(NamedTuple):
    """What the learner's process holds."""

    rss_bytes: int
    files: int


def held_by(run: ServedRun) -> Resources:
    process = psutil.Process(run.learner.pid)
    return Resources(process.memory_info().rss, process.num_fds())


def bench_endpoint(bench: EndpointBench, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench endpoint --json` prints. ShoalError when the run does not get going or ends."""
    settings: dict[str, Any] = {"requests": {"serving_share": bench.share, "evaluation_share": 0.0}}
    with (
        tempfile.TemporaryDirectory(prefix="shoal-endpoint-", dir=folder) as name,
        ServedRun(Path(name), settings, bench.capacity) as run,
    ):
        run.start(bench.nodes)
        run.wait("training to be under way", lambda: take_look(run).step >= WARM_STEPS)
        alone, rounds = [_alone(run, bench.seconds)], []
        for number in range(bench.rounds):
            rounds.append(_round(run, bench, number))
            say(describe_round(rounds[-1]))
            alone.append(_alone(run, bench.seconds))
        say(f"training alone: {', '.join(f'{rate:.0f}' for rate in alone)} tokens/s")
    kept = min(r["training_part"] for r in rounds)
    return {
        "ok": kept >= 1 - bench.share and not any(r["leaks"] or r["broken"] for r in rounds),
        "alone_tokens_per_s": alone, "rounds": rounds, "least_training_part": kept, "configured_part": 1 - bench.share,
        "kept_of_alone": fmean(r["training_tokens_per_s"] for r in rounds) / fmean(alone),
    }  # fmt: skip


def _alone(run: ServedRun, seconds: float) -> float:
    """Tokens per second of training while nobody asks."""
    before = take_look(run)
    time.sleep(seconds)
    after = take_look(run)
    return (after.training - before.training) / (after.at - before.at)


def _round(run: ServedRun, bench: EndpointBench, number: int) -> dict[str, Any]:
    """One crowd, and what is left of it."""
    before = held_by(run)
    looks = [take_look(run)]
    crowd = Crowd(
        url=run.url, key=run.key, clients=bench.clients, leave=bench.leave, tokens=bench.tokens, seed=number
    )  # fmt: skip
    most = [before.rss_bytes]
    tally = run_terminable(_watched, run, crowd, looks, most)
    # While some wait for a place, the class has all that it may have.
    full = [look for look in looks if look.waiting] or looks
    first, last = full[0], full[-1]
    seconds = last.at - first.at
    training, serving = last.training - first.training, last.serving - first.serving
    leaks = settle(run, before)
    after = held_by(run)
    return {
        "whole": len(tally.whole_s), "left": tally.left, "busy_429": tally.busy, "broken": tally.broken[:10],
        "first_token_s": {p: percentile(tally.first_s, q) for p, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "whole_answer_s": {p: percentile(tally.whole_s, q) for p, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
        "seconds": looks[-1].at - looks[0].at, "steps": looks[-1].step - looks[0].step,
        "training_tokens_per_s": training / seconds, "serving_tokens_per_s": serving / seconds,
        "training_part": training / (training + serving), "most_running": max(look.running for look in looks),
        "most_waiting": max(look.waiting for look in looks), "leaks": leaks,
        "files": [before.files, after.files], "rss_bytes": [before.rss_bytes, max(most), after.rss_bytes],
    }  # fmt: skip


async def _watched(run: ServedRun, crowd: Crowd, looks: list[RunLook], most: list[int]) -> CrowdTally:
    async def watch() -> None:
        while True:
            await trio.sleep(LOOK_S)
            looks.append(await trio.to_thread.run_sync(take_look, run))
            most.append(held_by(run).rss_bytes)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        tally = await ask_all(crowd)
        nursery.cancel_scope.cancel()
    return tally


def settle(run: ServedRun, before: Resources) -> list[str]:
    """What is left of clients that are all gone: nothing, or a sentence each."""
    deadline = time.monotonic() + SETTLE_S
    while (left := _left(run, before)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    count = _tokens_at_nodes(run)
    time.sleep(QUIET_S)
    if (more := _tokens_at_nodes(run) - count) > 0:
        left.append(f"nodes made {more} tokens for clients that are gone")
    return left


def _left(run: ServedRun, before: Resources) -> list[str]:
    status = wait_for("a status", run.status, SETTLE_S, [run.learner])
    requests, door, files = status["requests"], status["endpoint"], held_by(run).files
    held = {
        "connections": door["connections"], "requests in the endpoint": door["now"],
        "sequences that wait": requests["waiting"]["serving"], "sequences at nodes": requests["running"]["serving"],
        "open files more than before": max(0, files - before.files),
    }  # fmt: skip
    return [f"{count} {what}" for what, count in held.items() if count]


def _tokens_at_nodes(run: ServedRun) -> int:
    return sum(count for parts in run.made().values() for _, count in parts)


def describe_round(r: dict[str, Any]) -> str:
    """One line and a half."""
    first, whole = r["first_token_s"], r["whole_answer_s"]
    rss = " -> ".join(f"{size / 2**20:.0f}" for size in r["rss_bytes"])
    return (
        f"{r['whole']} whole answers, {r['left']} left, {r['busy_429']} answers 429, {len(r['broken'])} broken; "
        f"in {r['seconds']:.0f} s, {r['steps']} steps. Training {r['training_tokens_per_s']:.0f} tokens/s, serving "
        f"{r['serving_tokens_per_s']:.0f}: training has {r['training_part']:.1%}. First token p50 {first['p50']:.1f} s, "
        f"p99 {first['p99']:.1f} s; whole p50 {whole['p50']:.1f} s, p99 {whole['p99']:.1f} s. Learner's memory {rss} MiB, "
        f"open files {r['files'][0]} -> {r['files'][1]}; left over: {', '.join(r['leaks']) or 'nothing'}"
    )


def describe(result: dict[str, Any]) -> str:
    """What `shoal bench endpoint` prints."""
    kept = f"{result['kept_of_alone']:.0%} of what it makes alone"
    return (
        f"training kept {result['least_training_part']:.1%} of the tokens at the least while clients waited (configured "
        f"{result['configured_part']:.0%}), {kept}: {'ok' if result['ok'] else 'NOT OK'}"
    )

