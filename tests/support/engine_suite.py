"""What every engine core must do. An adapter's test module subclasses EngineSuite, or ModelSuite when it runs a real model, and
provides a fixture `world` with cores of its kind (compute in float32)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from node.engine.fake import ScriptedCore
from node.engine.flat_model import write_state
from node.engine.port import StateFile
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import BEHIND, PAST, Completion, Generate, Span
from p2p.version import Version
from tests.support.engine_world import (
    CONTEXT,
    V0,
    V1,
    V2,
    VOCAB,
    Gathered,
    World,
    ask,
    crowd,
    full_log_probs,
    qwen3_config,
)  # fmt: skip


class EngineSuite:
    def test_streams_contiguous_tokens_to_the_budget(self, world: World) -> None:
        core = world.core()
        before = core.stats().tokens  # of the engine since it started: a pool's may have served another test
        got = Gathered(core, ask("a"), ask("b", max_new_tokens=5, seed=9)).run()
        assert (len(got["a"].ids), got["a"].finish) == (12, "length")
        assert (len(got["b"].ids), got["b"].finish) == (5, "length")
        assert got["a"].spans == [Span(V0, 0, 12)]
        assert core.stats().tokens - before == 17 and not core.has_work() and core.step() == []

    def test_stop_token_ends_and_is_part_of_the_completion(self, world: World) -> None:
        free = Gathered(world.core(), ask()).run()["a"].ids
        stop = free[4]
        got = Gathered(world.core(), ask(stop_ids=(VOCAB + 9, stop))).run()["a"]
        assert got.finish == "stop" and got.ids == free[: free.index(stop) + 1]

    def test_a_stop_token_inside_the_prefix_is_a_token_like_any_other(self, world: World) -> None:
        """An episode's earlier turns end with one; the next turn's prefix holds them, and what the environment gave."""
        prefix, stop = (1, 9, 2, 9, 4), 9
        free = Gathered(world.core(), ask(prefix_ids=prefix, max_new_tokens=30)).run()["a"].ids
        assert tuple(free[:5]) == prefix and len(free) == 30
        end = next((i + 1 for i in range(5, 30) if free[i] == stop), 30)
        got = Gathered(world.core(), *crowd(3), ask(prefix_ids=prefix, stop_ids=(stop,), max_new_tokens=30)).run()["a"]
        assert got.ids == free[:end] and got.finish == ("stop" if end < 30 or free[-1] == stop else "length")
        # Elsewhere, from the midst of that turn: a draw hangs on its position, whoever wrote the tokens before it.
        moved = ask(prefix_ids=tuple(got.ids[:-1]), stop_ids=(stop,), max_new_tokens=30)
        if got.ids[-2] != stop:
            assert Gathered(world.core(), moved).run()["a"].ids == got.ids

    def test_tokens_do_not_depend_on_the_batch(self, world: World) -> None:
        alone = Gathered(world.core(), ask(max_new_tokens=30)).run()["a"]
        others = crowd(31)
        together = Gathered(world.core(max_running=20), *others[:15], ask(max_new_tokens=30), *others[15:]).run()
        assert together["a"].ids == alone.ids
        np.testing.assert_allclose(together["a"].logprobs, alone.logprobs, atol=1e-4)
        for other in (others[0], others[30]):
            again = Gathered(world.core(), other).run()[other.request_id]
            assert again.ids == together[other.request_id].ids

    def test_continuing_after_an_interrupt_elsewhere_gives_the_same_tokens(self, world: World) -> None:
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

    def test_commit_in_mid_sequence_starts_a_span_and_continues_as_a_fresh_engine_would(self, world: World) -> None:
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

    @pytest.mark.parametrize("let_go", ["interrupt", "abort"])
    def test_a_rest_is_no_pause(self, world: World, monkeypatch: pytest.MonkeyPatch, let_go: str) -> None:
        """A node that goes warm hands back what it runs, and installs versions for hours: nobody waits for its tokens."""
        core = world.core()
        Gathered(core, ask(max_new_tokens=24)).steps(3)
        getattr(core, let_go)()
        real, rest_s = time.perf_counter, 1e6
        monkeypatch.setattr(time, "perf_counter", lambda: real() + rest_s)
        core.stage(world.states[V1])
        assert core.commit().pause_s < rest_s

    def test_every_event_says_under_which_version_its_tokens_were_made(self, world: World) -> None:
        core = world.core()
        core.add(ask("a"))
        core.add(ask("b", max_new_tokens=3))
        assert {e.version for _ in range(5) for e in core.step()} == {V0}
        core.stage(world.states[V1])
        core.commit()
        core.add(ask("c"))
        assert {e.version for _ in range(3) for e in core.step() if e.count} == {V1}
        core.stage(replace(world.states[V0], version=V2))
        core.commit()
        assert [(e.version, e.ids, e.finish) for e in core.interrupt(["c"])] == [(V2, (), "interrupt")]

    def test_a_pinned_sequence_never_sees_another_version(self, world: World) -> None:
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
        assert [(e.finish, e.ids) for e in last] == [("interrupt", ())]
        assert [(e.finish, e.ids) for e in events if e.request_id == "waiting"] == [("interrupt", ())]
        got.add(last[0])
        assert got.spans == [Span(V0, 0, 4)]
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

    def test_stage_without_commit_changes_nothing(self, world: World) -> None:
        plain = Gathered(world.core(), ask()).run()["a"]
        core = world.core()
        got = Gathered(core, ask()).steps(4)
        core.stage(world.states[V1])
        assert got.run()["a"].ids == plain.ids and got["a"].spans == [Span(V0, 0, 12)]

    def test_bad_stages_are_refused_and_the_old_weights_serve_on(self, world: World, tmp_path: Path) -> None:
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

    def test_what_it_cannot_serve_is_refused_and_the_engine_goes_on(self, world: World) -> None:
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

    def test_nothing_to_generate_ends_at_once(self, world: World) -> None:
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

    def test_the_end_of_the_context_ends_a_sequence(self, world: World) -> None:
        got = Gathered(world.core(), ask(prompt_ids=(3,) * (CONTEXT - 6), max_new_tokens=50)).run()["a"]
        assert (len(got.ids), got.finish) == (6, "length")

    def test_interrupt_and_abort(self, world: World) -> None:
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

    def test_what_does_not_fit_waits_its_turn(self, world: World) -> None:
        core = world.core(max_running=3)
        got = Gathered(core, *(ask(f"q{i}", max_new_tokens=4) for i in range(8)))
        most = 0
        while core.has_work():
            got.steps(1)
            most = max(most, core.stats().running)
        assert most <= 3 and all(len(c.ids) == 4 for c in got.all.values())

    def test_state_of_another_epoch_and_partial_change(self, world: World) -> None:
        core = world.core(V1)
        base = Gathered(world.core(V1), ask()).run()["a"]
        core.stage(replace(world.states[V1], version=V2, changed=()))
        assert core.commit().version == V2
        got = Gathered(core, ask(min_version=V2)).run()["a"]
        assert got.spans == [Span(V2, 0, 12)]
        if not isinstance(core, ScriptedCore):
            assert got.ids == base.ids


class ModelSuite(EngineSuite):
    def test_greedy_is_what_generate_does(self, world: World) -> None:
        prompts = [(5, 6, 7), (1, 2, 3, 4, 5, 6, 7, 8), (40,)]
        core = world.core()
        requests = [ask(f"p{i}", prompt_ids=p, temperature=0.0, max_new_tokens=25) for i, p in enumerate(prompts)]
        got = Gathered(core, *requests).run()
        for i, prompt in enumerate(prompts):
            out = world.models[V0].generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=25, min_new_tokens=25, pad_token_id=0
            )
            assert got[f"p{i}"].ids == out[0, len(prompt) :].tolist()

    def test_log_probs_equal_a_full_forward_and_score(self, world: World) -> None:
        core = world.core()
        requests = [replace(r, top_p=1.0) for r in crowd(12)]
        got = Gathered(core, *requests).run()
        for r in requests:
            done = got[r.request_id]
            want = full_log_probs(world.models[V0], r.prompt_ids, done.ids, r.temperature)
            np.testing.assert_allclose(done.logprobs, want, atol=1e-4)
            scored = core.score(r.prompt_ids, done.ids, r.temperature)
            assert scored.dtype == np.float32
            np.testing.assert_allclose(scored, want, atol=1e-4)
        assert core.score((1,), ()).shape == (0,)
        for prompt, completion in [((), (1,)), ((1,), (VOCAB,)), ((1,), (1,) * CONTEXT)]:
            with pytest.raises(Refusal):
                core.score(prompt, completion)

    def test_log_probs_after_a_commit_are_those_of_the_new_weights(self, world: World) -> None:
        core = world.core()
        got = Gathered(core, ask(max_new_tokens=20)).steps(6)
        core.stage(world.states[V1])
        core.commit()
        done = got.run()["a"]
        np.testing.assert_allclose(
            done.logprobs,
            np.concatenate([full_log_probs(world.models[v], (5, 6, 7), done.ids, 1.0)[s] for v, s in
                            ((V0, slice(6)), (V1, slice(6, 20)))]),
            atol=1e-4,
        )  # fmt: skip

    def test_kept_cache_is_the_old_weights(self, world: World) -> None:
        keep = world.core(kv_policy="keep")
        got = Gathered(keep, ask(max_new_tokens=20)).steps(6)
        keep.stage(world.states[V1])
        keep.commit()
        done = got.run()["a"]
        assert done.spans == [Span(V0, 0, 6), Span(V1, 6, 20)]
        exact = full_log_probs(world.models[V1], (5, 6, 7), done.ids, 1.0)[6:]
        assert np.abs(np.array(done.logprobs[6:]) - exact).max() > 1e-3

    def test_only_changed_tensors_are_copied(self, world: World) -> None:
        core = world.core()
        name = "model.norm.weight"
        core.stage(replace(world.states[V1], changed=(name,)))
        core.commit()
        got = Gathered(core, ask()).run()["a"]
        want = full_log_probs(world.models[V0], (5, 6, 7), got.ids, 1.0)  # both versions have a norm of ones
        np.testing.assert_allclose(got.logprobs, want, atol=1e-4)

    def test_bf16_state_serves_its_own_values_in_float32(self, world: World, tmp_path: Path) -> None:
        path = tmp_path / "bf16.bin"
        core = world.make()
        core.load(world.folder, StateFile(path, write_state(world.models[V0], path, "bfloat16"), V0))
        rounded = AutoModelForCausalLM.from_config(qwen3_config()).eval()
        rounded.load_state_dict({k: t.bfloat16().float() for k, t in world.models[V0].state_dict().items()})
        got = Gathered(core, ask()).run()["a"]
        np.testing.assert_allclose(got.logprobs, full_log_probs(rounded, (5, 6, 7), got.ids, 1.0), atol=1e-4)

    @settings(
        max_examples=12, deadline=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.differing_executors],  # several engines inherit this suite
    )  # fmt: skip
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**16)), min_size=10, max_size=45))
    def test_any_interleaving_gives_exact_log_probs(self, world: World, ops: list[tuple[int, int]]) -> None:
        """Adds, steps, interrupts, aborts and commits in any order: every token's log probability is that of a full
        forward, over all tokens before it, under the version its span names."""
        core = world.core(max_running=5, prefill_tokens=60)
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
                core.stage(replace(world.states[(V0, V1)[commits % 2]], version=Version(0, commits)))
                core.commit()
        got.run()
        for name, done in got.all.items():
            for span in done.spans:
                model = world.models[(V0, V1)[span.version.step % 2]]
                want = full_log_probs(model, requests[name].prompt_ids, done.ids, 1.0)[span.start : span.stop]
                np.testing.assert_allclose(done.logprobs[span.start : span.stop], want, atol=1e-4)

    def test_broken_weights_end_sequences_with_an_error(self, world: World, tmp_path: Path) -> None:
        good = world.states[V0]
        flat = np.fromfile(good.path, np.uint8)
        spec = good.layout.by_name["model.norm.weight"]
        flat[spec.offset : spec.stop] = np.full(32, np.nan, np.float32).view(np.uint8)
        (tmp_path / "nan.bin").write_bytes(flat.tobytes())
        core = world.core()
        got = Gathered(core, ask()).steps(2)
        core.stage(StateFile(tmp_path / "nan.bin", good.layout, V1))
        core.commit()
        done = got.run()["a"]
        assert done.finish == "error" and len(done.ids) == 2
