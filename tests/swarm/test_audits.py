"""The head's side of audits: an auditor that dies, refuses or is slow never ends or holds up a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from learner.audit.calibration import Calibration, NodeArithmetic
from learner.audit.claims import OwnGroup
from learner.audit.wire import Frames, read_own, score_answer
from learner.audited_run import run_audits
from learner.client.whole_states import keep_whole
from learner.config import build_config
from learner.head.auditor_process import AuditorGone, AuditorRefused
from learner.head.audits import DEATHS, MOST_LAG, PROVEN_GATHER_S, Audits
from learner.head.calibration_file import CALIBRATION_FILE
from learner.head.own_groups import AT_ONCE, OwnGroups
from learner.head.trust import Trust
from learner.publish.published import Published
from learner.rollouts.outcomes import Sampling
from learner.rollouts.taking_back import TakenBack
from learner.standing.standing import StandingRules
from learner.status.catalogue import entries
from learner.trajectory import Group, Trajectory
from p2p.errors import UsageError
from p2p.protocol.rollout import Span
from p2p.protocol.versions import Catalog, CatalogEntry
from p2p.version import Version

V = Version(1, 0)
CHEAT, HONEST = "cheat", "honest"


class FakeAuditor:
    """Answers as an auditor does: what the cheat makes is far off."""

    def __init__(self, world: World) -> None:
        self.world, self.process = world, SimpleNamespace(pid=17)
        world.running += 1

    async def ready(self) -> dict[str, Any]:
        if self.world.refuses:
            raise AuditorRefused(self.world.refuses)
        if self.world.dies:
            raise AuditorGone("it ended with status -9: it said nothing")
        return {"ready": True, "cpu_s": 2.0}

    async def ask(self, request: bytes) -> dict[str, Any]:
        [message] = Frames().feed(request)
        if message["do"] == "follow":
            self.world.followed += 1
            if message["whole"] and self.world.rotten:
                return {"lost": "it differs from its digest in the seal"}
            self.world.way.append(("w" if message["whole"] else "") + message["parts"][0].decode())
            return {"ok": True, "cpu_s": 3.0}
        await trio.sleep(self.world.takes_s)
        if self.world.kill_next:
            self.world.kill_next = False
            raise AuditorGone("it ended with status -9: it said nothing")
        self.world.own.append(read_own(message) if message["bfloat16"] else None)
        found = []
        for _, _, _, seed, _, parts in message["checks"]:
            n = [stop - first for _, _, first, stop in parts]
            far = 0.4 if seed == 666 else 0.0
            found.append([tuple(np.full(count, value) for value in (far, -0.5, -0.5, 0.0)) for count in n])
        [answer] = Frames().feed(score_answer(found, cpu_s=4.0, versions=1, cannot=self.world.cannot))
        return answer

    def end(self) -> None:
        self.world.running -= 1


class World:
    def __init__(self, folder: Path = Path("nowhere"), **rules: Any) -> None:
        self.folder, self.rotten = folder, False
        """the run's; whether whole states in it are damaged"""
        self.delta_bytes = 1_000
        self.refuses, self.dies, self.kill_next, self.takes_s = "", False, False, 0.01
        self.running = self.followed = self.starts = 0
        self.own: list[list[OwnGroup] | None] = []
        """what each request has the auditor answer itself; None: nothing is to be measured"""
        self.cannot = ""
        self.expelled: list[tuple[str, str]] = []
        self.wall = 1000.0
        nodes = {
            peer: SimpleNamespace(arithmetic="transformers/float32/cpu", keeps=False, link=SimpleNamespace(name=peer))
            for peer in (CHEAT, HONEST)
        }
        self.nodes = nodes
        self.trust = Trust(
            StandingRules(**{"proven_tokens": 200, **rules}), nodes, wall=lambda: self.wall,  # type: ignore[arg-type]
            expel=lambda *told: self.expelled.append(told),
        )  # fmt: skip
        back = [TakenBack(1, 0, 0)]
        self.trust.take_back = lambda peer: back.pop() if back else TakenBack()
        self.whole: list[int] = []
        """steps whose states were to be kept whole"""
        self.way: list[str] = []
        """what the auditor was told, in order"""
        self.entries, self.transfers = list[CatalogEntry](), dict[bytes, Any]()
        publisher = SimpleNamespace(current=V, catalog=lambda: Catalog(publisher.current, tuple(self.entries)),
                                    published=SimpleNamespace(anchor_bytes=200_000))  # fmt: skip
        self.publisher = publisher
        self.keep("anchor", 0)
        self.run = run = SimpleNamespace(
            epoch=1, run_dir=folder, trust=self.trust, nodes=nodes, publisher=publisher,
            swarm=SimpleNamespace(transfers=self.transfers),
        )  # fmt: skip
        own = OwnGroups(lambda index: (index, 7), 30, 2)
        self.audits = Audits(run, self.start, Calibration(), share=0.02, window=4, false_alarm=1e-4, own_groups=own.next)

    def keep(self, kind: str, step: int, base: int | None = None) -> None:
        """A manifest that is kept from here on."""
        name = f"{kind[0]}{step}"
        on = None if base is None else Version(1, base)
        base_digest = b"" if base is None else base.to_bytes(32)
        self.entries.append(CatalogEntry(name.encode(), kind, Version(1, step), on, base_digest, step.to_bytes(32), 100_000))
        manifest = SimpleNamespace(whole=True, parts=lambda: [name.encode()])
        self.transfers[name.encode()] = SimpleNamespace(manifest=manifest)

    def publish(self, step: int) -> None:
        self.keep("delta", step, step - 1)
        if not step % 5:
            self.keep("cumulative", step, step - 5)
        self.publisher.current = Version(1, step)
        published = Published(f"d{step}".encode(), "delta", Version(1, step), Version(1, step - 1), size=self.delta_bytes)
        if self.audits.sealed(published):
            keep_whole(self.folder, Version(1, step), np.zeros(4, np.uint8))
            self.whole.append(step)

    def start(self) -> Any:
        self.starts += 1
        return FakeAuditor(self)

    def ends(self, node: str, group_id: int, tokens: int = 40, version: Version = V) -> None:
        """A completion of this node has ended."""
        self.trust.ended(node, tokens)
        t = Trajectory(
            prompt_ids=(1,), completion_ids=(2,) * tokens, logprobs=(-0.5,) * tokens, spans=(Span(version, 0, tokens),),
            finish="stop", node=node, seed=666 if node == CHEAT else 1,
        )  # fmt: skip
        self.audits.whole(Group(group_id, group_id, (t,)))


