"""Optimizers by name: what they change, what they keep, and that a checkpoint gives all of it back. And the learning rate."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from learner.section import wrong_keys
from learner.trainer.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from learner.trainer.matrices import keep_in_bfloat16
from learner.trainer.model import load_model
from learner.trainer.optimizers.host import HostAdamW
from learner.trainer.optimizers.kinds import bytes_per_parameter
from learner.trainer.optimizers.make import make_optimizer
from learner.trainer.optimizers.parts import parts_of
from learner.trainer.optimizers.schedule import learning_rate
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import OptimizerName, TrainerConfig, TrainerSection
from learner.trainer.trained import WholeModel
from learner.trajectory import Group
from netem.demo.tiny_model import build_random_model
from p2p.errors import UsageError
from tests.support.trainer_twins import make_group

KINDS: list[dict[str, Any]] = [
    {"optimizer": "adamw"},
    {"optimizer": "adamw_host"},
    {"optimizer": "adamw_host", "compute_dtype": "bfloat16"},
    {"optimizer": "muon"},
]
"""What can be run here, where it differs."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_model(tmp_path_factory.mktemp("tiny"), size="0.4m")


def settings(folder: Path, **changes: Any) -> TrainerConfig:
    base = {"device": "cpu", "threads": 1, "max_new_tokens": 8, "lr_ramp": 0, "lr": 1e-3}
    return TrainerConfig(model=str(folder), checkpoint_dir="unused", **{**base, **changes})


def groups_of(step: int) -> list[Group]:
    rng = np.random.default_rng(step)
    return [make_group(10 * step + i, rng) for i in range(4)]


def trainer_of(config: TrainerConfig) -> PolicyTrainer:
    return PolicyTrainer(WholeModel(load_model(config.model, "cpu").model), config)


def take(trainer: PolicyTrainer, step: int, groups: list[Group] | None = None) -> dict[str, float]:
    trainer.accumulate(groups or groups_of(step), step)
    return trainer.step(step)


