"""The audit bench with a real engine: honest tokens are at their places, a cheating child and other weights are found, and what
was made is not made again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import trio
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.audit.calibration import NodeArithmetic
from netem.bench.audit.bench import judge
from netem.bench.audit.making import HONEST, TokenGoals, TokenMaker, stream_of
from netem.bench.audit.table import tables
from netem.bench.audit.world import EIGHT, NOW, OTHER, World, rounded_weights, served
from node.engine.flat_model import write_state
from tests.support.nightly import nightly

pytestmark = pytest.mark.e2e

EXACT = NodeArithmetic("transformers", "float32", "cpu")


def world(folder: Path) -> World:
    """Random weights of which each token has some 2 nats."""
    config = Qwen3Config(
        vocab_size=48, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128,
        head_dim=32, max_position_embeddings=256, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder / "model")
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).eval()
        model.get_output_embeddings().weight.data.mul_(4)
        models.append(served(model))
    layout = write_state(models[0], folder / f"{NOW}.state")
    write_state(rounded_weights(models[0], 8), folder / f"{EIGHT}.state")
    write_state(models[1], folder / f"{OTHER}.state")
    return World("tiny", folder, layout, prompt=lambda index: (1, 2 + index % 40, 5), most=24, stop=(0,), context=64)


@nightly
def test_engines_are_made_to_cheat_and_are_found(tmp_path: Path) -> None:
    here = world(tmp_path)
    goals = TokenGoals(honest=8_000, cheat=2_500, mild=1_000)
    maker = TokenMaker(here, here.checker(), goals, sys.executable, lambda line: None)
    trio.run(maker.make, [EXACT])
    made = sorted((tmp_path / "tokens").rglob("*.npz"))
    trio.run(maker.make, [EXACT])
    assert sorted((tmp_path / "tokens").rglob("*.npz")) == made  # there was nothing left to do
    assert stream_of(here, EXACT, HONEST).tokens >= 8_000
    result = judge(here, [EXACT], 2_000, lambda line: None)
    row = result["honest"][0]
    assert row["exact"] > 0.999 and row["kind known"]["caught"] == 0
    found = {cheat["cheat"]: cheat["kind known"]["median"] for cheat in result["cheats"]}
    assert len(found) == 13 and all(tokens is not None and tokens < 4_000 for tokens in found.values()), str(found)
    assert "| top-k 3 |" in tables(result)
