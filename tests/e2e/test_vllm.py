"""vLLM as an engine, in an environment of its own (`make test-vllm`, or SHOAL_VLLM_PYTHON): the conformance suite, then what is
vLLM's alone. Skipped where there is no such environment."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
)

from learner.config import build_config, dump_toml
from netem.bench.chaos.account import differing
from netem.bench.chaos.run import GROUPS, Chaos, ChaosSettings, random_model
from netem.demo.recipes import RECIPES
from netem.processes.children import Children, LoggedProcess
from node.engine.flat_model import write_state
from node.engine.port import EngineDied, StateFile
from node.engine.process import EngineProcess, open_engine_process
from node.engine.transformers import TransformersCore, TransformersSettings
from p2p.errors import Refusal
from p2p.protocol.rollout import Completion, Generate, Span
from p2p.version import Version
from tests.support.core_process import ROOT, CorePool, CoreProcess
from tests.support.engine_suite import ModelSuite
from tests.support.engine_world import (
    CONTEXT,
    V0,
    V1,
    VOCAB,
    Gathered,
    World,
    ask,
    build_adapted_world,
    build_world,
    crowd,
    full_log_probs,
    qwen3_config,
)  # fmt: skip
from tests.support.nightly import nightly
from tests.support.watchdog import patience, status_of, until

PYTHON = os.environ.get("SHOAL_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with vLLM")]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CorePool]:
    pool = CorePool(PYTHON, "vllm", tmp_path_factory.mktemp("log") / "vllm.log")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, pool: CorePool) -> World:
    return build_world(tmp_path_factory.mktemp("model"), pool.core)


class TestVllm(ModelSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, real: World) -> World:
        return real


class TestVllmWithAnAdapter(ModelSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory, pool: CorePool) -> World:
        return build_adapted_world(tmp_path_factory.mktemp("adapted"), pool.core)

    def test_kept_cache_is_the_old_weights(self, world: World) -> None:
        """Not here: a request has one adapter in vLLM, so what runs goes on as a request of the new one, with keys of its own."""
        core = world.core(kv_policy="keep")
        got = Gathered(core, ask(max_new_tokens=20)).steps(6)
        core.stage(world.states[V1])
        core.commit()
        done = got.run()["a"]
        assert done.spans == [Span(V0, 0, 6), Span(V1, 6, 20)]
        exact = full_log_probs(world.models[V1], (5, 6, 7), done.ids, 1.0)[6:]
        np.testing.assert_allclose(done.logprobs[6:], exact, atol=1e-4)

    def test_only_changed_tensors_are_copied(self, world: World) -> None:
        """Of the base model. vLLM is given the adapter of a version whole, whatever changed in it."""
        core = world.core()
        core.stage(replace(world.states[V1], changed=("model.norm.weight",)))
        core.commit()
        got = Gathered(core, ask()).run()["a"]
        np.testing.assert_allclose(got.logprobs, full_log_probs(world.models[V1], (5, 6, 7), got.ids, 1.0), atol=1e-4)

    def test_an_adapter_alone_is_swapped_and_the_old_one_forgotten(self, world: World) -> None:
        core = world.core()
        got = Gathered(core, ask(max_new_tokens=60, prompt_ids=(7,) * 40))
        adapter = tuple(name for name in world.states[V1].layout.by_name if name.startswith("adapter."))
        for step in range(1, 6):
            got.steps(4)
            core.stage(replace(world.states[(V0, V1)[step % 2]], version=Version(0, step), changed=adapter))
            core.commit()
        done = got.run()["a"]
        assert done.spans == [*(Span(Version(0, i), 4 * i, 4 * i + 4) for i in range(5)), Span(Version(0, 5), 20, 60)]
        for span in done.spans:
            model = world.models[(V0, V1)[span.version.step % 2]]
            want = full_log_probs(model, (7,) * 40, done.ids, 1.0)[span.start : span.stop]
            np.testing.assert_allclose(done.logprobs[span.start : span.stop], want, atol=1e-4)


# --- beside a transformers node ---


def test_it_draws_what_the_transformers_engine_draws_and_takes_over_from_it(real: World) -> None:
    requests = crowd(20)
    other = TransformersCore(TransformersSettings(device="cpu"))
    other.load(real.folder, real.states[V0])
    want = Gathered(other, *requests).run()
    got = Gathered(real.core(), *requests).run()
    for r in requests:
        assert got[r.request_id].ids == want[r.request_id].ids
        np.testing.assert_allclose(got[r.request_id].logprobs, want[r.request_id].logprobs, atol=1e-4)
    half = {r.request_id: tuple(want[r.request_id].ids[: r.max_new_tokens // 2]) for r in requests}
    again = Gathered(real.core(), *(replace(r, prefix_ids=half[r.request_id]) for r in requests)).run()
    assert all(again[r.request_id].ids == want[r.request_id].ids for r in requests)


# --- keys and values across versions ---


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_no_request_reuses_what_older_weights_computed(
    policy: str, pool: CorePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of several blocks: before a commit, waiting across it, after it."""
    long = build_world(tmp_path, pool.core, qwen3_config(1024), scale=4)
    core = long.core(kv_policy=policy, max_running=4)
    prompt = tuple(int(t) for t in np.random.default_rng(1).integers(0, VOCAB, 600))
    group = [ask(f"g{i}", prompt_ids=prompt, seed=i, max_new_tokens=12) for i in range(8)]
    got = Gathered(core, *group).steps(3)
    assert (core.stats().running, core.stats().waiting) == (4, 4)
    core.stage(long.states[V1])
    core.commit()
    got.add(ask("new", prompt_ids=prompt, seed=99, max_new_tokens=12))
    got.run()
    for name, done in got.all.items():
        began_before = name in ("g0", "g1", "g2", "g3")
        assert done.spans == ([Span(V0, 0, 3), Span(V1, 3, 12)] if began_before else [Span(V1, 0, 12)])
        for span in done.spans:
            if policy == "keep" and began_before and span.version == V1:
                continue  # that is what was asked for
            want = full_log_probs(long.models[span.version], prompt, done.ids, 1.0)[span.start : span.stop]
            np.testing.assert_allclose(done.logprobs[span.start : span.stop], want, atol=1e-4)


