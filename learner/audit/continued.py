"""Completions that the auditor goes on with itself, as their seeds draw. Needs torch.

`generate` of transformers decodes, for it knows each architecture's cache, positions and padding; which token follows is ours.
Must not know why anything is gone on with, or versions.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from learner.audit.claims import Claim
from learner.audit.statistic import CHUNK_VALUES, SeededDraws, draws
from p2p.protocol.seeded import seed_keys, uniforms

TOKENS_AT_ONCE = 4_096
"""Places of the cache that one call of `generate` fills, padding included: of a model of 7B 470 MB in float32."""


def continued(
    model: nn.Module, claims: Sequence[Claim], lengths: Sequence[int], stop_ids: Collection[int], *, temperature: float,
    top_p: float,
) -> list[Claim]:  # fmt: skip
    """The claims, each with as many more tokens as make its completion `lengths` long: at each place the token that its seed
    draws, up to one of `stop_ids`, or as far as the model has positions. `model` is as for `score`."""
    config: Any = model.config
    room = _Room.of(config)
    found, left = list(claims), []
    for i, (claim, length) in enumerate(zip(claims, lengths, strict=True)):
        start = len(claim.prompt_ids) + len(claim.completion_ids)
        count = min(length - len(claim.completion_ids), room.positions - start)
        if count > 0:
            left.append(_Row(i, start, count))
    for rows in _batches(left, room):
        texts = [(*claims[row.claim].prompt_ids, *claims[row.claim].completion_ids) for row in rows]
        sampler = _SeededDraws([claims[row.claim] for row in rows], temperature, top_p)
        _generate(model, texts, max(row.count for row in rows), stop_ids, sampler)
        for row, drawn in zip(rows, sampler.found(), strict=True):
            ends = [at for at, token in enumerate(drawn.tokens[: row.count]) if int(token) in stop_ids]
            count = ends[0] + 1 if ends else row.count
            claim = claims[row.claim]
            found[row.claim] = dataclasses.replace(
                claim, completion_ids=(*claim.completion_ids, *drawn.tokens[:count].tolist()),
                logprobs=(*claim.logprobs, *drawn.logprobs[:count].tolist()), stop=None,
            )  # fmt: skip
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """Of `generate`'s batch."""

    claim: int
    start: int
    """tokens that are there, with the prompt's"""
    count: int
    """that are to follow"""


class _Room(NamedTuple):
    """What one call of `generate` may take."""

    positions: int
    """of the model"""
    rows: int

    @classmethod
    def of(cls, config: Any) -> _Room:
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return cls(int(positions or sys.maxsize), max(1, CHUNK_VALUES // config.vocab_size))

    def holds(self, rows: Sequence[_Row]) -> bool:
        """Each row is as wide as the longest, and goes on as long as any does."""
        width = max(row.start for row in rows) + max(row.count for row in rows)
        return len(rows) == 1 or (len(rows) <= self.rows and len(rows) * width <= TOKENS_AT_ONCE and width <= self.positions)


def _batches(rows: Sequence[_Row], room: _Room) -> Iterator[list[_Row]]:
    """Rows that go together, like lengths beside each other."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.start):
        if not room.holds([*batch, row]):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.no_grad()
def _generate(
    model: Any, texts: Sequence[Sequence[int]], count: int, stop_ids: Collection[int], sampler: LogitsProcessor
) -> None:
    """Have `sampler` choose up to `count` tokens behind each text."""
    width, device = max(map(len, texts)), next(model.parameters()).device
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long).unbind()
    for row, text in enumerate(texts):
        ids[row, width - len(text) :] = torch.tensor(text)
        mask[row, width - len(text) :] = 1
    model.generation_config = GenerationConfig()  # what a folder says of sampling is not how nodes draw
    asked = GenerationConfig(
        do_sample=False, max_new_tokens=count, pad_token_id=0, eos_token_id=sorted(stop_ids) or None, use_cache=True
    )
    model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=asked,
        logits_processor=LogitsProcessorList([sampler]),
    )  # fmt: skip


class _SeededDraws(LogitsProcessor):
    """Leaves of each row's logits that of the token which is drawn, and keeps what was drawn."""

    def __init__(self, claims: Sequence[Claim], temperature: float, top_p: float) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._keys = seed_keys([claim.seed for claim in claims])
        self._next = np.array([len(claim.completion_ids) for claim in claims], np.int64)
        self._drawn: list[SeededDraws] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = draws(scores.float(), uniforms(self._keys, self._next), self._temperature, self._top_p)
        self._drawn.append(drawn)
        self._next += 1
        chosen = torch.from_numpy(drawn.tokens)[:, None].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen, 0.0)

    def found(self) -> list[SeededDraws]:
        """Of each row, what was drawn: behind a stop token that means nothing."""
        columns = (np.stack(column, axis=1) for column in zip(*self._drawn, strict=True))
        return [SeededDraws(*row) for row in zip(*columns, strict=True)]
