"""What a node may do instead of its work: serve something else, draw otherwise, or change what honest work gave. Must not know
checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from learner.audit.scorer import Claim
from netem.bench.audit.nodes import MEMBERS
from netem.bench.audit.world import BEFORE, EIGHT, FOUR, LONG_AGO, NOW, OTHER

Change = Callable[[list[Claim], np.random.Generator], list[Claim]]


@dataclass(frozen=True, slots=True)
class Cheat:
    """How the tokens of one cheat are made."""

    state: str = NOW
    """what the engine serves"""
    temperature: float = 1.0
    top_k: int = 0
    shop: int = 1
    """completions of which the likeliest is sent"""
    change: Change | None = None
    """what is done to what the engine made"""
    mild: bool = False
    """it may take many tokens to find, or other states at hand"""
    rare: bool = False
    """it changes few tokens, so that it takes many to find, and claims the right log probabilities of these"""


def cheats(states: Sequence[str]) -> Mapping[str, Cheat]:
    """By name; those that serve other states where the world has them."""
    served = {name: Cheat(state=name, mild=name not in (OTHER, LONG_AGO)) for name in _ordered(states)}
    return served | {
        "temperature 0.7": Cheat(temperature=0.7), "temperature 0.9": Cheat(temperature=0.9), "top-k 3": Cheat(top_k=3),
        "greedy": Cheat(temperature=0.0), "best of two seeds": Cheat(shop=2),
        "copied answers": Cheat(change=_copied), "shuffled answers": Cheat(change=_shuffled),
        "edited tokens (1 in 20)": Cheat(change=_edited),
        **{f"last tokens ({_RARELY.format(rate)})": Cheat(change=partial(_last, rate=rate), rare=True) for rate in (100, 1_000)},
        "log probabilities: constant -1": Cheat(change=_constant), "log probabilities: +0.1": Cheat(change=_shifted),
        "log probabilities of another token": Cheat(change=_of_another),
    }  # fmt: skip


_RARELY = "1 in {:,} of all, nothing else"
"""How rarely a token is wrong."""


def _ordered(states: Sequence[str]) -> list[str]:
    first = [name for want in (OTHER, LONG_AGO, BEFORE, FOUR, EIGHT) for name in states if name.startswith(want)]
    return list(dict.fromkeys(first))


def likelier(tries: Sequence[list[Claim]]) -> list[Claim]:
    """Of several completions of each sequence the likeliest, under the first one's seed."""
    best = [max(same, key=lambda claim: sum(claim.logprobs)) for same in zip(*tries, strict=True)]
    return [replace(one, seed=first.seed) for one, first in zip(best, tries[0], strict=True)]


def _copied(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    """One completion in four is made, and copied for three more members of its group."""
    source = [claims[i - i % (MEMBERS // 2)] for i in range(len(claims))]
    return [
        replace(c, completion_ids=s.completion_ids, logprobs=s.logprobs) for c, s in zip(claims, source, strict=True)
    ]  # fmt: skip


def _shuffled(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    """The answers of a group, each under another member's seed: their log probabilities are right."""
    order = [i - i % MEMBERS + (i + 1 + int(rng.integers(MEMBERS - 1))) % MEMBERS for i in range(len(claims))]
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


def _last(claims: list[Claim], rng: np.random.Generator, rate: int) -> list[Claim]:
    """Of some completions the last token, and no other: one of `rate` tokens in all. What comes before is as it was drawn."""
    tokens = [t for c in claims for t in c.completion_ids]

    def edit(c: Claim) -> Claim:
        if rng.random() >= len(c.completion_ids) / rate:
            return c
        others = [t for t in tokens if t != c.completion_ids[-1]]
        return replace(c, completion_ids=(*c.completion_ids[:-1], int(rng.choice(others))))

    return [edit(c) for c in claims]


def _constant(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    return [replace(c, logprobs=(-1.0,) * len(c.logprobs)) for c in claims]


def _shifted(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    return [replace(c, logprobs=tuple(min(0.0, x + 0.1) for x in c.logprobs)) for c in claims]


def _of_another(claims: list[Claim], rng: np.random.Generator) -> list[Claim]:
    """Those of the token before it."""
    return [replace(c, logprobs=c.logprobs[-1:] + c.logprobs[:-1]) for c in claims]
