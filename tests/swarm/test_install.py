"""What the engine computes with is what the node says it serves, whichever step of an install fails."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import save_file

from node.engine.fake import ScriptedCore, ScriptedSettings
from node.engine.port import CommitResult, StateFile
from node.install.base_model import BaseModel
from node.install.shadow import Shadow
from p2p.errors import UsageError
from p2p.layout import Layout
from p2p.version import Version
from p2p.weights.state import FlatState
from p2p.weights.store import delete_chunks
from tests.support.harness import LAYOUT, changed_state, make_state, open_swarm


class TensorCore(ScriptedCore):
    """The scripted core with tensors of its own, filled as the transformers adapter does: a commit copies `changed`."""

    def load(self, model_dir, state: StateFile) -> None:
        super().load(model_dir, state)
        held = FlatState.open(state.path, state.layout)
        self.tensors = {spec.name: held.tensor(spec.name).copy() for spec in state.layout.tensors}

    def commit(self) -> CommitResult:
        state = self._staged
        assert state is not None
        new = FlatState.open(state.path, state.layout)
        names = [spec.name for spec in state.layout.tensors] if state.changed is None else state.changed
        copies = {name: new.tensor(name).copy() for name in names}
        result = super().commit()
        self.tensors.update(copies)
        return result

    def holds(self, state: FlatState) -> bool:
        return all(np.array_equal(self.tensors[spec.name], state.tensor(spec.name)) for spec in LAYOUT.tensors)


@pytest.mark.parametrize("resumed", [True, False], ids=["learner resumes", "next delta"])
async def test_a_shadow_that_could_not_follow_its_engine(tmp_path, autojump_clock, monkeypatch, resumed) -> None:
    """The engine took 1.6, then the disk was full. Whatever comes next must not build on the engine holding 1.5."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        core = TensorCore(ScriptedSettings())
        node = await swarm.start_node(1, core=core)
        first = make_state(1)
        head.publish(5, first)
        await head.until_installed([node.peer], Version(1, 5))
        await trio.sleep(3)
        assert core.holds(first)
        save, failed = Shadow._save, []  # the disk fails at this very write

        def fail_once(self: Shadow, held) -> None:
            if not failed and held.version == Version(1, 6):
                failed.append(held.version)
                raise OSError(errno.ENOSPC, "No space left on device")
            save(self, held)

        monkeypatch.setattr(Shadow, "_save", fail_once)
        second = changed_state(first, 2)
        head.publish(6, second, base=5, old=first)
        await trio.sleep(0.7)
        assert failed and core.holds(second) and node.agent.shadow.version == Version(1, 5)
        if resumed:  # step 6 was not checkpointed
            await swarm.kill_head()
            head = await swarm.start_head(2)
            head.publish(5, first)
            want, state = Version(2, 5), first
        else:  # one tensor goes back to what it was in 1.5: no difference to the shadow, one to the engine
            state = changed_state(second, 3)
            name = LAYOUT.tensors[0].name
            state.write_tensor(name, first.tensor(name))
            head.publish(7, state, base=6, old=second)
            want = Version(1, 7)
        await head.until_installed([node.peer], want, 120)
        await trio.sleep(3)
        assert head.status[node.peer].version == want
        assert core.holds(state)


# --- ways past single deltas


def states(count: int) -> list[FlatState]:
    made = [make_state(1)]
    for seed in range(2, count + 1):
        made.append(changed_state(made[-1], seed, 0.01))
    return made


