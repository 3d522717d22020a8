"""What a model takes, counted on one that has shapes and no values: `python -m learner.trainer.forecast.count` prints it as JSON.

The model is transformers' own from its configuration, in torch's fake mode: every operation of a forward and backward pass runs
and gives tensors without memory, whose bytes are counted while they live. So nothing is said twice, here and in the forward. What
is not seen: memory that a kernel takes for itself, and what an allocator wastes.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from learner.trainer.forecast.facts import REFUSED, ModelCosts
from learner.trainer.forecast.live import LiveBytes
from learner.trainer.forward.forward import TokenForward, can_checkpoint
from learner.trainer.forward.layout import RowTokens
from learner.trainer.forward.saved import layer_bytes
from learner.trainer.logit_chunks import LogitChunk, chunk_on
from learner.trainer.settings import CHECKPOINT_FROM, LoraSection
from p2p.errors import UsageError

FEW, MORE = 3, 4
"""Layers of two passes from which that of a deeper model follows: each layer more takes the same."""


def count_model(
    config: Any, tokens: int, *, checkpointing: str = "auto", bfloat16: bool = False, gpu: bool = False,
    lora: LoraSection | None = None, frozen: str = "float32",
) -> ModelCosts:  # fmt: skip
    """Of a model by transformers' configuration, with passes of `tokens` tokens. `lora` with a rank: an adapter is trained on the
    frozen model, whose weights are of the type `frozen`; parameters that need no gradient are not trained. `checkpointing`, as
    the setting. `gpu`: as on a GPU, where logits of more tokens exist at once."""
    how = _How(bfloat16, chunk_on("cuda" if gpu else "cpu"), lora if lora is not None and lora.rank else None, frozen)
    with FakeTensorMode():
        whole = _build(config, how)
        parameters = sum(p.numel() for p in whole.parameters())
        trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
        out = whole.get_output_embeddings()
        head = out.weight.numel() if out is not None else 0
        heads = {id(m.weight) for m in (whole.get_input_embeddings(), out) if m is not None}
        matrices = sum(p.numel() for p in whole.parameters() if p.requires_grad and p.ndim >= 2 and id(p) not in heads)
        checkpoint = checkpointing == "on" or (checkpointing == "auto" and parameters >= CHECKPOINT_FROM)
        checkpoint = checkpoint and can_checkpoint(whole)
    layers = int(getattr(config.get_text_config(), "num_hidden_layers", 0))
    found, layer, why = 0, 0, ""
    try:
        if layers > MORE:
            few, more = (
                _pass(_shallower(config, count), tokens, checkpoint=checkpoint, how=how) for count in (FEW, MORE)
            )
            found, layer = few.peak + (layers - FEW) * (more.peak - few.peak), more.layer
        else:
            found, layer = _pass(config, tokens, checkpoint=checkpoint, how=how)
    except Exception as error:  # any architecture may do what cannot be done without values: then it is not known
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return ModelCosts(
        parameters, trained, matrices, head=head, activations=found, tokens=tokens, layers=layers if layer else 0,
        layer_bytes=layer, bfloat16=bfloat16, unknown=why,
    )  # fmt: skip


def _build(config: Any, how: _How) -> nn.Module:
    """Within the mode in which tensors have no values."""
    if how.lora is None:
        return _plain(config)
    from learner.trainer.adapter.adapted import adapt

    # peft casts what it makes, which tensors of that mode cannot be: it works on the meta device, and all is replaced after.
    with unset_fake_temporarily(), torch.device("meta"):
        model = _plain(config)
        adapt(model, how.lora)  # in place
    frozen: torch.dtype = getattr(torch, how.frozen)
    made = dict[int, nn.Parameter]()
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(old) not in made:  # tied ones stay tied
                dtype = torch.float32 if old.requires_grad else frozen
                made[id(old)] = nn.Parameter(torch.empty(old.shape, dtype=dtype), requires_grad=old.requires_grad)
            setattr(module, name, made[id(old)])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


def _plain(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return model


def _shallower(config: Any, layers: int) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = list(kinds[:layers])
    return config


class _How(NamedTuple):
    bfloat16: bool
    chunk: LogitChunk
    lora: LoraSection | None = None
    """None: every weight is trained"""
    frozen: str = "float32"


class _Pass(NamedTuple):
    peak: int
    """most bytes at once, beside weights and gradients"""
    layer: int
    """bytes that a layer takes more when it is not run again in the backward; 0: none is"""


def _pass(config: Any, tokens: int, *, checkpoint: bool, how: _How) -> _Pass:
    """A forward and backward pass over one row. Two are run: gradients are there in the second, and what is added to them is
    counted."""
    with FakeTensorMode():
        model = _build(config, how)
        forward = TokenForward(model, checkpoint_layers=checkpoint, bfloat16=how.bfloat16, try_it=False, chunk=how.chunk)
        size = int(config.get_text_config().vocab_size)
        row = RowTokens((0,), tuple(i % size for i in range(tokens)))
        forward([row]).logprobs.sum().backward()
        held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        with LiveBytes(held) as live:
            forward([row]).logprobs.sum().backward()
        return _Pass(live.peak, int(layer_bytes(forward, tokens)))


def main() -> int:
    """Reads what is asked from stdin: `model`, a folder or a shape's name, and `count_model`'s other arguments."""
    from transformers import AutoConfig

    asked = json.load(sys.stdin)
    config = AutoConfig.from_pretrained(asked.pop("model"), local_files_only=True)
    try:
        found = count_model(config, lora=LoraSection(**asked.pop("lora")), **asked)
    except UsageError as error:
        print(json.dumps({REFUSED: list(error.problems)}))
        return 0
    print(json.dumps({name: getattr(found, name) for name in ModelCosts.__dataclass_fields__}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
