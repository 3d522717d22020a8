"""Scores completions again under one version's weights: one prefill for all of them. Needs torch; runs where its caller says.

Must not know nodes, who made what, or where the weights come from: a model of transformers is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from learner.audit.statistic import CHUNK_VALUES, distances
from p2p.protocol.seeded import seed_keys, uniforms

MOST_TOKENS = 16_384
"""Tokens of one forward, padding included."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A completion as it came from nodes."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """claimed, in nats; one a completion token"""
    seed: int
    first: int = 0
    """completion tokens before this one are not checked (others made them, or under another version)"""
    stop: int | None = None
    """nor those from this one on"""
    given: tuple[tuple[int, int], ...] = ()
    """[start, stop) of what an environment wrote, which nobody drew"""


class Scored(NamedTuple):
    """One entry a checked token."""

    distance: np.ndarray
    claimed: np.ndarray
    recomputed: np.ndarray


@torch.no_grad()
def score(model: nn.Module, claims: Sequence[Claim], temperature: float = 1.0, top_p: float = 1.0) -> list[Scored]:
    """Each claim's checked tokens. `model` has the weights of the version that all of them claim, in the type that they are to be
    checked in; logits are taken in float32."""
    out: list[Scored | None] = [None] * len(claims)
    order = sorted(range(len(claims)), key=lambda i: _length(claims[i]))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * _length(claims[i]) > MOST_TOKENS:
            _score(model, claims, batch, out, temperature, top_p)
            batch = []
        batch.append(i)
    if batch:
        _score(model, claims, batch, out, temperature, top_p)
    return [one for one in out if one is not None]


def _length(claim: Claim) -> int:
    return len(claim.prompt_ids) + len(claim.completion_ids)


def _score(
    model: Any, claims: Sequence[Claim], batch: list[int], out: list[Scored | None], temperature: float, top_p: float
) -> None:  # fmt: skip
    width = max(_length(claims[i]) for i in batch)
    device = next(model.parameters()).device
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, i in enumerate(batch):  # padded behind: causal attention never sees it
        tokens = (*claims[i].prompt_ids, *claims[i].completion_ids)
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
    hidden = model.get_decoder()(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).last_hidden_state
    places = [_places(claims[i]) for i in batch]
    rows = [row for row, of_row in enumerate(places) for _ in of_row]
    at = [len(claims[i].prompt_ids) + p - 1 for i, of_row in zip(batch, places, strict=True) for p in of_row]
    chosen = torch.tensor([claims[i].completion_ids[p] for i, of_row in zip(batch, places, strict=True) for p in of_row])
    drawn = uniforms(seed_keys([claims[batch[row]].seed for row in rows]), np.array([p for of in places for p in of], np.int64))
    head, parts, step = model.get_output_embeddings(), [], max(1, CHUNK_VALUES // model.config.vocab_size)
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        logits = head(hidden[rows[part], at[part]]).float()
        parts.append(distances(logits, chosen[part].to(device), drawn[part], temperature, top_p))
    distance, recomputed = (np.concatenate(column) if parts else np.empty(0) for column in zip(*parts, strict=True))
    ends = np.cumsum([len(of_row) for of_row in places])
    for i, of_row, end in zip(batch, places, ends, strict=True):
        own = slice(end - len(of_row), end)
        claimed = np.array([claims[i].logprobs[p] for p in of_row], np.float64)
        out[i] = Scored(distance[own], claimed, recomputed[own])


def _places(claim: Claim) -> list[int]:
    stop = len(claim.completion_ids) if claim.stop is None else claim.stop
    return [p for p in range(claim.first, stop) if not any(first <= p < last for first, last in claim.given)]