async def test_who_was_away_comes_back_in_one_step(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        away, stays = await swarm.start_nodes(2)
        made = states(6)
        head.publish(1, made[0])
        await head.until_installed([away.peer, stays.peer], Version(1, 1))
        await swarm.kill(away)
        for step in range(2, 6):
            head.publish(step, made[step - 1], base=step - 1, old=made[step - 2])
            await head.until_installed([stays.peer], Version(1, step))
        span = head.publish(5, made[4], base=1, old=made[0], cumulative=True)
        await trio.sleep(3)
        assert head.sent(span) == 0 and span.mid not in stays.agent.swarm.transfers, "nobody is sent what it did not ask for"
        back = await swarm.start_node(1)
        await head.until_installed([back.peer], Version(1, 5))
        assert set(head.installed[back.peer]) == {Version(1, 1), Version(1, 5)}
        assert back.agent.shadow.digest == made[4].digest() and not head.refusals and not head.reports
        head.publish(6, made[5], base=5, old=made[4])
        await head.until_installed([back.peer, stays.peer], Version(1, 6))


async def test_who_comes_back_when_what_led_on_is_gone_starts_over_with_the_anchor(tmp_path, autojump_clock, caplog) -> None:
    """It held a version after the anchor; meanwhile nobody else was there, and all that is kept begins with the anchor."""
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        away = await swarm.start_node(1)
        made = states(6)
        head.publish(1, made[0])
        head.publish(2, made[1], base=1, old=made[0])
        await head.until_installed([away.peer], Version(1, 2))
        await swarm.kill(away)
        for step in range(3, 6):
            head.publish(step, made[step - 1], base=step - 1, old=made[step - 2])
        head.publish(5, made[4], base=1, old=made[0], cumulative=True)
        head.publisher.prune([])
        back = await swarm.start_node(1)
        assert back.agent.shadow.version == Version(1, 2)
        await head.until_installed([back.peer], Version(1, 5))
        assert "keeps nothing that leads on from version 1.2: from version 1.1 again" in caplog.text
        assert back.agent.shadow.digest == made[4].digest() and not head.refusals
        head.publish(6, made[5], base=5, old=made[4])
        await head.until_installed([back.peer], Version(1, 6))


async def test_an_engine_is_not_taken_back_when_its_node_starts_over(tmp_path, autojump_clock) -> None:
    taken: list[Version] = []

    class Core(TensorCore):
        def commit(self) -> CommitResult:
            result = super().commit()
            taken.append(result.version)
            return result

    core = Core(ScriptedSettings())
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        made = states(6)
        head.publish(1, made[0])
        head.publish(2, made[1], base=1, old=made[0])
        node = await swarm.start_node(1, core=core)
        await head.until_installed([node.peer], Version(1, 2))
        while node.agent.slot.serving != Version(1, 2):
            await trio.sleep(0.1)
        node.agent.installer.sleep()
        for step in range(3, 6):
            head.publish(step, made[step - 1], base=step - 1, old=made[step - 2])
        head.publish(5, made[4], base=1, old=made[0], cumulative=True)
        head.publisher.prune([])
        node.agent.installer.wake()
        await head.until_installed([node.peer], Version(1, 5))
        assert Version(1, 1) in head.installed[node.peer] and node.agent.slot.serving == Version(1, 5)
        assert taken == sorted(taken) and taken[-1] == Version(1, 5) and core.holds(made[4])


def save_model(folder: Path, state: FlatState, *, without: str = "") -> BaseModel:
    """As Hugging Face would have it, in two files."""
    folder.mkdir(parents=True)
    tensors = {}
    for spec in LAYOUT.tensors:
        flat = torch.from_numpy(np.asarray(state.tensor(spec.name)).reshape(-1).view(np.uint8).copy())
        tensors[spec.name] = flat.view(getattr(torch, spec.dtype)).reshape(spec.shape)
    names = [n for n in tensors if n != without]
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in part}, str(folder / f"model-{number}.safetensors"))
    return BaseModel(folder)


