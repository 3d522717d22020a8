"""What can be set about the transformers engine. Must not import torch: the agent checks its own settings with this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformersSettings:
    device: str = "auto"
    """"cpu", "cuda", or "auto": cuda when there is one"""
    dtype: str = "auto"
    """compute dtype; "auto" is float32 on a CPU and the state's own dtype on a GPU"""
    attention: str = "sdpa"
    max_running: int = 64
    """sequences decoded at once; further ones wait"""
    max_context: int = 0
    """tokens of prompt and completion together; 0 for what the model allows"""
    prefill_tokens: int = 8192
    """padded tokens one admission may prefill; a single longer prompt still goes, alone"""
    kv_policy: str = "recompute"
    """what a commit does to running sequences: "recompute" their keys and values under the new weights (exact), or
    "keep" the old ones (faster; later tokens then mix two versions)"""

    def __post_init__(self) -> None:
        if self.kv_policy not in ("recompute", "keep"):
            raise ValueError(f"kv_policy {self.kv_policy!r} is neither recompute nor keep")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is none of auto, cpu, cuda")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is none of auto, float32, bfloat16, float16")
        if self.max_running < 1 or self.prefill_tokens < 1 or self.max_context < 0:
            raise ValueError("max_running and prefill_tokens must be at least 1, max_context at least 0")
