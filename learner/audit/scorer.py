"""Scores completions again under one version's weights: one prefill for all of them. Needs torch; runs where its caller says.

Must not know nodes, who made what, or where the weights come from: a model of transformers is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from learner.audit.claims import Claim
from learner.audit.statistic import CHUNK_VALUES, Distances, distances
from p2p.few_sizes import filled_up, multiple_on
from p2p.protocol.seeded import seed_keys, uniforms

__all__ = ["MOST_TOKENS", "Claim", "Scored", "score"]

MOST_TOKENS = 16_384
"""Tokens of one forward, padding included."""


class Scored(NamedTuple):
    """One entry a checked token."""

    distance: np.ndarray
    claimed: np.ndarray
    recomputed: np.ndarray


@torch.no_grad()
def score(model: nn.Module, claims: Sequence[Claim], temperature: float = 1.0, top_p: float = 1.0) -> list[Scored]:
    """Each claim's checked tokens. `model` has the weights of the version that all of them claim, in the type that they are to be
    checked in; logits are taken in float32."""
    found: dict[int, Scored] = {}
    batch: list[int] = []
    for i in sorted(range(len(claims)), key=lambda i: _length(claims[i])):
        if batch and (len(batch) + 1) * _width(model, _length(claims[i])) > MOST_TOKENS:
            found |= zip(batch, _score(model, [claims[j] for j in batch], temperature, top_p), strict=True)
            batch = []
        batch.append(i)
    if batch:
        found |= zip(batch, _score(model, [claims[j] for j in batch], temperature, top_p), strict=True)
    return [found[i] for i in range(len(claims))]


def _length(claim: Claim) -> int:
    return len(claim.prompt_ids) + len(claim.completion_ids)


def _width(model: nn.Module, longest: int) -> int:
    """Tokens of a forward's rows of which the longest has `longest`, within what the model has positions for."""
    some, config = next(model.parameters()), model.config.get_text_config()  # type: ignore[operator, union-attr]
    most = int(getattr(config, "max_position_embeddings", None) or longest)
    return max(longest, min(most, filled_up(longest, multiple_on(some.device.type, str(some.dtype)))))


def _score(model: Any, claims: Sequence[Claim], temperature: float, top_p: float) -> list[Scored]:
    """In one forward."""
    width = _width(model, max(map(_length, claims)))
    device = next(model.parameters()).device
    ids = torch.zeros(len(claims), width, dtype=torch.long)
    for row, claim in enumerate(claims):  # padded behind: causal attention never sees it, so that no mask has to say so
        tokens = (*claim.prompt_ids, *claim.completion_ids)
        ids[row, : len(tokens)] = torch.tensor(tokens)
    hidden = model.get_decoder()(input_ids=ids.to(device), use_cache=False).last_hidden_state
    places = [_places(claim) for claim in claims]
    rows = [row for row, of_row in enumerate(places) for _ in of_row]
    flat = [(claim, p) for claim, of_row in zip(claims, places, strict=True) for p in of_row]
    at = [len(claim.prompt_ids) + p - 1 for claim, p in flat]
    chosen = torch.tensor([claim.completion_ids[p] for claim, p in flat], dtype=torch.long, device=device)
    drawn = uniforms(seed_keys([claim.seed for claim, _ in flat]), np.array([p for _, p in flat], np.int64))
    head, step = model.get_output_embeddings(), max(1, CHUNK_VALUES // model.config.vocab_size)
    parts = [Distances(np.empty(0), np.empty(0))]
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        parts.append(distances(head(hidden[rows[part], at[part]]).float(), chosen[part], drawn[part], temperature, top_p))
    distance, recomputed = (np.concatenate(column) for column in zip(*parts, strict=True))
    claimed = np.array([claim.logprobs[p] for claim, p in flat], np.float64)
    ends = np.cumsum([len(of_row) for of_row in places])[:-1]
    columns = (np.split(column, ends) for column in (distance, claimed, recomputed))
    return [Scored(*row) for row in zip(*columns, strict=True)]


def _places(claim: Claim) -> list[int]:
    stop = len(claim.completion_ids) if claim.stop is None else claim.stop
    return [p for p in range(claim.first, stop) if not any(first <= p < last for first, last in claim.given)]
