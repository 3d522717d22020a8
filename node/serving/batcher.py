"""Tokens on their way to the head: gathered, so that a node costs it a few messages a second and not one a token.

Pure: time is passed in. Must not know the link, the engine or what a request asks for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import chain

import numpy as np
from msgspec.structs import replace

from p2p.protocol.generation import Tokens
from p2p.protocol.rollout import TokenEvent
from p2p.protocol.wire import MANY

FLUSH_S = 0.25
"""The longest that a token waits for company."""

FLUSH_TOKENS = 16
"""Tokens of one sequence that may wait. A node that is killed costs what waits here (and in the pipe from its engine): of the 32
tokens of a sequence that may be lost with any process, half are left to the head's journal."""

TOKENS_PER_MESSAGE = 20_000
"""Tokens in one message: about 160 KiB, far below a frame."""


class TokenBatcher:
    """What was made and not sent, of all sequences of a node.

    `due` is when it must go: at most FLUSH_S after its oldest token was added; at once when a sequence ended or has
    `flush_tokens` waiting; never while there is nothing.
    """

    def __init__(self, flush_tokens: int = FLUSH_TOKENS) -> None:
        self._flush_tokens = flush_tokens
        self._runs: dict[str, list[TokenEvent]] = {}
        """request id -> what waits, joined where it follows on under one version"""
        self.due = math.inf

    def add(self, event: TokenEvent, now: float) -> None:
        """Take one event, of whatever sequence. Those of one sequence come in order."""
        if not self._runs:
            self.due = now + FLUSH_S
        runs = self._runs.setdefault(event.request_id, [])
        if runs and runs[-1].goes_on_with(event):
            runs[-1] = runs[-1].joined(event)
        else:
            runs.append(event)
        if event.finish or sum(run.count for run in runs) >= self._flush_tokens:
            self.due = min(self.due, now)

    def take(self) -> list[Tokens]:
        """Everything, each sequence in its order; nothing is left."""
        out: list[Tokens] = []
        message: list[TokenEvent] = []
        size = 0
        for run in chain.from_iterable(self._runs.values()):
            # Float32 rounding can leave a sure token's log probability a hair above 0, which is no log probability.
            message.append(replace(run, packed_logprobs=np.minimum(run.logprobs, 0.0, dtype="<f4").tobytes()))
            size += run.count
            if size >= TOKENS_PER_MESSAGE or len(message) >= MANY:
                out.append(Tokens(tuple(message)))
                message, size = [], 0
        if message:
            out.append(Tokens(tuple(message)))
        self.drop(tuple(self._runs))
        return out

    def drop(self, request_ids: Collection[str]) -> None:
        """Nobody wants what these made any more."""
        for request_id in request_ids:
            self._runs.pop(request_id, None)
        if not self._runs:
            self.due = math.inf