# --- models ---

SMALL = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
             max_position_embeddings=256)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SMALL, num_key_value_heads=1, tie_word_embeddings=False),
        LlamaConfig(**SMALL, num_key_value_heads=2),
        Phi3Config(**SMALL, pad_token_id=0),
        GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0),
    ],
    ids=lambda c: c.model_type,
)  # fmt: skip
def test_other_architectures_update_in_place(config: PreTrainedConfig, pool: CorePool, tmp_path: Path) -> None:
    """Biases, untied heads, projections that a checkpoint has fused or transposed."""
    world = build_world(tmp_path, pool.core, config, scale=3)
    core = world.core()
    got = Gathered(core, *(ask(n, prompt_ids=p, max_new_tokens=20) for n, p in PROMPTS.items())).steps(8)
    core.stage(world.states[V1])
    core.commit()
    got.run()
    for name, prompt in PROMPTS.items():
        assert got[name].spans == [Span(V0, 0, 8), Span(V1, 8, 20)]
        for span in got[name].spans:
            want = full_log_probs(world.models[span.version], prompt, got[name].ids, 1.0)[span.start : span.stop]
            np.testing.assert_allclose(got[name].logprobs[span.start : span.stop], want, atol=1e-4)


PROMPTS = {"a": (5, 6, 7), "b": tuple(range(20)), "c": (40,)}


