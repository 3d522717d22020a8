"""Completions that the auditor makes itself, as seeds draw them. Needs torch.

`generate` of transformers decodes, for it knows each architecture's cache, positions and padding; which token follows is ours.
Must not know what they are made for, nodes or versions.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from learner.audit.claims import Claim
from learner.audit.statistic import CHUNK_VALUES, draws
from learner.rollouts.stop_strings import StopStrings
from p2p.protocol.seeded import seed_keys, uniforms

TOKENS_AT_ONCE = 2_048
"""Places of the cache that one call of `generate` fills, padding included, unless one row alone takes more. Of a model of 7B with
four heads of keys and values that is 235 MB in float32; prompts are the head's, so no node makes them long."""


@dataclass(frozen=True, slots=True)
class SampledBy:
    """How a run's nodes draw, and what ends a completion."""

    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: Collection[int] = ()
    stop: StopStrings | None = None
    """strings that end it, beside these"""
    longest: int = sys.maxsize
    """its tokens at the most"""

    def ends(self, ids: Sequence[int]) -> bool:
        """Whether the last of these tokens ends the completion that begins with them."""
        return ids[-1] in self.stop_ids or (self.stop is not None and self.stop.end(ids, 0, len(ids) - 1) is not None)


class OwnRow(NamedTuple):
    """A completion that is to be made."""

    prompt_ids: tuple[int, ...]
    seed: int
    most: int
    """tokens"""


def own_completions(model: nn.Module, rows: Sequence[OwnRow], sampled: SampledBy) -> list[Claim]:
    """Of each row what a node without any rounding would claim: at each place the token that the seed draws, until something
    ends it, or as far as the model has positions. `model` is as for `score`."""
    config: Any = model.config
    room = _Room.of(config)
    found: dict[int, Claim] = {}
    wanted = [row._replace(most=min(row.most, sampled.longest, room.positions - len(row.prompt_ids))) for row in rows]
    for batch in _batches(wanted, room):
        drawn = _SeededDraws([wanted[i] for i in batch], sampled)
        _generate(model, [wanted[i] for i in batch], drawn)
        found |= zip(batch, drawn.claims(), strict=True)
    return [found.get(i, Claim(row.prompt_ids, (), (), row.seed)) for i, row in enumerate(rows)]


class _Room(NamedTuple):
    """What one call of `generate` may take."""

    positions: int
    """of the model"""
    rows: int

    @classmethod
    def of(cls, config: Any) -> _Room:
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        return cls(int(positions or sys.maxsize), max(1, CHUNK_VALUES // config.vocab_size))

    def holds(self, rows: Sequence[OwnRow]) -> bool:
        """Each row is as wide as the longest, and goes on as long as any does."""
        width = max(len(row.prompt_ids) for row in rows) + max(row.most for row in rows)
        return len(rows) == 1 or (len(rows) <= self.rows and len(rows) * width <= TOKENS_AT_ONCE and width <= self.positions)


def _batches(rows: Sequence[OwnRow], room: _Room) -> Iterator[list[int]]:
    """Places of rows that go together, like lengths beside each other; of those that have room for a token."""
    batch: list[int] = []
    for i in sorted((i for i, row in enumerate(rows) if row.most > 0), key=lambda i: len(rows[i].prompt_ids)):
        if not room.holds([rows[k] for k in (*batch, i)]):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@torch.no_grad()
def _generate(model: Any, rows: Sequence[OwnRow], drawn: _SeededDraws) -> None:
    """Have tokens drawn behind each prompt until all rows have ended."""
    width, device = max(len(row.prompt_ids) for row in rows), next(model.parameters()).device
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long).unbind()
    for i, row in enumerate(rows):
        first = width - len(row.prompt_ids)
        ids[i, first:], mask[i, first:] = torch.tensor(row.prompt_ids), 1
    model.generation_config = GenerationConfig()  # what a model's folder says of sampling is not how nodes draw
    model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), logits_processor=LogitsProcessorList([drawn]),
        stopping_criteria=StoppingCriteriaList([_WhereEnded(drawn)]),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=max(row.most for row in rows), pad_token_id=0, use_cache=True
        ),
    )  # fmt: skip


class _SeededDraws(LogitsProcessor):
    """Leaves of each row's logits that of the token which is drawn, and keeps what was drawn until the row ended."""

    def __init__(self, rows: Sequence[OwnRow], sampled: SampledBy) -> None:
        self._rows, self._sampled, self._keys = rows, sampled, seed_keys([row.seed for row in rows])
        self._made: list[list[int]] = [[] for _ in rows]
        self._logprobs: list[list[float]] = [[] for _ in rows]
        self._at = 0
        self.ended = np.zeros(len(rows), bool)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        u = uniforms(self._keys, np.full(len(self._rows), self._at))
        drawn = draws(scores.float(), u, self._sampled.temperature, self._sampled.top_p)
        self._at += 1
        for i in np.flatnonzero(~self.ended).tolist():
            made = self._made[i]
            made.append(int(drawn.tokens[i]))
            self._logprobs[i].append(float(drawn.logprobs[i]))
            self.ended[i] = len(made) == self._rows[i].most or self._sampled.ends(made)
        chosen = torch.from_numpy(drawn.tokens)[:, None].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen, 0.0)

    def claims(self) -> list[Claim]:
        """Of each row, as far as it was made."""
        made = zip(self._rows, self._made, self._logprobs, strict=True)
        return [Claim(row.prompt_ids, tuple(ids), tuple(logprobs), row.seed) for row, ids, logprobs in made]


class _WhereEnded(StoppingCriteria):
    """Of each row, as its draws say."""

    def __init__(self, drawn: _SeededDraws) -> None:
        self._drawn = drawn

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor(self._drawn.ended, device=input_ids.device)
