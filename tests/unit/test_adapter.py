"""LoRA in the trainer: what is trained, kept and published, against a dense W + alpha / rank B A."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from learner.client.port import ResumeInfo
from learner.config import build_config
from learner.preflight.gather import gather
from learner.tasks.registry import make_task
from learner.trainer.adapter.adapted import PREFIX, AdaptedModel
from learner.trainer.adapter.adapter_weights import AdapterWeights
from learner.trainer.adapter.peft_form import adapter_file, check_same_adapter, peft_config
from learner.trainer.checkpoints.checkpoint import load_weights
from learner.trainer.export import export_run
from learner.trainer.forward.forward import TokenForward
from learner.trainer.forward.layout import RowTokens
from learner.trainer.model import load_model, named_state, served_tensors
from learner.trainer.opening import open_trained
from learner.trainer.policy import PolicyTrainer
from learner.trainer.settings import LoraSection, TrainerConfig
from learner.trainer.trainer import run_trainer
from netem.demo.tiny_model import build_random_model
from p2p.errors import UsageError
from p2p.layout import Layout
from p2p.weights.state import FlatState
from tests.support.trainer_twins import FakeClient, make_group, step_groups, whole_tensors
from tests.unit.test_device import twins
from tests.unit.test_publishing import SEGMENT

RANK = 4

SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "num_key_value_heads": 2,
}  # fmt: skip

MODELS = {"llama": LlamaConfig(**SHAPE), "tied": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)}

ROWS = [RowTokens((5, 6, 7), (8, 9, 10, 11)), RowTokens((5, 6, 7), (12, 13)), RowTokens((3, 4), (40, 41, 42))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_random_model(tmp_path_factory.mktemp("tiny"), size="0.4m")


def config(folder: Path, root: Path, rank: int = RANK, **changes: Any) -> TrainerConfig:
    lora = {"rank": rank, **changes.pop("lora", {})}
    base = {"device": "cpu", "threads": 1, "steps": 3, "max_new_tokens": 8, "lr": 1e-2, "lora": lora}
    return TrainerConfig(model=str(folder), checkpoint_dir=str(root), **{**base, **changes})


def random_model(kind: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(MODELS[kind]).eval()


def stir(adapted: AdaptedModel, seed: int = 0) -> None:
    """B as training leaves it: not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapted.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.05)


class Dense(nn.Module):
    """W x + scale B A x as one matrix, written without peft."""

    def __init__(self, inner: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale
        self.a, self.b = nn.Parameter(a.detach().clone()), nn.Parameter(b.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight + self.scale * self.b @ self.a, self.inner.bias)


def dense_twin(model: Any, adapted: AdaptedModel, scale: float) -> dict[str, nn.Parameter]:
    """Puts `Dense` where `adapted` has adapters; its parameters by the names of the adapter's."""
    model.requires_grad_(False)
    found = {}
    for layer in adapted.layers:
        parent, _, name = layer.path.rpartition(".")
        twin = Dense(model.get_submodule(layer.path), layer.a, layer.b, scale)
        setattr(model.get_submodule(parent), name, twin)
        found |= {f"{PREFIX}{layer.path}.lora_A": twin.a, f"{PREFIX}{layer.path}.lora_B": twin.b}
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("lora", "scale"), [(LoraSection(rank=4, alpha=8), 2.0), (LoraSection(rank=4, alpha=6, rslora=True), 3.0)]
)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_values_and_gradients_are_those_of_one_matrix_in_float64(
    kind: str, lora: LoraSection, scale: float, checkpoint: bool
) -> None:
    adapted = AdaptedModel(random_model(kind).double(), lora, served="float32")
    adapted.peft.double()
    stir(adapted)
    plain = random_model(kind).double()
    for tensor in plain.state_dict().values():
        tensor.copy_(tensor.float())  # what is served
    theirs = dense_twin(plain, adapted, scale)
    values = []
    for model in (adapted.module, plain):
        forward = TokenForward(model, checkpoint_layers=checkpoint)
        assert not forward.reason
        found = forward(ROWS)
        (found.logprobs * torch.linspace(-1, 1, len(found.logprobs)) + 0.1 * found.entropy).sum().backward()
        values.append(found.logprobs.detach())
    assert float((values[0] - values[1]).abs().max()) < 1e-6  # log probabilities are made in float32
    ours = dict(adapted.parameters())
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 2 * 7
    for name, parameter in ours.items():
        twin = theirs[name].grad
        assert parameter.grad is not None and twin is not None and float(twin.abs().max()) > 0
        assert float((parameter.grad - twin).abs().max()) < 1e-6 * max(1.0, float(twin.abs().max())), name
    assert not [name for name, p in adapted.module.named_parameters() if "lora_" not in name and p.grad is not None]


