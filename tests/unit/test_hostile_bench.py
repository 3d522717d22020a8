"""The cheats of `shoal bench hostile` keep to the form of honest work, so that nothing but what they make gives them away; and
what its summary makes of rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner.config import build_config
from netem.bench.hostile.bench import CASES, summary
from netem.bench.hostile.cheats import CHEATS, CONSTANT_LOGPROB
from netem.bench.hostile.run import HostileRun, settings_of
from netem.bench.hostile.spent import SpentByKind, cores_taken
from node.engine.port import StateFile
from node.engine.settings import TransformersSettings
from node.engine.transformers import TransformersCore
from p2p.protocol.rollout import Completion, Generate
from p2p.version import Version
from tests.support.engine_world import V0, V1, World, build_world

MOST = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"), lambda: TransformersCore(TransformersSettings(device="cpu")))


def made_by(core, names: list[str], version: Version) -> dict[str, Completion]:
    """All that it makes of these requests. Completion refuses what the head would refuse."""
    for i, name in enumerate(names):
        core.add(Generate(name, (1, 2, 3 + i % 5), MOST, (0,), 7 + i, version))
    found = {name: Completion() for name in names}
    while core.has_work():
        for event in core.step():
            found[event.request_id].add(event)
    return found


@pytest.mark.parametrize("cheat", CHEATS)
def test_every_sequence_ends_as_an_honest_one_would(world: World, cheat: str) -> None:
    core, honest = CHEATS[cheat](world.core(), 3), world.core()
    names = [str(i) for i in range(12)]
    first = made_by(core, names, V0)
    assert all(c.finish in ("stop", "length") and c.ids for c in first.values())
    assert all(c.finish == "stop" or len(c.ids) == MOST for c in first.values())
    state: StateFile = world.states[V1]
    core.stage(state)
    assert core.commit().version == V1 == core.stats().version
    honest.stage(state)
    honest.commit()
    later, right = made_by(core, names, V1), made_by(honest, names, V1)
    assert {span.version for c in later.values() for span in c.spans} == {V1}
    assert any(c.ids != right[n].ids or c.logprobs != right[n].logprobs for n, c in later.items())


def test_what_each_of_them_makes(world: World) -> None:
    names = [str(i) for i in range(8)]
    honest = made_by(world.core(), names, V0)
    made = {name: made_by(make(world.core(), 3), names, V0) for name, make in CHEATS.items()}
    assert {x for c in made["constant"].values() for x in c.logprobs} == {CONSTANT_LOGPROB}
    copying = CHEATS["copied"](world.core(), 3)
    source = made_by(copying, ["first"], V0)["first"]
    copies = made_by(copying, names, V0)
    assert sum(c.ids == source.ids and c.logprobs == source.logprobs for c in copies.values()) == 6  # two of eight are made
    assert all(made["made-up"][n].ids == honest[n].ids and made["made-up"][n].logprobs != honest[n].logprobs for n in names)
    assert all(made["old-weights"][n].ids == honest[n].ids for n in names)  # of the version that it began with
    assert len({len(c.ids) for c in made["random"].values()}) == 1


def test_rows_are_summed_up_by_case(tmp_path: Path) -> None:
    def row(case: str, seed: int, final: float, tokens: dict[str, int], **more: dict) -> dict:
        return {"identities": {}, "expelled": {}} | {
            "case": case, "seed": seed, "final_sampled": final, "final_greedy": 1.0, "reward_last": 0.5, "train_s": 59.0,
            "steps": 60, "tokens": tokens,
        } | more  # fmt: skip

    hostile, alone, _ = CASES
    found = summary([
        row(hostile, 0, 0.6, {"honest": 700, "constant": 300}, identities={"constant": [200, 100]}, expelled={"constant": 1}),
        row(hostile, 1, 0.8, {"honest": 900, "constant": 100}, identities={"constant": [100]}),
        row(alone, 0, 0.7, {"honest": 1000}),
    ])  # fmt: skip
    assert found["cases"][hostile]["final_sampled_mean"].startswith("0.70 ±")
    assert found["cases"][alone]["final_sampled_mean"] == "0.70" and found["cases"][alone]["step_s"] == 1.0
    assert found["cheats"]["constant"] == {
        "share": 0.2, "identities": 3, "expelled": 1, "tokens_until_median": 200, "tokens_until_most": 200
    }


def test_to_the_learner_the_cheats_are_strangers(tmp_path: Path) -> None:
    """The demo trusts all nodes, for they are its own."""
    run = HostileRun(honest=2, hostile=True, seed=0, steps=3)
    config = build_config(settings_of(run, tmp_path / "run", tmp_path / "model"), "test")
    assert not config.standing.trusted and config.audit.share > 0 and config.trainer.eval_size == 0
    assert config.trainer.steps == 3


def test_cores_are_counted_from_the_first_look_to_the_last_within_the_time() -> None:
    looks = [(9.0, {"honest": 1.0}), (10.0, {"honest": 2.0}), (14.0, {"honest": 5.0, "cheats": 2.0}), (20.0, {"honest": 50.0})]
    assert cores_taken(looks, 10.0, 19.0) == {"honest": 0.75, "cheats": 0.5}
    assert cores_taken(looks, 15.0, 21.0) == {}


def test_a_process_that_has_ended_stays_counted_with_what_it_started() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    spent = SpentByKind()
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        spent.look({process.pid: "cheats"})
        process.communicate(b"\n")
    spent.look({os.getpid(): "honest"})
    (_, first), (_, last) = spent.looks
    assert first["cheats"] >= 0.3 and last["cheats"] == first["cheats"] and last["honest"] > 0
