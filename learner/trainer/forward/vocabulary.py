"""Log probability and entropy of given tokens from hidden states, the vocabulary's projection in chunks.

Must not know models, rows or losses. Nothing of [tokens, vocabulary] outlives a chunk, in the backward neither: it computes each
chunk's logits anew. All of it is in float32, whatever the model computes in. Where that is bfloat16, products round what
they take, and not their sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learner.trainer.logit_chunks import LogitChunk, chunk_on
from p2p.few_sizes import FEW_SIZES


@dataclass(frozen=True, slots=True)
class LogitForm:
    """How a model makes logits of its projection: softcap * tanh(scale * x / softcap), or scale * x without a softcap. Then they
    are divided by `temperature`, the rollouts'."""

    scale: float = 1.0
    softcap: float = 0.0
    temperature: float = 1.0

    def of(self, projected: Tensor) -> Tensor:
        """Logits [n, V], in the projection's place."""
        if self.scale != 1.0:
            projected.mul_(self.scale)
        if self.softcap:
            projected.div_(self.softcap).tanh_().mul_(self.softcap)
        return projected if self.temperature == 1.0 else projected.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """What a gradient of logits is multiplied by to be one of the projection."""
        factor = self.scale / self.temperature
        if not self.softcap:
            return factor
        return factor * (1 - (logits * self.temperature / self.softcap).square())


class TokenLogprobs(NamedTuple):
    """Of each token, float32 [N]."""

    logprobs: Tensor
    entropy: Tensor


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, form: LogitForm, *,
    chunk: LogitChunk | None = None, rounded: bool = False,
) -> TokenLogprobs:  # fmt: skip
    """Log probability of `targets` (int64 [N]) and entropy (nats) under softmax of the logits of `hidden` [N, H], with gradients.

    `weight` [V, H] and `bias` [V] or None are the output projection's. `rounded`: products may round what they take, to bfloat16
    on a processor and to TF32 on a GPU, and add it up in float32. `chunk`: of how many tokens logits exist at once; None: what
    suits the device.
    """
    tokens = (chunk or chunk_on(hidden.device.type)).tokens_of(weight.shape[0])
    # What is rounded on a processor is compiled by size: with whole multiples here and there, a last chunk has few sizes.
    how = _How(form, max(1, tokens - tokens % FEW_SIZES if tokens > FEW_SIZES else tokens), rounded)
    return TokenLogprobs(*_ByChunks.apply(hidden, weight, bias, targets, how))


class _How(NamedTuple):
    form: LogitForm
    rows: int
    """tokens of a chunk"""
    rounded: bool


class _ByChunks(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How
    ) -> tuple[Tensor, Tensor]:
        count, (form, rows, rounded) = hidden.shape[0], how
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        entropy, total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False), _products(hidden.device.type, rounded):
            full, blocks = weight.float(), _Blocks(min(rows, count), weight)
            for at in range(0, count, rows):
                here = slice(at, at + rows)
                logits, p = blocks.of(hidden[here], full, bias, form)
                of_target = logits.gather(1, targets[here, None]).squeeze(1)
                most = logits.amax(dim=1, keepdim=True)
                shifted = logits.sub_(most)
                torch.exp(shifted, out=p)  # not normalised
                z = p.sum(dim=1)
                total[here] = z.log() + most.squeeze(1)
                logprobs[here] = of_target - total[here]
                # H = log Z - E[logit], both shifted
                entropy[here] = z.log() - p.mul_(shifted).sum(dim=1) / z
        saved = (hidden, weight, bias, targets, total, entropy)
        ctx.save_for_backward(*saved)
        ctx.how = how
        ctx.set_materialize_grads(False)  # None says that nothing came from there, zeros would have to be looked at
        return logprobs, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, total, entropy = ctx.saved_tensors
        form, rows, rounded = ctx.how
        if to_logprobs is None:
            to_logprobs = torch.zeros_like(total)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False), _products(hidden.device.type, rounded):
            full, blocks = weight.float(), _Blocks(min(rows, len(hidden)), weight)
            for at in range(0, len(hidden), rows):
                here = slice(at, at + rows)
                logits, p = blocks.of(hidden[here], full, bias, form)
                slope = form.slope(logits)  # before the logits are overwritten
                log_p = logits.sub_(total[here, None])
                if to_entropy is None:
                    gradient = log_p.exp_().mul_(-to_logprobs[here, None])
                else:
                    torch.exp(log_p, out=p)
                    spread = log_p.add_(entropy[here, None]).mul_(to_entropy[here, None]).add_(to_logprobs[here, None])
                    gradient = spread.mul_(p).neg_()
                gradient.scatter_add_(1, targets[here, None], to_logprobs[here, None])
                if isinstance(slope, Tensor) or slope != 1.0:  # a pass over all of it
                    gradient *= slope
                if of_hidden is not None:
                    of_hidden[here] = (gradient @ full).to(hidden.dtype)
                if of_weight is not None:
                    of_weight.addmm_(gradient.T, hidden[here].float())
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            None,
        )


@contextmanager
def _products(device: str, rounded: bool) -> Iterator[None]:
    """Until the end products of float32 take what they are given rounded, where `device` has instructions for that: a processor
    AMX. Others go on as they are."""
    if not rounded:
        yield
        return
    place = torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul
    before, place.fp32_precision = place.fp32_precision, "tf32" if device == "cuda" else "bf16"
    try:
        yield
    finally:
        place.fp32_precision = before


class _Blocks:
    """A chunk's logits, and room for as much again: the next chunk takes their place. Blocks of its own would be so many pages,
    each of which the system clears."""

    def __init__(self, rows: int, weight: Tensor) -> None:
        self._logits = torch.empty(rows, weight.shape[0], dtype=torch.float32, device=weight.device)
        self._more = torch.empty_like(self._logits)

    def of(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, form: LogitForm) -> tuple[Tensor, Tensor]:
        logits = torch.mm(hidden.float(), weight.T, out=self._logits[: len(hidden)])
        if bias is not None:
            logits += bias.float()
        return form.of(logits), self._more[: len(hidden)]
