"""Prefills and the cache they leave, in bfloat16 on a processor, where each length would be compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from node.engine.kvrows import prefill
from p2p.few_sizes import FEW_SIZES, multiple_on
from tests.support.engine_world import VOCAB, qwen3_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_prefills_of_few_sizes_leave_a_cache_without_what_filled_them_up(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = qwen3_config()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    widths = list[int]()
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    masked = list[bool]()
    model.register_forward_pre_hook(lambda _, args, kwargs: masked.append(kwargs["attention_mask"] is not None), with_kwargs=True)
    rng = np.random.default_rng(1)
    for lengths in ((5,), (3, 20), (32,), (40, 1, 33), (70, 64), (50, 50)):
        rows: list[list[int]] = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
        kv, logits = prefill(model, config, rows, CPU, multiple=multiple_on("cpu", str(dtype)))
        longest = max(lengths)
        assert masked == [len(set(lengths)) > 1], "what fills rows up needs no mask"
        assert kv.width == longest and kv.pads.tolist() == [longest - n for n in lengths]
        assert widths.pop() == (longest if dtype == torch.float32 else -(-longest // FEW_SIZES) * FEW_SIZES)
        following = kv.decode(model, torch.tensor([[1]] * len(rows)))
        for row, first, second in zip(rows, logits, following, strict=True):
            alone = (model(input_ids=torch.tensor([ids]), attention_mask=None).logits[0, -1] for ids in (row, [*row, 1]))
            for got, want in zip((first, second), alone, strict=True):
                assert_alike(got, want, dtype)
        widths.clear()
        masked.clear()


def assert_alike(got: Any, want: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0)
