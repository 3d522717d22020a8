"""What a node's engine is measured against, in a process of the engine's environment:
`python -P vllm_alone.py KIND SETTINGS(JSON)`.

KIND "offline": vLLM's `LLM.generate`; "async": vLLM's `AsyncLLM` in its own process layout; "core": our adapter alone.
One JSON object a line comes in (what to do), one goes out (what was measured). Everything else that is printed goes to stderr.
Must not know the others, nor be imported: it sets up its process, and AsyncLLM is asyncio.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SETTLE_S = 0.2
"""Between two pauses of one load."""


def prompts(ask: dict[str, Any]) -> list[list[int]]:
    """As `models.prompts`, which may not be there in this environment."""
    return [
        np.random.default_rng(ask["seed"] + i).integers(0, ask["vocabulary"], ask["length"]).tolist()
        for i in range(ask["count"])
    ]


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of vLLM that are the same as our adapter's: without CUDA graphs, here as there."""
    return {
        "model": settings["whole"], "skip_tokenizer_init": True, "dtype": settings["dtype"], "enforce_eager": True,
        "max_num_seqs": settings["running"], "max_model_len": settings["context"], "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": settings["kv_bytes"],
    }  # fmt: skip


def offline(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """vLLM's offline batch. Returns the function that answers a question."""
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments(settings))

    def generate(ask: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(
            temperature=1.0, max_tokens=ask["new"], ignore_eos=True, detokenize=False, logprobs=0 if ask["logprobs"] else None
        )
        given = [{"prompt_token_ids": ids} for ids in prompts(ask)]
        began = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}

    return generate


def core(settings: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Our adapter of vLLM, in this process. Returns the function that answers a question."""
    from node.engine.port import StateFile
    from node.engine.settings import VllmSettings
    from node.engine.vllm.engine import VllmCore
    from p2p.layout import Layout
    from p2p.protocol.rollout import Generate
    from p2p.version import Version

    engine = VllmCore(
        VllmSettings(dtype=settings["dtype"], max_running=settings["running"], kv_bytes=settings["kv_bytes"], graphs="none")
    )
    layout = Layout.from_wire(settings["layout"])
    engine.load(Path(settings["folder"]), StateFile(Path(settings["state"]), layout, Version(0, 0)))

    def generate(ask: dict[str, Any]) -> dict[str, Any]:
        requests = [
            Generate(str(i), tuple(ids), ask["new"], stop_ids=(), seed=i, min_version=Version(0, 0))
            for i, ids in enumerate(prompts(ask))
        ]
        began, made = time.perf_counter(), 0
        for request in requests:
            engine.add(request)
        while engine.has_work():
            made += sum(event.count for event in engine.step())
        return {"seconds": time.perf_counter() - began, "tokens": made}

    return generate


class Paused:
    """AsyncLLM under load, paused and resumed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        self._arrivals: list[float] = []

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(settings)))

        self._engine = self._loop.run_until_complete(start())

    def __call__(self, ask: dict[str, Any]) -> dict[str, Any]:
        return self._loop.run_until_complete(self._measure(ask))

    async def _one(self, name: str, ids: list[int], new: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        async for _ in self._engine.generate({"prompt_token_ids": ids}, params, request_id=name):
            self._arrivals.append(time.perf_counter())

    async def _measure(self, ask: dict[str, Any]) -> dict[str, Any]:
        self._arrivals = []
        tasks = [
            asyncio.create_task(self._one(f"{ask['seed']}.{i}", ids, ask["new"])) for i, ids in enumerate(prompts(ask))
        ]
        while len(self._arrivals) < 10 * len(tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        whole, bare = [], []
        for _ in range(ask["pauses"]):
            whole.append(await self._paused(lambda: self._engine.pause_generation(mode="keep", clear_cache=True)))
            bare.append(await self._paused(lambda: self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {
            "call_s": [call for call, _ in whole], "gap_s": [gap for _, gap in whole],
            "bare_s": [call for call, _ in bare], "bare_gap_s": [gap for _, gap in bare],
        }  # fmt: skip

    async def _paused(self, pause: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
        """(seconds from the call of pause to the return of resume, the longest time without a token until they flow again)."""
        began, at = time.perf_counter(), len(self._arrivals)
        await pause()
        await self._engine.resume_generation()
        call = time.perf_counter() - began
        seen = len(self._arrivals)
        while len(self._arrivals) <= seen:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await asyncio.sleep(SETTLE_S)
        near = self._arrivals[max(0, at - 1) :]
        return call, max(b - a for a, b in pairwise(near))


def main(argv: list[str]) -> int:
    """Answer questions until stdin ends; `argv` is [kind, settings as JSON]."""
    kind, settings = argv[0], json.loads(argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from node.engine.vllm.compat import prepare

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if settings["processes"] else "0"
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first log probabilities take 15 s
    prepare(settings["threads"])
    makers: dict[str, Callable[..., Callable[[dict[str, Any]], dict[str, Any]]]] = {
        "offline": offline, "core": core, "async": Paused,
    }  # fmt: skip
    act = makers[kind](settings)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(act(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # vLLM's ends take seconds, and its processes end with this one


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
