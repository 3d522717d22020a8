"""How far each token of a completion is from the draw that it should be. Pure functions of logits.

A node draws token i of a sequence by one uniform number u of (seed, i): the token k whose interval [F(k-1), F(k)) of the
cumulative distribution, in vocabulary order, holds u. So whoever has the weights can tell from one prefill what should have been
drawn (the family of Token-DiFR and IPT-LS, arXiv 2511.02620). Equality is no test: rounding moves the intervals' edges, and at a
high entropy neighbours are narrow. The **distance** of u from the claimed token's interval is: it is 0 for the very token, small
where an edge moved, and of the order of a token's probability where the token was not drawn so.

How far rounding can move an edge depends on where it is: hardly at all where one token is all but certain. So there is the
**shift** as well: by how many nats every logit must have been off, at the least, for the seed to draw the claimed token. When no
logit is off by more than d, the odds of "this token or one before it" change by a factor of at most exp(2 d / temperature).

Must not know models, nodes or what follows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK_VALUES = 1 << 24
"""Logits that are looked at together: 128 MiB in float64. No array of all tokens and the whole vocabulary is made."""


MOST_SHIFT = 100.0
"""Nats: a shift is never said to be more."""


class Distances(NamedTuple):
    """One entry a token, float64."""

    distance: np.ndarray
    """of the seeded number from the claimed token's interval, in [0, 1]; 1 for a token of probability zero"""
    logprob: np.ndarray
    """of the claimed token, in nats, under the checker's own distribution; -inf outside the nucleus"""
    shift: np.ndarray
    """of logits, in nats, at the least, with which it would have been drawn; MOST_SHIFT for a token of probability zero"""


def distances(logits: Tensor, ids: Tensor, draws: np.ndarray, temperature: float = 1.0, top_p: float = 1.0) -> Distances:
    """For logits [n, vocabulary], claimed `ids` int64 [n] and `draws` float64 [n] in [0, 1). Temperature above 0."""
    found = []
    rows = max(1, CHUNK_VALUES // logits.shape[-1])
    for first in range(0, len(ids), rows):
        part = slice(first, first + rows)
        found.append(_distances(logits[part], ids[part], torch.from_numpy(draws[part]), temperature, top_p))
    if not found:
        return Distances(np.empty(0), np.empty(0), np.empty(0))
    return Distances(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _distances(logits: Tensor, ids: Tensor, draws: Tensor, temperature: float, top_p: float) -> Distances:
    logp = torch.log_softmax(logits.double() / temperature, dim=-1)
    if top_p < 1:
        logp = _nucleus(logp, top_p)
    p = logp.exp()
    chosen = ids[:, None].to(logp.device)
    own = p.gather(-1, chosen)[:, 0]
    upper = p.cumsum(-1).gather(-1, chosen)[:, 0]
    u = draws.to(logp.device)
    distance = torch.maximum(upper - own - u, u - upper).clamp(min=0.0)
    distance = torch.where(own > 0, distance, torch.ones_like(distance))
    logprob, shift = logp.gather(-1, chosen)[:, 0], _shift(upper - own, upper, u, temperature)
    shift = torch.where(own > 0, shift, torch.full_like(shift, MOST_SHIFT))
    return Distances(distance.cpu().numpy(), logprob.cpu().numpy(), shift.cpu().numpy())


def _shift(lower: Tensor, upper: Tensor, u: Tensor, temperature: float) -> Tensor:
    """For intervals [lower, upper) and seeded numbers u, float64 [n]: half of the least change of log odds that brings u into
    them, in nats before the division by the temperature."""
    at, under, over = (torch.logit(edge.clamp(0.0, 1.0)) for edge in (u, lower, upper))
    shift = torch.where(u >= upper, at - over, torch.where(u < lower, under - at, torch.zeros_like(u)))
    return (shift * (temperature / 2)).nan_to_num(nan=MOST_SHIFT).clamp(0.0, MOST_SHIFT)


class SeededDraws(NamedTuple):
    """One entry a place."""

    tokens: np.ndarray
    """int64"""
    logprobs: np.ndarray
    """float64, nats"""


def draws(logits: Tensor, uniforms: np.ndarray, temperature: float = 1.0, top_p: float = 1.0) -> SeededDraws:
    """For logits [n, vocabulary] and `uniforms` float64 [n] in [0, 1): the tokens whose intervals hold them. Temperature above
    0. At most CHUNK_VALUES logits."""
    logp = torch.log_softmax(logits.double() / temperature, dim=-1)
    if top_p < 1:
        logp = _nucleus(logp, top_p)
    upper = logp.exp().cumsum(-1)
    u = torch.from_numpy(uniforms).to(logp.device)[:, None] * upper[:, -1:]  # the sum may be a little below 1
    chosen = torch.searchsorted(upper, u, right=True).clamp(max=logp.shape[-1] - 1)
    return SeededDraws(chosen[:, 0].cpu().numpy(), logp.gather(-1, chosen)[:, 0].cpu().numpy())


def _nucleus(logp: Tensor, top_p: float) -> Tensor:
    """As the engines' nucleus: the fewest most probable tokens that reach top_p, ties to the lower id."""
    order = torch.argsort(logp, dim=-1, descending=True, stable=True)
    ordered = logp.gather(-1, order).exp()
    before = ordered.cumsum(-1) - ordered
    before[:, 0] = 0.0
    keep = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, before < top_p)
    logp = logp.masked_fill(~keep, -torch.inf)
    return logp - torch.logsumexp(logp, dim=-1, keepdim=True)