def test_what_it_cannot_run_is_refused_at_load_and_the_process_goes_on(real: World, pool: CorePool, tmp_path: Path) -> None:
    core = pool.core(kv_bytes=1 << 12)
    with pytest.raises(Refusal, match="cache blocks"):
        core.load(real.folder, real.states[V0])
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(Refusal, match="no_such_model"):
        core.load(tmp_path / "unknown", real.states[V0])
    with pytest.raises(Refusal, match="model folder"):
        core.load(tmp_path / "nowhere", real.states[V0])
    other = qwen3_config()
    other.intermediate_size = 32
    other.save_pretrained(tmp_path / "other")
    core = pool.core()
    with pytest.raises(Refusal, match="1024 of 2048 values"):
        core.load(tmp_path / "other", real.states[V0])
    latent = DeepseekV3Config(
        **SMALL, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=32, q_lora_rank=32,
        qk_rope_head_dim=32, v_head_dim=32, qk_nope_head_dim=32, moe_intermediate_size=32, first_k_dense_replace=1,
    )  # fmt: skip
    # Experts have other names in transformers than in the checkpoints that vLLM reads.
    experts = MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
    for config in (latent, experts):
        config.save_pretrained(tmp_path / config.model_type)
        path = tmp_path / f"{config.model_type}.bin"
        layout = write_state(AutoModelForCausalLM.from_config(config), path)
        with pytest.raises(Refusal):
            core.load(tmp_path / config.model_type, StateFile(path, layout, V0))
    core.load(real.folder, real.states[V0])
    assert Gathered(core, ask()).run()["a"].finish == "length"


# --- updates that go wrong ---


def test_a_wrong_copy_is_found_and_loaded_densely(real: World) -> None:
    core = real.core()
    assert isinstance(core, CoreProcess)
    got = Gathered(core, ask(max_new_tokens=20)).steps(6)
    core.stage(real.states[V1])
    core.sabotage(fills=3)
    core.commit()
    done = got.run()["a"]
    assert done.spans == [Span(V0, 0, 6), Span(V1, 6, 20)]
    want = full_log_probs(real.models[V1], (5, 6, 7), done.ids, 1.0)[6:]
    np.testing.assert_allclose(done.logprobs[6:], want, atol=1e-4)


def test_weights_that_never_match_are_refused_and_the_old_ones_serve_on(real: World) -> None:
    plain = Gathered(real.core(), ask(max_new_tokens=20)).run()["a"]
    core = real.core()
    assert isinstance(core, CoreProcess)
    got = Gathered(core, ask(max_new_tokens=20)).steps(6)
    core.stage(replace(real.states[V1], changed=tuple(real.states[V1].layout.by_name)))
    core.sabotage(fills=1, reloads=1)
    with pytest.raises(Refusal, match="after a dense reload too"):
        core.commit()
    assert core.stats().version == V0
    done = got.run()["a"]
    assert done.ids == plain.ids and done.spans == [Span(V0, 0, 20)]
    core.stage(real.states[V1])
    assert core.commit().version == V1


@pytest.mark.parametrize("known", [True, False])
def test_an_engine_whose_old_weights_are_lost_too_is_broken(real: World, known: bool) -> None:
    """The way back fails as well; or there is none, since nobody vouches for the file that was served."""
    core = real.core()
    assert isinstance(core, CoreProcess)
    core.stage(replace(real.states[V1], changed=tuple(real.states[V1].layout.by_name) if known else None))
    core.sabotage(fills=100000 if known else 1, reloads=1)
    try:
        with pytest.raises(RuntimeError, match="EngineBroken"):
            core.commit()
    finally:
        core.sabotage(fills=0)
    core.load(real.folder, real.states[V0])


# --- storms ---


def test_abort_storms_leave_nothing_behind(real: World) -> None:
    core = real.core(max_running=8)
    rng = np.random.default_rng(3)
    plain = Gathered(real.core(), ask("witness", max_new_tokens=100)).run()["witness"]
    got = Gathered(core, ask("witness", max_new_tokens=100))
    for i in range(60):
        names = [f"s{i}.{j}" for j in range(6)]
        for name in names:
            got.add(ask(name, max_new_tokens=50, seed=i))
        got.steps(1)
        core.abort([n for n in names if rng.random() < 0.7])
        got.take(core.interrupt([n for n in names if rng.random() < 0.5]))
        core.abort([n for n in got.all if n != "witness"])
    got.run()
    assert got["witness"].ids == plain.ids and got["witness"].finish == "length"
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)


