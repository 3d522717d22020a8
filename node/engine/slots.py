"""What the engine cores have in common: the requests that they hold, and the queue and the running rows of those that batch
themselves. Must not know models, caches or processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from node.engine.port import EngineCore
from node.engine.requests import check_request, check_tokens, finish_before_start
from node.engine.rows import EngineRow, Rows
from p2p.errors import Refusal
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version


class HoldingCore(EngineCore):
    """A core that knows the requests which it holds. A subclass says in `_take` how it lets go of them."""

    def __init__(self, *, vocab: int = 0, max_context: int = 0, version: Version | None = None) -> None:
        self.held: dict[str, EngineRow] = {}
        """request id -> its row, running or waiting"""
        self._ended: list[TokenEvent] = []
        """events that were made outside of a step: the next step returns them"""
        self._last_step: float | None = None
        """when the last step that somebody waits behind returned; None while nobody waits for a token"""
        self._version = version or Version(0, 0)
        self._vocab, self._max_context = vocab, max_context

    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        return bool(self.held or self._ended)

    def interrupt(self, request_ids: Sequence[str] | None = None) -> list[TokenEvent]:
        """See `EngineCore.interrupt`."""
        return [row.last_event(self._version, "interrupt") for row in self._let_go(request_ids)]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `EngineCore.abort`."""
        self._let_go(request_ids)

    def _let_go(self, request_ids: Sequence[str] | None) -> list[EngineRow]:
        gone = self._take(self._known(request_ids))
        if not self.held:
            self._last_step = None  # an engine that rests until the next version does not make anybody wait
        return gone

    def _waiting_since(self, begin: float) -> float:
        """From when a commit that begins now costs somebody time: the last step, or its own beginning where nobody waits."""
        return begin if self._last_step is None or not self.held else min(begin, self._last_step)

    def _known(self, request_ids: Sequence[str] | None) -> list[str]:
        """Those of `request_ids` (None: all) that are held, each once."""
        return list(self.held) if request_ids is None else [n for n in dict.fromkeys(request_ids) if n in self.held]

    def _take(self, names: list[str]) -> list[EngineRow]:
        """Let go of these held requests, running or waiting, and return their rows."""
        raise NotImplementedError

    def _checked(self, request: Generate) -> EngineRow:
        """A row for `request`. Refusal as `EngineCore.add` says."""
        check_request(
            request, serving=self._version, vocab_size=self._vocab, max_context=self._max_context, in_use=self.held
        )
        return EngineRow(request)

    def _check_score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> None:
        """Refusal unless a completion of this prompt fits the context, with token ids of the vocabulary."""
        if not prompt_ids or len(prompt_ids) + len(completion_ids) > self._max_context:
            raise Refusal(f"cannot score {len(prompt_ids)}+{len(completion_ids)} tokens in {self._max_context}")
        check_tokens(prompt_ids, self._vocab, "prompt to score")
        check_tokens(completion_ids, self._vocab, "completion to score")


class SlotCore(HoldingCore):
    """A core that batches its rows itself: a queue of waiting rows in front of the running ones."""

    def __init__(self, *, vocab: int = 0, max_context: int = 0, version: Version | None = None) -> None:
        super().__init__(vocab=vocab, max_context=max_context, version=version)
        self._waiting: deque[EngineRow] = deque()
        self._rows = Rows(max_context)

    def add(self, request: Generate) -> None:
        """See `EngineCore.add`."""
        row = self.held[request.request_id] = self._checked(request)
        self._waiting.append(row)

    def _first_waiting(self, events: list[TokenEvent]) -> EngineRow | None:
        """The first row of the queue that needs a token. Those before it, whose prefix is complete, end in `events`."""
        while self._waiting:
            row = self._waiting[0]
            finish = finish_before_start(row.request, self._max_context)
            if not finish:
                return row
            self._waiting.popleft()
            del self.held[row.request.request_id]
            events.append(row.last_event(self._version, finish))
        return None

    def _append(self, rows: Rows, ids: np.ndarray, logprobs: np.ndarray, events: list[TokenEvent]) -> np.ndarray:
        """Give each of `rows` its token (ids int64 [n], logprobs float32 [n]); returns the indices of those that go on."""
        made, going = rows.advance(ids, logprobs, self._version)
        events.extend(made)
        for event in made:
            if event.finish:
                del self.held[event.request_id]
        return going

    def _take(self, names: list[str]) -> list[EngineRow]:
        gone = {name: self.held.pop(name) for name in names}
        self._waiting = deque(r for r in self._waiting if r.request.request_id not in gone)
        stay = [i for i, r in enumerate(self._rows.rows) if r.request.request_id not in gone]
        if len(stay) < len(self._rows):
            self._keep(np.array(stay, dtype=np.int64))
        return list(gone.values())

    def _keep(self, index: np.ndarray) -> None:
        """Thin the running rows to `index` (int64)."""
        self._rows.select(index)
