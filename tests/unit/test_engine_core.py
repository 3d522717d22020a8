"""The conformance suite over the scripted and the transformers core, then what is theirs alone. vLLM, and all of them through
a process: tests/e2e."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
)

from node.engine import transformers as engine_module
from node.engine.fake import ScriptedCore, ScriptedSettings, scripted_token
from node.engine.flat_model import write_state
from node.engine.port import EngineCore, StateFile
from node.engine.transformers import TransformersCore, TransformersSettings
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import Span
from tests.support.engine_suite import EngineSuite, ModelSuite
from tests.support.engine_world import (
    ALPHA,
    CONTEXT,
    RANK,
    V0,
    V1,
    V2,
    VOCAB,
    Gathered,
    World,
    ask,
    build_adapted_world,
    build_world,
    full_log_probs,
    qwen3_config,
)
from tests.support.faulty_core import Faults, FaultyCore


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("model"), make_transformers)


def make_fake(**settings: object) -> EngineCore:
    return ScriptedCore(ScriptedSettings(**{"max_context": CONTEXT, **settings}))  # type: ignore[arg-type]


def make_transformers(**settings: object) -> EngineCore:
    return TransformersCore(TransformersSettings(**{"device": "cpu", **settings}))  # type: ignore[arg-type]


class TestFake(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory) -> World:
        return build_world(tmp_path_factory.mktemp("model"), make_fake)


class TestTransformers(ModelSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, real: World) -> World:
        return real


class TestTransformersWithAnAdapter(ModelSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory) -> World:
        return build_adapted_world(tmp_path_factory.mktemp("adapted"), make_transformers)


# --- an adapter ---


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "cannot be read"),
        ({"r": "many"}, "cannot be read"),
        ({"r": 4}, "not those of rank 4"),
        ({"use_dora": True}, "only plain LoRA is known here, not use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "not rank_pattern"),
        ({"peft_type": "IA3"}, "not IA3"),
        ({"r": float("inf")}, "cannot be read"),
        ({"lora_alpha": 10**400}, "cannot be read"),
        ("[" * 200_000, "cannot be read"),
        ({"r": 0}, "r must be at least 1"),
        ({"lora_alpha": float("nan")}, "lora_alpha finite"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(
    change: dict[str, object] | str | None, reason: str, tmp_path: Path
) -> None:
    """`change`: of the configuration's keys, the whole text of another, or None for none."""
    world = build_adapted_world(tmp_path, make_transformers)
    config = tmp_path / "adapter_config.json"
    if change is None:
        config.unlink()
    elif isinstance(change, str):
        config.write_text(change)
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(Refusal, match=reason):
        world.core()


def test_an_adapter_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    world = build_adapted_world(tmp_path, make_transformers)
    good = world.states[V0]
    rows = [(t.name, t.dtype, t.shape) for t in good.layout.tensors]
    path = good.path
    for old, new, reason in [
        ("adapter.model.layers.0.mlp.up_proj.lora_A", None, "not pairs"),
        ("adapter.model.layers.0.mlp.up_proj.", "adapter.model.layers.7.mlp.up_proj.", "no such layer"),
        ("adapter.model.layers.0.mlp.up_proj.", "adapter.model.norm.", "a Qwen3RMSNorm there"),
        ("adapter.model.layers.0.mlp.up_proj.", "adapter.model.layers.0.mlp.down_proj.x.", "no such layer"),
    ]:
        changed = [(n.replace(old, new or ""), d, s) for n, d, s in rows if new is not None or n != old]
        layout = Layout.build(changed)
        path.write_bytes(bytes(layout.nbytes))
        with pytest.raises(Refusal, match=reason):
            make_transformers().load(tmp_path, StateFile(path, layout, V0))


def test_rank_stabilised_adapters_have_another_scale(tmp_path: Path) -> None:
    world = build_adapted_world(tmp_path, make_transformers)
    config = tmp_path / "adapter_config.json"
    settings = json.loads(config.read_text()) | {"use_rslora": True}
    plain = Gathered(world.core(), ask()).run()["a"]
    config.write_text(json.dumps(settings))
    other = Gathered(world.core(), ask()).run()["a"]
    assert np.abs(np.array(plain.logprobs) - other.logprobs).max() > 1e-3
    config.write_text(json.dumps(settings | {"lora_alpha": ALPHA / RANK**0.5}))
    assert Gathered(world.core(), ask()).run()["a"].ids == plain.ids