def test_sequences_that_outgrow_the_memory_wait_and_none_is_lost(real: World) -> None:
    """Room for two and a half full sequences: vLLM preempts, and computes again what it threw out."""
    block = 2 * 2 * 2 * 32 * 4 * CONTEXT
    core = real.core(kv_bytes=4 * block)
    assert core.stats().kv_tokens == 4 * CONTEXT
    requests = [ask(f"r{i}", prompt_ids=(i + 1,) * 20, max_new_tokens=100, seed=i) for i in range(12)]
    got = Gathered(core, *requests).run()
    roomy = Gathered(real.core(), *requests).run()
    assert all(got[r.request_id].ids == roomy[r.request_id].ids for r in requests)


# --- through the process, under load ---


class Load:
    """Requests that an engine always has `width` of; their completions, and the states that they were made under."""

    def __init__(self, engine: EngineProcess, width: int, total: int, **changes: object) -> None:
        self.engine, self.width, self.total, self._changes = engine, width, total, changes
        self.requests: dict[str, Generate] = {}
        self.done: dict[str, Completion] = {}
        self.tokens = 0

    async def _add(self) -> None:
        i = len(self.requests)
        rng = np.random.default_rng(i)
        prompt = tuple(int(t) for t in rng.integers(0, VOCAB, rng.integers(3, 60)))
        request = ask(
            f"r{i}", prompt_ids=prompt, seed=i, temperature=(0.0, 1.0, 0.7)[i % 3],
            max_new_tokens=int(rng.integers(20, 180)), **self._changes,
        )  # fmt: skip
        self.requests[request.request_id], self.done[request.request_id] = request, Completion()
        await self.engine.add(request)

    async def run(self) -> None:
        for _ in range(self.width):
            await self._add()
        while not all(c.finish for c in self.done.values()):
            for event in await self.engine.events.receive():
                self.done[event.request_id].add(event)
                self.tokens += len(event.ids)
                if event.finish and len(self.requests) < self.total:
                    await self._add()

    def check(self, models: dict[Version, torch.nn.Module]) -> float:
        """Nothing lost, every token's log probability that of its span's version, greedy ones the best; the worst difference."""
        worst = 0.0
        assert len(self.done) == self.total
        for name, done in self.done.items():
            request = self.requests[name]
            assert (done.finish, len(done.ids)) == ("length", request.max_new_tokens)
            for span in done.spans:
                with torch.no_grad():
                    tokens = torch.tensor([[*request.prompt_ids, *done.ids]])
                    logits = models[span.version](tokens).logits[0, len(request.prompt_ids) - 1 : -1].double()
                logp = torch.log_softmax(logits / (request.temperature or 1.0), -1)[span.start : span.stop]
                ids = torch.tensor(done.ids[span.start : span.stop])
                if request.temperature == 0:
                    assert logp.argmax(-1).tolist() == ids.tolist()
                want = logp.gather(-1, ids[:, None])[:, 0].numpy()
                worst = max(worst, float(np.abs(want - done.logprobs[span.start : span.stop]).max()))
        return worst


