"""Log probabilities of rows under a model: the one door for the trainer and its reference.

Must not know rewards, groups or versions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learner.trainer.forward.attention import PLAN, AttentionPlan, plan, use_packed_attention
from learner.trainer.forward.layout import PackedRows, RowTokens, packed
from learner.trainer.forward.varlen import VarlenPlan, varlen_plan
from learner.trainer.forward.varlen_trial import works_on
from learner.trainer.forward.vocabulary import LogitForm, TokenLogprobs, token_logprobs
from learner.trainer.logit_chunks import LogitChunk
from learner.trainer.model import completion_logprobs
from p2p.few_sizes import multiple_on, rounded_up
from p2p.gpu_attention import without_plans_by_shape
from p2p.processes import give_back_what_is_freed

log = logging.getLogger("shoal.trainer")

INSIDE = "call_inside"
"""Name of a method of a model whose parameters are only at hand during its forward: it calls what it is given, with all of
them at hand (`learner.trainer.ranks.sharding`)."""

SAME = 2e-3
"""Nats: the packed forward of a model must give its own log probabilities this nearly in float32, or it is not used."""

SAME_IN_BFLOAT16 = 0.25
"""Nats in the mean over tokens, for a model whose weights are bfloat16 and whose logits so have steps of a sixteenth:
SmolLM2-135M is 0.07 apart, and 0.94 where rows see each other."""


class TokenForward:
    """A model that gives log probabilities of rows' sampled tokens.

    Rows lie one behind the other without padding (`learner.trainer.forward.layout`), where the model can do that: attention that
    transformers lets us replace, an output projection of a known form, no state beside keys and values. Whether it can is found
    out with a few tokens, by comparing with the model's own logits. Other models run in padded rows, with all logits at once.
    """

    def __init__(
        self, model: nn.Module, *, share_prompts: bool = True, checkpoint_layers: bool = False, bfloat16: bool = False,
        try_it: bool = True, give_back: bool = False, chunk: LogitChunk | None = None,
    ) -> None:  # fmt: skip
        """`checkpoint_layers`: keep each layer's input alone for the backward, and run it again there. `bfloat16`: compute in it
        (autocast); log probabilities stay float32. `try_it` False: a model without values, of which it is not known whether it
        can be packed; it is taken for one that can. `give_back`: let the system have what is free before the
        logits, when most is held: holes between what layers keep were up to a quarter of a step's memory there.
        `chunk`: of how many tokens logits exist at once; None: what suits the device."""
        self.model, self._share, self._bfloat16, self._chunk = model, share_prompts, bfloat16, chunk
        self._give_back = give_back_what_is_freed if give_back else _keep
        without_plans_by_shape(torch)
        computed = {(p.device.type, "bfloat16" if bfloat16 else str(p.dtype)) for p in model.parameters()}
        self.multiple = max(multiple_on(*one) for one in computed)
        """tokens of whose multiples forwards are"""
        self.varlen = False
        """a layer's attention is one call for all rows"""
        self.reason = self._why_padded() if try_it else ""
        """why rows are padded; "" where they are packed"""
        if self.reason:
            log.warning("forwards are padded, with all logits at once, and take more memory: %s", self.reason)
        if not try_it:
            use_packed_attention(model)
        if try_it and not self.reason:
            self._try_varlen()
        if hasattr(model, INSIDE):
            model.reshard()  # type: ignore[operator]
        self.layers = 0
        """layers of which the input alone is kept for the backward, as far as `kept` does not say otherwise"""
        self.kept = 0
        """of these: how many, the last ones, keep everything instead, which takes memory and saves running them again"""
        if checkpoint_layers:
            self._checkpoint_layers()

    def __call__(
        self, rows: Sequence[RowTokens], *, temperature: float = 1.0, entropy_gradient: bool = True
    ) -> TokenLogprobs:
        """[N] each: the sampled tokens row after row, in nats, with gradient. Without `entropy_gradient` padded rows keep
        no graph of the entropy, which is of all logits at once."""
        if self.reason:
            return self._padded(rows, temperature, entropy_gradient)
        return self._packed(rows, temperature)

    def _packed(self, rows: Sequence[RowTokens], temperature: float) -> TokenLogprobs:
        inside = getattr(self.model, INSIDE, None)
        found: TokenLogprobs = inside(self._by_parts, rows, temperature) if inside else self._by_parts(rows, temperature)
        return found

    def _by_parts(self, rows: Sequence[RowTokens], temperature: float) -> TokenLogprobs:
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        device = head.weight.device
        laid = packed(rows, share_prompts=self._share, multiple=self.multiple)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._bfloat16):
            hidden: Tensor = self.model.get_decoder()(  # type: ignore[operator]
                input_ids=torch.tensor([laid.ids], device=device),
                position_ids=torch.tensor([laid.positions], device=device),
                use_cache=False,
                **{PLAN: self._plan(laid, device)},
            ).last_hidden_state[0]
        self._give_back()
        count = len(laid.predicts)
        fill = [0] * (rounded_up(count, self.multiple) - count)
        predicting = hidden.index_select(0, torch.tensor(laid.predicts + fill, device=device))
        targets, form = torch.tensor(laid.targets + fill, device=device), _form(self.model.config, temperature)
        found = token_logprobs(predicting, head.weight, head.bias, targets, form, chunk=self._chunk, rounded=self._bfloat16)
        return TokenLogprobs(found.logprobs[:count], found.entropy[:count]) if fill else found

    def _plan(self, laid: PackedRows, device: torch.device) -> AttentionPlan | VarlenPlan:
        return varlen_plan(laid, device) if self.varlen else plan(laid, device)

    def _try_varlen(self) -> None:
        """One call a layer, on a GPU in bfloat16, which is what its kernel computes in; if it gives what the buckets give."""
        device = next(self.model.parameters()).device
        if device.type != "cuda" or not self._bfloat16:
            return
        # Both, whatever the first one says: ranks gather the model for the second together.
        reasons = works_on(device, self.model.config.get_text_config()), self._why_not_varlen()
        why = reasons[0] or reasons[1]
        if why:
            log.warning("attention is computed by groups of like lengths, which is slower: %s", why)
        self.varlen = not why

    @torch.no_grad()
    def _why_not_varlen(self) -> str:
        """ "" when the model itself gives the same log probabilities."""
        found = list[Tensor]()
        try:
            for self.varlen in (False, True):
                found.append(self._packed(self._some_rows(), 1.0).logprobs)
        except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        apart = float((found[0] - found[1]).abs().mean())
        return "" if apart < SAME_IN_BFLOAT16 else f"log probabilities are {apart:.3g} nats off"

    def _some_rows(self) -> list[RowTokens]:
        """With a prompt that two of them share."""
        size = min(int(self.model.config.get_text_config().vocab_size), 97)
        ids = tuple(7 * i % size for i in range(12))
        return [RowTokens(ids[:3], ids[3:8]), RowTokens(ids[:3], ids[4:6]), RowTokens(ids[2:4], ids[5:])]

    def _checkpoint_layers(self) -> None:
        """The library's own way needs training mode, in which dropout and routers do other things than when they generate."""
        for layer in recomputable_layers(self.model):
            layer.forward = partial(self._recomputed, self.layers, layer.forward)
            self.layers += 1

    def _recomputed(self, number: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or number >= self.layers - self.kept:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def _padded(self, rows: Sequence[RowTokens], temperature: float, entropy_gradient: bool = False) -> TokenLogprobs:
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._bfloat16):
            found = completion_logprobs(
                self.model, [row.prompt for row in rows], [row.completion for row in rows],
                given=[row.given for row in rows], temperature=temperature,
                entropy="gradient" if entropy_gradient else True,
            )  # fmt: skip
        assert found.entropy is not None
        return TokenLogprobs(found.logprobs[found.mask], found.entropy[found.mask])

    def _why_padded(self) -> str:
        """"" when the packed forward gives what the model itself gives."""
        before = getattr(self.model.config, "_attn_implementation", "sdpa")
        rows = self._some_rows()
        compute, self._bfloat16 = self._bfloat16, False
        try:
            with torch.no_grad():
                self.model.set_attn_implementation("sdpa")  # type: ignore[operator]
                own = self._padded(rows, 1.0)
                use_packed_attention(self.model)
                ours = self._packed(rows, 1.0)
            apart, exact = (own.logprobs - ours.logprobs).abs(), self.model.dtype != torch.bfloat16
            same = bool(apart.max() < SAME) if exact else bool(apart.mean() < SAME_IN_BFLOAT16)
            reason = "" if same else f"packed rows give other log probabilities, by up to {float(apart.max()):.3g} nats"
        except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            self._bfloat16 = compute
        if reason:
            self.model.set_attn_implementation(before)  # type: ignore[operator]
        return reason


def _keep() -> None:
    """What is free stays with the process."""


def _form(config: Any, temperature: float) -> LogitForm:
    """How this architecture makes logits, by the names that transformers' models have for it."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    return LogitForm(scale, float(getattr(text, "final_logit_softcapping", None) or 0.0), temperature)


def can_checkpoint(model: nn.Module) -> bool:
    """Whether the model has layers that can be run again in the backward."""
    return next(recomputable_layers(model), None) is not None


def recomputable_layers(module: nn.Module) -> Iterator[nn.Module]:
    """What transformers itself would checkpoint, whatever the model calls its list of them; outermost ones."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from recomputable_layers(child)
