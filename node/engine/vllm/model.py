"""The plan of a vLLM engine, from a model's folder and our settings: architecture, dtype, context, memory. Must not import
vllm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from node.engine.adapter import AdapterPlan, read_adapter
from node.engine.flat_model import compute_dtype, context_length, read_config
from node.engine.port import StateFile
from node.engine.settings import VllmSettings
from p2p.errors import Refusal
from p2p.layout import ITEMSIZE

CPU_KV_BYTES = 4 << 30
"""Bytes for keys and values on a CPU, at most, unless the settings say more: vLLM's default is most of the machine's memory."""

KV_BLOCK = 128
"""Tokens of a block of keys and values in vLLM on a CPU: each sequence may leave most of one block unused."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a vLLM engine is built for. A model whose plan equals that of a running engine can be loaded into it."""

    model_dir: Path
    config: str
    """the folder's config.json"""
    architectures: tuple[str, ...]
    """what vLLM looks the model up by"""
    dtype: str
    context: int
    vocab: int
    kv_bytes: int | None
    """None: vLLM decides"""
    adapter: AdapterPlan | None = None


def plan_model(model_dir: Path, state: StateFile, settings: VllmSettings, *, on_cpu: bool) -> LoadPlan:
    """The plan for the model in `model_dir` with the weights of `state`. Refusal when the folder's configuration is unreadable,
    or of a model that cannot generate."""
    config, text = read_config(model_dir), (model_dir / "config.json").read_text(encoding="utf-8")
    architectures = tuple(config.architectures or ())
    if not architectures:  # a configuration that was never saved with a model lacks them
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if known is None:
            raise Refusal(f"{config.model_type} is no causal LM, and config.json names no architecture")
        architectures = (known,)
    context = context_length(config, settings.max_context)
    dtype, vocab = compute_dtype(state, settings.dtype, on_cpu=on_cpu), int(config.get_text_config().vocab_size)
    kv_bytes = settings.kv_bytes or (cpu_kv_bytes(config, dtype, context, settings.max_running) if on_cpu else None)
    return LoadPlan(
        model_dir, text, architectures, dtype=dtype, context=context, vocab=vocab, kv_bytes=kv_bytes,
        adapter=read_adapter(model_dir, state.layout),
    )  # fmt: skip


def cpu_kv_bytes(config: Any, dtype: str, context: int, sequences: int) -> int:
    """Bytes of keys and values that `sequences` sequences of `context` tokens take, at most CPU_KV_BYTES."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width * ITEMSIZE[dtype]
    blocks = sequences * -(-context // KV_BLOCK) + sequences + 2
    return min(blocks * KV_BLOCK * token, CPU_KV_BYTES)