def learned(world: World, steps: int, wire: str) -> tuple[list[StateFile], dict[Version, torch.nn.Module]]:
    """States of `steps` updates after V0 as `wire` values, each with the tensors that it changed: all, some, none in turn."""
    config = qwen3_config(512)
    torch.manual_seed(7)
    weights = {n: t.detach().clone() for n, t in world.models[V0].named_parameters()}  # a tied one once
    files: list[StateFile] = []
    models: dict[Version, torch.nn.Module] = {}
    for step in range(steps + 1):
        names = [n for i, n in enumerate(sorted(weights)) if step and (step % 3 == 1 or (step % 3 == 2 and i % 4 == 0))]
        for name in names:
            weights[name] += 0.05 * weights[name].abs().mean() * torch.randn_like(weights[name])
        model = AutoModelForCausalLM.from_config(config).eval()
        model.load_state_dict({n: t.to(getattr(torch, wire)).float() for n, t in weights.items()}, strict=False)
        path = world.folder / f"{wire}{step}.bin"
        layout = write_state(model, path, wire)
        changed = tuple(n for n in names if n in layout.by_name)
        files.append(StateFile(path, layout, Version(0, step), changed if step else None))
        models[Version(0, step)] = model
    return files, models


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
async def test_twenty_updates_under_load_are_exact_and_lose_nothing(wire: str, tmp_path: Path) -> None:
    world = build_world(tmp_path, lambda **_: pytest.fail("not here"), qwen3_config(512), scale=4)
    files, models = learned(world, 20, wire)
    settings = {"max_running": 32, "log": str(tmp_path / "log")}
    pauses = []
    with patience():
        async with open_engine_process("vllm", settings, python=PYTHON) as engine:
            await engine.load(world.folder, files[0])
            load = Load(engine, width=40, total=160)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load.run)
                for i, state in enumerate(files[1:]):
                    while load.tokens < (i + 1) * 600:
                        await trio.sleep(0.005)
                    await engine.stage(state)
                    pauses.append(await engine.commit())
            assert (await engine.stats()).version == Version(0, 20)
    worst = load.check(models)
    spans = sum(len(c.spans) for c in load.done.values())
    pause = 1e3 * float(np.median([p.pause_s for p in pauses]))
    print(f"{wire}: {load.tokens} tokens in {spans} spans, worst difference {worst:.1e}, median pause {pause:.1f} ms")
    assert worst < 1e-4 and {s.version.step for c in load.done.values() for s in c.spans} >= set(range(20))


async def test_sigkill_and_another_process_goes_on_from_the_same_tokens(real: World, tmp_path: Path) -> None:
    settings = {"max_running": 8, "log": str(tmp_path / "log")}
    whole = Gathered(real.core(max_running=8), ask(max_new_tokens=100)).run()["a"]
    part = Completion()
    with patience():
        async with open_engine_process("vllm", settings, python=PYTHON) as engine:
            await engine.load(real.folder, real.states[V0])
            await engine.add(ask(max_new_tokens=100))
            while len(part.ids) < 10:
                for event in await engine.events.receive():
                    part.add(event)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDied, match="SIGKILL"):
                while True:
                    await engine.stats()
            async for batch in engine.events:
                for event in batch:
                    part.add(event)
        assert 10 <= len(part.ids) < 100 and part.ids == whole.ids[: len(part.ids)]
        async with open_engine_process("vllm", settings, python=PYTHON) as engine:
            await engine.load(real.folder, real.states[V0])
            await engine.add(ask(max_new_tokens=100, prefix_ids=tuple(part.ids)))
            while not part.finish:
                for event in await engine.events.receive():
                    part.add(event)
    assert part.ids == whole.ids


# --- in a run ---


@nightly
def test_engines_killed_in_mid_generation_cost_no_token_and_no_link(tmp_path: Path) -> None:
    """Their nodes go on passing chunks; the next engine begins at the version that the node holds by then; a run of transformers
    nodes that nothing disturbs makes the same tokens."""
    model = random_model(tmp_path / "model")
    engine = ("--engine", "vllm", "--engine-python", PYTHON)
    settings = ChaosSettings(seed=6, steps=12, nodes=2, node_kills=0, learner_kills=0, engine_kills=3, engine=engine)
    chaos = Chaos(tmp_path / "run", model, settings)
    account = chaos.go()
    assert account.lost == 0 and account.aborted == {} and account.consumed == GROUPS * settings.steps
    kills = account.engine_kills
    assert len(kills) == 3 and all(Version.parse(k.next) >= Version.parse(k.served) for k in kills), kills
    assert sum(k.relayed for k in kills) > 0, kills
    assert "connection lost" not in chaos.shoal.said("learner-1")
    quiet = Chaos(tmp_path / "quiet", model, replace(settings, engine_kills=0, engine=()))
    quiet.go()
    assert differing(chaos.books.trajectories, quiet.books.trajectories) == []