def test_the_adapter_begins_as_nothing_and_by_the_seed_alone(tiny: Path) -> None:
    def opened(seed: int, noise: int = 0) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        return {n: t.detach().clone() for n, t in open_trained(config(tiny, Path("unused"), seed=seed)).trained.named_state()}

    one, again, other = opened(1), opened(1, noise=7), opened(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    for name, tensor in one.items():
        is_b = name.endswith("lora_B")
        assert bool((tensor == 0).all()) == is_b and torch.equal(tensor, other[name]) == is_b
        assert tensor.dtype == torch.float32 and tensor.shape[1 if is_b else 0] == RANK
    a = one[f"{PREFIX}model.layers.0.mlp.down_proj.lora_A"]
    bound = a.shape[1] ** -0.5  # kaiming's, for a = sqrt(5)
    assert 0.9 * bound < float(a.abs().max()) <= bound


def test_the_base_is_there_without_a_second_model(tiny: Path) -> None:
    """Entered between a forward and its backward, where the trainer needs the reference."""
    plain = TokenForward(load_model(tiny, "cpu").model)(ROWS).logprobs.detach()
    gradients = []
    for between in (False, True):
        adapted = open_trained(config(tiny, Path("unused"), served_dtype="float32")).trained
        assert isinstance(adapted, AdaptedModel)
        stir(adapted)
        forward = TokenForward(adapted.module, checkpoint_layers=True)
        found = forward(ROWS).logprobs
        assert float((found.detach() - plain).abs().max()) > 1e-3
        if between:
            with adapted.base():
                base = forward(ROWS).logprobs
            assert torch.equal(base, plain) and not base.requires_grad
        found.sum().backward()
        gradients.append([p.grad for _, p in adapted.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_kl_is_against_the_base_and_costs_no_second_model(tiny: Path) -> None:
    groups = [make_group(i, np.random.default_rng(0)) for i in range(3)]
    metrics = []
    for kl_coef, reference in ((0.1, None), (0.1, load_model(tiny, "cpu").model), (0.0, None)):
        adapted = open_trained(config(tiny, Path("unused"), served_dtype="float32")).trained
        assert isinstance(adapted, AdaptedModel)
        stir(adapted)
        settings = config(tiny, Path("unused"), served_dtype="float32", kl_coef=kl_coef)
        trainer = PolicyTrainer(adapted, settings, reference=reference)
        trainer.accumulate(groups)
        metrics.append(trainer.step(0))
    assert metrics[0] == metrics[1] and metrics[0]["loss/mean"] > metrics[2]["loss/mean"] + 1e-4


@pytest.mark.parametrize(("served", "compute"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_the_base_is_published_as_it_would_be_alone_and_only_once(tiny: Path, served: str, compute: str) -> None:
    alone = served_tensors(load_model(tiny, "cpu").model, served)
    trained = open_trained(config(tiny, Path("unused"), served_dtype=served, compute_dtype=compute)).trained
    assert isinstance(trained, AdaptedModel)
    both = served == compute == "bfloat16"
    assert trained.module.dtype == (torch.bfloat16 if both else torch.float32)
    assert {p.dtype for _, p in trained.parameters()} == {torch.float32}
    stir(trained)
    weights = trained.weights()
    given = whole_tensors(weights)
    assert weights.frozen == alone.keys() and given.keys() - alone.keys() == dict(trained.parameters()).keys()
    for name, (dtype, bits) in alone.items():
        assert given[name][0] == dtype and np.array_equal(given[name][1], bits), name
    for name, parameter in trained.parameters():
        assert given[name][0] == served
        assert np.array_equal(given[name][1], served_tensors(nn.ParameterDict({"x": parameter}), served)["x"][1])

    stir(trained, 1)
    told = [weights.take(s) for s in weights.layout.segments(4096)]
    frozen = [weights.frozen.issuperset(weights.layout.touched(s.start, s.stop)) for s in weights.layout.segments(4096)]
    assert [not isinstance(found, np.ndarray) for found in told] == frozen and sum(frozen) > 20
    assert not any(len(found.ranks) or found.counts.any() for found in told if not isinstance(found, np.ndarray))
    weights.forget()
    assert whole_tensors(weights).keys() == given.keys()


def test_published_as_the_same_bytes_as_whole_tensors(tiny: Path, tmp_path: Path) -> None:
    """Through the client, with anchors and cumulative deltas; no delta has a byte of the base."""
    trained = open_trained(config(tiny, Path("unused"))).trained
    assert isinstance(trained, AdaptedModel)
    copied, tells = twins(tmp_path, anchor_every=4, squash_every=3)
    for step in range(9):
        stir(trained, step)
        whole = AdapterWeights(dict(trained.frozen_state()), dict(trained.parameters()), "bfloat16")
        copied.publish(step, whole_tensors(whole, SEGMENT))
        tells.publish(step, trained.weights())
    assert copied.made == tells.made and {made.kind for made in tells.made} == {"anchor", "delta", "cumulative"}
    layout, frozen = trained.weights().layout, trained.weights().frozen
    adapter = [s.index for s in layout.segments(SEGMENT) if not frozen.issuperset(layout.touched(s.start, s.stop))]
    least = min(len(payload) for made in tells.made if made.kind == "delta" for payload in made.segments)
    for made in tells.made:
        if made.kind == "delta":
            assert [i for i, payload in enumerate(made.segments) if len(payload) > least] == adapter
    for head in (copied, tells):
        head.close()


def test_a_base_in_bfloat16_trains_alike(tiny: Path) -> None:
    groups = [make_group(i, np.random.default_rng(0)) for i in range(3)]
    gradients = []
    for compute in ("float32", "bfloat16"):
        settings = config(tiny, Path("unused"), compute_dtype=compute, activation_checkpointing="on")
        trained = open_trained(settings).trained
        assert isinstance(trained, AdaptedModel)
        stir(trained)
        trainer = PolicyTrainer(trained, settings)
        assert not trainer.forward.reason
        trainer.accumulate(groups)
        trainer.flush()
        found = [p.grad for _, p in trained.parameters()]
        assert {p.grad.dtype for _, p in trained.parameters() if p.grad is not None} == {torch.float32}
        gradients.append(torch.cat([g.reshape(-1) for g in found if g is not None]))
    one, other = gradients
    assert len(one) == len(other) and float(torch.cosine_similarity(one, other, dim=0)) > 0.995


def test_only_the_adapter_changes_in_twenty_steps(tiny: Path, tmp_path: Path) -> None:
    """Through the trainer's own loop: published states, checkpoints and what they weigh."""
    task, tokenizer = make_task("reverse", 0), load_model(tiny, "cpu").tokenizer
    client = FakeClient(lambda step: step_groups(step, tokenizer, task))
    settings = config(tiny, tmp_path, steps=20, micro_batch_tokens=256)
    run_trainer(client, settings)
    states = [client.published[step] for step in range(21)]
    base = served_tensors(load_model(tiny, "cpu").model)
    changed = set()
    for one, other in itertools.pairwise(states):
        changed |= {name for name in one if not np.array_equal(one[name][1], other[name][1])}
    assert changed == {name for name in states[0] if name.startswith(PREFIX)}
    for name, (_, bits) in base.items():
        assert all(np.array_equal(state[name][1], bits) for state in states)
    digests = {base_digest({name: state[name] for name in base}) for state in states}
    assert digests == {base_digest(base)}
    from safetensors import safe_open

    with safe_open(str(client.committed[-1][1] / "model.safetensors"), "pt") as file:
        assert set(file.keys()) == changed


def base_digest(tensors: dict[str, tuple[str, np.ndarray]]) -> bytes:
    layout = Layout.build([(name, dtype, bits.shape) for name, (dtype, bits) in tensors.items()])
    state = FlatState.in_memory(layout)
    for name, (_, bits) in tensors.items():
        state.write_tensor(name, bits)
    return state.digest()


def test_resumed_as_undisturbed(tiny: Path, tmp_path: Path) -> None:
    task, tokenizer = make_task("reverse", 0), load_model(tiny, "cpu").tokenizer
    feed: Callable[[int], Any] = lambda step: step_groups(step, tokenizer, task)
    whole, first = FakeClient(feed), FakeClient(feed)
    run_trainer(whole, config(tiny, tmp_path / "whole", steps=6))
    run_trainer(first, config(tiny, tmp_path / "cut", steps=3))
    second = FakeClient(feed, start=ResumeInfo(1, 3, first.committed[-1][1]))
    run_trainer(second, config(tiny, tmp_path / "second", steps=6))
    for step in (3, 4, 5, 6):
        one, other = whole.published[step], second.published[step]
        assert one.keys() == other.keys() and all(np.array_equal(one[n][1], other[n][1]) for n in one)
    # And what cannot be continued is refused by the checkpoint itself, whoever starts the trainer.
    for rank, message in ((0, "is of another model"), (8, "not (8, ")):
        third = FakeClient(feed, start=ResumeInfo(1, 3, first.committed[-1][1]))
        with pytest.raises(UsageError) as refused:
            run_trainer(third, config(tiny, tmp_path / "cut", rank, steps=6))
        assert message in str(refused.value) and not third.published


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory as a trainer leaves it."""
    run_dir = tmp_path_factory.mktemp("run")
    task, tokenizer = make_task("reverse", 0), load_model(tiny, "cpu").tokenizer
    client = FakeClient(lambda step: step_groups(step, tokenizer, task))
    settings = config(tiny, run_dir / "checkpoints", steps=4, lora={"alpha": 6.0, "rslora": True})
    run_trainer(client, settings)
    (run_dir / "run.json").write_text("{}")
    (run_dir / "trainer.json").write_text(settings.model_dump_json())
    db = sqlite3.connect(run_dir / "journal.sqlite")
    with db:
        db.execute("CREATE TABLE commits (step, checkpoint)")
        db.execute("INSERT INTO commits VALUES (4, ?)", (str(client.committed[-1][1]),))
    db.close()
    return run_dir


def test_exported_merged_and_as_an_adapter_that_peft_loads(run: Path, tiny: Path, tmp_path: Path) -> None:
    """Both give the logits of what was trained, up to the rounding of what is served."""
    from peft import PeftModel

    trained = open_trained(config(tiny, Path("unused"), lora={"alpha": 6.0, "rslora": True})).trained
    load_weights(run / "checkpoints" / "step_4", trained)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        wanted = trained.module(ids).logits
        base = load_model(tiny, "cpu").model(ids).logits
    assert export_run(run, tmp_path / "merged") == {"ok": True, "step": 4, "folder": str(tmp_path / "merged")}
    export_run(run, tmp_path / "adapter", adapter=True)
    merged = load_model(tmp_path / "merged", "cpu").model
    assert dict(named_state(merged)).keys() == dict(named_state(load_model(tiny, "cpu").model)).keys()
    loaded = PeftModel.from_pretrained(load_model(tiny, "cpu").model, str(tmp_path / "adapter"))
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tiny) and (written["r"], written["use_rslora"]) == (RANK, True)
    assert (tmp_path / "adapter" / "tokenizer_config.json").is_file()
    learned = float((wanted - base).abs().max())
    assert learned > 0.05
    with torch.no_grad():
        for name, model in (("merged", merged), ("adapter", loaded)):
            apart = float((model(ids).logits - wanted).abs().max())
            assert apart < 0.03 * learned, name


def test_a_run_without_an_adapter_exports_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "trainer.json").write_text(json.dumps({"model": "m"}))
    with pytest.raises(UsageError, match="it has no adapter to export; leave --adapter out"):
        export_run(tmp_path, tmp_path / "out", adapter=True)


@pytest.mark.parametrize(("before", "now", "message"), [
    ({}, {"rank": 4}, r"trainer\.lora\.rank = 4, and the run in .* was begun with 0"),
    ({"rank": 4}, {}, r"trainer\.lora\.rank = 0, and .* begun with 4: a run keeps its adapter"),
    ({"rank": 4}, {"rank": 4, "alpha": 16}, r"trainer\.lora\.alpha = 16, and .* with 32"),
    ({"rank": 4}, {"rank": 4, "targets": ["q_proj"]}, r'trainer\.lora\.targets = \["q_proj"\], and .* with "all-linear"'),
    ({"rank": 4}, {"rank": 4, "rslora": True}, r"trainer\.lora\.rslora = true, and .* with false"),
    ({"rank": 4}, {"rank": 4}, ""), ({}, {}, ""), ({"alpha": 8}, {}, ""), (None, {"rank": 4}, ""),
])  # fmt: skip
def test_a_run_keeps_its_adapter(tmp_path: Path, before: Any, now: Any, message: str) -> None:
    if before is not None:
        kept = LoraSection(**before).model_dump() if before else None
        (tmp_path / "trainer.json").write_text(json.dumps({"steps": 3} | ({"lora": kept} if kept else {})))
    if not message:
        return check_same_adapter(tmp_path, LoraSection(**now))
    with pytest.raises(UsageError, match=message):
        check_same_adapter(tmp_path, LoraSection(**now))


def test_a_dry_run_tells_both(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That peft is lacking, and that the run was begun otherwise."""
    (tmp_path / "run.json").write_text('{"run": "1"}')
    (tmp_path / "trainer.json").write_text("{}")
    values = {"run_dir": str(tmp_path), "model": str(tiny), "trainer": {"lora": {"rank": 4}, "device": "cpu"}}

    def found(**changes: Any) -> list[str]:
        facts = gather(build_config(values | changes, "test"), resume=True, thorough=False)
        return [finding.what for finding in facts.tried if "adapter" in finding.what]

    assert len(found()) == 1 and "trainer.lora.rank = 4, and the run in" in found()[0]
    assert found(trainer={"device": "cpu"}) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert found() == ["trainer.lora.rank: adapters need peft, which is not installed: pip install '.[lora]'"]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.up_proj"]])
def test_nodes_are_told_as_peft_would_read_it(tmp_path: Path, targets: Any) -> None:
    from peft import LoraConfig

    lora = LoraSection(rank=8, alpha=16, targets=targets, rslora=True)
    (tmp_path / "adapter_config.json").write_bytes(adapter_file(lora, "some/model"))
    read = LoraConfig.from_pretrained(str(tmp_path))
    assert (read.r, read.lora_alpha, read.use_rslora, read.lora_dropout) == (8, 16, True, 0.0)
    assert read.target_modules in (targets, set(targets)) and read.base_model_name_or_path == "some/model"
    assert adapter_file(LoraSection(), "some/model") == b""
    assert json.loads(adapter_file(lora, str(tmp_path)))["base_model_name_or_path"] == tmp_path.name
    assert peft_config(LoraSection(rank=1, alpha=0.5), "m")["lora_alpha"] == 0.5


@pytest.mark.parametrize(("targets", "message"), [
    (["nothing_here"], r"trainer\.lora\.targets: .*nothing_here"),
    (["lm_head"], r"lm_head is the output head; only linear layers"),
    (["embed_tokens"], r"embed_tokens is Embedding; only linear layers"),
])  # fmt: skip
def test_targets_that_cannot_be(targets: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AdaptedModel(random_model("llama"), LoraSection(rank=2, targets=targets))


def test_some_targets_alone(tiny: Path) -> None:
    adapted = AdaptedModel(load_model(tiny, "cpu").model, LoraSection(rank=2, targets=["q_proj", "mlp.up_proj"]))
    assert {layer.path.split(".")[-1] for layer in adapted.layers} == {"q_proj", "up_proj"}
    assert dict(adapted.frozen_state()).keys() == dict(named_state(load_model(tiny, "cpu").model)).keys()
