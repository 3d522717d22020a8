"""Our own draws inside vLLM, through its logits processor interface: they give the token that the transformers engine would draw.

vLLM is asked for greedy sampling. This processor draws each row's token from the untouched logits with `sampling.sample`
(counter based: logits, temperature, top_p, seed and completion position, nothing else), leaves that token as the only one
possible, and keeps its log probability under the true distribution for whoever asks with `drawn`. So a sequence may move
between engines, vLLM computes no log probabilities, and how it batches never changes a draw. Must not know versions.

Imported by vLLM in the process of each worker; all ranks of a tensor-parallel group see the same logits and draw alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from node.engine.sampling import SamplingParams, log_probs, sample

ASK = "shoal"
"""The key in a request's `extra_args` that holds the value made by `ask`."""


def ask(key: str, seed: int, temperature: float, top_p: float, position: int, token: int = -1) -> dict[str, Any]:
    """The `extra_args` of a request: how its tokens are drawn. `key` names it in `drawn`; `position` is the place, in its
    completion, of the first token that is drawn here. With a `token` of 0 or more nothing is drawn: it is that token."""
    return {ASK: (key, seed, temperature, top_p, position, token)}


_last: dict[str, tuple[int, np.ndarray]] = {}


def drawn() -> dict[str, tuple[int, np.ndarray]]:
    """Request -> (token id, its log probability as float32 [1]) of the last batch. For a row still in prefill the value means
    nothing."""
    return _last


class Draws(LogitsProcessor):
    """The logits processor that vLLM makes in each worker; the module says what it does."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, tuple[tuple[str, int, float, float, int, int], list[int]]] = {}
        """batch index -> (what was asked, the request's tokens so far: vLLM's own list, which grows)"""
        self._params: SamplingParams | None = None
        self._names: list[str] = []
        self._outputs: list[list[int]] = []
        self._first = np.empty(0, np.int64)
        self._given: list[tuple[int, int, float]] = []
        """(row, token, temperature) where nothing is drawn"""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called by vLLM before each step: rows that left, entered or moved within its batch; None when nothing changed."""
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, _, output_ids in batch_update.added:
            asked = (params.extra_args or {}).get(ASK)
            if asked is None:
                rows.pop(index, None)
            else:
                rows[index] = (tuple(asked), output_ids)
        for a, b, direction in batch_update.moved:
            from_a, from_b = rows.pop(a, None), rows.pop(b, None)
            if from_a is not None:
                rows[b] = from_a
            if from_b is not None and direction == MoveDirectionality.SWAP:
                rows[a] = from_b
        self._params = None

    def _build(self, n: int) -> SamplingParams:
        # vLLM's own warm-up batches ask nothing.
        rows = [self._rows.get(i, (("", 0, 0.0, 1.0, 0, -1), [])) for i in range(n)]
        self._names = [asked[0] for asked, _ in rows]
        self._outputs = [output_ids for _, output_ids in rows]
        self._first = np.array([asked[4] for asked, _ in rows], dtype=np.int64)
        self._given = [(i, asked[5], asked[2]) for i, (asked, _) in enumerate(rows) if asked[5] >= 0]
        return SamplingParams.build(
            [asked[1] for asked, _ in rows], [asked[2] for asked, _ in rows], [asked[3] for asked, _ in rows], self._device
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Called by vLLM in each step: logits [rows, vocab] in; out comes 0 at the drawn token and -inf elsewhere, in place."""
        n = logits.shape[0]
        if self._params is None or len(self._names) != n:
            self._params = self._build(n)
        positions = self._first + np.array([len(ids) for ids in self._outputs], dtype=np.int64)
        ids, logprobs = sample(logits, self._params, positions)
        for i, token, temperature in self._given:
            one = SamplingParams.build([0], [temperature], [1.0], logits.device)
            ids[i], logprobs[i] = token, float(log_probs(logits[i : i + 1], one)[0, token])
        _last.clear()
        _last.update(zip(self._names, zip(ids.tolist(), logprobs[:, None], strict=True), strict=True))
        return logits.fill_(-torch.inf).scatter_(1, torch.from_numpy(ids).to(logits.device)[:, None], 0.0)
