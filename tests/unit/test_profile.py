"""Network profiles: what a file says, what it may not say, and what scaling keeps."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.networks.profile import LEARNER, PRESETS, Step, build_profile, load_profile
from p2p.errors import UsageError

BASE = """
[learner]
up_mbit = 40
down_mbit = 100
delay_ms = 12.5

[[nodes]]
count = 3
preset = "home-cable"
"""


def build(text: str) -> Any:
    return build_profile(tomllib.loads(text), "test.toml")


def test_a_small_profile() -> None:
    profile = build(BASE)
    assert [h.name for h in profile.hosts] == [LEARNER, "node-1", "node-2", "node-3"]
    assert (profile.learner.access.up, profile.learner.access.down) == (40e6, 100e6)
    assert profile.host("node-2").access == PRESETS["home-cable"]
    node = profile.host("node-1")
    assert profile.delay(profile.learner, node) == pytest.approx(0.0225) == profile.delay(node, profile.learner)
    assert profile.mtu == 1500 and profile.congestion == "cubic" and profile.scale == 1.0 and profile.name == "profile"
    with pytest.raises(KeyError, match="no host 'node-4'"):
        profile.host("node-4")


def test_a_preset_with_differences_sites_traces_and_nat() -> None:
    profile = build("""
        name = "mixed"
        scale = 0.1
        mtu = 9000
        [sites.lab]
        preset = "lan"
        [learner]
        preset = "dc"
        [[nodes]]
        name = "lab"
        count = 2
        site = "lab"
        preset = "us-wan"
        loss = 0.01
        [[nodes]]
        name = "flat"
        preset = "lte"
        dialable = false
        trace = [[0, 10, 20], [5.5, 0, 0], [8, 1, 2]]
    """)
    assert [h.name for h in profile.hosts] == [LEARNER, "lab-1", "lab-2", "flat"]
    lab = profile.host("lab-1").access
    assert lab.loss == 0.01 and lab.up == pytest.approx(100e6) and lab.delay == 0.015
    assert profile.delay(profile.host("lab-1"), profile.host("lab-2")) == pytest.approx(0.0002)
    assert profile.delay(profile.host("lab-1"), profile.host("flat")) == pytest.approx(0.040)
    flat = profile.host("flat")
    assert not flat.dialable and flat.trace == (Step(0, 1e6, 2e6), Step(5.5, 0, 0), Step(8, 1e5, 2e5))
    assert profile.scale == 0.1 and profile.sites["lab"].up == pytest.approx(100e6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("learner", "required")),
        ("[learner]\npreset = 'lan'\n", ("nodes", "required")),
        (BASE + "speed = 3\n", ("nodes.0.speed", "unknown key")),
        (BASE.replace("home-cable", "home"), ("nodes.0", "preset 'home' is not one of lan, dc")),
        (BASE.replace("up_mbit = 40\n", ""), ("learner", "needs a preset, or up_mbit and down_mbit")),
        (BASE + "up_mbit = 0\n", ("nodes.0.up_mbit", "greater than 0")),
        (BASE + "up_mbit = '20'\n", ("nodes.0.up_mbit", "number")),
        (BASE + "up_mbit = inf\n", ("nodes.0.up_mbit", "finite")),
        (BASE + "loss = 1.0\n", ("nodes.0.loss", "less than 1")),
        (BASE + "site = 'x'\n", ("node-1", "no site 'x'")),
        (BASE + "name = 'Node 1'\n", ("nodes.0.name",)),
        (BASE + "trace = [[0, 1]]\n", ("nodes.0", "each row is")),
        (BASE + "trace = [[1, 1, 1], [1, 2, 2]]\n", ("nodes.0", "times must rise")),
        (BASE + "trace = [[0, -1, 1]]\n", ("nodes.0", "below 0")),
        (BASE + "[[nodes]]\ncount = 2\npreset = 'lte'\n", ("two hosts are called 'node-1'",)),
        ("congestion = 'fast'\n" + BASE, ("congestion", "cubic")),
        ("mtu = 100\n" + BASE, ("mtu",)),
        (BASE.replace("count = 3", "count = 99999"), ("nodes.0.count",)),
    ],
)
def test_what_a_profile_may_not_say(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        build(text)
    said = str(error.value)
    assert said.startswith("test.toml: ") and "\n" not in said and all(word in said for word in words), said


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "crowd.toml"
    with pytest.raises(UsageError, match="no such profile"):
        load_profile(path)
    path.write_text("a = \n")
    with pytest.raises(UsageError, match="is not TOML"):
        load_profile(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="cannot read"):
        load_profile(path)
    path.write_text(BASE)
    assert load_profile(path).name == "crowd"


@given(st.floats(0.001, 10), st.floats(0.001, 10))
def test_scaling_keeps_times_and_ratios(first: float, second: float) -> None:
    profile = build(BASE)
    scaled = profile.scaled(first).scaled(second)
    assert scaled.scale == pytest.approx(first * second)
    for before, after in zip(profile.hosts, scaled.hosts, strict=True):
        assert after.access.up / after.access.down == pytest.approx(before.access.up / before.access.down)
        assert after.access.up == pytest.approx(before.access.up * first * second)
        assert (after.access.delay, after.access.loss, after.access.queue) == (
            before.access.delay, before.access.loss, before.access.queue
        )  # fmt: skip