async def test_an_old_anchor_and_what_changed_since_serve_a_joiner(tmp_path, autojump_clock) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        made = states(6)
        head.publish(1, made[0])
        for step in range(2, 7):
            head.publish(step, made[step - 1], base=step - 1, old=made[step - 2])
            if step in (3, 5):
                head.publish(step, made[step - 1], base=1, old=made[0], cumulative=True)
        head.publisher.prune([])
        entries = head.publisher.catalog().entries  # type: ignore[union-attr]
        kept = {(e.kind, e.version.step) for e in entries if e.version.step}
        assert kept == {("anchor", 1), ("delta", 5), ("cumulative", 5), ("delta", 6)}
        node = await swarm.start_node(1)
        await head.until_installed([node.peer], Version(1, 6))
        assert node.agent.shadow.digest == made[5].digest() and not head.reports


def test_a_base_model_has_no_adapter_and_the_state_zeros(tmp_path) -> None:
    layout = Layout.build([*((t.name, t.dtype, t.shape) for t in LAYOUT.tensors), ("adapter.x.lora_A", "bfloat16", (2, 3))])
    model, state = states(1)[0], FlatState.in_memory(layout)
    save_model(tmp_path / "model", model).write(state)
    assert all(np.array_equal(state.tensor(t.name), model.tensor(t.name)) for t in LAYOUT.tensors)
    assert not state.tensor("adapter.x.lora_A").any()


@pytest.mark.parametrize("step", [1, 2, 5], ids=["just that", "a version on", "many versions on"])
async def test_who_has_the_base_model_downloads_what_was_learned_since(tmp_path, autojump_clock, step) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        made = states(5)
        whole = head.publish(1, made[0])
        for later in range(2, step + 1):
            head.publish(later, made[later - 1], base=later - 1, old=made[later - 2])
        if step == 5:
            head.publish(5, made[4], base=1, old=made[0], cumulative=True)
            head.publish(5, made[4])
            delete_chunks(head.publisher.prune([]))
            assert {e.version for e in head.publisher.catalog().entries if e.version.step} == {Version(1, 5)}  # type: ignore[union-attr]
        node = await swarm.start_node(1, base_model=save_model(tmp_path / "model", made[0]))
        await head.until_installed([node.peer], Version(1, step))
        came = sum(i.bytes_from_head + i.bytes_from_peers for i in head.installed[node.peer].values())
        assert came < whole.size / 5 and node.agent.shadow.digest == made[step - 1].digest()
        assert (came > 0) == (step > 1) and not head.reports


@pytest.mark.parametrize("what", ["another model", "a tensor lacks"])
async def test_a_base_model_that_does_not_fit_costs_nothing_but_a_word(tmp_path, autojump_clock, caplog, what) -> None:
    async with open_swarm(tmp_path) as swarm:
        head = await swarm.start_head()
        made = states(2)
        head.publish(1, made[0])
        without = LAYOUT.tensors[0].name if what == "a tensor lacks" else ""
        node = await swarm.start_node(1, base_model=save_model(tmp_path / "model", make_state(9), without=without))
        await head.until_installed([node.peer], Version(1, 1))
        head.publish(2, made[1], base=1, old=made[0])
        await head.until_installed([node.peer], Version(1, 2))
        assert node.agent.shadow.digest == made[1].digest() and not head.reports
        assert ("not what this run began with" if not without else f"no tensor '{without}'") in caplog.text


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"--base-model .*no \.safetensors file"):
        BaseModel(tmp_path)


def test_a_base_model_of_another_dtype_is_cast_as_the_learner_casts(tmp_path) -> None:
    layout = Layout.build([("w", "bfloat16", (3, 5))])
    masters = torch.randn(3, 5)
    save_file({"w": masters, "more": torch.zeros(2)}, str(tmp_path / "model.safetensors"))
    state = FlatState.in_memory(layout)
    BaseModel(tmp_path).write(state)
    assert np.array_equal(state.tensor("w"), masters.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))
    for wrong in (Layout.build([("w", "bfloat16", (5, 3))]), Layout.build([("w", "int16", (3, 5))])):
        with pytest.raises(UsageError, match="the run's is"):
            BaseModel(tmp_path).write(FlatState.in_memory(wrong))
