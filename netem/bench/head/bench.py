"""`shoal bench head`: does the head keep up with a thousand nodes that stream tokens, on one core?

The real head (rollouts, collector, ledger, dispatcher, journal on disk) over real libp2p links on loopback, against nodes that
a second process simulates (`simulated_nodes`). What is not real: the nodes' engines, the trainer (a task here that takes batches,
commits and publishes a small delta) and the tokenizer. Where the machine has two cores, the head's process is held to one.

The honest number is CPU seconds of the head's process for a second's worth of tokens (what `nodes` x `rate` make in a second):
below 1.0 one core keeps up, whatever else the machine is doing meanwhile.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import trio

from learner.rollouts.controller import Rollouts
from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.outcomes import Sampling
from netem.bench.head.board import VOCABULARY, Board, HeadBench
from netem.bench.head.meter import Look, Meter, spread
from netem.bench.head.simulated_nodes import STOP
from netem.bench.head.twins import Trainer
from netem.bench.real_head import RealHead, open_real_head, until
from p2p.errors import ShoalError, UsageError
from p2p.files import write_whole
from p2p.processes import python_command, start
from p2p.termination import run_terminable

RUN = "bench-head"
"""Name of the run that the nodes join."""

SIMULATED_NODES = "netem.bench.head.simulated_nodes"
"""The module of the other process, which is all nodes."""

SAMPLES, GROUPS = 16, 128
"""A group and a step: the batch of the published systems that the rollout bench compares with."""

PROMPT = 64
"""Tokens of a prompt."""

WARM_S = 90.0
"""Seconds of the longest wait for the first step's groups."""

JOIN_S = 180.0
"""Seconds of the longest wait for all nodes to join, and then for all to be at work: so long that only a hang reaches it."""


