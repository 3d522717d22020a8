"""What computing in bfloat16 does to a run's own model on its own prompts, found without any node. Needs torch.

A run in which nobody is trusted has no honest node to measure. But the auditor has the weights: it computes some places of
completions in bfloat16 as well, as a node of transformers would have, and what that gives is judged in float32 like a node's
claim. The places are such as nobody could choose: the head gives prompt and seed, so a completion that is as the seed draws it
is the same whoever sends it, but for rounding. Where it first is not, a node may have led it to places that suit it, and nothing
behind counts.

Must not know nodes, versions or what follows.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from learner.audit.bets import NEAR
from learner.audit.claims import Claim, prompt_number
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.measuring import STRETCH
from learner.audit.repeats import SeenTokens
from learner.audit.scorer import draw, score
from learner.audit.statistic import SeededDraws

MOST_OF_PROMPT = STRETCH
"""Places of one prompt's completions that are looked at in one call: a calibration counts no more of it."""


def measure_bfloat16(
    model: nn.Module, claims: Sequence[Claim], scored: Sequence[Deviations], most: int, temperature: float = 1.0,
    top_p: float = 1.0, *, seen: SeenTokens | None = None,
) -> OwnDeviations:  # fmt: skip
    """What an honest node that computes in bfloat16 would have come to at up to `most` places of these claims, all of them
    together. `scored`: what `score` found of them; `model`, in float32, is as it was for that, and is left so. `seen`: what it
    came to before."""
    places = list(_places_of_nobodys_choice(claims, scored, most))
    if not places:
        return OwnDeviations(Deviations(*(np.empty(0) for _ in Deviations._fields)), np.empty(0, bool), np.empty(0))
    with _in_bfloat16(model):
        drawn = draw(model, places, temperature, top_p)
    found = score(model, places, temperature, top_p, drawn)
    seen = SeenTokens() if seen is None else seen
    repeated = [_repeated(*of, seen) for of in zip(places, drawn, found, strict=True)]
    prompts = [np.full(len(new), float(prompt_number(claim.prompt_ids))) for claim, new in zip(places, repeated, strict=True)]
    columns = (np.concatenate(column) for column in zip(*found, strict=True))
    return OwnDeviations(Deviations(*columns), np.concatenate(repeated), np.concatenate(prompts))


def _repeated(claim: Claim, drawn: SeededDraws, found: Deviations, seen: SeenTokens) -> np.ndarray:
    """Which of the tokens that were drawn at a claim's places came so before. Where another one than the claim's was, it is new:
    there are few."""
    repeated = np.zeros(len(drawn.tokens), bool)
    places = np.flatnonzero(drawn.tokens == np.array(claim.completion_ids))
    again = seen.again(claim.prompt_ids, claim.completion_ids, places.tolist(), found.claimed[places], found.recomputed[places])
    repeated[places] = ~np.isnan(again)
    return repeated


def as_drawn(scored: Deviations) -> int:
    """Of a completion's first tokens, how many are as the seed draws them: up to rounding, which moves an interval's edge by less
    than NEAR. A token that is further from its draw than that, or than it is likely, may have been picked from many: beyond it
    nothing counts."""
    with np.errstate(over="ignore"):
        odd = ~(scored.distance <= np.minimum(np.exp(scored.recomputed), NEAR))
    return int(odd.argmax()) if odd.any() else len(odd)


def _places_of_nobodys_choice(claims: Sequence[Claim], scored: Sequence[Deviations], most: int) -> Iterator[Claim]:
    """The claims, cut off where they are not as drawn any more: the place of that token still counts, for it was read before it.
    What an environment gave ends them too: it may be the answer to what a node led it to."""
    left, of_prompt = most, Counter[tuple[int, ...]]()
    for claim, found in zip(claims, scored, strict=True):
        if claim.first:
            continue
        stop = len(claim.completion_ids) if claim.stop is None else claim.stop
        stop = min([stop, as_drawn(found) + 1, left, MOST_OF_PROMPT - of_prompt[claim.prompt_ids], *(g[0] for g in claim.given)])
        if stop <= 0:
            continue
        left -= stop
        of_prompt[claim.prompt_ids] += stop
        yield dataclasses.replace(
            claim, completion_ids=claim.completion_ids[:stop], logprobs=claim.logprobs[:stop], stop=stop, given=()
        )


@contextmanager
def _in_bfloat16(model: nn.Module) -> Iterator[None]:
    """Its parameters are rounded and back: those of a version that was published in bfloat16 come back as they were. Buffers
    (positions' frequencies) stay, as they do in a node's model."""
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, values in kept:
            parameter.data = values.to(torch.bfloat16)
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values
