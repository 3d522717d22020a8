"""The bookkeeping of an engine's sequences, without a tensor of the model: limits, stop tokens, positions, events.

Must not know caches, models or processes. The work for each token is done by numpy over all rows at once; only the events are
made row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from node.engine.requests import completion_limit
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.protocol.wire import MAX_LINE
from p2p.version import Version


@dataclass(eq=False, slots=True)
class EngineRow:
    """One sequence the engine holds: its request and its completion so far (prefix included)."""

    request: Generate
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids.extend(self.request.prefix_ids)

    def tokens(self) -> list[int]:
        return [*self.request.prompt_ids, *self.ids]

    def last_event(self, version: Version, finish: str, message: str = "") -> TokenEvent:
        """An event without tokens that ends this row."""
        return TokenEvent(
            self.request.request_id, len(self.ids), b"", b"", version=version, finish=finish, message=message[:MAX_LINE]
        )


def pinned_elsewhere(held: Mapping[str, EngineRow], version: Version) -> list[str]:
    """The requests that must end once `version` is installed, because they ask for another version exactly."""
    return [name for name, row in held.items() if row.request.exact_version not in (None, version)]


class Advanced(NamedTuple):
    """What one token for every row led to."""

    events: list[TokenEvent]
    going: np.ndarray
    """int64: the indices of the rows that go on"""


class Rows:
    """Running rows, in batch order."""

    def __init__(self, max_context: int) -> None:
        self.rows: list[EngineRow] = []
        self._max_context = max_context
        self._index([])

    def _index(self, rows: list[EngineRow]) -> None:
        self.rows = rows
        self.positions = np.array([len(r.ids) for r in rows], dtype=np.int64)
        """int64 [n]: the completion position each row draws next"""
        self._limits = np.array([completion_limit(r.request, self._max_context) for r in rows], dtype=np.int64)
        width = max((len(r.request.stop_ids) for r in rows), default=0)
        self._stops = np.full((len(rows), width), -1, dtype=np.int64)
        for stops, row in zip(self._stops, rows, strict=True):
            stops[: len(row.request.stop_ids)] = row.request.stop_ids

    def __len__(self) -> int:
        return len(self.rows)

    def extend(self, rows: Sequence[EngineRow]) -> None:
        self._index([*self.rows, *rows])

    def select(self, index: np.ndarray) -> None:
        self._index([self.rows[i] for i in index])

    def advance(self, ids: np.ndarray, logprobs: np.ndarray, version: Version) -> Advanced:
        """Append one drawn token to every row: ids int64 [n], logprobs float32 [n].

        A row whose log probability is not a number ends with "error" and without the token.
        """
        stopped = (self._stops == ids[:, None]).any(axis=1)
        full = self.positions + 1 >= self._limits
        broken = ~np.isfinite(logprobs)
        over = stopped | full | broken
        events = []
        for i, (row, token) in enumerate(zip(self.rows, ids.tolist(), strict=True)):
            start = len(row.ids)
            if over[i]:
                if broken[i]:
                    events.append(row.last_event(version, "error", "the model's logits are not numbers"))
                    continue
                finish = "stop" if stopped[i] else "length"
            else:
                finish = ""
            row.ids.append(token)
            made = logprobs[i : i + 1]
            events.append(TokenEvent.of(row.request.request_id, start, (token,), made, version=version, finish=finish))
        self.positions += 1
        return Advanced(events, np.flatnonzero(~over))
