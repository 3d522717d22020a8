"""One conformance suite for every EngineCore, then what only a real model can show. Through the process: tests/e2e."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
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
    Qwen3Config,
)

from node.engine import transformers as engine_module
from node.engine.base import EngineCore, StateFile
from node.engine.fake import Faults, ScriptedCore, ScriptedSettings, scripted_token
from node.engine.model import write_state
from node.engine.transformers import TransformersCore, TransformersSettings
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import BEHIND, PAST, Completion, Generate, Span, TokenEvent
from p2p.version import Version

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(1, 2)
VOCAB, CONTEXT = 48, 128

torch.set_num_threads(1)


@dataclass
class World:
    """A model folder, states of it at V0 and V1, and how to make a core that serves one."""

    folder: Path
    states: dict[Version, StateFile]
    models: dict[Version, torch.nn.Module]
    make: Callable[..., EngineCore]

    def core(self, version: Version = V0, **settings: object) -> EngineCore:
        core = self.make(**settings)
        core.load(self.folder, self.states[version])
        return core


def qwen3_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, tie_word_embeddings=True, max_position_embeddings=CONTEXT,
    )  # fmt: skip


def build_world(folder: Path, kind: str) -> World:
    """Weights scaled up, so that tokens depend sharply on what came before them."""
    config = qwen3_config()
    config.save_pretrained(folder)
    states, models = {}, {}
    for seed, version in enumerate((V0, V1)):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1:
                    p.mul_(6)
        path = folder / f"state{version}.bin"
        states[version] = StateFile(path, write_state(model, path), version)
        models[version] = model

    def make(**settings: object) -> EngineCore:
        if kind == "fake":
            return ScriptedCore(ScriptedSettings(**{"max_context": CONTEXT, **settings}))  # type: ignore[arg-type]
        return TransformersCore(TransformersSettings(**{"device": "cpu", **settings}))  # type: ignore[arg-type]

    return World(folder, states, models, make)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("model"), "transformers")


@pytest.fixture(scope="module", params=["fake", "transformers"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("model"), request.param)


def ask(name: str = "a", **changes: object) -> Generate:
    base = Generate(name, prompt_ids=(5, 6, 7), max_new_tokens=12, stop_ids=(), seed=3, min_version=V0)
    return replace(base, **changes)  # type: ignore[arg-type]


class Gathered:
    """Completions put together from events; Completion itself refuses gaps, overlaps and versions that go back."""

    def __init__(self, core: EngineCore, *requests: Generate) -> None:
        self.core = core
        self.all: dict[str, Completion] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Generate) -> None:
        self.core.add(request)
        prefix = list(request.prefix_ids)
        self.all[request.request_id] = Completion(ids=prefix, logprobs=[0.0] * len(prefix))

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.all[event.request_id].add(event)

    def steps(self, n: int) -> Gathered:
        for _ in range(n):
            self.take(self.core.step())
        return self

    def run(self) -> Gathered:
        for _ in range(2000):
            if not self.core.has_work():
                return self
            self.take(self.core.step())
        raise AssertionError("the engine never ends")

    def __getitem__(self, name: str) -> Completion:
        return self.all[name]


def crowd(n: int) -> list[Generate]:
    """n requests that differ in everything: prompts, lengths, budgets, temperatures, seeds."""
    rng = np.random.default_rng(7)
    return [
        ask(
            f"crowd{i}",
            prompt_ids=tuple(int(t) for t in rng.integers(0, VOCAB, rng.integers(1, 30))),
            max_new_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.8, 1.0])),
            seed=int(rng.integers(0, 1000)),
        )
        for i in range(n)
    ]


# --- every core ---


def test_streams_contiguous_tokens_to_the_budget(world: World) -> None:
    core = world.core()
    got = Gathered(core, ask("a"), ask("b", max_new_tokens=5, seed=9)).run()
    assert (len(got["a"].ids), got["a"].finish) == (12, "length")
    assert (len(got["b"].ids), got["b"].finish) == (5, "length")
    assert got["a"].spans == [Span(V0, 0, 12)]
    assert core.stats().tokens == 17 and not core.has_work() and core.step() == []


def test_stop_token_ends_and_is_part_of_the_completion(world: World) -> None:
    free = Gathered(world.core(), ask()).run()["a"].ids
    stop = free[4]
    got = Gathered(world.core(), ask(stop_ids=(VOCAB + 9, stop))).run()["a"]
    assert got.finish == "stop" and got.ids == free[: free.index(stop) + 1]


def test_tokens_do_not_depend_on_the_batch(world: World) -> None:
    alone = Gathered(world.core(), ask(max_new_tokens=30)).run()["a"]
    others = crowd(31)
    together = Gathered(world.core(max_running=20), *others[:15], ask(max_new_tokens=30), *others[15:]).run()
    assert together["a"].ids == alone.ids
    np.testing.assert_allclose(together["a"].logprobs, alone.logprobs, atol=1e-4)
    for other in (others[0], others[30]):
        again = Gathered(world.core(), other).run()[other.request_id]
        assert again.ids == together[other.request_id].ids


def test_continuing_after_an_interrupt_elsewhere_gives_the_same_tokens(world: World) -> None:
    whole = Gathered(world.core(), ask(max_new_tokens=20)).run()["a"]
    first = Gathered(world.core(), ask(max_new_tokens=20), *crowd(5)).steps(8)
    first.take(first.core.interrupt(["a", "unknown"]))
    part = first["a"]
    assert part.finish == "interrupt" and part.ids == whole.ids[:8]
    second = Gathered(world.core(), *crowd(3), ask(max_new_tokens=20, prefix_ids=tuple(part.ids))).run()["a"]
    assert second.ids == whole.ids and second.finish == "length"
    np.testing.assert_allclose(second.logprobs[8:], whole.logprobs[8:], atol=1e-4)
    first.run()
    assert all(c.finish == "length" for name, c in first.all.items() if name != "a")


def test_commit_in_mid_sequence_starts_a_span_and_continues_as_a_fresh_engine_would(world: World) -> None:
    core = world.core()
    got = Gathered(core, ask(max_new_tokens=24, temperature=0.8), *crowd(6)).steps(9)
    core.stage(world.states[V1])
    result = core.commit()
    assert result.version == V1 == core.stats().version and result.pause_s >= result.apply_s >= 0
    got.run()
    assert got["a"].spans == [Span(V0, 0, 9), Span(V1, 9, 24)]
    fresh = world.core(V1)
    prefix = tuple(got["a"].ids[:9])
    again = Gathered(fresh, ask(max_new_tokens=24, temperature=0.8, prefix_ids=prefix)).run()["a"]
    assert again.ids == got["a"].ids
    np.testing.assert_allclose(again.logprobs[9:], got["a"].logprobs[9:], atol=1e-4)


def test_a_reply_says_under_which_versions_it_began_and_ended(world: World) -> None:
    core = world.core()
    core.add(ask("a"))
    core.add(ask("b", max_new_tokens=3))
    ends = [e for _ in range(5) for e in core.step() if e.finish]
    assert [(e.request_id, e.start_version, e.end_version) for e in ends] == [("b", V0, V0)]
    core.stage(world.states[V1])
    core.commit()
    core.add(ask("none", prefix_ids=(1, 2), max_new_tokens=2))
    events = [e for _ in range(9) for e in core.step()]
    assert {e.request_id: (e.start_version, e.end_version) for e in events if e.finish} == {"a": (V0, V1), "none": (None, None)}
    assert all(e.start_version is None and e.end_version is None for e in events if not e.finish)
    # An interrupt names the last token's version, not the one that serves by then.
    core.add(ask("c"))
    core.step()
    core.stage(replace(world.states[V0], version=V2))
    core.commit()
    [event] = core.interrupt()
    assert (event.version, event.start_version, event.end_version) == (V2, V1, V1)


def test_a_pinned_sequence_never_sees_another_version(world: World) -> None:
    core = world.core(max_running=2)
    core.add(ask("pinned", exact_version=V0))
    core.add(ask("free"))
    core.add(ask("waiting", exact_version=V0))
    got = Completion()
    for _ in range(4):
        for event in core.step():
            if event.request_id == "pinned":
                got.add(event)
    core.stage(world.states[V1])
    core.commit()
    assert core.has_work()
    events = [e for _ in range(10) for e in core.step()]
    last = [e for e in events if e.request_id == "pinned"]
    assert [(e.finish, e.ids, e.end_version) for e in last] == [("interrupt", (), V0)]
    assert [(e.finish, e.end_version) for e in events if e.request_id == "waiting"] == [("interrupt", None)]
    got.add(last[0])
    assert got.spans == [Span(V0, 0, 4)] and (got.start_version, got.end_version) == (V0, V0)
    assert {e.version for e in events if e.request_id == "free"} == {V1}
    for pin, cause in ((V0, PAST), (V2, BEHIND)):
        with pytest.raises(Refusal, match=f"version {pin} exactly") as refused:
            core.add(ask("again", exact_version=pin))
        assert refused.value.cause == cause
    with pytest.raises(Refusal) as refused:
        core.add(ask("again", min_version=V2))
    assert refused.value.cause == BEHIND
    # The rest goes on at that version elsewhere, as if nothing had happened.
    other = world.core()
    other.add(ask("b", exact_version=V0, prefix_ids=tuple(got.ids)))
    rest = [e for _ in range(9) for e in other.step()]
    alone = world.core()
    alone.add(ask("c"))
    whole = [t for _ in range(12) for e in alone.step() for t in e.ids]
    assert [*got.ids, *(t for e in rest for t in e.ids)] == whole
    core.add(ask("here", exact_version=V1))
    assert {e.version for _ in range(12) for e in core.step()} == {V1}


def test_stage_without_commit_changes_nothing(world: World) -> None:
    plain = Gathered(world.core(), ask()).run()["a"]
    core = world.core()
    got = Gathered(core, ask()).steps(4)
    core.stage(world.states[V1])
    assert got.run()["a"].ids == plain.ids and got["a"].spans == [Span(V0, 0, 12)]


def test_bad_stages_are_refused_and_the_old_weights_serve_on(world: World, tmp_path: Path) -> None:
    plain = Gathered(world.core(), ask()).run()["a"]
    core = world.core()
    got = Gathered(core, ask()).steps(3)
    good = world.states[V1]
    rows = [(t.name, t.dtype, t.shape) for t in good.layout.tensors]
    cut = tmp_path / "cut.bin"
    cut.write_bytes(good.path.read_bytes()[:-200])
    name, dtype, shape = rows[0]
    for bad, reason in [
        (replace(good, layout=Layout.build(rows[1:])), "tensors"),
        (replace(good, layout=Layout.build([*rows, ("extra", "float32", (2,))])), "tensors"),
        (replace(good, layout=Layout.build([(name, dtype, (*shape, 1)), *rows[1:]])), "shape|tensors"),
        (replace(good, path=cut), "state file of"),
        (replace(good, path=tmp_path / "nowhere.bin"), "state file"),
        (replace(good, changed=("no.such.tensor",)), "no.such.tensor"),
    ]:
        with pytest.raises(Refusal, match=reason):
            core.stage(bad)
        with pytest.raises(RuntimeError, match="nothing is staged"):
            core.commit()
    assert got.run()["a"].ids == plain.ids and core.stats().version == V0


def test_what_it_cannot_serve_is_refused_and_the_engine_goes_on(world: World) -> None:
    core = world.core()
    got = Gathered(core, ask("live"))
    for bad, reason in [
        (ask(min_version=V1), "serves 0.0"),
        (ask("live"), "already here"),
        (ask(prompt_ids=()), "empty prompt"),
        (ask(prompt_ids=(1,) * CONTEXT), "no room"),
        (ask(prompt_ids=(1,) * 100, prefix_ids=(1,) * 50), "no room"),
        (ask(prompt_ids=(1, VOCAB)), "outside the vocabulary"),
        (ask(prompt_ids=(1, -1)), "outside the vocabulary"),
        (ask(prefix_ids=(VOCAB + 3,)), "outside the vocabulary"),
        (ask(temperature=-1.0), "temperature"),
        (ask(temperature=float("nan")), "temperature"),
        (ask(top_p=0.0), "top_p"),
        (ask(max_new_tokens=-1), "-1 tokens"),
    ]:
        with pytest.raises(Refusal, match=reason) as caught:
            core.add(bad)
        assert caught.value.version is not None or "vocabulary" in reason
    assert got.run()["live"].finish == "length"
    got.add(ask("live2", min_version=V0))
    assert got.run()["live2"].finish == "length"


def test_nothing_to_generate_ends_at_once(world: World) -> None:
    core = world.core()
    got = Gathered(
        core,
        ask("zero", max_new_tokens=0),
        ask("spent", max_new_tokens=2, prefix_ids=(1, 2)),
        ask("stopped", prefix_ids=(1, 9), stop_ids=(9,)),
    ).steps(1)
    assert [got[n].finish for n in ("zero", "spent", "stopped")] == ["length", "length", "stop"]
    assert [len(got[n].ids) for n in ("zero", "spent", "stopped")] == [0, 2, 2]
    assert not core.has_work()


def test_the_end_of_the_context_ends_a_sequence(world: World) -> None:
    got = Gathered(world.core(), ask(prompt_ids=(3,) * (CONTEXT - 6), max_new_tokens=50)).run()["a"]
    assert (len(got.ids), got.finish) == (6, "length")


def test_interrupt_and_abort(world: World) -> None:
    core = world.core(max_running=2)
    names = ["r0", "r1", "w0", "w1"]
    got = Gathered(core, *(ask(n) for n in names)).steps(3)
    assert (core.stats().running, core.stats().waiting) == (2, 2)
    core.abort(["r0", "w0"])
    events = core.interrupt()
    assert [(e.request_id, e.finish, e.start, e.ids) for e in events] == [
        ("r1", "interrupt", 3, ()),
        ("w1", "interrupt", 0, ()),
    ]
    assert not core.has_work() and core.step() == [] and core.interrupt() == []
    got.add(ask("r0"))  # an aborted name may be used again
    assert got.run()["r0"].finish == "length"
    got.add(ask("x"))
    core.abort()
    assert not core.has_work()


def test_what_does_not_fit_waits_its_turn(world: World) -> None:
    core = world.core(max_running=3)
    got = Gathered(core, *(ask(f"q{i}", max_new_tokens=4) for i in range(8)))
    most = 0
    while core.has_work():
        got.steps(1)
        most = max(most, core.stats().running)
    assert most <= 3 and all(len(c.ids) == 4 for c in got.all.values())


def test_state_of_another_epoch_and_partial_change(world: World) -> None:
    core = world.core(V1)
    base = Gathered(world.core(V1), ask()).run()["a"]
    core.stage(replace(world.states[V1], version=V2, changed=()))
    assert core.commit().version == V2
    got = Gathered(core, ask(min_version=V2)).run()["a"]
    assert got.spans == [Span(V2, 0, 12)]
    if isinstance(core, TransformersCore):
        assert got.ids == base.ids


# --- the scripted core ---


def test_scripted_tokens_and_faults(tmp_path: Path) -> None:
    core = ScriptedCore(version=V1)
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


def test_greedy_is_what_generate_does(real: World) -> None:
    prompts = [(5, 6, 7), (1, 2, 3, 4, 5, 6, 7, 8), (40,)]
    core = real.core()
    requests = [ask(f"p{i}", prompt_ids=p, temperature=0.0, max_new_tokens=25) for i, p in enumerate(prompts)]
    got = Gathered(core, *requests).run()
    for i, prompt in enumerate(prompts):
        out = real.models[V0].generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=25, min_new_tokens=25, pad_token_id=0
        )
        assert got[f"p{i}"].ids == out[0, len(prompt) :].tolist()


def full_log_probs(model: torch.nn.Module, prompt: tuple[int, ...], ids: list[int], temperature: float) -> np.ndarray:
    tokens = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].double() / (temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()


def test_log_probs_equal_a_full_forward_and_score(real: World) -> None:
    core = real.core()
    requests = [replace(r, top_p=1.0) for r in crowd(12)]
    got = Gathered(core, *requests).run()
    for r in requests:
        done = got[r.request_id]
        want = full_log_probs(real.models[V0], r.prompt_ids, done.ids, r.temperature)
        np.testing.assert_allclose(done.logprobs, want, atol=1e-4)
        scored = core.score(r.prompt_ids, done.ids, r.temperature)
        assert scored.dtype == np.float32
        np.testing.assert_allclose(scored, want, atol=1e-4)
    assert core.score((1,), ()).shape == (0,)
    for prompt, completion in [((), (1,)), ((1,), (VOCAB,)), ((1,), (1,) * CONTEXT)]:
        with pytest.raises(Refusal):
            core.score(prompt, completion)


def test_log_probs_after_a_commit_are_those_of_the_new_weights(real: World) -> None:
    core = real.core()
    got = Gathered(core, ask(max_new_tokens=20)).steps(6)
    core.stage(real.states[V1])
    core.commit()
    done = got.run()["a"]
    np.testing.assert_allclose(
        done.logprobs,
        np.concatenate([full_log_probs(real.models[v], (5, 6, 7), done.ids, 1.0)[s] for v, s in
                        ((V0, slice(6)), (V1, slice(6, 20)))]),
        atol=1e-4,
    )  # fmt: skip


def test_kept_cache_is_the_old_weights(real: World) -> None:
    keep = real.core(kv_policy="keep")
    got = Gathered(keep, ask(max_new_tokens=20)).steps(6)
    keep.stage(real.states[V1])
    keep.commit()
    done = got.run()["a"]
    assert done.spans == [Span(V0, 0, 6), Span(V1, 6, 20)]
    exact = full_log_probs(real.models[V1], (5, 6, 7), done.ids, 1.0)[6:]
    assert np.abs(np.array(done.logprobs[6:]) - exact).max() > 1e-3


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

            def out_of_memory(*_: object) -> None:
                raise MemoryError("no room for the cache")

            patch.setattr(engine_module, "prefill", out_of_memory)
        with pytest.raises((OSError, MemoryError)):
            core.commit()
    done = got.run()["a"]
    assert done.ids == plain.ids and done.spans == [Span(V0, 0, 12)]
    np.testing.assert_allclose(done.logprobs, plain.logprobs, atol=1e-4)
    core.stage(real.states[V1])
    assert core.commit().version == V1


def test_only_changed_tensors_are_copied(real: World) -> None:
    core = real.core()
    name = "model.norm.weight"
    core.stage(replace(real.states[V1], changed=(name,)))
    core.commit()
    got = Gathered(core, ask()).run()["a"]
    want = full_log_probs(real.models[V0], (5, 6, 7), got.ids, 1.0)  # both versions have a norm of ones
    np.testing.assert_allclose(got.logprobs, want, atol=1e-4)


def test_groups_share_one_prefill(real: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    prefill = engine_module.prefill

    def counting(model: object, config: object, sequences: list[object], device: object) -> object:
        rows.append(len(sequences))
        return prefill(model, config, sequences, device)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "prefill", counting)
    group = [ask(f"g{i}", seed=i) for i in range(6)]
    got = Gathered(real.core(), *group, ask("other", prompt_ids=(9, 9))).run()
    assert rows == [2]
    assert got["g4"].ids == Gathered(real.core(), group[4]).run()["g4"].ids


def test_admission_respects_the_prefill_budget(real: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    prefill = engine_module.prefill

    def counting(model: object, config: object, sequences: list[tuple[int, ...]], device: object) -> object:
        sizes.append(len(sequences) * max(len(s) for s in sequences))
        return prefill(model, config, sequences, device)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "prefill", counting)
    long = [ask(f"l{i}", prompt_ids=(i + 1,) * (20 + i), max_new_tokens=8) for i in range(6)]
    core = real.core(prefill_tokens=50)
    got = Gathered(core, *long, ask("huge", prompt_ids=(2,) * 90)).steps(4)
    core.stage(real.states[V1])
    core.commit()
    got.run()
    assert max(s for s in sizes if s < 90) <= 50 and 90 in sizes
    assert all(c.finish == "length" for c in got.all.values())


def test_bf16_state_serves_its_own_values_in_float32(real: World, tmp_path: Path) -> None:
    path = tmp_path / "bf16.bin"
    core = real.make()
    core.load(real.folder, StateFile(path, write_state(real.models[V0], path, "bfloat16"), V0))
    rounded = AutoModelForCausalLM.from_config(qwen3_config()).eval()
    rounded.load_state_dict({k: t.bfloat16().float() for k, t in real.models[V0].state_dict().items()})
    got = Gathered(core, ask()).run()["a"]
    np.testing.assert_allclose(got.logprobs, full_log_probs(rounded, (5, 6, 7), got.ids, 1.0), atol=1e-4)


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


@settings(max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**16)), min_size=10, max_size=45))
def test_any_interleaving_gives_exact_log_probs(real: World, ops: list[tuple[int, int]]) -> None:
    """Adds, steps, interrupts, aborts and commits in any order: every token's log probability is that of a full
    forward, over all tokens before it, under the version its span names."""
    core = real.core(max_running=5, prefill_tokens=60)
    got = Gathered(core)
    requests: dict[str, Generate] = {}
    commits = 0
    for n, (op, x) in enumerate(ops):
        rng = np.random.default_rng(x)
        if op < 4:
            prompt = tuple(int(t) for t in rng.integers(0, VOCAB, 1 + x % 25))
            request = ask(f"r{n}", prompt_ids=prompt, seed=x, max_new_tokens=1 + x % 30, stop_ids=(x % VOCAB,))
            requests[request.request_id] = request
            got.add(request)
        elif op < 7:
            got.steps(1 + x % 4)
        elif op == 7 and requests:
            got.take(core.interrupt([f"r{x % len(ops)}", f"r{x % 7}"]))
        elif op == 8:
            core.abort([f"r{x % len(ops)}"])
        elif op == 9:
            commits += 1
            core.stage(replace(real.states[(V0, V1)[commits % 2]], version=Version(0, commits)))
            core.commit()
    got.run()
    for name, done in got.all.items():
        for span in done.spans:
            model = real.models[(V0, V1)[span.version.step % 2]]
            want = full_log_probs(model, requests[name].prompt_ids, done.ids, 1.0)[span.start : span.stop]
            np.testing.assert_allclose(done.logprobs[span.start : span.stop], want, atol=1e-4)


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


def test_broken_weights_end_sequences_with_an_error(real: World, tmp_path: Path) -> None:
    good = real.states[V0]
    flat = np.fromfile(good.path, np.uint8)
    spec = good.layout.by_name["model.norm.weight"]
    flat[spec.offset : spec.stop] = np.full(32, np.nan, np.float32).view(np.uint8)
    (tmp_path / "nan.bin").write_bytes(flat.tobytes())
    core = real.core()
    got = Gathered(core, ask()).steps(2)
    core.stage(StateFile(tmp_path / "nan.bin", good.layout, V1))
    core.commit()
    done = got.run()["a"]
    assert done.finish == "error" and len(done.ids) == 2
