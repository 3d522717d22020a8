"""What the engine computes with is what the node says it serves, whichever step of an install fails."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import trio

from node.agent import _clip
from node.engine.base import CommitResult, StateFile
from node.engine.fake import ScriptedCore, ScriptedSettings
from node.engine.wire import Events, decode, encode
from node.shadow import Shadow
from p2p.protocol.rollout import TokenEvent
from p2p.state import FlatState
from p2p.version import Version
from tests.swarm.harness import LAYOUT, changed_state, make_state, open_swarm


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
        save, failed = Shadow._save, []

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


def test_a_logprob_a_hair_above_zero_is_zero() -> None:
    """Events come over a socket as read-only arrays."""
    event = TokenEvent("1.0.0", 0, (1, 2), np.array([1e-7, -1.0], np.float32), Version(1, 1))
    came = decode(encode(Events([event]))[4:]).events[0]
    assert _clip(came).logprobs.tolist() == [0.0, -1.0]