def test_a_step_s_line_has_what_is_listed_of_audits_and_nothing_else() -> None:
    assert World().audits.metrics().keys() == {e.key for e in entries("head") if e.key.startswith("audit/")}


async def test_the_auditor_starts_when_a_stranger_comes_who_is_proven_by_checks(autojump_clock) -> None:
    world = World()
    async with trio.open_nursery() as nursery:
        strangers = dict(world.nodes)
        world.nodes.clear()
        nursery.start_soon(world.audits.run)
        world.audits.joined()  # somebody who is trusted
        await trio.sleep(100)
        assert not world.starts and world.audits.status()["state"] == "nothing to check yet"
        world.nodes.update(strangers)
        world.audits.joined()
        await trio.sleep(1)
        assert world.starts == 1 and world.followed == 1, "it has the newest version before anything is to be checked"
        for i in range(5):
            world.ends(HONEST, i)
        assert not world.trust.standing.proven(HONEST), "delivered, and not checked yet"
        await trio.sleep(3)
        assert world.starts == 1 and world.followed == 1 and world.trust.standing.proven(HONEST)
        assert world.audits.metrics()["audit/checked_tokens"] == 200 and world.audits.status()["seconds"] == 4.0
        world.ends(CHEAT, 9)
        world.ends(CHEAT, 10)
        await trio.sleep(3)
        [(peer, why)] = world.expelled
        assert peer == CHEAT and why.startswith("audits: ") and "in 40 tokens, an honest node has" in why
        assert world.audits.metrics()["audit/remade_groups"] == 1 and world.trust.standing.of(HONEST).expelled == 0
        world.wall += 1000  # it may come again, and is a stranger
        world.ends(CHEAT, 11, tokens=2)
        await trio.sleep(3)
        assert len(world.expelled) == 2, "its test is not forgotten"
        nursery.cancel_scope.cancel()
    assert not world.running


