"""InlineEngine on a mock clock: the Engine contract in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from node.engine.fake import ScriptedCore, ScriptedSettings
from node.engine.port import EngineDied, StateFile
from p2p.errors import Refusal
from p2p.layout import Layout
from p2p.protocol.rollout import Completion, Generate, Span
from p2p.version import Version
from tests.support.faulty_core import Faults, FaultyCore
from tests.support.inline_engine import BUFFER, InlineEngine, open_inline_engine

V0, V1 = Version(0, 0), Version(0, 1)


def ask(name: str = "a", max_new_tokens: int = 12, min_version: Version = V0) -> Generate:
    return Generate(name, (5, 6, 7), max_new_tokens, (), 3, min_version)


def make_core(faults: Faults | None = None) -> ScriptedCore:
    return FaultyCore(faults or Faults(), ScriptedSettings(check_files=False))


async def collect(engine: InlineEngine, into: Completion) -> None:
    while not into.finish:
        for event in await engine.events.receive():
            into.add(event)


async def test_steps_take_virtual_time(autojump_clock: trio.testing.MockClock) -> None:
    async with open_inline_engine(make_core(), step_s=0.5) as engine:
        done = Completion()
        await engine.add(ask())
        await collect(engine, done)
        assert (len(done.ids), done.finish) == (12, "length")
        assert trio.current_time() == pytest.approx(6.0)
        with pytest.raises(Refusal):
            await engine.add(ask("b", min_version=V1))


async def test_commit_between_two_tokens(autojump_clock: trio.testing.MockClock) -> None:
    async with open_inline_engine(make_core(), step_s=1.0, commit_s=10.0) as engine:
        done = Completion()
        async with trio.open_nursery() as nursery:
            await engine.add(ask())
            nursery.start_soon(collect, engine, done)
            await trio.sleep(4.5)
            await engine.stage(StateFile(Path("state"), Layout.build([]), V1))
            result = await engine.commit()
            assert (result.version, result.pause_s) == (V1, 10.0)
        assert done.spans == [Span(V0, 0, 4), Span(V1, 4, 12)]
        with pytest.raises(RuntimeError, match="nothing is staged"):
            await engine.commit()


async def test_interrupt_abort_and_score(autojump_clock: trio.testing.MockClock) -> None:
    async with open_inline_engine(make_core(), step_s=1.0) as engine:
        await engine.add(ask("a", 100))
        await engine.add(ask("b", 100))
        await trio.sleep(3.5)
        await engine.abort(["b"])
        await engine.interrupt(["a", "unknown"])
        done = Completion()
        while not done.finish:
            for event in await engine.events.receive():
                if event.request_id == "a":
                    done.add(event)
        assert (len(done.ids), done.finish) == (3, "interrupt")
        assert (await engine.stats()).running == 0
        assert (await engine.score((1,), (2, 3))).shape == (2,)


async def test_death_is_engine_died_everywhere(autojump_clock: trio.testing.MockClock) -> None:
    for faults, reason in [(Faults(step_error_at=5), "broken after 5"), (Faults(), "power cut")]:
        async with open_inline_engine(make_core(faults), step_s=1.0) as engine:
            await engine.add(ask("a", 100))
            if reason == "power cut":
                await trio.sleep(4.5)
                engine.kill(reason)
            seen = [e async for batch in engine.events for e in batch]
            assert len(seen) == 4
            for call in (engine.stats(), engine.add(ask("z")), engine.commit(), engine.interrupt()):
                with pytest.raises(EngineDied, match=reason):
                    await call


async def test_it_waits_for_a_consumer_that_does_not_read(autojump_clock: trio.testing.MockClock) -> None:
    async with open_inline_engine(make_core(), step_s=0.01) as engine:
        await engine.add(ask("a", 1000))
        await trio.sleep(100)
        made = (await engine.stats()).tokens
        assert BUFFER <= made <= 2 * BUFFER + 1
        done = Completion()
        await collect(engine, done)
        assert len(done.ids) == 1000
