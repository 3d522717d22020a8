"""The engine as a child process: the same results as in process, and every way to die reported promptly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import trio

from node.engine.child import EVENT_WINDOW
from node.engine.fake import ScriptedCore
from node.engine.port import Engine, EngineDied, StateFile
from node.engine.process import PROGRESS_S, EngineProcess, open_engine_process, register_starter, start_program
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import Completion, Generate, Span, TokenEvent
from p2p.version import Version
from tests.support.faulty_core import start_faulty
from tests.support.watchdog import patience, until

pytestmark = pytest.mark.e2e

V0, V1 = Version(0, 0), Version(0, 1)


def ask(name: str = "a", **changes: Any) -> Generate:
    base = Generate(name, prompt_ids=(5, 6, 7), max_new_tokens=12, stop_ids=(), seed=3, min_version=V0)
    return replace(base, **changes)


async def gather(engine: Engine, *names: str) -> dict[str, Completion]:
    """Read events until all of these ended."""
    done = {name: Completion() for name in names}
    while not all(c.finish for c in done.values()):
        for event in await engine.events.receive():
            if event.request_id in done:
                done[event.request_id].add(event)
    return done


async def drain(engine: Engine) -> int:
    """Tokens read until `events` closes."""
    count = 0
    async for batch in engine.events:
        count += sum(len(e.ids) for e in batch)
    return count


def empty_state(folder: Path, version: Version) -> StateFile:
    (folder / "state").touch()
    return StateFile(folder / "state", Layout.build([]), version)


async def test_fake_through_the_process(tmp_path: Path) -> None:
    state = empty_state(tmp_path, V0)
    log = tmp_path / "engine.log"
    with patience():
        async with open_engine_process("fake", {"log": str(log)}) as engine:
            await engine.load(tmp_path, state)
            core = ScriptedCore()
            for request in (ask("a"), ask("b", seed=2**64 - 1, prompt_ids=tuple(range(40)))):
                await engine.add(request)
                core.add(request)
            got = await gather(engine, "a", "b")
            want = {"a": Completion(), "b": Completion()}
            while core.has_work():
                for event in core.step():
                    want[event.request_id].add(event)
            assert got == want
            with pytest.raises(Refusal) as caught:
                await engine.add(ask("late", min_version=Version(3, 4)))
            assert (caught.value.version, caught.value.fatal) == (Version(3, 4), False)
            assert "serves 0.0" in caught.value.reason
            with pytest.raises(RuntimeError, match="nothing is staged"):
                await engine.commit()
            with pytest.raises(RuntimeError, match="no such method"):
                await engine._call("close")  # no public method asks so wrongly
            await engine.stage(replace(state, version=V1, changed=()))
            assert (await engine.commit()).version == V1
            assert (await engine.score((1, 2), (3, 4))).tolist() == core_scores((1, 2), (3, 4))
            stats = await engine.stats()
            assert (stats.tokens, stats.version, stats.running) == (24, V1, 0)
            pid = engine.pid
        with pytest.raises(EngineDied, match="closed"):
            await engine.stats()
        assert not psutil.pid_exists(pid)
    assert "nothing is staged" in log.read_text()


def core_scores(prompt: tuple[int, ...], completion: tuple[int, ...]) -> list[float]:
    return ScriptedCore(version=V1).score(prompt, completion).tolist()


async def test_interrupted_sequences_end_in_the_stream_before_the_call_returns() -> None:
    with patience():
        async with open_engine_process("fake", {"step_s": 0.01}) as engine:
            for i in range(3):
                await engine.add(ask(f"r{i}", max_new_tokens=1000))
            batch = await engine.events.receive()
            assert batch[0].start == 0
            await engine.abort(["r2"])
            await engine.interrupt()
            assert (await engine.stats()).running == 0
            ends: list[TokenEvent] = []
            while len(ends) < 2:
                ends += [e for e in await engine.events.receive() if e.finish]
            assert [(e.request_id, e.finish) for e in ends] == [("r0", "interrupt"), ("r1", "interrupt")]


async def test_an_agent_that_reads_no_events_stops_the_decoding_but_not_the_commands() -> None:
    with patience():
        async with open_engine_process("fake", {}, progress_s=2.0) as engine:
            await engine.add(ask("a", max_new_tokens=1000))
            made = -1
            while made != (made := (await engine.stats()).tokens) or made == 0:
                await trio.sleep(0.05)
            assert EVENT_WINDOW <= made <= 2 * EVENT_WINDOW
            await trio.sleep(3.0)  # longer than the progress deadline: a waiting engine is not a stuck one
            assert (await engine.stats()).tokens == made
            assert len((await gather(engine, "a"))["a"].ids) == 1000


async def assert_dead(engine: EngineProcess, match: str) -> None:
    for call in (engine.stats(), engine.add(ask("z")), engine.commit(), engine.interrupt()):
        with pytest.raises(EngineDied, match=match):
            await call
    await drain(engine)
    with patience():
        while psutil.pid_exists(engine.pid):
            await trio.sleep(0.01)


async def test_sigkill_is_engine_died_everywhere_at_once() -> None:
    async with open_engine_process("fake", {"step_s": 0.2}) as engine:
        await engine.add(ask("a", max_new_tokens=1000))
        await engine.events.receive()
        outcomes: list[str] = []

        async def pending_call() -> None:
            with pytest.raises(EngineDied):
                while True:
                    await engine.stats()
            outcomes.append("call")

        async def reading() -> None:
            await drain(engine)
            outcomes.append("events")

        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pending_call)
            nursery.start_soon(reading)
            await trio.sleep(0.05)
            os.kill(engine.pid, signal.SIGKILL)
        assert trio.current_time() - start < PROGRESS_S and sorted(outcomes) == ["call", "events"]
        await assert_dead(engine, "SIGKILL")


@pytest.fixture
def faulty() -> Iterator[None]:
    """Engines of this test have the faults that their settings name."""
    register_starter(start_faulty)
    yield
    register_starter(start_program)


async def test_a_stuck_child_is_killed_and_reported(faulty: None) -> None:
    with patience():
        async with open_engine_process("fake", {"stall_at": 4}, progress_s=2.0) as engine:
            await engine.add(ask("a", max_new_tokens=1000))
            assert await drain(engine) == 3
            await assert_dead(engine, "did not answer")


async def test_a_broken_step_ends_the_engine_with_its_reason(faulty: None) -> None:
    with patience():
        async with open_engine_process("fake", {"step_error_at": 5}) as engine:
            await engine.add(ask("a", max_new_tokens=1000))
            assert await drain(engine) == 4
            await assert_dead(engine, "broken after 5")


async def test_an_engine_that_lost_its_weights_ends_with_its_reason(tmp_path: Path, faulty: None) -> None:
    with patience():
        async with open_engine_process("fake", {"commit_broken": "neither old nor new"}) as engine:
            await engine.stage(empty_state(tmp_path, V1))
            with pytest.raises(EngineDied, match="neither old nor new"):
                await engine.commit()
            await assert_dead(engine, "neither old nor new")


async def test_settings_it_does_not_know_fail_at_the_start() -> None:
    with patience(), pytest.raises(EngineDied, match="no_such"):
        async with open_engine_process("fake", {"no_such": 1}):
            raise AssertionError("it came up")


async def test_cancelling_the_agent_ends_the_child() -> None:
    pid = 0
    with patience(), trio.CancelScope() as scope:
        async with open_engine_process("fake", {}) as engine:
            pid = engine.pid
            await engine.add(ask("a", max_new_tokens=4000))
            scope.cancel()
            await trio.sleep_forever()
    assert pid and not psutil.pid_exists(pid)


AGENT = """
import trio
from node.engine.process import open_engine_process
async def main():
    async with open_engine_process("fake", {"step_s": 0.01}) as engine:
        print(engine.pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


def test_the_child_dies_with_its_agent() -> None:
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True, env=env)
    assert agent.stdout is not None
    child = psutil.Process(int(agent.stdout.readline()))
    agent.kill()
    agent.wait()
    until("the child's end", lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_the_agent_side_does_not_import_torch() -> None:
    code = "import sys, node.engine.process, tests.support.inline_engine; sys.exit('torch' in sys.modules)"
    root = str(Path(__file__).resolve().parents[2])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}).returncode == 0


