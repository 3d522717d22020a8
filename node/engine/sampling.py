"""Drawing tokens: pure functions of logits, parameters, seed and position. Must not know models, caches or requests.

The token at completion position i of a sequence depends only on its own logits and on (temperature, top_p, seed, i):
one uniform number per (seed, i) comes from a counter-based hash (`p2p.protocol.seeded`), and the token is read off the
inverse cumulative distribution in float64. So a batch's composition, a migration or a restart never changes a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from p2p.protocol.seeded import seed_keys, uniforms


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of n rows, on the logits' device; None where a whole batch does not need one."""

    keys: np.ndarray
    """uint64 [n], from `seed_keys`"""
    temperature: torch.Tensor | None
    """float64 [n, 1], 1 for greedy rows; None: all 1"""
    top_p: torch.Tensor | None
    """float64 [n, 1], 1 for greedy rows; None: all 1"""
    greedy: torch.Tensor | None
    """bool [n]; None: no row is greedy"""

    @classmethod
    def build(
        cls,
        seeds: Sequence[int],
        temperature: Sequence[float],
        top_p: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> SamplingParams:
        """Temperature 0 means greedy, whose reported distribution is temperature 1 without top_p."""
        heat, nucleus = np.array(temperature, dtype=np.float64), np.array(top_p, dtype=np.float64)
        cold = heat == 0
        heat, nucleus = np.where(cold, 1.0, heat), np.where(cold, 1.0, nucleus)

        def column(values: np.ndarray) -> torch.Tensor | None:
            return None if (values == 1).all() else torch.from_numpy(values).to(device)[:, None]

        return cls(
            seed_keys(seeds), column(heat), column(nucleus), torch.from_numpy(cold).to(device) if cold.any() else None
        )


def log_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 [n, vocab]: the log distribution each row is sampled from; -inf outside the nucleus.

    Nucleus (Holtzman et al. 2020): the fewest most probable tokens that together reach top_p, at least one; ties
    at its edge go to the lower token id.
    """
    scaled = logits.double()
    if params.temperature is not None:
        scaled = scaled / params.temperature
    logp = torch.log_softmax(scaled, dim=-1)
    if params.top_p is None:
        return logp
    order = torch.argsort(logp, dim=-1, descending=True, stable=True)
    ordered = logp.gather(-1, order).exp()
    before = ordered.cumsum(-1) - ordered
    before[:, 0] = 0.0
    keep = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, before < params.top_p) | (params.top_p >= 1)
    logp = logp.masked_fill(~keep, -torch.inf)
    return logp - torch.logsumexp(logp, dim=-1, keepdim=True)


class Drawn(NamedTuple):
    """One token for each row."""

    ids: np.ndarray
    """int64 [n]"""
    logprobs: np.ndarray
    """float32 [n]: the log probability of each under `log_probs`"""


def sample(logits: torch.Tensor, params: SamplingParams, positions: np.ndarray) -> Drawn:
    """Draw one token per row of logits [n, vocab] at completion `positions` int64 [n].

    A token of probability zero is never drawn. A row whose logits are not numbers gets a log probability that is not finite.
    """
    logp = log_probs(logits, params)
    ids = _read_off(logp, torch.from_numpy(uniforms(params.keys, positions)).to(logp.device)[:, None])
    if params.greedy is not None:
        ids = torch.where(params.greedy, logits.argmax(-1), ids)
    chosen = logp.gather(-1, ids[:, None])[:, 0]
    return Drawn(ids.cpu().numpy(), chosen.to(torch.float32).cpu().numpy())


def _read_off(logp: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """int64 [n]: each row's first token, of a probability above zero, at which the cumulative distribution passes u [n, 1]."""
    p = logp.exp()
    if p.device.type == "cpu":
        # A CPU sums one value after the other, so the sum is monotone and rises only where p > 0: a binary search finds the same
        # token, and for a wide vocabulary only the exponentials take time.
        cdf = p.cumsum_(-1)
        ids = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)[:, 0]
        missed = ids == cdf.shape[-1]  # u rounded up to the whole sum, or logits that are not numbers
        if not missed.any():
            return ids
        p = logp.exp()
        ids = ids.masked_fill(missed, 0)
    else:
        cdf = p.cumsum(-1)
        ids = ((cdf > u * cdf[:, -1:]) & (p > 0)).to(torch.uint8).argmax(-1)
    # A parallel cumsum need not be monotone in the last bit: should no token qualify, take the most probable one.
    return torch.where(p.gather(-1, ids[:, None])[:, 0] > 0, ids, p.argmax(-1))
