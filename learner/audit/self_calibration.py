"""What computing in bfloat16 does to a run's own model on its own prompts, found without any node. Needs torch.

A run in which nobody is trusted has no honest node to measure. But the auditor has the weights: it answers some of the run's
prompts itself, in float32, and computes the places of these completions in bfloat16 as well, as a node of transformers would
have. What that gives is judged in float32 like a node's claim. Prompts and seeds are the head's, so no node has a say in it.

Must not know nodes, versions or what follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from learner.audit.claims import Claim, OwnGroup, prompt_number
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.measuring import STRETCH
from learner.audit.own_completions import OwnRow, SampledBy, own_completions
from learner.audit.repeats import SeenTokens
from learner.audit.scorer import draw, score
from learner.audit.statistic import SeededDraws

MOST_OF_PROMPT = STRETCH
"""Places of one prompt's completions that are looked at in one call, for a calibration counts no more of it. Where prompts are
few each has more completions, for of few prompts many tokens are measured (`PLENTY`)."""

MOST_READ = 2_048
"""Tokens that are read in one call, prompts and all, one completion at least: checks wait meanwhile, and prompts may be long."""


def measure_bfloat16(
    model: nn.Module, groups: Sequence[OwnGroup], most: int, sampled: SampledBy, *, seen: SeenTokens | None = None
) -> OwnDeviations:  # fmt: skip
    """What an honest node that computes in bfloat16 would come to at up to `most` places of completions of these groups, fewer
    where that is much to read. `model`, in float32, is left as it was. `seen`: what it came to before."""
    claims = _completions(model, groups, most, sampled)
    if not claims:
        return OwnDeviations.none()
    asked = (sampled.temperature, sampled.top_p)
    with _in_bfloat16(model):
        drawn = draw(model, claims, *asked)
    found = score(model, claims, *asked, drawn)
    seen = SeenTokens() if seen is None else seen
    repeated = [_repeated(*of, seen) for of in zip(claims, drawn, found, strict=True)]
    prompts = [np.full(len(new), float(prompt_number(claim.prompt_ids))) for claim, new in zip(claims, repeated, strict=True)]
    columns = (np.concatenate(column) for column in zip(*found, strict=True))
    return OwnDeviations(Deviations(*columns), np.concatenate(repeated), np.concatenate(prompts))


def _completions(model: nn.Module, groups: Sequence[OwnGroup], most: int, sampled: SampledBy) -> list[Claim]:
    """Of these groups, in their order. In rounds, for how long a completion becomes is known when it is there: until then it has
    room for all that it may become."""
    left, to_read, of_prompt, found = most, MOST_READ, Counter[tuple[int, ...]](), list[Claim]()
    most_of_prompt = max(MOST_OF_PROMPT, most // max(1, len({group.prompt_ids for group in groups})))
    waiting = [OwnRow(group.prompt_ids, seed, min(sampled.longest, MOST_OF_PROMPT)) for group in groups for seed in group.seeds]
    while waiting and left > 0:
        rows, others, room = list[OwnRow](), list[OwnRow](), Counter(of_prompt)
        for row in waiting:
            length = min(row.most, left - sum(of.most for of in rows), most_of_prompt - room[row.prompt_ids])
            read = sum(len(of.prompt_ids) + of.most for of in rows) + len(row.prompt_ids) + length
            if length > 0 and (read <= to_read or not (rows or found)):
                rows.append(row._replace(most=length))
                room[row.prompt_ids] += length
            else:
                others.append(row)
        if not rows:
            break
        made = own_completions(model, rows, sampled)
        for claim in made:
            of_prompt[claim.prompt_ids] += len(claim.completion_ids)
            left -= len(claim.completion_ids)
            to_read -= len(claim.prompt_ids) + len(claim.completion_ids)
        found += [claim for claim in made if claim.completion_ids]
        waiting = others
    return found


def _repeated(claim: Claim, drawn: SeededDraws, found: Deviations, seen: SeenTokens) -> np.ndarray:
    """Which of the tokens that were drawn at a claim's places came so before. Where another one than the claim's was, it is new:
    there are few."""
    repeated = np.zeros(len(drawn.tokens), bool)
    places = np.flatnonzero(drawn.tokens == np.array(claim.completion_ids))
    again = seen.again(claim.prompt_ids, claim.completion_ids, places.tolist(), found.claimed[places], found.recomputed[places])
    repeated[places] = ~np.isnan(again)
    return repeated


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
