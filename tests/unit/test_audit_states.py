"""The states of the last versions in one state and what was undone: a random walk between them gives each one exactly."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from learner.audit.states import StateWindow, ToldState
from p2p.codec import encode_segment
from p2p.errors import Refusal
from p2p.layout import Layout, Segment
from p2p.version import Version
from p2p.weights.state import FlatState

SEGMENT = 1024
LAYOUT = Layout.build([
    ("a", "bfloat16", (37, 40)), ("b", "bfloat16", (300,)), ("norm", "float32", (64,)), ("steps", "int64", (3,)),
    ("frozen", "bfloat16", (40, 40)),
])  # fmt: skip


def fresh(rng: np.random.Generator) -> FlatState:
    state = FlatState.in_memory(LAYOUT)
    for spec in LAYOUT.tensors:
        bits = rng.integers(0, 1 << 15, spec.shape).astype(f"u{spec.itemsize}")
        state.write_tensor(spec.name, bits)
    return state


def changed(rng: np.random.Generator, old: FlatState, share: float) -> FlatState:
    """Some words of some tensors, never of the frozen one."""
    new = FlatState.in_memory(LAYOUT)
    new.bytes[...] = old.bytes
    for spec in LAYOUT.tensors:
        if spec.name != "frozen" and rng.random() < 0.8:
            words = new.tensor(spec.name).reshape(-1)
            where = rng.random(len(words)) < share
            words[where] += words.dtype.type(rng.integers(1, 5))
    return new


def payloads(new: FlatState, base: FlatState | None):
    def payload(segment: Segment) -> bytes:
        return encode_segment(new.words(segment), base.words(segment) if base is not None else None).payload

    return payload


def begin(window: StateWindow, version: Version, state: FlatState) -> None:
    window.begin(ToldState(version, SEGMENT, payloads(state, None), state.tensor_digests(), state.digest()), LAYOUT)


def follow(window: StateWindow, version: Version, state: FlatState, base: FlatState) -> None:
    window.follow(ToldState(version, SEGMENT, payloads(state, base), state.tensor_digests(), state.digest()), base.digest())


def jump(window: StateWindow, version: Version, state: FlatState) -> None:
    def nothing(segment: Segment) -> bytes:
        raise AssertionError("a whole state needs no payload")

    window.jump(ToldState(version, SEGMENT, nothing, state.tensor_digests(), state.digest()), state.bytes)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("jumps", [False, True])
def test_a_random_walk_gives_the_exact_states(seed: int, jumps: bool) -> None:
    rng, dice = np.random.default_rng(seed), random.Random(seed)
    keep = dice.randint(1, 6)
    window = StateWindow(keep)
    states = {Version(1, 0): fresh(rng)}
    begin(window, Version(1, 0), states[Version(1, 0)])
    copies = {spec.name: np.array(window.state.tensor(spec.name)) for spec in LAYOUT.tensors}
    window.take_stale()
    newest = Version(1, 0)
    for _ in range(120):
        if dice.random() < 0.25:
            version = Version(1, newest.step + dice.choice((1, 1, 2)))
            states[version] = changed(rng, states[newest], dice.choice((0.0, 0.002, 0.05, 0.9)))
            if jumps and dice.random() < 0.5:
                jump(window, version, states[version])
            else:
                follow(window, version, states[version], states[newest])
            newest = version
            assert window.newest_digest == states[version].digest()
        else:
            version = dice.choice(window.versions)
            window.move(version)
        assert window.at == version and np.array_equal(window.state.bytes, states[version].bytes)
        assert window.state.digest() == window.digest(version) == states[version].digest()
        for name in window.take_stale():
            copies[name] = np.array(window.state.tensor(name))
        for name, copy in copies.items():  # who makes only what is stale anew has the state
            assert np.array_equal(copy, states[version].tensor(name)), name
        assert window.versions == tuple(sorted(states)[-len(window.versions) :]) and len(window.versions) <= keep
        assert window.undo <= (len(window.versions) - 1) * (LAYOUT.nbytes + 64 * 8)
    assert len(window.versions) == keep and window.given_up == 0


def test_what_did_not_change_is_neither_kept_nor_stale() -> None:
    rng = np.random.default_rng(0)
    first = fresh(rng)
    second = FlatState.in_memory(LAYOUT)
    second.bytes[...] = first.bytes
    second.tensor("norm")[5] += 1
    window = StateWindow(4)
    begin(window, Version(1, 0), first)
    assert window.take_stale() == set(LAYOUT.by_name)
    follow(window, Version(1, 1), second, first)
    assert window.undo == 8 and "norm" in window.take_stale()
    window.move(Version(1, 0))
    assert "frozen" not in window.take_stale()


def test_memory_is_bounded_and_the_oldest_goes() -> None:
    rng = np.random.default_rng(0)
    window, states = StateWindow(10, undo_bytes=3000), [fresh(rng)]
    begin(window, Version(1, 0), states[0])
    for step in range(1, 8):
        states.append(changed(rng, states[-1], 0.2))
        follow(window, Version(1, step), states[-1], states[-2])
        assert window.undo <= 3000
    assert 1 <= len(window.versions) < 8 and window.given_up == 8 - len(window.versions)
    window.move(window.versions[0])
    assert window.state.digest() == states[window.versions[0].step].digest()
    with pytest.raises(KeyError, match="not held"):
        window.move(Version(1, 0))
    with pytest.raises(KeyError, match="not held"):
        window.digest(Version(1, 0))


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first = fresh(rng)
    second, third = changed(rng, first, 0.1), changed(rng, first, 0.1)
    window = StateWindow(4)
    with pytest.raises(Refusal, match="unknown base"):
        follow(window, Version(1, 1), second, first)
    begin(window, Version(1, 0), first)
    follow(window, Version(1, 1), second, first)
    for version, state, base, why in (
        (Version(1, 2), third, first, "unknown base"), (Version(1, 1), third, second, "not newer"),
    ):  # fmt: skip
        with pytest.raises(Refusal, match=why):
            follow(window, version, state, base)
    wrong = changed(rng, second, 0.1)
    for payload, digests, digest, why in (
        (payloads(wrong, second), third.tensor_digests(), third.digest(), "differs from its digest"),
        (payloads(wrong, second), wrong.tensor_digests(), third.digest(), "state digest"),
        (lambda s: b"\xff", wrong.tensor_digests(), wrong.digest(), "segment 0"),
    ):  # fmt: skip
        with pytest.raises(Refusal, match=why):
            window.follow(ToldState(Version(1, 2), SEGMENT, payload, digests, digest), second.digest())
    assert window.at == Version(1, 1) and window.state.digest() == second.digest()
    window.move(Version(1, 0))
    assert window.state.digest() == first.digest()
    with pytest.raises(Refusal, match="differs from its digest"):
        window.begin(ToldState(Version(1, 5), SEGMENT, payloads(second, None), first.tensor_digests(), first.digest()), LAYOUT)
    assert window.versions == () and window.newest is None


def test_a_whole_state_that_is_not_the_seal_s_leaves_the_window_as_it_was() -> None:
    rng = np.random.default_rng(0)
    first = fresh(rng)
    states = [first, changed(rng, first, 0.9), changed(rng, first, 0.9)]
    window = StateWindow(3)
    with pytest.raises(Refusal, match="no whole state"):
        jump(window, Version(1, 0), states[0])
    begin(window, Version(1, 0), states[0])
    told = ToldState(Version(1, 2), SEGMENT, lambda _: b"", states[2].tensor_digests(), states[2].digest())
    with pytest.raises(Refusal, match="differs from its digest"):
        window.jump(told, states[1].bytes)
    with pytest.raises(Refusal, match="bytes"):
        window.jump(told, states[2].bytes[:-1])
    with pytest.raises(Refusal, match="not newer"):
        jump(window, Version(1, 0), states[0])
    assert window.versions == (Version(1, 0),) and np.array_equal(window.state.bytes, states[0].bytes)
    jump(window, Version(1, 2), states[2])
    window.move(Version(1, 0))
    assert np.array_equal(window.state.bytes, states[0].bytes)
