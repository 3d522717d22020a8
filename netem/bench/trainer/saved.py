"""What a forward keeps for its backward, before and now, counted on a model of true width without values. No GPU, no weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from learner.trainer.forecast.live import LiveBytes
from learner.trainer.forecast.sizes import shape_config
from learner.trainer.forward.forward import TokenForward
from learner.trainer.forward.layout import RowTokens
from learner.trainer.forward.saved import Saved, saved_by, saved_bytes

ROWS = 8
"""Rows of the forward, of equal lengths: then the older way pads nothing."""


def compare_saved(shape: str, tokens: int) -> dict[str, Any]:
    """One forward of `tokens` tokens, in float32: all logits at once and every activation kept, as at 1832404, and as it is now
    with every layer run again."""
    row = tokens // ROWS
    prompts = [tuple((i + r) % 1000 for i in range(row // 4)) for r in range(ROWS)]
    rows = [RowTokens(prompt, tuple(i % 1000 for i in range(row - row // 4))) for prompt in prompts]
    with FakeTensorMode():
        before, largest_before = _before(shape, rows)
        model = _model(shape)
        forward = TokenForward(model, checkpoint_layers=True, try_it=False)
        with LiveBytes([*model.parameters()]) as live:
            # One row of as many tokens: what several rows are put together by are values, which there are none of here.
            now = saved_bytes(forward, [RowTokens((0,) * (tokens // 4), (0,) * (tokens - tokens // 4))])
        largest = live.largest({tuple(p.shape) for p in model.parameters()})
        vocabulary = shape_config(shape).vocab_size
    return {
        "shape": shape, "tokens": tokens, "vocabulary": vocabulary, "before": before.total, "now": now.total,
        "share": now.total / before.total, "largest_before": list(largest_before), "largest_now": list(largest),
    }  # fmt: skip


def _model(shape: str) -> Any:
    return AutoModelForCausalLM.from_config(shape_config(shape), attn_implementation="sdpa").eval()


def _before(shape: str, rows: list[RowTokens]) -> tuple[Saved, tuple[int, ...]]:
    """The operations of 1832404 (learner/model.py there), on rows of one length."""
    model = _model(shape)
    width = len(rows[0].completion)
    ids = torch.zeros(len(rows), len(rows[0].prompt) + width - 1, dtype=torch.int64)
    targets = torch.zeros(len(rows), width, 1, dtype=torch.int64)

    def run() -> Tensor:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=width).logits.float()
        log_p = torch.log_softmax(logits, dim=-1)
        with torch.no_grad():
            detached = log_p.detach()
            -(detached.exp() * detached).sum(dim=-1)
        return log_p.gather(2, targets).squeeze(2)

    with LiveBytes([*model.parameters()]) as live:
        found = saved_by(model, run)
    return found, live.largest({tuple(p.shape) for p in model.parameters()})


def describe_saved(result: dict[str, Any]) -> str:
    """Two lines."""
    return (
        f"{result['shape']} shapes, {result['tokens']:,} tokens, float32: kept for the backward "
        f"{result['before'] / 2**30:.2f} GiB before, {result['now'] / 2**30:.2f} GiB now ({result['share']:.3f} of it)\n"
        f"largest tensor of the forward: {result['largest_before']} before, {result['largest_now']} now; the vocabulary has "
        f"{result['vocabulary']:,}"
    )
