"""Many completions at once from a small model of Qwen3's or Llama's shape, as a node on a CPU makes them: weights rounded to the
served type, arithmetic in float32.

Faster than a model of transformers by what its Python costs: a decoding step of this size is some hundred microseconds of
arithmetic. Must not know tasks, rewards, versions or training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from learner.trainer.model import served_dtype

HIDDEN = -1e9
"""Added to the score of a position that is not seen: the padding before a short prompt, and what comes later."""


@dataclass(frozen=True, slots=True)
class _Layer:
    norm: Tensor
    qkv: Tensor
    """the three projections, one below the other"""
    q_norm: Tensor | None
    """None: of Llama's shape"""
    k_norm: Tensor | None
    out: Tensor
    norm_after: Tensor
    gate_up: Tensor
    down: Tensor


class Completions(NamedTuple):
    """One entry a row."""

    ids: list[tuple[int, ...]]
    """sampled tokens, the stop token with them"""
    logprobs: list[tuple[float, ...]]
    """of each, in nats"""


class Sampler:
    """The weights as they were at the last `load`."""

    def __init__(self, model: nn.Module, dtype: str = "bfloat16") -> None:
        config: Any = model.config
        self._dtype = served_dtype(dtype)
        self._heads, self._kv = config.num_attention_heads, config.num_key_value_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps, self._eos = float(config.rms_norm_eps), int(config.eos_token_id)
        rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
        at = torch.arange(config.max_position_embeddings)[:, None] * rotary.inv_freq[None, :].float()
        self._cos, self._sin = (torch.cat([f, f], dim=1) for f in (at.cos(), at.sin()))
        self._layers = list[_Layer]()
        self.load(model)

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Take the model's weights as nodes would get them."""
        state = {n: p.detach().to(self._dtype).float() for n, p in model.named_parameters(remove_duplicate=True)}
        self._words, self._norm = state["model.embed_tokens.weight"], state["model.norm.weight"]
        self._head = state.get("lm_head.weight", self._words)
        self._layers.clear()
        while (at := f"model.layers.{len(self._layers)}.") + "input_layernorm.weight" in state:
            of = {name.removeprefix(at).removesuffix(".weight"): t for name, t in state.items() if name.startswith(at)}
            self._layers.append(
                _Layer(
                    norm=of["input_layernorm"], norm_after=of["post_attention_layernorm"],
                    qkv=torch.cat([of[f"self_attn.{x}_proj"] for x in "qkv"]), out=of["self_attn.o_proj"],
                    q_norm=of.get("self_attn.q_norm"), k_norm=of.get("self_attn.k_norm"),
                    gate_up=torch.cat([of["mlp.gate_proj"], of["mlp.up_proj"]]), down=of["mlp.down_proj"],
                )
            )  # fmt: skip

    @torch.no_grad()
    def __call__(self, prompts: Sequence[tuple[int, ...]], copies: int, most: int, draws: Tensor | None = None) -> Completions:
        """`copies` completions of each prompt, of at most `most` tokens, prompt after prompt. `draws` [rows, most]: uniform
        numbers that choose the tokens; None: greedy. A prompt is read once for all its copies."""
        width = max(map(len, prompts))
        pads = torch.tensor([width - len(p) for p in prompts])
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        kept = torch.arange(width)
        hidden = (kept[None, :] < pads[:, None])[:, None, :] | (kept[None, :] > kept[:, None])[None]  # [P, width, width]
        caches = [self._empty(len(prompts), width + most) for _ in self._layers]
        at = (kept[None, :] - pads[:, None]).clamp(min=0)
        state = self._run(ids, at, caches, 0, hidden * HIDDEN)[:, -1]
        caches = [tuple(half.repeat_interleave(copies, dim=0) for half in pair) for pair in caches]
        state, pads = state.repeat_interleave(copies, dim=0), pads.repeat_interleave(copies)
        rows, seen = len(pads), (torch.arange(width + most)[None, :] < pads[:, None]) * HIDDEN
        tokens, logprobs = torch.zeros(rows, most, dtype=torch.long), torch.zeros(rows, most)
        ended, lengths = torch.zeros(rows, dtype=torch.bool), torch.full((rows,), most)
        for i in range(most):
            scores = self._scores(state)
            if draws is None:
                chosen = scores.argmax(dim=-1)
            else:
                total = scores.exp().cumsum(dim=-1)
                drawn = (draws[:, i] * total[:, -1])[:, None]
                chosen = torch.searchsorted(total, drawn, right=True).squeeze(1).clamp(max=scores.shape[1] - 1)
            tokens[:, i], logprobs[:, i] = chosen, scores.gather(1, chosen[:, None]).squeeze(1)
            lengths = lengths.where(ended | (chosen != self._eos), torch.tensor(i + 1))
            ended |= chosen == self._eos
            if bool(ended.all()) or i + 1 == most:
                break
            place = (width + i - pads)[:, None]
            state = self._run(chosen[:, None], place, caches, width + i, seen[:, None, : width + i + 1])[:, 0]
        ends = lengths.tolist()
        return Completions(
            [tuple(row[:n]) for row, n in zip(tokens.tolist(), ends, strict=True)],
            [tuple(row[:n]) for row, n in zip(logprobs.tolist(), ends, strict=True)],
        )

    def _scores(self, state: Tensor) -> Tensor:
        """Log probabilities [B, vocabulary] of the next token, from hidden states [B, H]."""
        return torch.log_softmax(linear(state, self._head), dim=-1)

    def _empty(self, rows: int, width: int) -> tuple[Tensor, ...]:
        return torch.empty(rows, self._kv, width, self._size), torch.empty(rows, self._kv, width, self._size)

    def _run(self, ids: Tensor, at: Tensor, caches: Sequence[tuple[Tensor, ...]], first: int, hidden: Tensor) -> Tensor:
        """`ids` and their positions `at` [B, T], keys and values behind the `first` of the caches; `hidden` [B, T, first + T] is
        added to scores. The last hidden states [B, T, H]."""
        batch, count = ids.shape
        last, per = first + count, self._heads // self._kv
        x, cos, sin = embedding(ids, self._words), self._cos[at][:, None], self._sin[at][:, None]  # [B, 1, T, D]
        for layer, (keys, values) in zip(self._layers, caches, strict=True):
            mixed = linear(self._normed(x, layer.norm), layer.qkv).view(batch, count, -1, self._size)
            q, k = mixed[:, :, : self._heads], mixed[:, :, self._heads : -self._kv]
            q = self._turned((q if layer.q_norm is None else self._normed(q, layer.q_norm)).transpose(1, 2), cos, sin)
            k = self._turned((k if layer.k_norm is None else self._normed(k, layer.k_norm)).transpose(1, 2), cos, sin)
            keys[:, :, first:last], values[:, :, first:last] = k, mixed[:, :, -self._kv :].transpose(1, 2)
            q = q.reshape(batch, self._kv, per * count, self._size) * self._size**-0.5
            scores = (q @ keys[:, :, :last].transpose(2, 3)).view(batch, self._kv, per, count, last)
            weights = torch.softmax(scores + hidden[:, None, None], dim=-1).view(batch, self._kv, per * count, last)
            mean = (weights @ values[:, :, :last]).view(batch, self._heads, count, self._size)
            x = x + linear(mean.transpose(1, 2).reshape(batch, count, -1), layer.out)
            gate, up = linear(self._normed(x, layer.norm_after), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        return self._normed(x, self._norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, weight.shape, weight, self._eps)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self._size // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
