"""One engine on simulated time. Pure: told the time, says when the next thing happens.

All sequences that run make one token a step, so one clock, in tokens, serves them all: a sequence that joins at clock c with r
tokens to make ends at c + r. Between two events n is fixed and the context grows by n a step, so the time for any number of
steps is a quadratic, and no step is simulated by itself.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from learner.dispatch.throughput import Throughput

FILL = 0.95
"""Share of the KV memory up to which sequences are let in. What runs may grow beyond it, until the memory is full."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One member of a group, wherever it is."""

    group: int
    member: int
    """its number in the group"""
    prompt: int
    """tokens of its prompt"""
    length: int
    """tokens that it will make; only the engine knows"""
    made: float = 0.0
    """tokens made when it last joined or left an engine; what its engine made since then comes on top"""
    oldest: int = -1
    """version of its first token"""
    node: str = ""
    """the engine that has it; "" while it waits for one"""
    attempt: int = 0
    """times that it was taken from a node or lost with one"""
    joined: float = 0.0
    """the engine's clock when it began to run there"""
    runs: bool = False
    """it is being decoded; otherwise it waits for memory or a place"""
    cached: bool = False
    """its prompt was read for another member of the group, so only its own tokens are prefilled"""

    key: tuple[int, int] = (0, 0)
    """(group, member)"""

    def __post_init__(self) -> None:
        self.key = self.group, self.member


@dataclass
class SimEngine:
    """Told the time (`advance`), it says when its next event is (`next_at`) and what that is (`settle`)."""

    name: str
    model: Throughput
    prefill_s: float
    """seconds of prefill a token"""
    room: int
    """tokens of KV that fit"""
    limit: int
    """most sequences at once"""
    at: float = 0.0
    """time up to which everything below is right"""
    clock: float = 0.0
    """tokens that a sequence which always ran would have made"""
    context: float = 0.0
    """tokens of KV that what runs holds"""
    debt: float = 0.0
    """seconds of prefill before the next step"""
    running: list[Sequence] = field(default_factory=list)
    """in order of joining"""
    waiting: deque[Sequence] = field(default_factory=deque)
    total: float = 0.0
    """tokens made in all"""
    ended: int = 0
    """sequences that ended in all"""
    stamp: int = 0
    """number of the one event of this engine that counts; the owner's"""
    preempted: int = 0
    """times that a running sequence was put back for want of memory"""
    _ends: list[tuple[float, int, Sequence]] = field(default_factory=list)
    """heap of (clock at the end, order of joining, sequence); entries of sequences that left are dropped late"""
    _count: int = 0
    _prompts: dict[int, int] = field(default_factory=dict)
    """group -> members here, whose prompt is read once"""

    def advance(self, now: float) -> None:
        """Let the time pass until `now`, up to which nothing ends."""
        left = now - self.at
        self.at = now
        paid = min(self.debt, left)
        self.debt -= paid
        left -= paid
        n = len(self.running)
        if n and left > 0:
            a, b = self.model.k1 * n / 2, self.model.step_s(n, self.context)
            steps = 2 * left / (b + math.sqrt(b * b + 4 * a * left))
            self.clock += steps
            self.context += n * steps
            self.total += n * steps

    def next_at(self) -> float:
        """When something ends or the KV memory is full; inf when nothing will."""
        n = len(self.running)
        if not n:
            return math.inf
        self._drop_stale()
        steps = max(0.0, self._ends[0][0] - self.clock)
        if n > 1:
            steps = min(steps, max(0.0, (self.room - self.context) / n))
        return self.at + self.debt + steps * (self.model.step_s(n, self.context) + self.model.k1 * n * steps / 2)

    def settle(self) -> list[Sequence]:
        """After `advance` to `next_at`: what has ended. Makes room where the memory is full, lets in what waits."""
        ended = []
        self._drop_stale()
        while self._ends and self._ends[0][0] <= self.clock + 1e-6:
            _, _, sequence = heapq.heappop(self._ends)
            self._leave(sequence)
            sequence.made = float(sequence.length)
            self.ended += 1
            ended.append(sequence)
            self._drop_stale()
        # The newest goes back to the head of the queue, as vLLM does: its KV is read anew later.
        while len(self.running) > 1 and self.context >= self.room - 1e-6:
            newest = self.running[-1]
            self._leave(newest)
            self.waiting.appendleft(newest)
            self.preempted += 1
        self._let_in()
        return ended

    def add(self, sequence: Sequence) -> None:
        """Give it a sequence (`advance` first)."""
        sequence.node, sequence.cached = self.name, self._prompts.get(sequence.group, 0) > 0
        self._prompts[sequence.group] = self._prompts.get(sequence.group, 0) + 1
        self.waiting.append(sequence)
        self._let_in()

    def remove(self, sequence: Sequence) -> None:
        """Take it away with what it has made (`advance` first)."""
        if sequence.runs:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        self._forget(sequence)
        self._let_in()

    def gone(self) -> list[Sequence]:
        """The node is lost: what it held, in order of joining, `made` as it stood."""
        held = [*self.running, *self.waiting]
        for sequence in list(self.running):
            self._leave(sequence)
        self.waiting.clear()
        self._prompts.clear()
        for sequence in held:
            sequence.node = ""
        self.debt = 0.0
        return held

    def made(self, sequence: Sequence) -> float:
        """Tokens that a sequence of this engine has made so far."""
        return sequence.made + (self.clock - sequence.joined if sequence.runs else 0.0)

    # ---- inside

    def _end(self, sequence: Sequence) -> float:
        return sequence.joined + sequence.length - sequence.made

    def _drop_stale(self) -> None:
        """Let the first of the ends be one that holds, if any does."""
        while self._ends:
            end, _, sequence = self._ends[0]
            if sequence.runs and sequence.node == self.name and end == self._end(sequence):
                return
            heapq.heappop(self._ends)

    def _let_in(self) -> None:
        while self.waiting and len(self.running) < self.limit:
            first = self.waiting[0]
            context = first.prompt + first.made
            if self.running and self.context + context > FILL * self.room:
                break
            self.waiting.popleft()
            self.debt += self.prefill_s * (first.made + (0 if first.cached else first.prompt))
            first.cached, first.runs, first.joined = False, True, self.clock
            self.context += context
            self.running.append(first)
            self._count += 1
            heapq.heappush(self._ends, (self._end(first), self._count, first))

    def _leave(self, sequence: Sequence) -> None:
        sequence.made += self.clock - sequence.joined
        sequence.runs = False
        self.context = max(0.0, self.context - sequence.prompt - sequence.made)
        self.running.remove(sequence)
        if sequence.made >= sequence.length - 1e-6:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        left = self._prompts.get(sequence.group, 0) - 1
        if left > 0:
            self._prompts[sequence.group] = left
        else:
            self._prompts.pop(sequence.group, None)
