"""The transformers engine and the trainer's extraction on a CUDA device. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from learner.trainer.model import served_tensors
from node.engine.flat_model import write_state
from node.engine.port import StateFile
from node.engine.settings import TransformersSettings
from node.engine.transformers import TransformersCore
from p2p.protocol.rollout import Completion, Generate
from p2p.version import Version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = Qwen3Config(
    vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    intermediate_size=512, tie_word_embeddings=True, max_position_embeddings=512,
)  # fmt: skip


def make_state(folder: Path, seed: int, version: Version) -> tuple[StateFile, torch.nn.Module]:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG)
    CONFIG.save_pretrained(folder)
    path = folder / f"{seed}.state"
    return StateFile(path, write_state(model, path, "float32"), version), model.cuda().eval()


def run(core: TransformersCore, requests: list[Generate]) -> dict[str, Completion]:
    out = {r.request_id: Completion() for r in requests}
    for request in requests:
        core.add(request)
    while core.has_work():
        for event in core.step():
            out[event.request_id].add(event)
    return out


def test_greedy_equals_generate_and_survives_a_commit(tmp_path: Path) -> None:
    first, model = make_state(tmp_path, 1, Version(1, 0))
    second, other = make_state(tmp_path, 2, Version(1, 1))
    core = TransformersCore(TransformersSettings(device="cuda", dtype="float32"))
    core.load(tmp_path, first)
    prompt = (5, 9, 33, 7)
    for state, reference, name in ((first, model, "a"), (second, other, "b")):
        if state is second:
            core.stage(second)
            assert core.commit().version == Version(1, 1)
        done = run(core, [Generate(name, prompt, 24, (255,), 1, Version(1, 0), temperature=0.0)])[name]
        want = reference.generate(torch.tensor([prompt]).cuda(), do_sample=False, max_new_tokens=24, eos_token_id=255)
        assert done.ids == want[0, len(prompt) :].tolist()
    core.close()


def test_served_bits_of_a_model_on_the_device() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).cuda()
    on_device = served_tensors(model, "bfloat16")
    on_cpu = served_tensors(model.cpu(), "bfloat16")
    assert on_device.keys() == on_cpu.keys()
    for name, (dtype, bits) in on_device.items():
        assert dtype == on_cpu[name][0] and np.array_equal(bits, on_cpu[name][1])