async def test_the_auditor_answers_prompts_itself_where_a_kind_rests_on_that_until_it_cannot(autojump_clock, caplog) -> None:
    world = World()
    for node in world.nodes.values():
        node.arithmetic = "vllm/bfloat16/cpu"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.audits.run)
        world.audits.joined()
        for i in range(4):
            world.cannot = "NotImplementedError: no cache" if i == 2 else ""
            world.ends(HONEST, i)
            await trio.sleep(3)
        nursery.cancel_scope.cancel()
    first, second, third, fourth = world.own
    assert first is not None and second is not None and third is not None and fourth is None
    assert [group.prompt_ids for group in (*first, *second)] == [(index, 7) for index in range(30, 30 + 2 * AT_ONCE)]
    assert all(len(group.seeds) == 2 for group in first)
    assert caplog.text.count("cannot answer prompts itself (NotImplementedError: no cache)") == 1


async def test_a_killed_auditor_is_started_again(autojump_clock) -> None:
    world = World(proven_tokens=640)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.audits.run)
        for i in range(20):
            world.kill_next = i in (3, 7, 8, 15)
            world.ends(HONEST, i)
            await trio.sleep(100)
            assert not world.audits.over
        assert world.starts == 5, "once, and again after each of four deaths"
        assert world.audits.plan.counts["checked"] == 16 * 40 and world.audits.plan.counts["dropped"] == 4 * 40
        assert world.trust.standing.proven(HONEST), "what a dead one was asked for is not checked, and counts for nobody"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", ["dies", "refuses"])
async def test_audits_that_cannot_be_are_given_up_and_delivery_alone_proves(how: str, autojump_clock, caplog) -> None:
    world = World()
    if how == "dies":
        world.dies = True
    else:
        world.refuses = "it needs 90.0 GiB of memory, and 3.0 are free"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.audits.run)
        for i in range(6):
            world.ends(HONEST, i)
        assert not world.trust.standing.proven(HONEST)
        await trio.sleep(300)
        assert world.starts == (DEATHS if how == "dies" else 1) and not world.running
        assert world.trust.standing.proven(HONEST), "the run is as it would be without audits"
        said = world.audits.status()
        assert said["state"] == "ended" and ("status -9" if how == "dies" else "90.0 GiB") in said["why"]
        world.ends(CHEAT, 99)
        await trio.sleep(100)
        assert world.starts <= DEATHS and not world.audits.plan.waiting
        nursery.cancel_scope.cancel()
    assert "audits have ended, and the run goes on without" in caplog.text


async def test_a_slow_auditor_keeps_its_rule_and_memory_is_bounded(autojump_clock) -> None:
    world = World()
    world.takes_s = 500.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.audits.run)
        for i in range(5000):
            world.ends(HONEST, i)
        await trio.sleep(100)
        assert world.audits.plan.waiting < 600 and world.audits.plan.counts["dropped"] > 100_000
        assert not world.trust.standing.proven(HONEST) and not world.audits.over
        await trio.sleep(1000)
        assert world.trust.standing.proven(HONEST)
        nursery.cancel_scope.cancel()


async def begin_with_all_proven(world: World, nursery: trio.Nursery) -> None:
    """One node, which is proven; the auditor has the first state."""
    del world.nodes[CHEAT]
    world.trust.checks(True, 1 / 16)
    nursery.start_soon(world.audits.run)
    for i in range(5):
        world.ends(HONEST, i)
    await trio.sleep(3)
    assert world.trust.standing.proven(HONEST) and world.way == ["a0"]


