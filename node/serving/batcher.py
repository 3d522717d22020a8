"""Tokens on their way to the head: gathered, so that a node costs it a few messages a second and not one a token.

Pure: time is passed in. Must not know the link, the engine or what a request asks for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from p2p.protocol.generation import Tokens
from p2p.protocol.rollout import TokenEvent

FLUSH_S = 0.25
"""The longest that a token waits for company."""

FLUSH_TOKENS = 16
"""Tokens of one sequence that may wait. A node that is killed costs what waits here (and in the pipe from its engine): of the 32
tokens of a sequence that may be lost with any process, half are left to the head's journal."""

TOKENS_PER_MESSAGE = 20_000
"""Tokens in one message: about 160 KiB, far below a frame."""


@dataclass(slots=True)
class _Run:
    """Events of one sequence that follow each other under one version."""

    events: list[TokenEvent]
    stop: int
    """completion position after the last token"""
    waiting: int
    """tokens of the sequence that wait, in earlier runs and in this one"""

    def goes_on_with(self, event: TokenEvent) -> bool:
        last = self.events[-1]
        return last.version == event.version and not last.finish and self.stop == event.start

    def joined(self) -> TokenEvent:
        """All of them as one."""
        first, last = self.events[0], self.events[-1]
        # Float32 rounding can leave a sure token's log probability a hair above 0, which is no log probability.
        logprobs = np.minimum(np.frombuffer(b"".join([e.packed_logprobs for e in self.events]), "<f4"), 0.0, dtype="<f4")
        ids = b"".join([e.packed_ids for e in self.events])
        return TokenEvent(first.request_id, first.start, ids, logprobs.tobytes(), first.version, last.finish, last.message)


class TokenBatcher:
    """What was made and not sent, of all sequences of a node.

    `due` is when it must go: at most `flush_s` after its oldest token was added; at once when a sequence ended or has
    `flush_tokens` waiting; never while there is nothing.
    """

    def __init__(self, flush_s: float = FLUSH_S, flush_tokens: int = FLUSH_TOKENS) -> None:
        self._flush_s, self._flush_tokens = flush_s, flush_tokens
        self._runs: list[_Run] = []
        self._last: dict[str, _Run] = {}
        """request id -> its newest run"""
        self.due = math.inf

    def add(self, event: TokenEvent, now: float) -> None:
        """Take one event, of whatever sequence. Those of one sequence come in order."""
        if not self._runs:
            self.due = now + self._flush_s
        run = self._last.get(event.request_id)
        if run is not None and run.goes_on_with(event):
            run.events.append(event)
        else:
            run = self._last[event.request_id] = _Run([event], event.start, run.waiting if run is not None else 0)
            self._runs.append(run)
        run.stop += event.count
        run.waiting += event.count
        if event.finish or run.waiting >= self._flush_tokens:
            self.due = min(self.due, now)

    def take(self) -> list[Tokens]:
        """Everything, to be sent in this order; nothing is left."""
        out: list[Tokens] = []
        runs: list[TokenEvent] = []
        size = 0
        for run in self._runs:
            runs.append(run.joined())
            size += runs[-1].count
            if size >= TOKENS_PER_MESSAGE:
                out.append(Tokens(tuple(runs)))
                runs, size = [], 0
        if runs:
            out.append(Tokens(tuple(runs)))
        self._empty()
        return out

    def drop(self, request_ids: Collection[str]) -> None:
        """Nobody wants what these made any more."""
        self._runs = [run for run in self._runs if run.events[0].request_id not in request_ids]
        for request_id in request_ids:
            self._last.pop(request_id, None)
        if not self._runs:
            self._empty()

    def _empty(self) -> None:
        self._runs, self._last, self.due = [], {}, math.inf
