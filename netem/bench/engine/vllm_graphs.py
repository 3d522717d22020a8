"""vLLM's engine with one kind of CUDA graphs, in a process of the engine's environment: `python -P vllm_graphs.py ASK(JSON)`.

Prints one JSON object: seconds of the start, tokens a second by sequences at once, pauses of commits under load, and how far
tokens' log probabilities are from those of transformers under the version that they claim, and under the other one. Must not be
imported: it sets up its process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LOADED = 32
"""Sequences that run while versions change."""

EVERY = 32
"""Steps from one version to the next."""

PROMPT = 40
"""Tokens of a prompt."""

TRANSFORMERS = "transformers"
"""In place of a kind of graphs: the transformers engine."""


@dataclass
class Checked:
    """What came of one request, whose tokens are compared with transformers."""

    prompt: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """of the version of each token"""


def make_states(ask: dict[str, Any], folder: Path) -> list[Any]:
    """Two states of unrelated random values, of the same layout; with a rank: one base and two adapters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from node.engine.flat_model import state_tensors, write_tensors
    from node.engine.port import StateFile
    from p2p.layout import ADAPTER
    from p2p.version import Version

    rank = int(ask["rank"])
    config = Qwen3Config(**ask["config"])
    config.save_pretrained(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    device, found = "cuda" if torch.cuda.is_available() else "cpu", list[StateFile]()
    for step in range(2):
        torch.manual_seed(0 if rank else step)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, ask["dtype"]))
        tensors = {name: tensor.detach().cpu() for name, tensor in state_tensors(model).items()}
        torch.manual_seed(step)
        for name, module in model.named_modules() if rank else ():
            if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
                # So large that the two versions are as far apart as two models.
                for part, shape in (("lora_A", (rank, module.in_features)), ("lora_B", (module.out_features, rank))):
                    tensors[f"{ADAPTER}{name}.{part}"] = torch.randn(shape) * (shape[1] ** -0.5 if part == "lora_A" else 0.1)
        layout = write_tensors(tensors, folder / f"state-{step}.bin", ask["dtype"])
        found.append(StateFile(folder / f"state-{step}.bin", layout, Version(0, step)))
        del model
    return found


def requests(sequences: list[Checked], new: int) -> list[Any]:
    """Of these prompts, named by their places."""
    from p2p.protocol.rollout import Generate
    from p2p.version import Version

    return [
        Generate(str(i), one.prompt, new, stop_ids=(), seed=i, min_version=Version(0, 0)) for i, one in enumerate(sequences)
    ]


def drawn(count: int, vocabulary: int, seed: int) -> list[Checked]:
    """Random prompts."""
    rng = np.random.default_rng(seed)
    return [Checked(tuple(int(x) for x in rng.integers(0, vocabulary, PROMPT))) for _ in range(count)]


def speed(core: Any, ask: dict[str, Any], count: int, vocabulary: int) -> dict[str, Any]:
    """Tokens a second of `count` sequences at once, with their prefill, and the median step."""
    for request in requests(drawn(count, vocabulary, count), ask["new"]):
        core.add(request)
    began, made, steps = time.perf_counter(), 0, list[float]()
    while core.has_work():
        at = time.perf_counter()
        made += sum(event.count for event in core.step())
        steps.append(time.perf_counter() - at)
    return {"sequences": count, "tokens_per_s": made / (time.perf_counter() - began), "step_s": float(np.median(steps))}


class Swapped(NamedTuple):
    """What came of versions that changed under sequences."""

    commits: list[dict[str, float]]
    """seconds of each"""
    sequences: list[Checked]


def versions(core: Any, states: list[Any], vocabulary: int) -> Swapped:
    """Sequences that go on through three versions, the first state's again as the last."""
    from p2p.version import Version

    sequences, commits = drawn(LOADED, vocabulary, 1), []
    for request in requests(sequences, 3 * EVERY):
        core.add(request)
    step = 0
    while core.has_work():
        if step in (EVERY, 2 * EVERY):
            number = step // EVERY
            at = time.perf_counter()
            core.stage(replace(states[number % 2], version=Version(0, number)))
            staged = time.perf_counter()
            result = core.commit()
            commits.append({"stage_s": staged - at, "pause_s": result.pause_s, "apply_s": result.apply_s})
        for event in core.step():
            one = sequences[int(event.request_id)]
            one.ids += event.ids
            one.logprobs += [float(x) for x in event.logprobs]
            one.steps += [event.version.step] * event.count
        step += 1
    return Swapped(commits, sequences)


def apart(folder: Path, states: list[Any], sequences: list[Checked], dtype: str) -> dict[str, float]:
    """Nats between what was said and what transformers says, over all tokens: under the version claimed, and the other."""
    from node.engine.settings import TransformersSettings
    from node.engine.transformers import TransformersCore

    off = dict[tuple[int, int], np.ndarray]()
    for which, state in enumerate(states):
        reference = TransformersCore(TransformersSettings(dtype=dtype))  # type: ignore[arg-type]
        reference.load(folder, state)
        for i, one in enumerate(sequences):
            off[i, which] = np.abs(np.array(one.logprobs) - reference.score(one.prompt, one.ids))
        reference.close()
    claimed = np.concatenate([np.where(np.array(one.steps) % 2, off[i, 1], off[i, 0]) for i, one in enumerate(sequences)])
    other = np.concatenate([np.where(np.array(one.steps) % 2, off[i, 0], off[i, 1]) for i, one in enumerate(sequences)])
    return {
        "mean": float(claimed.mean()), "most": float(claimed.max()), "other": float(other.mean()), "tokens": len(claimed)
    }  # fmt: skip


def open_core(ask: dict[str, Any], running: int) -> Any:
    """The engine that is measured: vLLM's with a kind of graphs, or transformers'."""
    from node.engine.settings import TransformersSettings, VllmSettings
    from node.engine.transformers import TransformersCore

    if ask["graphs"] == TRANSFORMERS:
        import torch

        if not torch.cuda.is_available():
            torch.set_num_threads(ask["threads"])
        return TransformersCore(TransformersSettings(dtype=ask["dtype"], max_running=running))
    from node.engine.vllm.engine import VllmCore

    return VllmCore(
        VllmSettings(dtype=ask["dtype"], graphs=ask["graphs"], kv_bytes=int(ask["kv_bytes"]), max_running=running)
    )


def main(ask: dict[str, Any]) -> dict[str, Any]:
    """Measure."""
    folder = Path(ask["folder"])
    states, counts = make_states(ask, folder), [int(n) for n in ask["sequences"]]
    core, began = open_core(ask, max(LOADED, *counts)), time.perf_counter()
    core.load(folder, states[0])
    found: dict[str, Any] = {"start_s": time.perf_counter() - began, "graphs": ask["graphs"], "rank": ask["rank"]}
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    speed(core, ask | {"new": 8}, counts[0], vocabulary)
    found["speeds"] = [speed(core, ask, count, vocabulary) for count in counts]
    found["commits"], sequences = versions(core, states, vocabulary)
    core.close()
    return found | {"apart": apart(folder, states, sequences, ask["dtype"])}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.loads(sys.argv[1])
    if asked["graphs"] != TRANSFORMERS:
        from node.engine.vllm.compat import prepare

        prepare(asked["threads"])
    print(json.dumps(main(asked)), file=answers, flush=True)
    os._exit(0)  # vLLM's ends take seconds