class Body(nn.Module):
    """Every sort of parameter that the rule tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.experts = nn.Parameter(torch.randn(2, 8, 8))
        self.head = nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.tokens(ids) + self.positions(ids % 5))
        return self.head(self.down(torch.tanh(self.up(x)) @ torch.eye(16)) @ self.experts[0] @ self.experts[1])


def test_parameters_are_told_apart() -> None:
    body = Body()
    found = {part: [n.name for n in named] for part, named in parts_of(body.named_parameters(), body)._asdict().items()}
    assert found == {
        "hidden": ["up.weight", "down.weight"], "stacks": ["experts"], "head": ["head.weight"],
        "embeddings": ["tokens.weight", "positions.weight"], "vectors": ["norm.weight", "norm.bias", "up.bias"],
    }  # fmt: skip
    body.head.weight = body.tokens.weight  # tied: it goes with the embedding
    tied = parts_of(body.named_parameters(), body)
    assert tied.head == [] and [n.name for n in tied.embeddings] == ["tokens.weight", "positions.weight"]


@pytest.mark.parametrize("kind", ["adamw", "adamw_host", "muon"])
def test_norms_biases_and_embeddings_do_not_decay(tiny: Path, kind: OptimizerName) -> None:
    """Without gradient only decay moves a weight: by lr * decay of itself."""
    torch.manual_seed(0)
    body = Body()
    before = {n: p.detach().clone() for n, p in body.named_parameters()}
    config = settings(tiny, optimizer=kind, lr=0.1, weight_decay=0.5)
    optimizer = make_optimizer(body.named_parameters(), config, body)
    for p in body.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    decayed = {n for n, p in body.named_parameters() if not torch.equal(p, before[n])}
    assert decayed == {"up.weight", "down.weight", "experts", "head.weight"}
    for name, parameter in body.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if name in decayed else 1.0))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_each_trains(tiny: Path, kind: dict[str, Any]) -> None:
    """A step again and again on the same groups: what was rewarded becomes likelier."""
    trainer, groups = trainer_of(settings(tiny, objective="topr", **kind)), groups_of(0)
    losses = [take(trainer, 0, groups)["loss/mean"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_saved_and_loaded_it_goes_on_bit_for_bit(tiny: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    config = settings(tiny, weight_decay=0.1, **kind)
    through, resumed = trainer_of(config), trainer_of(config)
    for step in range(2):
        take(through, step)
    folder = save_checkpoint(tmp_path, 2, through.trained, through.optimizer, epoch=1, config={})
    assert load_checkpoint(folder, resumed.trained, resumed.optimizer) == 2
    for step in (2, 3):
        assert take(through, step) == take(resumed, step)
    for (name, a), (_, b) in zip(through.trained.named_state(), resumed.trained.named_state(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(states(through.optimizer), states(resumed.optimizer), strict=True):
        assert torch.equal(a, b)


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for _, entry in sorted(optimizer.state_dict()["state"].items()) for _, value in sorted(entry.items())]


@pytest.mark.parametrize("bucket", [4, 4096, 1 << 28])
def test_on_the_host_the_update_has_adamw_s_bits(tiny: Path, bucket: int) -> None:
    """The masters apart, as for a GPU, gradients by buckets of a value, of a few tensors, of all."""
    config = settings(tiny, weight_decay=0.1)
    plain, apart = trainer_of(config), trainer_of(config)
    model = apart.trained.module
    groups = [
        {"params": list(zip(g["param_names"], g["params"], strict=True)), "kind": "adamw_host", "weight_decay": g["weight_decay"]}
        for g in apart.optimizer.param_groups
    ]
    apart.optimizer = HostAdamW(groups, model=model, bfloat16=False, lr=config.lr, betas=(0.9, 0.95), bucket_bytes=bucket)
    for step in range(3):
        assert take(plain, step) == take(apart, step)
    for a, b in zip(plain.trained.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    masters = [p for g in apart.optimizer.param_groups for p in g["params"]]
    assert not {p.data_ptr() for p in masters} & {p.data_ptr() for p in model.parameters()}
    assert all(p.grad is None for p in (*masters, *model.parameters()))


def test_with_bfloat16_the_device_keeps_rounded_masters_and_float32_gradients(tiny: Path) -> None:
    trainer = trainer_of(settings(tiny, optimizer="adamw_host", compute_dtype="bfloat16", lr=1e-5))
    before = [p.detach().clone() for g in trainer.optimizer.param_groups for p in g["params"]]
    trainer.accumulate(groups_of(0), 0)
    trainer.flush()
    resident = dict(trainer.trained.module.named_parameters())
    assert {p.dtype for p in resident.values() if p.ndim > 1} == {torch.bfloat16}
    assert {p.dtype for p in resident.values() if p.ndim < 2} == {torch.float32}
    assert {p.grad.dtype for p in resident.values() if p.grad is not None} == {torch.float32}
    trainer.step(0)
    for group in trainer.optimizer.param_groups:
        for name, master in zip(group["param_names"], group["params"], strict=True):
            assert master.dtype == torch.float32 and torch.equal(master.to(resident[name].dtype), resident[name])
    # Changes far below bfloat16's steps are not lost: they are in the masters.
    after = [p for g in trainer.optimizer.param_groups for p in g["params"]]
    moved = [not torch.equal(a, b) and torch.equal(a.bfloat16(), b.bfloat16()) for a, b in zip(before, after, strict=True)]
    assert any(moved)


def test_matrices_in_bfloat16_compute_as_under_autocast(tiny: Path) -> None:
    """Projections round their weights to bfloat16 under autocast anyway; the sum through the layers stays float32."""
    ids = torch.arange(3, 30)[None]
    found = list[torch.Tensor]()
    for halved in (False, True):
        model = load_model(tiny, "cpu").model
        with torch.no_grad():
            for p in model.get_input_embeddings().parameters():  # type: ignore[operator]
                p.copy_(p.bfloat16())  # rows of the embedding are rounded too: only that differs
        if halved:
            keep_in_bfloat16(model, model.parameters())
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(model(ids).logits.float())
    assert torch.equal(*found)


@pytest.mark.parametrize(("compute", "kept"), [("bfloat16", torch.bfloat16), ("auto", torch.float32)])
def test_the_reference_is_kept_as_it_is_computed_with(tiny: Path, compute: str, kept: torch.dtype) -> None:
    """In bfloat16 it measures the same divergence: its embedding was rounded already, as in most models' files."""
    found = list[dict[str, float]]()
    for halved in (True, False):
        reference = load_model(tiny, "cpu").model
        with torch.no_grad():
            for p in reference.get_input_embeddings().parameters():  # type: ignore[operator]
                p.copy_(p.bfloat16())
        config = settings(tiny, kl_coef=0.1, kl_off_policy="weigh", compute_dtype=compute)
        trainer = PolicyTrainer(WholeModel(load_model(tiny, "cpu").model), config, reference=reference)
        if not halved:
            reference.float()  # the same values, in twice the memory
        else:
            assert {p.dtype for p in reference.parameters() if p.ndim > 1} == {kept}
        take(trainer, 0)
        found.append(take(trainer, 1))
    assert found[0] == found[1]