def bench_head(bench: HeadBench, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench head --json` prints. UsageError where numbers make no sense; ShoalError when nodes do not get there."""
    b = bench
    if b.nodes < 1 or b.sequences < 1 or not (b.rate > 0 and b.seconds > 0 and b.length >= 2 and b.flush_s >= 0):
        raise UsageError("nodes, sequences, rate, seconds: above 0; length: at least 2")
    with tempfile.TemporaryDirectory(prefix="shoal-head-", dir=folder) as name, _one_core():
        return run_terminable(_run, b, Path(name), say)


@contextmanager
def _one_core() -> Iterator[None]:
    """This process on its first core (the nodes' gets the others, see `_nodes`); as it was afterwards."""
    cores, thresholds = os.sched_getaffinity(0), gc.get_threshold()
    if len(cores) > 1:
        os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        gc.unfreeze()
        gc.set_threshold(*thresholds)


async def _run(bench: HeadBench, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    origin, board = time.monotonic(), Board(folder / "board", create=True)
    # So stale that the ledger never holds nodes back: of a group of 16 about half runs in the mean over its life.
    staleness = max(2, math.ceil(3 * bench.nodes * bench.sequences / SAMPLES / GROUPS))
    settings = RolloutSettings(
        max_staleness=staleness, groups_per_step=GROUPS, samples=SAMPLES, seed=0,
        sampling=Sampling(int(16 * bench.length), (STOP,)), micro_batch_groups=4,
    )  # fmt: skip
    async with open_real_head(folder, RUN, settings, length=PROMPT, vocabulary=VOCABULARY) as real:
        head, meter, trainer = real.head, Meter(origin), Trainer(real, board)
        meter.watch(real.rollouts)
        await real.start()
        await trainer.publish(0)
        ticket = folder / "ticket.txt"  # not on a command line, which every user of the machine sees
        write_whole(ticket, real.ticket, private=True)
        arguments = json.dumps(dataclasses.asdict(bench)), str(ticket), str(folder / "board"), str(origin)
        with _nodes(*arguments) as process:
            check = partial(_check, process)
            await until(lambda: board["joined"] == bench.nodes, "every node to join", check, JOIN_S)
            joined_s = time.monotonic() - origin
            say(f"{bench.nodes} nodes joined in {joined_s:.1f} s")
            real.nursery.start_soon(trainer.run)
            at_work = 0.9 * bench.nodes * bench.sequences
            await until(lambda: board["busy"] >= at_work, "every node to be at work", check, JOIN_S)
            result = await _measure(bench, real, board, meter=meter, process=process, say=say)
        tally = head.journal.counts().trajectories
        result |= {"joined_s": joined_s, "steps": head.trainer_requests.step}
        result |= {"lost": tally.lost, "refusals": len(head.reports)}
        result["ok"] = result["cpu_per_s"] < 1 and not tally.lost and not head.reports
    return result


@contextmanager
def _nodes(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The other process, on the cores that the head has not."""
    process = start(python_command(SIMULATED_NODES, *arguments))
    others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
    if others:
        try:
            os.sched_setaffinity(process.pid, others)
        except OSError:
            pass  # cores that we are not given: it stays where we are
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _check(process: subprocess.Popen[bytes]) -> None:
    """ShoalError when the process of the nodes has ended."""
    if process.poll() is not None:
        raise ShoalError(f"the process of the nodes ended with status {process.returncode}")


async def _measure(
    bench: HeadBench, real: RealHead, board: Board, *, meter: Meter, process: subprocess.Popen[bytes], say: Callable[[str], None]
) -> dict[str, Any]:
    head = real.head
    with trio.move_on_after(WARM_S) as scope:
        while head.trainer_requests.step < 1:
            _check(process)
            await trio.sleep(0.5)
    if scope.cancelled_caught:
        say("the first step's groups were not there in time: measuring before they are")
    await trio.sleep(bench.settle)
    gc.collect()
    me = psutil.Process()
    start, ended_before = Look.now(board, meter, me), head.journal.counts().groups
    meter.on = True
    looks = [start]
    while time.monotonic() < start.at + bench.seconds:
        await trio.sleep(min(1.0, max(0.0, start.at + bench.seconds - time.monotonic())))
        _check(process)
        looks.append(Look.now(board, meter, me))
    end = looks[-1]
    meter.on = False
    gc.collect()
    blocks = sys.getallocatedblocks()
    board["phase"] = Board.STOP
    total, counts = end.since(start), head.journal.counts().groups
    keys = ("nodes", "rate", "sequences", "length", "flush_s")
    return {key: getattr(bench, key) for key in keys} | {
        "seconds": end.at - start.at, "cores": len(os.sched_getaffinity(0)),
        "tokens_per_s": total["made"], "accepted_per_s": total["accepted"], "messages_per_s": total["messages"],
        "runs_per_s": total["runs"], "cpu_per_s": total["cpu"] * bench.nodes * bench.rate / max(1.0, total["accepted"]),
        "cpu_used_per_s": total["cpu"], "nodes_cpu_per_s": total["nodes_cpu"],
        "backlog_start": start.backlog, "backlog_end": end.backlog,
        "backlog_max": max(look.backlog for look in looks), "nodes_late_s": max(look.late for look in looks[1:]),
        "writes_per_s": total["writes"], "pieces_per_s": total["journaled"],
        "accept_s": spread(meter.ages), "journal_s": spread(meter.journal_ages),
        "rss_start": start.rss, "rss_end": end.rss, "blocks_start": start.blocks, "blocks_end": blocks,
        "tokens_held": _held(real.rollouts), "groups_finished": counts.finished + counts.consumed - ended_before.finished
        - ended_before.consumed,
    }  # fmt: skip


def _held(rollouts: Rollouts) -> int:
    """Tokens that the head holds, of unfinished sequences and of finished groups that no step took."""
    unfinished = sum(sum(held.values()) for held in rollouts.collector.progress().values())
    return unfinished + sum(len(t.completion_ids) for g in rollouts.buffers.finished.values() for t in g.trajectories)


def _times(spread: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in spread.items())


def describe(result: dict[str, Any]) -> str:
    """A few lines for people."""
    r, verdict = result, "keeps up" if result["cpu_per_s"] < 1 else "does not keep up"
    return "\n".join([
        f"{r['nodes']} nodes x {r['sequences']} sequences made {r['tokens_per_s']:,.0f} tokens/s for {r['seconds']:.0f} s, "
        f"{r['accepted_per_s']:,.0f} accepted, in {r['messages_per_s']:,.0f} messages and {r['runs_per_s']:,.0f} runs a second",
        f"head: {r['cpu_per_s']:.2f} CPU s for a second's tokens ({verdict}); "
        f"nodes' process {r['nodes_cpu_per_s']:.2f}, at most {r['nodes_late_s'] * 1e3:.0f} ms late",
        f"backlog (sent, not accepted): {r['backlog_start']:,} -> {r['backlog_end']:,}, at most {r['backlog_max']:,}",
        f"from making to acceptance: {_times(r['accept_s'])}",
        f"to the journal: {_times(r['journal_s'])}; {r['writes_per_s']:.0f} transactions, {r['pieces_per_s']:,.0f} pieces a s",
        f"RSS {r['rss_start'] / 2**20:.0f} -> {r['rss_end'] / 2**20:.0f} MiB, {r['blocks_start']:,} -> {r['blocks_end']:,} "
        f"Python blocks, {r['tokens_held']:,} tokens held",
        f"{r['groups_finished']} groups finished, {r['steps']} steps, {r['lost']} lost, {r['refusals']} refusals",
    ])  # fmt: skip
