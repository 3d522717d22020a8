"""Nodes of the bench: completions of one model's weights, drawn by seeds, in several arithmetics; and cheats that change how.

Must not know what is checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from learner.audit.scorer import Claim
from netem.bench.staleness.sampler import Sampler
from p2p.protocol.seeded import seed_keys, uniforms

Prompt = tuple[int, ...]


class MakesClaims(Protocol):
    """A node: one completion for each prompt and seed."""

    def __call__(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Claim]: ...


def seeded_draws(seeds: Sequence[int], most: int) -> np.ndarray:
    """float64 [rows, most]"""
    keys = seed_keys(seeds)
    return np.stack([uniforms(keys, np.full(len(seeds), place)) for place in range(most)], axis=1)


def served(model: nn.Module) -> nn.Module:
    """A copy with weights as nodes get them: rounded to bfloat16, kept in float32."""
    made = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return made


class ChangedSampler(Sampler):
    """The fast sampler, with the distribution that it draws from changed; it reports the log probabilities of `honest` ones."""

    def __init__(self, model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(model)
        self._change = change

    def _scores(self, state: Tensor) -> Tensor:
        return torch.log_softmax(self._change(super()._scores(state)), dim=-1)


@dataclass
class FastNode:
    """Float32 arithmetic of our own, one batch."""

    sampler: Sampler
    most: int

    def __call__(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Claim]:
        draws = torch.from_numpy(seeded_draws(seeds, self.most))
        made = self.sampler(list(prompts), 1, self.most, draws)
        return [
            Claim(tuple(p), ids, logprobs, seed)
            for p, seed, ids, logprobs in zip(prompts, seeds, made.ids, made.logprobs, strict=True)
        ]


class TransformersNode:
    """Arithmetic of transformers in a given type, in batches of `rows`: prompts of one length, keys and values kept."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, most: int, eos: int, rows: int) -> None:
        self._model: Any = copy.deepcopy(model).to(dtype).eval()
        self._most, self._eos, self._rows = most, eos, rows

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Claim]:
        out: list[Claim] = []
        for first in range(0, len(prompts), self._rows):
            out += self._batch(prompts[first : first + self._rows], seeds[first : first + self._rows])
        return out

    def _batch(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Claim]:
        draws = torch.from_numpy(seeded_draws(seeds, self._most))
        ids, cache = torch.tensor(prompts), None
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for place in range(self._most):
            made = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, logp = made.past_key_values, torch.log_softmax(made.logits[:, -1].double(), dim=-1)
            cdf = logp.exp().cumsum(-1)
            chosen = torch.searchsorted(cdf, draws[:, place : place + 1] * cdf[:, -1:], right=True)
            chosen = chosen.clamp(max=logp.shape[-1] - 1)
            claimed = logp.gather(-1, chosen)[:, 0].tolist()
            for row in (~ended).nonzero()[:, 0].tolist():
                tokens[row].append(int(chosen[row]))
                logprobs[row].append(claimed[row])
            ended |= chosen[:, 0] == self._eos
            if bool(ended.all()):
                break
            ids = chosen
        rows = zip(prompts, seeds, tokens, logprobs, strict=True)
        return [Claim(tuple(p), tuple(t), tuple(lp), seed) for p, seed, t, lp in rows]


def rounded_weights(model: nn.Module, bits: int) -> nn.Module:
    """A copy with each row of each matrix rounded to so many bits (symmetric, by its largest value)."""
    made, levels = copy.deepcopy(model), 2 ** (bits - 1) - 1
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                scale = parameter.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
                parameter.copy_((parameter / scale).round() * scale)
    return made


def hotter(temperature: float) -> Callable[[Tensor], Tensor]:
    """Another temperature."""
    return lambda logp: logp / temperature


def top_k(k: int) -> Callable[[Tensor], Tensor]:
    """The k most likely tokens alone; 1 is greedy."""

    def change(logp: Tensor) -> Tensor:
        least = logp.topk(k, dim=-1).values[:, -1:]
        return logp.masked_fill(logp < least, -1e9)

    return change
