"""What a node may do instead of its work. Each takes what honest work would be made of and gives claims. Must not know checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from learner.audit.scorer import Claim
from netem.bench.audit.engines import (
    ChangedSampler,
    FastNode,
    MakesClaims,
    Prompt,
    hotter,
    rounded_weights,
    top_k,
)
from netem.bench.staleness.sampler import Sampler


def cheats(now: nn.Module, before: nn.Module, long_ago: nn.Module, other: nn.Module, most: int) -> Mapping[str, MakesClaims]:
    """By name. `before` and `long_ago` are the weights of one and of ten versions ago, `other` is another model."""
    honest = FastNode(Sampler(now), most)
    plain: dict[str, MakesClaims] = {
        "another model": FastNode(Sampler(other), most),
        "weights of ten versions ago": FastNode(Sampler(long_ago), most),
        "weights of one version ago": FastNode(Sampler(before), most),
        "4-bit weights": FastNode(Sampler(rounded_weights(now, 4)), most),
        "8-bit weights": FastNode(Sampler(rounded_weights(now, 8)), most),
        "temperature 0.7": FastNode(ChangedSampler(now, hotter(0.7)), most),
        "temperature 0.9": FastNode(ChangedSampler(now, hotter(0.9)), most),
        "top-k 3": FastNode(ChangedSampler(now, top_k(3)), most),
        "greedy": FastNode(ChangedSampler(now, top_k(1)), most),
    }
    changed: dict[str, Callable[[list[Claim], np.random.Generator], list[Claim]]] = {
        "copied answers": _copied, "shuffled answers": _shuffled, "edited tokens (1 in 20)": _edited,
        "log probabilities: constant -1": _constant, "log probabilities: +0.1": _shifted,
        "log probabilities of another token": _of_another,
    }  # fmt: skip
    plain["best of two seeds"] = _shopping(honest)
    for name, change in changed.items():
        plain[name] = _after(honest, change)
    return plain


def _after(honest: MakesClaims, change: Callable[[list[Claim], np.random.Generator], list[Claim]]) -> MakesClaims:
    def make(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Claim]:
        return change(honest(prompts, seeds), np.random.default_rng(int(seeds[0]) % 2**32))

    return make


def _shopping(honest: MakesClaims) -> MakesClaims:
    """Of two completions the likelier one."""

    def make(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Claim]:
        first, second = honest(prompts, seeds), honest(prompts, [seed + 1_000_003 for seed in seeds])
        better = (a if sum(a.logprobs) >= sum(b.logprobs) else b for a, b in zip(first, second, strict=True))
        return [replace(one, seed=seed) for one, seed in zip(better, seeds, strict=True)]

    return make


def _copied(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    """One completion in four is made, and copied for three more prompts."""
    source = [claims[i - i % 4] for i in range(len(claims))]
    return [
        replace(c, completion_ids=s.completion_ids, logprobs=s.logprobs) for c, s in zip(claims, source, strict=True)
    ]  # fmt: skip


def _shuffled(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    order = rng.permutation(len(claims))
    return [
        replace(c, completion_ids=claims[i].completion_ids, logprobs=claims[i].logprobs)
        for c, i in zip(claims, order, strict=True)
    ]  # fmt: skip


def _edited(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    """The claimed log probabilities stay those of what was drawn."""
    tokens = [t for c in claims for t in c.completion_ids]

    def edit(c: Claim) -> Claim:
        ids = tuple(int(rng.choice(tokens)) if rng.random() < 0.05 else t for t in c.completion_ids)
        return replace(c, completion_ids=ids)

    return [edit(c) for c in claims]


def _constant(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    return [replace(c, logprobs=(-1.0,) * len(c.logprobs)) for c in claims]


def _shifted(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    return [replace(c, logprobs=tuple(min(0.0, x + 0.1) for x in c.logprobs)) for c in claims]


def _of_another(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    """Those of the token before it."""
    return [replace(c, logprobs=c.logprobs[-1:] + c.logprobs[:-1]) for c in claims]
