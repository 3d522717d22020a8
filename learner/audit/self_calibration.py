"""What computing in bfloat16 does to a run's own model on its own prompts, found without any node. Needs torch.

A run in which nobody is trusted has no honest node to measure. But the auditor has the weights: it computes some places of
completions in bfloat16 as well, as a node of transformers would have, and what that gives is judged in float32 like a node's
claim. The places are such as nobody could choose: the head gives prompt and seed, so a completion that is as the seed draws it
is the same whoever sends it, but for rounding. Where it first is not, a node may have led it to places that suit it: from there
on the auditor goes on by itself, as the seed draws.

Must not know nodes, versions or what follows.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from learner.audit.bets import NEAR
from learner.audit.claims import Claim, prompt_number
from learner.audit.continued import continued
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.measuring import STRETCH
from learner.audit.repeats import SeenTokens
from learner.audit.scorer import draw, score
from learner.audit.statistic import SeededDraws

MOST_OF_PROMPT = STRETCH
"""Places of one prompt's completions that are looked at in one call: a calibration counts no more of it."""


class SampledBy(NamedTuple):
    """How nodes draw."""

    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: Collection[int] = ()
    """tokens that end a completion"""
    longest: int = MOST_OF_PROMPT
    """tokens of a completion at the most"""


PLAIN = SampledBy()
"""From the whole distribution at temperature 1."""


def measure_bfloat16(
    model: nn.Module, claims: Sequence[Claim], scored: Sequence[Deviations], most: int, sampled: SampledBy = PLAIN, *,
    seen: SeenTokens | None = None,
) -> OwnDeviations:  # fmt: skip
    """What an honest node that computes in bfloat16 would have come to at up to `most` places of these claims, all of them
    together. `scored`: what `score` found of them; `model`, in float32, is as it was for that, and is left so. `seen`: what it
    came to before."""
    places = _places_of_nobodys_choice(model, claims, scored, most, sampled)
    temperature, top_p = sampled.temperature, sampled.top_p
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


class _Begun(NamedTuple):
    """A claim's beginning that is as its seed draws it."""

    claim: Claim
    goes_on: bool
    """whether more would have been drawn behind it"""


def _begun(claim: Claim, scored: Deviations) -> _Begun:
    """What an environment gave ends it: that may be the answer to what a node led it to."""
    whole = len(claim.completion_ids) if claim.stop is None else claim.stop
    given = min((gap[0] for gap in claim.given), default=whole)
    drawn, end = as_drawn(scored), min(whole, given)
    stop = min(drawn, end)
    cut = dataclasses.replace(
        claim, completion_ids=claim.completion_ids[:stop], logprobs=claim.logprobs[:stop], stop=None, given=()
    )
    return _Begun(cut, drawn < end or (given >= whole and not claim.ended))


def _places_of_nobodys_choice(
    model: nn.Module, claims: Sequence[Claim], scored: Sequence[Deviations], most: int, sampled: SampledBy
) -> list[Claim]:  # fmt: skip
    """The claims as their seeds draw them: what a node wrote is in them as far as it is that, and what would have followed then.
    In rounds, for how long a completion becomes is known when it is there: it has room until then for all it may become."""
    left, of_prompt, found = most, Counter[tuple[int, ...]](), list[Claim]()
    waiting = [_begun(claim, of) for claim, of in zip(claims, scored, strict=True) if not claim.first]
    while waiting and left:
        taken, lengths, others, room = list[Claim](), list[int](), list[_Begun](), Counter(of_prompt)
        for begun in waiting:
            claim = begun.claim
            length = sampled.longest if begun.goes_on else len(claim.completion_ids)
            length = min(length, left - sum(lengths), MOST_OF_PROMPT - room[claim.prompt_ids])
            if length <= 0:
                others.append(begun)
                continue
            ids, logprobs = claim.completion_ids[:length], claim.logprobs[:length]
            taken.append(dataclasses.replace(claim, completion_ids=ids, logprobs=logprobs))
            lengths.append(length)
            room[claim.prompt_ids] += length
        if not taken:
            break
        for claim in continued(
            model, taken, lengths, sampled.stop_ids, temperature=sampled.temperature, top_p=sampled.top_p
        ):  # fmt: skip
            left -= len(claim.completion_ids)
            of_prompt[claim.prompt_ids] += len(claim.completion_ids)
            found.append(claim)
        waiting = others
    return found


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