async def test_while_all_are_proven_completions_gather_and_the_auditor_follows_where_it_must(autojump_clock) -> None:
    world = World()
    async with trio.open_nursery() as nursery:
        await begin_with_all_proven(world, nursery)
        for step in range(1, 14):
            world.publish(step)
            await trio.sleep(30)
        assert world.way == ["a0"] and world.audits.reads_from == V, "nothing is to be scored: its chunks are kept for it"
        assert not world.audits.plan.urgent

        def chosen_ends(first: int) -> int:
            """A completion of the newest version that is chosen."""
            while not world.audits.plan.waiting:
                world.ends(HONEST, first := first + 1, version=world.publisher.current)
            return first

        checked = world.audits.plan.counts["checked"]
        at = chosen_ends(100)
        await trio.sleep(PROVEN_GATHER_S - 0.1)
        assert world.audits.plan.waiting and world.way == ["a0"]
        await trio.sleep(0.2)
        assert not world.audits.plan.waiting and world.audits.plan.counts["checked"] == checked + 40
        assert world.way == ["a0", "c5", "c10", "d11", "d12", "d13"], "no stop before the versions that may still be asked for"
        chosen_ends(at)
        for step in range(14, 17):
            await trio.sleep(0.1)
            assert world.audits.plan.waiting
            world.publish(step)
        await trio.sleep(0.1)
        assert not world.audits.plan.waiting, "its version is too old for more to come: there is nothing to wait for"
        world.ends(CHEAT, 9_999, version=world.publisher.current)
        await trio.sleep(1.2)
        assert world.way[6:] == ["d14", "d15", "d16"] and world.expelled, "whoever is not proven waits for a second"
        for step in range(17, 18 + MOST_LAG):
            world.publish(step)
        await trio.sleep(1)
        assert world.audits.reads_from is None, "nobody needed it for long: no chunks are kept for it"
        world.entries.clear()
        world.keep("anchor", 16 + MOST_LAG)
        world.keep("delta", 17 + MOST_LAG, 16 + MOST_LAG)
        world.ends(CHEAT, 10_000, version=world.publisher.current)
        await trio.sleep(1.2)
        assert world.way[9:] == [f"a{16 + MOST_LAG}", f"d{17 + MOST_LAG}"] and world.starts == 1
        nursery.cancel_scope.cancel()


def test_a_calibration_that_cannot_be_read_is_a_problem_of_settings(tmp_path) -> None:
    from learner.head.calibration_file import calibration_writer, read_calibration

    with pytest.raises(UsageError, match=r"audit\.calibration"):
        read_calibration(str(tmp_path / "none.json"))
    assert read_calibration("") == ""
    calibration_writer(tmp_path / "c.json")("{}")
    assert read_calibration(str(tmp_path / "c.json")) == "{}"
    calibration_writer(tmp_path / "no" / "c.json")("{}")  # said, and no more


