"""Scores completions again under one version's weights: one prefill for all of them. Needs torch; runs where its caller says.

Must not know nodes, who made what, or where the weights come from: a model of transformers is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from learner.audit.claims import Claim, places_of
from learner.audit.deviations import Deviations
from learner.audit.statistic import CHUNK_VALUES, Distances, SeededDraws, distances, draws
from p2p.few_sizes import filled_up, multiple_on
from p2p.protocol.seeded import seed_keys, uniforms

__all__ = ["MOST_TOKENS", "Claim", "draw", "score"]

MOST_TOKENS = 16_384
"""Tokens of one forward, padding included."""


@torch.no_grad()
def score(
    model: nn.Module, claims: Sequence[Claim], temperature: float = 1.0, top_p: float = 1.0,
    drawn: Sequence[SeededDraws] | None = None,
) -> list[Deviations]:  # fmt: skip
    """Each claim's checked tokens. `model` has the weights of the version that all of them claim, in the type that they are to be
    checked in; logits are taken in float32. `drawn`: at the same places, what is scored in place of the claims' own tokens."""

    def of_batch(batch: list[int]) -> list[Deviations]:
        rows = _Rows(model, [claims[i] for i in batch])
        if drawn is None:
            chosen = [rows.claims[row].completion_ids[p] for row, p in rows.flat]
            claimed = [rows.claims[row].logprobs[p] for row, p in rows.flat]
        else:
            chosen = [int(token) for i in batch for token in drawn[i].tokens]
            claimed = [float(logprob) for i in batch for logprob in drawn[i].logprobs]
        parts = [Distances(np.empty(0), np.empty(0), np.empty(0))]
        for part, logits in rows.logits():
            ids = torch.tensor(chosen[part], dtype=torch.long, device=logits.device)
            parts.append(distances(logits, ids, rows.uniforms[part], temperature, top_p))
        distance, recomputed, shift = (np.concatenate(column) for column in zip(*parts, strict=True))
        columns = map(rows.split, (distance, np.array(claimed, np.float64), recomputed, shift))
        return [Deviations(*row) for row in zip(*columns, strict=True)]

    return _in_batches(model, claims, of_batch)


@torch.no_grad()
def draw(model: nn.Module, claims: Sequence[Claim], temperature: float = 1.0, top_p: float = 1.0) -> list[SeededDraws]:
    """What a node with this model would have drawn at each checked place of the claims, each after the claim's own tokens."""

    def of_batch(batch: list[int]) -> list[SeededDraws]:
        rows = _Rows(model, [claims[i] for i in batch])
        parts = [SeededDraws(np.empty(0, np.int64), np.empty(0))]
        parts += (draws(logits, rows.uniforms[part], temperature, top_p) for part, logits in rows.logits())
        columns = (rows.split(np.concatenate(column)) for column in zip(*parts, strict=True))
        return [SeededDraws(*row) for row in zip(*columns, strict=True)]

    return _in_batches(model, claims, of_batch)


T = TypeVar("T")


def _in_batches(model: nn.Module, claims: Sequence[Claim], of_batch: Callable[[list[int]], list[T]]) -> list[T]:
    """What `of_batch` gives of each claim, where it is told of those of one forward together."""
    found: dict[int, T] = {}
    batch: list[int] = []
    for i in sorted(range(len(claims)), key=lambda i: _length(claims[i])):
        if batch and (len(batch) + 1) * _width(model, _length(claims[i])) > MOST_TOKENS:
            found |= zip(batch, of_batch(batch), strict=True)
            batch = []
        batch.append(i)
    if batch:
        found |= zip(batch, of_batch(batch), strict=True)
    return [found[i] for i in range(len(claims))]


def _length(claim: Claim) -> int:
    return len(claim.prompt_ids) + len(claim.completion_ids)


def _width(model: nn.Module, longest: int) -> int:
    """Tokens of a forward's rows of which the longest has `longest`, within what the model has positions for."""
    some, config = next(model.parameters()), model.config.get_text_config()  # type: ignore[operator, union-attr]
    most = int(getattr(config, "max_position_embeddings", None) or longest)
    return max(longest, min(most, filled_up(longest, multiple_on(some.device.type, str(some.dtype)))))


class _Rows:
    """Some claims as the rows of one forward, and their checked places one after the other."""

    def __init__(self, model: Any, claims: Sequence[Claim]) -> None:
        self.claims = claims
        width = _width(model, max(map(_length, claims)))
        ids = torch.zeros(len(claims), width, dtype=torch.long)
        for row, claim in enumerate(claims):  # padded behind: causal attention never sees it, so that no mask has to say so
            tokens = (*claim.prompt_ids, *claim.completion_ids)
            ids[row, : len(tokens)] = torch.tensor(tokens)
        device = next(model.parameters()).device
        self._hidden = model.get_decoder()(input_ids=ids.to(device), use_cache=False).last_hidden_state
        self._head, self._step = model.get_output_embeddings(), max(1, CHUNK_VALUES // model.config.vocab_size)
        places = [_places(claim) for claim in claims]
        self._ends = np.cumsum([len(of_row) for of_row in places])[:-1]
        self.flat = [(row, p) for row, of_row in enumerate(places) for p in of_row]
        """row and place in its completion, of each checked token"""
        seeds, at = [claims[row].seed for row, _ in self.flat], np.array([p for _, p in self.flat], np.int64)
        self.uniforms = uniforms(seed_keys(seeds), at)

    def logits(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """float32 [places, vocabulary] of some places after the other: all of them are too many at once."""
        rows = [row for row, _ in self.flat]
        at = [len(self.claims[row].prompt_ids) + p - 1 for row, p in self.flat]
        for first in range(0, len(rows), self._step):
            part = slice(first, first + self._step)
            yield part, self._head(self._hidden[rows[part], at[part]]).float()

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """One entry a checked place, by claim."""
        return np.split(values, self._ends)


def _places(claim: Claim) -> list[int]:
    return places_of(claim.first, len(claim.completion_ids) if claim.stop is None else claim.stop, claim.given)