# --- the scripted core ---


def test_scripted_tokens_and_faults(tmp_path: Path) -> None:
    core = FaultyCore(Faults(), version=V1)
    got = Gathered(core, ask(max_new_tokens=3)).run()["a"]
    assert got.ids == [scripted_token((5, 6, 7), 3, i, V1, VOCAB)[0] for i in range(3)]
    state = StateFile(tmp_path / "s", Layout.build([]), V2)
    (tmp_path / "s").touch()
    core.faults = Faults(stage_error="disk full")
    with pytest.raises(Refusal, match="disk full"):
        core.stage(state)
    for faults, error in [(Faults(commit_error="boom"), RuntimeError), (Faults(digest_mismatch=True), Refusal)]:
        core.faults = faults
        core.stage(state)
        with pytest.raises(error):
            core.commit()
        assert core.stats().version == V1
    core.faults = Faults(step_error_at=5)
    core.add(ask(max_new_tokens=9))
    core.step()
    with pytest.raises(RuntimeError, match="broken after 5"):
        core.step()


# --- a real model ---


@pytest.mark.parametrize("broken", ["copy", "recompute"])
def test_a_commit_that_fails_half_way_puts_the_old_weights_back(
    real: World, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Gathered(real.core(), ask()).run()["a"]
    core = real.core()
    got = Gathered(core, ask()).steps(5)
    core.stage(real.states[V1])
    with monkeypatch.context() as patch:
        if broken == "copy":
            read = engine_module.MappedState.tensor
            seen: list[str] = []

            def failing(self: engine_module.MappedState, name: str) -> torch.Tensor:
                seen.append(name)
                if len(seen) == 5:
                    raise OSError("the disk is gone")
                return read(self, name)

            patch.setattr(engine_module.MappedState, "tensor", failing)
        else:

            def out_of_memory(*_: object, **__: object) -> None:
                raise MemoryError("no room for the cache")

            patch.setattr(engine_module, "prefill", out_of_memory)
        with pytest.raises((OSError, MemoryError)):
            core.commit()
    done = got.run()["a"]
    assert done.ids == plain.ids and done.spans == [Span(V0, 0, 12)]
    np.testing.assert_allclose(done.logprobs, plain.logprobs, atol=1e-4)
    core.stage(real.states[V1])
    assert core.commit().version == V1


def test_the_first_token_of_a_version_needs_no_pass_over_the_model_but_the_commit_s(
    real: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = real.core()
    asked = [ask(f"r{i}", prompt_ids=(5, 6, 7)[: i + 1], seed=i) for i in range(3)]
    got = Gathered(core, *asked).steps(5)
    before = {name: list(done.ids) for name, done in got.all.items()}
    core.stage(real.states[V1])
    core.commit()
    core.abort(["r1"])  # the rows are thinned between the commit and the step
    with monkeypatch.context() as patch:
        patch.setattr(engine_module.KVRows, "decode", lambda *_: pytest.fail("another pass"))
        got.steps(1)
    for name in ("r0", "r2"):
        assert got[name].spans[-1] == Span(V1, 5, 6)
    got.run()
    fresh = real.core()
    fresh.stage(real.states[V1])
    fresh.commit()
    again = Gathered(fresh, *(ask(r.request_id, prompt_ids=r.prompt_ids, seed=r.seed, prefix_ids=tuple(before[r.request_id]))
                              for r in (asked[0], asked[2]))).run()  # fmt: skip
    for name in ("r0", "r2"):
        assert got[name].ids == again[name].ids
        np.testing.assert_allclose(got[name].logprobs[5:], again[name].logprobs[5:], atol=1e-4)


def test_two_commits_without_a_step_between_go_on_under_the_second(real: World) -> None:
    core = real.core()
    got = Gathered(core, ask()).steps(5)
    before = tuple(got["a"].ids)
    second = replace(real.states[V0], version=V2)
    for state in (real.states[V1], second):
        core.stage(state)
        core.commit()
    done = got.run()["a"]
    fresh = real.core()
    fresh.stage(second)
    fresh.commit()
    again = Gathered(fresh, ask(prefix_ids=before)).run()["a"]
    assert done.ids == again.ids and done.spans[-1].version == V2
    np.testing.assert_allclose(done.logprobs[5:], again.logprobs[5:], atol=1e-4)


def test_groups_share_one_prefill(real: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    prefill = engine_module.prefill

    def counting(model: object, config: object, sequences: list[object], device: object, **more: int) -> object:
        rows.append(len(sequences))
        return prefill(model, config, sequences, device, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "prefill", counting)
    group = [ask(f"g{i}", seed=i) for i in range(6)]
    got = Gathered(real.core(), *group, ask("other", prompt_ids=(9, 9))).run()
    assert rows == [2]
    assert got["g4"].ids == Gathered(real.core(), group[4]).run()["g4"].ids


def test_admission_respects_the_prefill_budget(real: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    prefill = engine_module.prefill

    def counting(model: object, config: object, sequences: list[tuple[int, ...]], device: object, **more: int) -> object:
        sizes.append(len(sequences) * max(len(s) for s in sequences))
        return prefill(model, config, sequences, device, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "prefill", counting)
    long = [ask(f"l{i}", prompt_ids=(i + 1,) * (20 + i), max_new_tokens=8) for i in range(6)]
    core = real.core(prefill_tokens=50)
    got = Gathered(core, *long, ask("huge", prompt_ids=(2,) * 90)).steps(4)
    core.stage(real.states[V1])
    core.commit()
    got.run()
    assert max(s for s in sizes if s < 90) <= 50 and 90 in sizes
    assert all(c.finish == "length" for c in got.all.values())


def test_tied_weights_appear_once(real: World) -> None:
    names = real.states[V0].layout.by_name
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_models_it_would_decode_wrongly_are_refused_at_load(real: World, tmp_path: Path) -> None:
    core = real.make()
    sliding = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, sliding_window=16,
    )  # fmt: skip
    sliding.save_pretrained(tmp_path / "sliding")
    with pytest.raises(Refusal, match="Sliding"):
        core.load(tmp_path / "sliding", real.states[V0])
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(Refusal, match="no_such_model"):
        core.load(tmp_path / "unknown", real.states[V0])
    with pytest.raises(Refusal, match="model folder"):
        core.load(tmp_path / "nowhere", real.states[V0])
    dynamic = qwen3_config()
    dynamic.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    dynamic.max_position_embeddings = 64
    dynamic.save_pretrained(tmp_path / "dynamic")
    with pytest.raises(Refusal, match="dynamic rotary"):
        real.make(max_context=128).load(tmp_path / "dynamic", real.states[V0])


SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=64,
)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
        OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, pad_token_id=1),
        FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
        LlamaConfig(**SMALL, num_key_value_heads=2),
        Phi3Config(**SMALL, pad_token_id=0),
        MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
        DeepseekV3Config(
            **SMALL, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=8, q_lora_rank=8,
            qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, moe_intermediate_size=16, first_k_dense_replace=1,
        ),
    ],
    ids=lambda c: c.model_type,
)  # fmt: skip
def test_other_architectures_decode_in_a_padded_batch_as_in_a_full_forward(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    """Learned positions, offset positions, ALiBi, rotary, experts, latent attention."""
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4)
    path = tmp_path / "state"
    core = TransformersCore()
    core.load(tmp_path, StateFile(path, write_state(model, path), V0))
    prompts = {"a": (5, 6, 7), "b": tuple(range(20)), "c": (40,)}
    got = Gathered(core, *(ask(n, prompt_ids=p) for n, p in prompts.items())).run()
    for name, prompt in prompts.items():
        want = full_log_probs(model, prompt, got[name].ids, 1.0)
        np.testing.assert_allclose(got[name].logprobs, want, atol=1e-4)


def test_unsuitable_architectures_say_why(tmp_path: Path, real: World) -> None:
    for config, reason in [
        (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "not full attention"),
        (BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "set max_context"),
    ]:
        config.save_pretrained(tmp_path / config.model_type)
        with pytest.raises(Refusal, match=reason):
            real.make().load(tmp_path / config.model_type, real.states[V0])
    with pytest.raises(Refusal, match="position_ids"):
        real.make(max_context=64, attention="eager").load(tmp_path / "bloom", real.states[V0])