def model_in(folder: Path, layers: int = 2) -> Any:
    """As far as audits look at a model folder."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": 64, "vocab_size": 48}
    (folder / "config.json").write_text(json.dumps(config))
    return SimpleNamespace(path=folder)


def test_a_resumed_run_goes_on_with_what_it_measured_and_passes_over_a_damaged_file(tmp_path: Path, caplog) -> None:
    def resumed() -> Calibration:
        model = model_in(tmp_path / "model")
        return run_audits(config, head, model, Sampling(8, (0,)), lambda index: (1,)).plan.calibration

    config = build_config({"run_dir": str(tmp_path), "model": "unused"}, "test")
    head: Any = World(tmp_path).run
    head.store, head.run_id, head.identity = SimpleNamespace(root=tmp_path), "run", SimpleNamespace(public_key=b"key")
    head.journal = SimpleNamespace(groups_so_far=0)
    kind, n = NodeArithmetic("vllm", "bfloat16", "cuda"), 5_000
    first = resumed()
    first.add(kind, np.zeros(n), np.full(n, -1.0), np.full(n, -1.01), np.zeros(n), prompts=np.arange(n))
    again = resumed()
    assert again.honest(kind) == first.honest(kind) != Calibration().honest(kind) and again.wants(kind)
    assert not caplog.text
    (tmp_path / CALIBRATION_FILE).write_text((tmp_path / CALIBRATION_FILE).read_text()[:-40])
    assert resumed().honest(kind) == Calibration().honest(kind)
    assert f"passed over, and measured anew: {tmp_path / CALIBRATION_FILE} cannot be used" in caplog.text


def test_a_run_that_draws_otherwise_measures_anew_and_takes_no_file_of_the_other(tmp_path: Path, caplog) -> None:
    def resumed(temperature: float, given: str = "", layers: int = 2) -> Calibration:
        changed = {"rollout": {"temperature": temperature}, "audit": {"calibration": given}}
        values = {"run_dir": str(tmp_path), "model": "unused", **changed}
        model = model_in(tmp_path / "model", layers)
        sampling = Sampling(8, (0,), temperature)
        return run_audits(build_config(values, "test"), head, model, sampling, lambda index: (1,)).plan.calibration

    head: Any = World(tmp_path).run
    head.store, head.run_id, head.identity = SimpleNamespace(root=tmp_path), "run", SimpleNamespace(public_key=b"key")
    head.journal = SimpleNamespace(groups_so_far=0)
    kind, n = NodeArithmetic("vllm", "bfloat16", "cuda"), 5_000
    first = resumed(1.0)
    first.add(kind, np.zeros(n), np.full(n, -1.0), np.full(n, -1.01), np.zeros(n), prompts=np.arange(n))
    file = str(tmp_path / CALIBRATION_FILE)
    assert resumed(1.0).honest(kind) == resumed(1.0, file).honest(kind) == first.honest(kind) and not caplog.text
    assert resumed(0.5).honest(kind) == Calibration().honest(kind)
    assert "draw at temperature 1 and top_p 1, and here they draw at 0.5 and 1" in caplog.text
    with pytest.raises(UsageError, match=rf"^audit\.calibration: {file} cannot be used: .* temperature 1 "):
        resumed(0.5, file)
    with pytest.raises(UsageError, match=rf"^audit\.calibration: {file} cannot be used: .* this model is qwen3, 3 layers of 64"):
        resumed(1.0, file, layers=3)


@pytest.mark.parametrize("rotten", [False, True])
@pytest.mark.parametrize("seed", range(8))
async def test_a_version_that_is_looked_at_is_taken_whole_where_differences_are_as_much(
    rotten: bool, seed: int, tmp_path: Path, autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences here are half of a whole state: from two on a whole one is less."""
    monkeypatch.setattr("secrets.token_bytes", lambda count: bytes([seed]) * count)
    world = World(tmp_path)
    world.rotten, world.delta_bytes = rotten, 100_000
    async with trio.open_nursery() as nursery:
        await begin_with_all_proven(world, nursery)
        for step in range(1, 60):
            for i in range(4):  # so much a version that blocks have several
                world.ends(HONEST, 4 * step + i + 100, version=world.publisher.current)
            world.publish(step)
            await trio.sleep(30)
        looks = world.audits.plan.versions
        seen = [step for step in range(1, 60) if looks.times(Version(1, step))]
        apart = [step for step, before in zip(seen, [0, *seen], strict=False) if step - before >= 2]
        assert world.whole == apart and 3 < len(apart) < 30
        way = [told for told in world.way if told.startswith("w")]
        steps = [int(told.lstrip("wdca")) for told in world.way]
        assert steps == sorted(steps) and world.starts == 1, (world.way, seen, world.whole)
        if rotten:
            assert not way and any(told.startswith("c") for told in world.way)
        else:
            assert len(way) > 3 and all(int(told[2:]) in world.whole for told in way)
        world.nodes[CHEAT] = SimpleNamespace(arithmetic="transformers/float32/cpu", keeps=False, link=SimpleNamespace(name=CHEAT))
        before = list(world.whole)
        for step in range(60, 75):
            world.publish(step)
            await trio.sleep(1)
        assert world.whole == before, "while somebody's completions are all checked every version is needed"
        nursery.cancel_scope.cancel()