def test_a_checkpoint_of_one_group_without_names_is_read(tiny: Path, tmp_path: Path) -> None:
    """As they were before decay was apart. Bit for bit: the division into groups changes no update."""
    config = settings(tiny, optimizer="adamw")
    before, after = trainer_of(config), trainer_of(config)
    before.optimizer = torch.optim.AdamW(
        [p for _, p in before.trained.parameters()], lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step in range(2):
        take(before, step)
    folder = save_checkpoint(tmp_path, 2, before.trained, before.optimizer, epoch=1, config={})
    load_checkpoint(folder, after.trained, after.optimizer)
    assert take(before, 2) == take(after, 2)
    for a, b in zip(before.trained.module.parameters(), after.trained.module.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("saved", "asked"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_s_checkpoint_is_refused_in_a_line(tiny: Path, tmp_path: Path, saved: str, asked: str) -> None:
    first, other = (trainer_of(settings(tiny, optimizer=kind)) for kind in (saved, asked))
    take(first, 0)
    folder = save_checkpoint(tmp_path, 1, first.trained, first.optimizer, epoch=1, config={})
    with pytest.raises(UsageError, match=r"checkpoint .*step_1: .*set trainer\.optimizer as the run was begun"):
        load_checkpoint(folder, other.trained, other.optimizer)


def test_a_checkpoint_that_moved_between_cpu_and_gpu_names_what_decides(tiny: Path, tmp_path: Path) -> None:
    """With trainer.optimizer = "adamw_host" both times: in float32 on a CPU it is plain AdamW."""
    first, other = (trainer_of(settings(tiny, optimizer="adamw_host", compute_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    take(first, 0)
    folder = save_checkpoint(tmp_path, 1, first.trained, first.optimizer, epoch=1, config={})
    with pytest.raises(UsageError, match=r"set trainer\.optimizer, trainer\.device and trainer\.compute_dtype as"):
        load_checkpoint(folder, other.trained, other.optimizer)


def test_settings_of_a_resumed_run_are_its_own(tiny: Path, tmp_path: Path) -> None:
    first, other = (trainer_of(settings(tiny, weight_decay=decay)) for decay in (0.0, 0.25))
    take(first, 0)
    folder = save_checkpoint(tmp_path, 1, first.trained, first.optimizer, epoch=1, config={})
    load_checkpoint(folder, other.trained, other.optimizer)
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.25, 0.0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_bytes_a_parameter_are_those_of_the_tensors(tiny: Path, tmp_path: Path, kind: dict[str, Any]) -> None:
    trainer = trainer_of(settings(tiny, **kind))
    parts = parts_of(trainer.trained.parameters(), trainer.trained.module)
    take(trainer, 0)
    trainer.accumulate(groups_of(1), 1)
    trainer.flush()
    hidden = sum(p.numel() for _, p in parts.hidden)
    others = sum(p.numel() for part in (parts.stacks, parts.head, parts.embeddings) for _, p in part)
    vectors = sum(p.numel() for _, p in parts.vectors)
    halves = "compute_dtype" in kind
    name = "adamw_host" if halves else kind["optimizer"].removesuffix("_host")  # on a CPU in float32 the two are one
    expected = [
        hidden * a + others * b + vectors * (b + 2 * (halves and i != 1))  # vectors stay float32
        for i, (a, b) in enumerate(
            zip(
                bytes_per_parameter(name, bfloat16=halves),
                bytes_per_parameter(name, bfloat16=halves, hidden_matrix=False), strict=True,
            )
        )
    ]  # fmt: skip
    weights = [p for _, p in trainer.trained.parameters()]
    on_device = sum(p.nbytes + p.grad.nbytes for p in weights if p.grad is not None)
    moments = sum(t.nbytes for entry in trainer.optimizer.state.values() for k, t in entry.items() if k != "step")
    masters = sum(p.nbytes for group in trainer.optimizer.param_groups for p in group["params"])
    assert [on_device + (0 if halves else moments), masters + moments if halves else 0] == expected[:2]
    folder = save_checkpoint(tmp_path, 1, trainer.trained, trainer.optimizer, epoch=1, config={})
    disk = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert disk == pytest.approx(expected[2], rel=0.02)


def test_eight_bits_without_their_package_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UsageError, match=r"adamw_8bit.*pip install '\.\[bitsandbytes\]'"):
        trainer_of(settings(tiny, optimizer="adamw_8bit"))
    each = bytes_per_parameter("adamw_8bit")
    assert each.device == pytest.approx(10, abs=0.05) and each.disk == pytest.approx(6, abs=0.05)


# The learning rate.

SECTIONS = st.builds(
    TrainerSection, steps=st.integers(0, 200), lr=st.floats(1e-8, 1.0), lr_ramp=st.integers(0, 250),
    lr_schedule=st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt"]), lr_min_ratio=st.floats(0.0, 1.0),
)  # fmt: skip


@given(config=SECTIONS, step=st.integers(0, 400))
def test_the_rate_is_within_its_bounds_and_falls_after_the_ramp(config: TrainerSection, step: int) -> None:
    now, later = learning_rate(config, step), learning_rate(config, step + 1)
    assert 0 <= now <= config.lr
    if step + 1 < config.lr_ramp:
        assert now == pytest.approx(config.lr * (step + 1) / config.lr_ramp)
    else:
        assert later <= now * (1 + 1e-12) and now >= config.lr * config.lr_min_ratio * (1 - 1e-12)


@pytest.mark.parametrize(
    ("name", "middle", "last"),
    [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1), ("inverse_sqrt", 1 / math.sqrt(6), 1 / math.sqrt(11))],
)
def test_each_schedule_by_hand(name: str, middle: float, last: float) -> None:
    """A ramp of 10 steps of 110: the middle of the rest is after 60."""
    config = TrainerSection(steps=110, lr=2.0, lr_ramp=10, lr_schedule=name, lr_min_ratio=0.1)  # type: ignore[arg-type]
    rates = [learning_rate(config, step) / 2.0 for step in (0, 9, 59, 109)]
    assert rates == pytest.approx([0.1, 1.0, middle, last])
    if name in ("linear", "cosine"):
        assert learning_rate(config, 500) == pytest.approx(0.2)


def test_unknown_names_and_bounds_are_refused() -> None:
    for wrong in ({"optimizer": "adam"}, {"lr_schedule": "step"}, {"lr_min_ratio": 1.5}, {"lr_min_ratio": -0.1}):
        (found,) = wrong_keys(TrainerSection, wrong)
        assert found.key == next(iter(wrong))
