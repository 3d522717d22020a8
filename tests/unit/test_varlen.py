"""Attention in one call over rows of any lengths gives what the buckets and the model itself give: with a kernel that is written
here, row by row, since torch's is for a GPU (tests/gpu)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from learner.trainer.forward import forward as forward_module
from learner.trainer.forward.attention import PLAN, packed_attention, plan
from learner.trainer.forward.forward import TokenForward
from learner.trainer.forward.layout import RowTokens, packed
from learner.trainer.forward.varlen import RowEnds, varlen_plan
from learner.trainer.forward.varlen_trial import works_on

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=48, max_position_embeddings=256)  # fmt: skip
CPU = torch.device("cpu")


def row_by_row(
    query: Tensor, key: Tensor, value: Tensor, ends: RowEnds, *, window: int | None, scale: float | None
) -> Tensor:
    """As `Kernel` says, by the formula."""
    q_at, k_at = ends.queries.tolist(), ends.keys.tolist()
    assert ends.most_queries == max(np.diff(q_at)) and ends.most_keys == max(np.diff(k_at))
    assert (q_at[-1], k_at[-1]) == (len(query), len(key)) and len(key) == len(value)
    outs = []
    for row in range(len(q_at) - 1):
        q = query[q_at[row] : q_at[row + 1]].transpose(0, 1)
        k, v = (x[k_at[row] : k_at[row + 1]].transpose(0, 1).repeat_interleave(q.shape[0] // x.shape[1], 0) for x in (key, value))
        last = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        at = torch.arange(k.shape[1])[None]
        seen = (at <= last) if window is None else (at <= last) & (at > last - window)
        scores = (q @ k.transpose(1, 2)) * (scale or q.shape[2] ** -0.5)
        outs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


class NoGradient(torch.autograd.Function):
    """Values as they are, gradients that are no numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, torch.nan)


def rows_of(seed: int, prompts: int = 3, samples: int = 3) -> list[RowTokens]:
    rng = np.random.default_rng(seed)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(1, 64, rng.integers(1, most)))

    return [RowTokens(prompt, tokens(25)) for prompt in (tokens(15) for _ in range(prompts)) for _ in range(samples)]


def of_all(forward: TokenForward, rows: list[RowTokens]) -> list[Tensor]:
    """Log probabilities, entropies and gradients."""
    found = forward(rows)
    weights = torch.linspace(-1, 1, len(found.logprobs))
    parameters = list(forward.model.parameters())
    gradients = torch.autograd.grad((found.logprobs * weights).sum() + 0.1 * found.entropy.sum(), parameters)
    return [found.logprobs.detach(), found.entropy.detach(), *gradients]


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SMALL), Qwen3Config(**SMALL, head_dim=16), MistralConfig(**SMALL, sliding_window=9)],
    ids=lambda c: c.model_type,
)  # fmt: skip
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
def test_values_and_gradients_are_those_of_the_buckets(
    config: Any, share: bool, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    forward = TokenForward(model, share_prompts=share, checkpoint_layers=checkpoint)
    assert not forward.reason and not forward.varlen
    rows = rows_of(1)
    want = of_all(forward, rows)
    monkeypatch.setattr(forward_module, "varlen_plan", partial(varlen_plan, kernel=row_by_row))
    forward.varlen = True
    for mine, theirs in zip(of_all(forward, rows), want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=7), st.booleans(), st.sampled_from([1, 8]),
    st.sampled_from([None, 3]), st.sampled_from([None, 0.3]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_layout_is_attended_as_by_its_buckets(
    drawn: list[tuple[int, int]], share: bool, multiple: int, window: int | None, scale: float | None
) -> None:
    prompts = ((1,), (2, 3, 4), (5, 6, 7, 8, 9))
    laid = packed([RowTokens(prompts[p], (7,) * n) for p, n in drawn], share_prompts=share, multiple=multiple)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, len(laid.ids), 8, generator=generator) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    how = {PLAN: plan(laid, CPU), "sliding_window": window, "scaling": scale}
    want = packed_attention(module, query, key, value, None, **how).out
    mine = varlen_plan(laid, CPU, row_by_row).attend(query, key, value, window=window, scale=scale)
    assert mine.shape == want.shape
    real = sorted(at for bucket in laid.buckets for s in bucket.stretches for at in range(s.start, s.stop))
    torch.testing.assert_close(mine[:, real], want[:, real], rtol=1e-5, atol=1e-5)


def test_what_does_not_give_the_same_is_not_used() -> None:
    config = Qwen3Config(**SMALL, head_dim=16)
    assert works_on(CPU, config, row_by_row) == ""
    for wrong in (
        lambda *given, **how: 1.1 * row_by_row(*given, **how),
        lambda *given, **how: row_by_row(*given, **{**how, "window": None}),
        lambda *given, **how: row_by_row(*given, **{**how, "scale": None}),
        lambda *given, **how: NoGradient.apply(row_by_row(*given, **how)),
    ):
        assert "off" in works_on(CPU, config, wrong)
    assert "Error" in works_on(CPU, config), "torch's own has no kernel for a processor"


def test_a_kernel_that_aligns_the_first_query_with_the_first_key_is_found_out() -> None:
    def aligned_left(query: Tensor, key: Tensor, value: Tensor, ends: RowEnds, **rest: Any) -> Tensor:
        begins, sizes = ends.keys[:-1], ends.queries.diff()
        kept = torch.cat([torch.arange(int(at), int(at + n)) for at, n in zip(begins, sizes, strict=True)])
        alike = ends._replace(keys=ends.queries, most_keys=ends.most_queries)
        return row_by_row(query, key[kept], value[kept], alike, **rest)

    assert "off" in works_on(CPU, LlamaConfig(**SMALL), aligned_left)
