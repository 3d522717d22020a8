"""Held-out accuracy with the trainer's own weights. Must not know versions, groups or the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from learner.tasks.port import ChatFormat, Prompt, Score, Task
from learner.tasks.prompting import PLAIN_CHAT, decode_completion, encode_prompt, stop_ids, stop_tokens

EVAL_BATCH = 64
"""Sequences decoded together: with more, a small model on a CPU makes hardly more tokens per second."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Means over the held-out prompts."""

    exact: float
    """fraction fully right"""
    reward: float
    length: float
    """mean completion tokens"""


def held_out_prompts(task: Task, size: int) -> list[Prompt]:
    """The fixed held-out set: the first `size` held-out problems, or all where there are fewer."""
    count = task.held_out_count
    return [task.held_out(i) for i in range(size if count is None else min(size, count))]


def evaluate(
    model: Any, tokenizer: Any, score: Callable[[Prompt, str], Score], prompts: Sequence[Prompt], max_new_tokens: int, *,
    form: ChatFormat = PLAIN_CHAT, stop: Sequence[str] = (),
) -> EvalResult:  # fmt: skip
    """Greedy completions of `prompts`, scored by `score` (a Scorer's). Leaves the model in the mode it was in. `form` and `stop`
    are the task's."""
    if not prompts:
        raise ValueError("nothing to evaluate on")
    was_training = model.training
    model.eval()
    exact = reward = length = 0.0
    try:
        for start in range(0, len(prompts), EVAL_BATCH):
            part = prompts[start : start + EVAL_BATCH]
            ids_of = [encode_prompt(tokenizer, p, form) for p in part]
            completions = greedy(model, tokenizer, ids_of, max_new_tokens, stop_tokens(tokenizer, stop))
            for prompt, ids in zip(part, completions, strict=True):
                result = score(prompt, decode_completion(tokenizer, ids, stop))
                exact, reward, length = exact + result.exact, reward + result.reward, length + len(ids)
    finally:
        model.train(was_training)
    return EvalResult(exact / len(prompts), reward / len(prompts), length / len(prompts))


@torch.no_grad()
def greedy(
    model: Any, tokenizer: Any, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, more_stops: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """Greedy completions, each cut after its first stop token (which it includes)."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    stops = (*stop_ids(tokenizer, eos), *more_stops)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    width = max(len(p) for p in prompts)
    device = next(model.parameters()).device
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)  # left-padded
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops),
        pad_token_id=pad,
    )
    completions = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        completions.append(tuple(row[:end]))
    return completions
