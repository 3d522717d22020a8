"""What the doctor makes of facts: memory, limits, files, disk, clock, addresses, the learner's sandbox."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from learner.doctor import examine_learner, judge_run_disk, judge_sandbox
from learner.rewards.sandbox_probe import missing_layers
from node.doctor.examination import answer, judge_devices, judge_engines, judge_python, look_at_libp2p, say
from node.doctor.machine import (
    ContainerLimits,
    KernelClock,
    judge_clock,
    judge_disk,
    judge_files,
    judge_limits,
    judge_memory,
    look_at_disk,
    read_kernel_clock,
    read_limits,
)
from node.doctor.reach import Dialled, judge_ahead, judge_dialled, judge_listening, judge_seen, sound_address
from p2p.findings import OK, WARNING, WRONG, DoctorFinding, count_of
from p2p.limits import GIB

NOW = 1_800_000_000.0


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_limits_of_control_groups_version_2(tmp_path: Path) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text("0::/system.slice/shoal.service\n")
    assert read_limits(groups, root) == ContainerLimits()
    write(root / "system.slice", memory__max="8589934592\n", cpu__max="max 100000\n", pids__max="max\n")
    write(root / "system.slice" / "shoal.service", memory__max="max\n", cpu__max="150000 100000\n", pids__max="512\n")
    assert read_limits(groups, root) == ContainerLimits(8 * GIB, 1.5, 512)
    groups.write_text("0::/somewhere/on/the/host\n")  # seen from within a container
    write(root, memory__max="1073741824\n")
    assert read_limits(groups, root) == ContainerLimits(GIB)


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    groups.write_text("4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n2:pids:/\n1:name=systemd:/\nnonsense\n")
    write(root / "memory", memory__limit_in_bytes="2147483648\n")
    write(root / "memory" / "docker" / "x", memory__limit_in_bytes="9223372036854771712\n")
    write(root / "cpu", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    write(root / "pids", pids__max="100\n")
    assert read_limits(groups, root) == ContainerLimits(2 * GIB, 0.5, 100)
    write(root / "cpu", cpu__cfs_quota_us="-1\n")
    assert read_limits(groups, root).cpus is None
    assert read_limits(tmp_path / "nothing", root) == ContainerLimits()


def test_the_machine() -> None:
    assert judge_memory(16 * GIB, 8 * GIB, ContainerLimits()) == DoctorFinding("memory", OK, "8 GiB of 16 GiB are free")
    tight = judge_memory(16 * GIB, 8 * GIB, ContainerLimits(memory=GIB))
    assert tight.state == WARNING and "may use 1 GiB" in tight.said and tight.todo
    assert judge_limits(ContainerLimits(), 8).state == OK
    assert judge_limits(ContainerLimits(cpus=4, processes=4096), 8) == DoctorFinding(
        "limits", OK, "4 of 8 cores, 4,096 threads and processes"
    )
    few = judge_limits(ContainerLimits(cpus=0.5, processes=64), 8)
    assert few.state == WARNING and "at least one core" in few.todo and "--pids-limit" in few.todo
    assert (judge_files(256).state, judge_files(4096).state, judge_files(-1).state) == (WARNING, OK, OK)
    assert "LimitNOFILE" in judge_files(256).todo


def test_disks(tmp_path: Path) -> None:
    states = [judge_disk("disk", tmp_path, writable=True, free=free).state for free in (0, GIB, 100 * GIB)]
    assert states == [WRONG, WARNING, OK]
    assert judge_disk("disk", tmp_path, writable=False, free=100 * GIB).state == WRONG
    assert str(tmp_path / "a" / "b") in look_at_disk("disk", tmp_path / "a" / "b").said
    (tmp_path / "file").write_text("")
    assert look_at_disk("disk", tmp_path / "file" / "x").state == WRONG
    assert judge_run_disk(tmp_path, writable=False, free=0).state == WARNING  # a node would run all the same
    assert [judge_run_disk(tmp_path, writable=True, free=n * GIB).state for n in (1, 50)] == [WARNING, OK]


def test_clocks() -> None:
    read_kernel_clock()  # whatever it says here
    assert judge_clock(0.0, None).state == WRONG
    assert judge_clock(NOW, None).state == OK and "2027-01-15" in judge_clock(NOW, None).said
    assert judge_clock(NOW, KernelClock(True, 0.02)).state == OK
    assert judge_clock(NOW, KernelClock(False, 16.0)).state == WARNING
    assert [judge_ahead(s).state for s in (0.4, -59, 61, -3600, 90_000, -90_000)] == [OK, OK, WARNING, WARNING, WRONG, WRONG]
    assert "ahead of" in judge_ahead(3600).said and "behind" in judge_ahead(-3600).said


ADDRESS = "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooW"


@pytest.mark.parametrize(
    ("answers", "state", "words"),
    [
        ([Dialled(ADDRESS, True, took_s=0.02)], OK, ("8.8.8.8:4001 answers in 20 ms",)),
        ([Dialled(ADDRESS, False, "no answer"), Dialled("/ip4/10.0.0.1/tcp/1", True)], OK, ("10.0.0.1:1 answers", "does not")),
        ([Dialled(ADDRESS, False, "no answer in 15 s")], WRONG, ("no answer in 15 s", "firewall")),
        ([Dialled(ADDRESS, False, "Connection refused")], WRONG, ("nothing listens there",)),
        ([Dialled("/ip4/10.0.0.1/tcp/4001", False, "no answer in 15 s")], WRONG, ("swarm.announce",)),
        ([Dialled("/ip4/127.0.0.1/tcp/4001", False, "Connection refused")], WRONG, ("own machine only",)),
        ([Dialled(ADDRESS, True, "the ticket expired")], WRONG, ("refuses this machine: the ticket expired", "fresh ticket")),
        ([Dialled(ADDRESS, False, "what answers there is no peer of ours: b'HTTP'")], WRONG, ("another program answers",)),
        ([], WRONG, ("names no address",)),
    ],
)
def test_the_way_to_the_learner(answers: list[Dialled], state: str, words: tuple[str, ...]) -> None:
    found = judge_dialled(answers)
    assert found.state == state and all(word in f"{found.said} {found.todo}" for word in words), found
    assert bool(found.todo) == (state != OK)


def test_ways_in() -> None:
    assert judge_listening(["/ip4/8.8.8.8/tcp/4001/p2p/12D3KooW", "/ip4/127.0.0.1/tcp/4001"]).state == OK
    assert "--map-port" in judge_listening(["/ip4/192.168.1.4/tcp/4001", "/ip4/127.0.0.1/tcp/4001"]).todo
    assert "0.0.0.0" in judge_listening(["/ip6/::1/tcp/4001"]).todo
    ours = ["192.168.1.4", "8.8.8.8", "127.0.0.1"]
    assert judge_seen("", ours, None).state == OK
    assert "no NAT" in judge_seen("/ip4/8.8.8.8/tcp/9", ours, None).said
    assert "on this machine" in judge_seen("/ip4/127.0.0.1/tcp/9", ours, WARNING).said
    nat = judge_seen("/ip4/9.9.9.9/tcp/9", ours, WARNING)
    assert nat.state == WARNING and "behind NAT" in nat.said and "--map-port" in nat.todo
    assert "forwarded" in judge_seen("/ip4/9.9.9.9/tcp/9", ours, OK).said
    assert judge_seen("/ip4/9.9.9.9/tcp/9", ours, None).state == OK


def test_what_a_stranger_says_is_cleaned() -> None:
    refused = judge_dialled([Dialled("/ip4/\x1b[2J/tcp/1", True, "\x07\x1b]0;title")])
    assert not re.search(r"[\x00-\x1f\x7f]", f"{refused.said}{refused.todo}")


def test_the_learners_part(tmp_path: Path) -> None:
    assert judge_sandbox([], 6).state == OK
    bare = judge_sandbox(["namespaces", "Landlock"], 0)
    assert bare.state == WARNING and "namespaces, Landlock" in bare.said and "allow_unconfined" in bare.todo
    less = judge_sandbox(["seccomp"], 4)
    assert less.state == WARNING and "seccomp=unconfined is a trade" in less.todo and "is gone for everything" in less.todo
    assert set(missing_layers()) <= {"namespaces", "Landlock", "seccomp"}
    assert [finding.what for finding in examine_learner(tmp_path / "runs")] == ["reward sandbox", "disk: checkpoints"]


def facts(*, ok: bool = True, devices: int = 0) -> dict[str, Any]:
    engine = {"package": "transformers", "version": "5.0", "device": "cpu", "dtype": "float32", "memory": 8 * GIB}
    return {
        "ok": ok, "python": "/x/python", "torch": "2.9", "devices": [{"name": "H200", "memory": 141 * GIB}] * devices,
        "engines": {
            "transformers": engine | {"missing": "" if ok else "/x/python has no torch"},
            "vllm": engine | {"version": "", "missing": "/x/python has no vllm"},
        },
    }  # fmt: skip


def test_engines_and_devices() -> None:
    assert [finding.state for finding in judge_engines(facts())] == [OK, OK]
    none = judge_engines(facts(ok=False))
    assert [finding.state for finding in none] == [WRONG, WRONG] and all(finding.todo for finding in none)
    assert judge_devices(facts(devices=2), driver=True).said == "H200 with 141 GiB, H200 with 141 GiB"
    assert "nvidia-smi" in judge_devices(facts(), driver=True).todo
    assert judge_devices(facts(), driver=False).state == WARNING
    assert (judge_python((3, 12)).state, judge_python((3, 10)).state) == (OK, WRONG)
    assert look_at_libp2p().state == OK


def test_the_answer() -> None:
    warning = DoctorFinding("memory", WARNING, "little [bold]of it[/bold]", "buy more")
    wrong = DoctorFinding("disk", WRONG, "none", "buy one")
    assert answer(facts(), [warning])["ok"] and not answer(facts(), [warning, wrong])["ok"]
    assert answer(facts(), [wrong])["findings"] == [{"what": "disk", "state": "wrong", "said": "none", "todo": "buy one"}]
    assert answer(facts(), [])["engines"] == facts()["engines"]
    assert count_of([warning, wrong], WRONG) == 1
    page = io.StringIO()
    say([wrong, warning], Console(file=page))  # the worst last
    lines = [line.rstrip() for line in page.getvalue().splitlines()]
    assert lines == [
        "warning  memory  little [bold]of it[/bold]", "                 -> buy more", "wrong    disk    none",
        "                 -> buy one", "No node would run here as it is: 1 wrong, 1 to know of.",
    ]  # fmt: skip


def test_what_a_learner_says_that_it_sees_is_an_address_or_nothing() -> None:
    for sound in ("/ip4/127.0.0.1/tcp/9", "/ip6/2001:db8::7/tcp/4001"):
        assert sound_address(sound) == sound
    escape = "/ip6/fe80::1%\x1b]0;owned\x07/tcp/9"
    for wrong in ("", escape, "/dns4/example.org/tcp/80", "/ip4/1.2.3.4/tcp/9/p2p/x", "/ip4/1.2.3/tcp/9"):
        assert sound_address(wrong) == ""
