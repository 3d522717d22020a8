"""What `shoal bench head` counts at the head while tokens come. Must not know how nodes or trainer are simulated."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from learner.journal.records import Piece
from learner.rollouts.controller import Rollouts
from netem.bench.head.board import Board, age_s
from netem.bench.head.simulated_nodes import STOP
from p2p.protocol.generation import Tokens

SAMPLE_EVERY = 8
"""Of so many Tokens messages one is asked for the age of its tokens."""


@dataclass
class Meter:
    """What is counted at the head while tokens come."""

    origin: float
    accepted: int = 0
    runs: int = 0
    messages: int = 0
    ages: list[np.ndarray] = field(default_factory=list)
    """seconds from making to acceptance, of a sample of tokens"""
    journal_ages: list[np.ndarray] = field(default_factory=list)
    """and to the end of the journal's transaction"""
    writes: int = 0
    journaled: int = 0
    on: bool = False

    def watch(self, rollouts: Rollouts) -> None:
        """Count all that `rollouts` accepts and journals from now on. To be called before the head runs."""
        take = rollouts.on_tokens

        def on_tokens(peer: str, message: Tokens) -> int:
            accepted = take(peer, message)
            self.accepted += accepted
            self.messages += 1
            self.runs += len(message.runs)
            if self.on and self.messages % SAMPLE_EVERY == 0:
                ids = np.frombuffer(b"".join(run.packed_ids for run in message.runs), "<u4")
                self.ages.append(age_s(ids[ids != STOP], time.monotonic(), self.origin))
            return accepted

        rollouts.on_tokens = on_tokens  # type: ignore[method-assign]
        record = rollouts.journal.record_tokens

        def record_tokens(pieces: Iterable[Piece]) -> None:
            batch = list(pieces)
            record(batch)
            self.writes += bool(batch)
            self.journaled += len(batch)
            if self.on:
                ids = np.frombuffer(b"".join(piece.ids for piece in batch[::SAMPLE_EVERY]), "<u4")
                self.journal_ages.append(age_s(ids[ids != STOP], time.monotonic(), self.origin))

        rollouts.journal.record_tokens = record_tokens  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Look:
    """Everything that is counted, at one moment."""

    at: float
    """monotonic time"""
    totals: dict[str, Any]
    """CPU seconds of both processes, and counts since the beginning"""
    rss: int
    blocks: int
    """of Python's allocator"""
    late: float

    @classmethod
    def now(cls, board: Board, meter: Meter, me: psutil.Process) -> Look:
        """Of this moment. `me`: this process, the head's."""
        use = resource.getrusage(resource.RUSAGE_SELF)
        totals = {
            "cpu": use.ru_utime + use.ru_stime, "nodes_cpu": board["cpu_us"] / 1e6, "made": board["made"], "sent": board["sent"],
            **{name: getattr(meter, name) for name in ("accepted", "messages", "runs", "writes", "journaled")},
        }  # fmt: skip
        rss, late = me.memory_info().rss, board["late_us"] / 1e6
        return cls(time.monotonic(), totals, rss=rss, blocks=sys.getallocatedblocks(), late=late)

    @property
    def backlog(self) -> int:
        """Tokens that were sent and not accepted."""
        return int(self.totals["sent"] - self.totals["accepted"])

    def since(self, before: Look) -> dict[str, float]:
        """Rates a second."""
        seconds = self.at - before.at
        return {name: (total - before.totals[name]) / seconds for name, total in self.totals.items()}


def spread(ages: list[np.ndarray]) -> dict[str, float]:
    """Median, 99th percentile and most, seconds."""
    all_ages = np.concatenate(ages) if ages and sum(map(len, ages)) else np.zeros(1)
    return {"p50": float(np.percentile(all_ages, 50)), "p99": float(np.percentile(all_ages, 99)), "max": float(all_ages.max())}
