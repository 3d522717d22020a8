"""Shapes of models as transformers' configurations, by name: of what is forecast and measured without a download.

Must not import torch or transformers before a configuration is asked for.
"""

from __future__ import annotations

from typing import Any

from p2p.errors import UsageError

QWEN_SIZES = ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
"""The sizes of Qwen2.5, by which models are spoken of."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "2m": ("qwen3", {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 384, "vocab_size": 8192, "tie_word_embeddings": True,
    }),
    "20m": ("qwen3", {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 1024, "vocab_size": 24576, "tie_word_embeddings": True,
    }),
    "135m": ("llama", {  # SmolLM2-135M
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "rope_theta": 100_000,
    }),
    "360m": ("qwen3", {
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "0.5b": ("qwen2", {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "1.5b": ("qwen2", {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "3b": ("qwen2", {
        "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
        "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "7b": ("qwen2", {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    }),
    "14b": ("qwen2", {
        "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "intermediate_size": 13824, "vocab_size": 152064, "tie_word_embeddings": False,
    }),
    "32b": ("qwen2", {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
        "intermediate_size": 27648, "vocab_size": 152064, "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""Name -> kind of model and its configuration's values. 2m, 20m and 360m are made up to fit on a small machine; 135m is
SmolLM2-135M's; the others are Qwen2.5's."""


def shape_config(name: str, **changed: Any) -> Any:
    """transformers' configuration of a shape, some values `changed`. UsageError for an unknown name."""
    from transformers import AutoConfig

    if name not in SHAPES:
        raise UsageError(f"model shape {name!r} is not one of {', '.join(SHAPES)}")
    kind, values = SHAPES[name]
    return AutoConfig.for_model(kind, **{"max_position_embeddings": 32768, **values, **changed})
