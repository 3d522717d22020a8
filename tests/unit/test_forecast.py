"""What training is forecast to take: counted on shapes, summed by settings, told in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from learner.preflight.counting import count_costs
from learner.trainer.adapter.adapted import adapt
from learner.trainer.forecast.count import count_model
from learner.trainer.forecast.facts import ModelCosts
from learner.trainer.forecast.forecast import (
    HOLES,
    KEEP_SHARE,
    KERNELS_BYTES,
    LIBRARIES_BYTES,
    SMALL_HOLES,
    SMALL_HOLES_COMPILED,
    MemoryForecast,
    TrainingPlan,
    forecast,
    kept_layers,
    room_to_keep,
)
from learner.trainer.forecast.live import LiveBytes
from learner.trainer.forecast.sizes import QWEN_SIZES, SHAPES, shape_config
from learner.trainer.forecast.words import line, table, what_helps
from learner.trainer.forward.forward import TokenForward
from learner.trainer.forward.layout import RowTokens
from learner.trainer.forward.saved import layer_bytes
from learner.trainer.logit_chunks import ON_PROCESSOR
from learner.trainer.settings import LoraSection, TrainerSection
from p2p.errors import UsageError

GIB = 1 << 30
COSTS = ModelCosts(10**9, 10**9, 8 * 10**8, activations=2 * GIB, tokens=4096, layers=20, layer_bytes=GIB)
CPU, GPU = TrainingPlan(own_memory=False), TrainingPlan(own_memory=True)


def taken(costs: ModelCosts = COSTS, plan: TrainingPlan = GPU) -> MemoryForecast:
    return forecast(costs, plan)


def test_bytes_a_parameter_of_plain_training() -> None:
    """Weights 4, gradients 4, AdamW 8, the published state 2, and the activations."""
    assert taken().device == 18 * 10**9 + 2 * GIB and taken().host == 4 * 10**9 + 12 * 10**9 + LIBRARIES_BYTES
    on_cpu = taken(plan=CPU)
    holes = int(HOLES * 2 * GIB)
    assert on_cpu.device == (16 + 4) * 10**9 + 2 * GIB + holes + LIBRARIES_BYTES and on_cpu.host == 0
    in_bfloat16 = replace(COSTS, bfloat16=True, head=10**8)
    compiled = (40 + 8) * KERNELS_BYTES
    assert taken(in_bfloat16, CPU).device == on_cpu.device + compiled + 2 * 10**8
    assert taken(in_bfloat16).device == taken().device
    small = replace(COSTS, parameters=9 * 10**6, trained=9 * 10**6, matrices=0)
    assert taken(small, CPU).size_of("holes between them") == int(SMALL_HOLES * 2 * GIB)
    compiled_small = taken(replace(small, bfloat16=True), CPU)
    assert compiled_small.size_of("holes between them") == int(SMALL_HOLES_COMPILED * 2 * GIB)
    assert taken(plan=replace(GPU, reference=True)).device - taken().device == 4 * 10**9


def test_moments_follow_each_other() -> None:
    """What is cast to be published is not there beside gradients and activations: the larger of the two counts."""
    small = replace(COSTS, activations=0)
    with_gradients = forecast(small, CPU)
    assert with_gradients.device == 20 * 10**9 + LIBRARIES_BYTES, "gradients are more than what is cast"
    frozen = replace(small, trained=0, matrices=0)
    assert forecast(frozen, CPU).device == (4 + 4 + 2) * 10**9 + LIBRARIES_BYTES, "no gradients: what is cast counts"


@pytest.mark.parametrize(("optimizer", "device", "host"), [("adamw", 12, 0), ("adamw_8bit", 6.03, 0), ("adamw_host", 4, 12)])
def test_optimizers(optimizer: str, device: float, host: float) -> None:
    plan = replace(GPU, optimizer=optimizer)
    found = forecast(COSTS, plan)
    each = sum(i.size for i in found.items if i.place == "device" and i.name in ("weights", "optimizer")) / COSTS.parameters
    assert each == pytest.approx(device, rel=0.01)
    assert sum(i.size for i in found.items if i.place == "host" and i.name == "optimizer") == pytest.approx(host * 10**9)


def test_ranks_share_all_but_activations_and_an_adapter_leaves_the_rest_frozen() -> None:
    assert taken(plan=replace(GPU, ranks=4)).device == 18 * 10**9 // 4 + 2 * GIB
    together = taken(plan=replace(CPU, ranks=4)), taken(plan=CPU)
    each = 2 * GIB * (1 + HOLES) + LIBRARIES_BYTES
    assert together[0].device - together[1].device == pytest.approx(3 * each, abs=4), "in one memory: four times"
    of_four = {item.name: item.size for item in taken(plan=replace(GPU, ranks=4)).items}
    assert of_four["published states"] == 4 * 10**9, "the first rank holds them whole"
    adapter = replace(COSTS, trained=10**7, matrices=10**7)
    plan = replace(GPU, whole=False, frozen_bytes=2, copies=3)
    found = forecast(adapter, plan)
    assert found.device == pytest.approx(2 * 10**9 + 2 * GIB + 18 * 10**7, rel=0.01)
    assert found.disk == 3 * 12 * 10**7


def test_layers_that_may_keep_everything() -> None:
    assert room_to_keep(100 * GIB, 0) == KEEP_SHARE * 100 * GIB and room_to_keep(GIB, 10**9) == 0
    assert [kept_layers(COSTS, replace(GPU, room=room)) for room in (0, 5 * GIB, 99 * GIB)] == [0, 5, 20]
    assert taken(plan=replace(GPU, room=5 * GIB)).device - taken().device == 5 * GIB


@pytest.mark.parametrize("bfloat16", [False, True])
def test_an_adapter_is_counted_as_it_is_trained(bfloat16: bool) -> None:
    """What layers keep is that of a real one. A frozen layer keeps no input of its own, and no rounded copy of its weights."""
    shape, lora = shape_config("2m"), LoraSection(rank=4)
    frozen = "bfloat16" if bfloat16 else "float32"
    costs = count_model(shape, 256, checkpointing="on", bfloat16=bfloat16, lora=lora, frozen=frozen)
    model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, frozen), attn_implementation="sdpa").eval()
    adapt(model, lora)
    assert costs.parameters == sum(p.numel() for p in model.parameters()) and not costs.unknown
    assert costs.trained == costs.matrices == sum(p.numel() for p in model.parameters() if p.requires_grad)
    real = TokenForward(model, checkpoint_layers=True, bfloat16=bfloat16)
    assert costs.layer_bytes == int(layer_bytes(real, 256))
    deeper = shape_config("2m", num_hidden_layers=2 * shape.num_hidden_layers)  # counted by its first layers
    six = count_model(deeper, 256, checkpointing="on", bfloat16=bfloat16, lora=lora, frozen=frozen)
    assert six.layer_bytes == costs.layer_bytes and six.trained == 2 * costs.trained and six.activations > costs.activations
    whole = count_model(shape, 256, checkpointing="on", bfloat16=bfloat16)
    assert 0 < costs.layer_bytes < (0.9 if bfloat16 else 1.0) * whole.layer_bytes


def test_targets_that_a_model_has_not_are_told_by_the_setting(tmp_path: Path) -> None:
    """The process that counts finds it out: the head does not import torch."""
    shape_config("2m").save_pretrained(tmp_path)
    section = TrainerSection(micro_batch_tokens=64, lora=LoraSection(rank=4))
    found = count_costs(tmp_path, section, gpu=False)
    assert 0 < found.trained < found.parameters / 10 and found.activations
    wrong = section.model_copy(update={"lora": LoraSection(rank=4, targets=["nope"])})
    with pytest.raises(UsageError, match=r"^trainer\.lora\.targets: .*nope"):
        count_costs(tmp_path, wrong, gpu=False)


def test_words() -> None:
    said = line(taken(plan=replace(GPU, copies=3)))
    for part in ("18.8 GiB on the trainer's device", "weights 4, gradients 4, optimizer 8", "activations 2 GiB at 4,096 tokens"):
        assert part in said
    assert "on its host" in said and "on the disk" in said
    assert "activations not counted" in line(taken(replace(COSTS, activations=0)))
    rows = table(taken())
    assert any("activations" in row and "while training" in row for row in rows) and "in total" in rows[-1]


@pytest.mark.parametrize(
    ("costs", "plan", "word"),
    [
        (replace(COSTS, activations=90 * GIB), GPU, "micro_batch_tokens"),
        (COSTS, replace(GPU, room=99 * GIB), "activation_checkpointing"),
        (COSTS, GPU, "adamw_host"),
        (COSTS, CPU, "adamw_8bit"),
        (COSTS, replace(GPU, ranks=2), "micro_batch_tokens"),
        (replace(COSTS, activations=0), replace(GPU, optimizer="adamw_host"), "smaller model"),
    ],
)
def test_the_setting_that_helps_most(costs: ModelCosts, plan: TrainingPlan, word: str) -> None:
    assert word in what_helps(forecast(costs, plan))


def test_a_model_is_counted_by_its_shape() -> None:
    """Nothing of it is made: 32B costs no more than a small one. Deeper models follow from shallow ones."""
    shape = shape_config("2m")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(shape)
    costs = count_model(shape, 256, checkpointing="on")
    assert costs.parameters == sum(p.numel() for p in whole.parameters()) == costs.trained and not costs.unknown
    assert costs.head == 8192 * 128
    once, twice = (count_model(shape, tokens, checkpointing="on") for tokens in (4096, 8192))
    assert 1.3 * once.activations < twice.activations < 2.2 * once.activations
    six = count_model(shape_config("2m", num_hidden_layers=6), 256, checkpointing="off")
    seven, five = (count_model(shape_config("2m", num_hidden_layers=n), 256, checkpointing="off") for n in (7, 5))
    assert seven.activations - six.activations == six.activations - five.activations > costs.layer_bytes / 2
    assert set(QWEN_SIZES) < set(SHAPES)
    with pytest.raises(UsageError, match="not one of 2m"):
        shape_config("8t")


def test_live_bytes_are_those_that_are_alive() -> None:
    with FakeTensorMode():
        kept = torch.zeros(1000)
        with LiveBytes([kept]) as live:
            a = kept + 1
            b = (a * 2).sum()
            assert live.peak == 8004 and live.now == 4004, "the product is gone, the sum is there"
            del a, b
            assert live.now == 0


def test_nothing_of_tokens_times_vocabulary_is_ever_made() -> None:
    """Forward and backward: beside weights and their gradients no tensor has more values than a chunk of logits."""
    size, tokens = 151_936, 2048
    config = shape_config("2m", vocab_size=size, num_hidden_layers=2)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        forward = TokenForward(model, checkpoint_layers=True, try_it=False)
        with LiveBytes([*model.parameters()]) as live:
            forward([RowTokens((0,), tuple(range(tokens)))]).logprobs.sum().backward()
    largest = torch.Size(live.largest({tuple(p.shape) for p in model.parameters()})).numel()
    assert 0 < largest <= ON_PROCESSOR.size / 4 < tokens * size / 10