async def test_transformers_through_the_process(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, Qwen3Config

    from node.engine.flat_model import write_state
    from node.engine.transformers import TransformersCore, TransformersSettings

    config = Qwen3Config(
        vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    states = []
    for seed, version in enumerate((V0, V1)):
        torch.manual_seed(seed)
        path = tmp_path / f"{version}.bin"
        states.append(StateFile(path, write_state(AutoModelForCausalLM.from_config(config), path), version))
    settings = {"device": "cpu", "max_running": 8}
    with patience():
        async with open_engine_process("transformers", {**settings, "threads": 1}) as engine:
            await engine.load(tmp_path, states[0])
            await engine.add(ask("a", max_new_tokens=400))
            done = Completion()
            while len(done.ids) < 5:
                for event in await engine.events.receive():
                    done.add(event)
            await engine.stage(states[1])
            with pytest.raises(Refusal, match="state file"):
                await engine.stage(replace(states[1], path=tmp_path / "nowhere"))
            await engine.stage(states[1])
            assert (await engine.commit()).version == V1
            while not done.finish:
                for event in await engine.events.receive():
                    done.add(event)
            assert [s.version for s in done.spans] == [V0, V1] and len(done.ids) == 400
            at = done.spans[1].start
            core = TransformersCore(TransformersSettings(**settings))  # type: ignore[arg-type]
            core.load(tmp_path, states[1])
            core.add(ask("a", max_new_tokens=400, prefix_ids=tuple(done.ids[:at])))
            again = Completion(ids=done.ids[:at], logprobs=done.logprobs[:at], spans=[Span(V0, 0, at)])
            while core.has_work():
                for event in core.step():
                    again.add(event)
            assert again.ids == done.ids
            np.testing.assert_allclose(again.logprobs, done.logprobs, atol=1e-4)
            np.testing.assert_allclose(
                await engine.score((5, 6, 7), done.ids), core.score((5, 6, 7), done.ids), atol=1e-4
            )