def learner_of(shoal: Children, tmp_path: Path, demo_model: Path, steps: int, served: str) -> tuple[LoggedProcess, Path]:
    """A learner with no staleness, and its ticket."""
    settings = RECIPES["reverse"].config(tmp_path / "run", demo_model, steps, 0)
    settings["rollout"]["max_staleness"] = 0
    settings["trainer"]["served_dtype"] = served
    (tmp_path / "learner.toml").write_text(dump_toml(build_config(settings, "test").model_dump()))
    learner = shoal.start("learner", "learner", str(tmp_path / "learner.toml"), "--json")
    ticket = tmp_path / "run" / "ticket.txt"
    until("a ticket", ticket.exists, shoal)
    return learner, ticket


def node_of(shoal: Children, tmp_path: Path, name: str, ticket: Path, *engine: str) -> LoggedProcess:
    where = ("--dir", str(tmp_path / name), "--listen", "/ip4/127.0.0.1/tcp/0")
    return shoal.start(name, "node", "--join", str(ticket), "--name", name, "--json", *where, *engine)


def mismatch_kl(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["mismatch_kl/mean"] for line in lines if "mismatch_kl/mean" in line]


def test_a_run_on_two_vllm_nodes_and_one_of_transformers(shoal: Children, tmp_path: Path, demo_model: Path) -> None:
    """Served in float32, with no staleness: what nodes report is what the trainer computes, whichever engine made it."""
    learner, ticket = learner_of(shoal, tmp_path, demo_model, 12, "float32")
    names = ("vllm-1", "vllm-2")
    nodes = [node_of(shoal, tmp_path, name, ticket, "--engine", "vllm", "--engine-python", PYTHON) for name in names]
    until("vLLM to serve", lambda: any("engine serves" in shoal.said(name) for name in names), shoal)
    nodes.append(node_of(shoal, tmp_path, "transformers", ticket))
    assert status_of(learner, shoal) == 0, shoal.said("learner")
    assert [status_of(node, shoal) for node in nodes] == [0, 0, 0]
    result = shoal.result("learner")
    assert result["step"] == 12 and result["trajectories"]["lost"] == 0 and result["trajectories"]["aborted"] == {}
    assert all(node["digest_ok"] and node["version"] == "1.12" for node in result["nodes"])
    # Which of them made how much is theirs: one that came up late may have found little left.
    assert sum(node["tokens"] for node in result["nodes"] if node["name"] != "transformers") > 0, result["nodes"]
    kl = mismatch_kl(tmp_path / "run")
    assert len(kl) == 12 and max(kl) < 1e-6, kl


@nightly
def test_a_node_that_computes_in_bfloat16(shoal: Children, tmp_path: Path, demo_model: Path) -> None:
    """Served in bfloat16 and computed in it; the trainer's masters and its recomputation are float32."""
    learner, ticket = learner_of(shoal, tmp_path, demo_model, 8, "bfloat16")
    node = node_of(shoal, tmp_path, "vllm", ticket, "--engine", "vllm", "--engine-python", PYTHON, "--dtype", "bfloat16")
    assert status_of(learner, shoal) == 0, shoal.said("learner")
    assert status_of(node, shoal) == 0
    kl = mismatch_kl(tmp_path / "run")
    print(f"mismatch_kl/mean: {min(kl):.1e} to {max(kl):.1e}")
    assert len(kl) == 8 and 0 < max(kl) < 5e-3, kl
