"""The auditor: it follows versions as nodes do, and scores what the real engine made while it installed them."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import trio

from learner.audit.auditor import Auditor
from learner.audit.calibration import Calibration, NodeArithmetic
from learner.audit.plan import AuditPlan, Check, ToldKind
from learner.audit.wire import Frames, follow_request, read_claims, read_deviations, score_answer, score_request
from learner.head.auditor_process import AuditorGone, AuditorProcess, AuditorRefused
from learner.standing.standing import Standing, StandingRules
from learner.trajectory import Group
from p2p.errors import Refusal, UsageError
from p2p.version import Version
from tests.support.audit_world import AuditWorld

FLOAT32 = NodeArithmetic("transformers", "float32", "cpu")


def plan(calibration: Calibration | None = None) -> AuditPlan:
    standing = Standing(StandingRules(checks=True))
    return AuditPlan(b"s" * 32, 1, standing, calibration or Calibration(), kind_of=lambda peer: ToldKind(FLOAT32))


def checks_of(of: AuditPlan, world: AuditWorld, seeds: range, steps: list[int], every: int) -> list[Check]:
    for trajectory in world.generate(seeds, steps, every):
        of.whole(Group(trajectory.seed, 0, (trajectory,)))
    return of.next(1 << 30)


def asked(auditor: Auditor, request: bytes):
    [message] = Frames().feed(request)
    [answer] = Frames().feed(auditor.answer(message))
    return answer


@pytest.mark.parametrize("rank", [0, 4])
def test_what_the_engine_made_under_several_versions_is_sound_under_each(tmp_path: Path, rank: int) -> None:
    world = AuditWorld(tmp_path, versions=4, rank=rank, now=time.time())
    auditor, of = Auditor(world.settings(4)), plan()
    for parts in world.parts:
        assert asked(auditor, follow_request(parts))["ok"]
    checks = checks_of(of, world, range(12), [0, 1, 2, 3], every=6)
    assert {len(check.parts) for check in checks} >= {4}, "sequences that went on under every version"
    found = read_deviations(asked(auditor, score_request(checks)), checks)
    worst = max(float(np.abs(d.claimed - d.recomputed).max()) for of_check in found for d in of_check)
    assert worst < 1e-4, worst
    assert max(float(d.distance.max()) for of_check in found for d in of_check) < 1e-3
    tokens = 0
    for check, of_check in zip(checks, found, strict=True):
        for judged in of.found(check, of_check):
            assert not judged.verdict.caught
            tokens += judged.tokens
    assert tokens == sum(part.stop - part.first for check in checks for part in check.parts) == of.counts["checked"] > 200


@pytest.mark.parametrize("rank", [0, 4])
def test_tokens_of_the_version_before_are_found(tmp_path: Path, rank: int) -> None:
    """A node that names version 1.2 and computes with 1.1."""
    world = AuditWorld(tmp_path, versions=3, rank=rank, now=time.time())
    auditor, of = Auditor(world.settings(3)), plan()
    for parts in world.parts:
        auditor.follow(parts)
    stale = []
    for trajectory in world.generate(range(8), [1], 99):
        spans = tuple(dataclasses.replace(span, version=Version(1, 2)) for span in trajectory.spans)
        stale.append(dataclasses.replace(trajectory, spans=spans))
    of.whole(Group(0, 0, tuple(stale)))
    checks = of.next(1 << 30)
    found = read_deviations(asked(auditor, score_request(checks)), checks)
    caught = [j for check, d in zip(checks, found, strict=True) for j in of.found(check, d) if j.verdict.caught]
    assert caught and caught[0].verdict.tokens <= 100, caught


def test_versions_out_of_the_window_are_answered_with_nothing(tmp_path: Path) -> None:
    world = AuditWorld(tmp_path, versions=4, now=time.time())
    auditor, of = Auditor(world.settings(2)), plan()
    for parts in world.parts:
        auditor.follow(parts)
    assert auditor.window.versions == (Version(1, 2), Version(1, 3))
    checks = checks_of(of, world, range(4), [0, 1, 2, 3], every=6)
    found = read_deviations(asked(auditor, score_request(checks)), checks)
    for check, of_check in zip(checks, found, strict=True):
        assert [d is not None for d in of_check] == [part.version.step >= 2 for part in check.parts]


def test_a_version_whose_state_lies_there_whole_needs_none_of_those_between(tmp_path: Path) -> None:
    world = AuditWorld(tmp_path, versions=5, now=time.time())
    auditor, of = Auditor(world.settings(4)), plan()
    auditor.follow(world.parts[0])
    rotten = tmp_path / "rotten"
    rotten.write_bytes(b"\1" * len(world.states[3].bytes))
    for file in (rotten, tmp_path / "gone", world.states[2].path):
        assert "lost" in asked(auditor, follow_request(world.parts[3], str(file)))
    assert auditor.window.versions == (Version(1, 0),)
    assert asked(auditor, follow_request(world.parts[3], str(world.states[3].path))) == {"ok": True}
    auditor.follow(world.parts[4])
    assert auditor.window.versions == (Version(1, 0), Version(1, 3), Version(1, 4))
    checks = checks_of(of, world, range(4), [0, 3, 4], every=6)
    found = read_deviations(asked(auditor, score_request(checks)), checks)
    assert all(d is not None and float(d.distance.max()) < 1e-3 for of_check in found for d in of_check)


def test_what_is_not_the_heads_or_not_there_is_refused(tmp_path: Path) -> None:
    world = AuditWorld(tmp_path, versions=3, now=time.time())
    auditor = Auditor(world.settings(3))
    assert "unknown base" in asked(auditor, follow_request(world.parts[1]))["lost"]
    auditor.follow(world.parts[0])
    with pytest.raises(Refusal, match="not whole"):
        auditor.follow(world.parts[1][:-1])
    other = AuditWorld(tmp_path / "other", versions=1, now=time.time())
    settings = dataclasses.replace(world.settings(3), head_key=b"x".hex() * 32)
    with pytest.raises(Refusal, match="not signed"):
        Auditor(settings).follow(other.parts[0])
    for file in (tmp_path / "chunks").rglob("*"):
        if file.is_file():
            file.write_bytes(b"rot")
    with pytest.raises(Refusal, match="damaged"):
        auditor.follow(world.parts[1])
    with pytest.raises(UsageError, match="cannot be built"):
        Auditor(dataclasses.replace(settings, model=str(tmp_path / "none")))


def test_too_little_memory_is_said_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = AuditWorld(tmp_path, versions=1, now=time.time())
    monkeypatch.setattr("learner.audit.auditor.psutil.virtual_memory", lambda: type("M", (), {"available": 1 << 20}))
    with pytest.raises(UsageError, match=r"GiB of memory.*--audit 0"):
        Auditor(world.settings(3))


def test_answers_are_read_as_strictly_as_they_are_asked(tmp_path: Path) -> None:
    world, of = AuditWorld(tmp_path, versions=1, now=time.time()), plan()
    checks = checks_of(of, world, range(2), [0], every=99)
    [message] = Frames().feed(score_request(checks))
    claims = read_claims(message)
    assert [len(c) for c in claims] == [1, 1] and claims[0][0][1].completion_ids == checks[0].completion_ids
    for wrong in ({"found": []}, {"found": [[None]]}, {}, {"found": [[None, None], [None]]}):
        with pytest.raises(ValueError, match="asked"):
            read_deviations(wrong, checks)
    [answer] = Frames().feed(score_answer([[None], [None]]))
    assert read_deviations(answer, checks) == [[None], [None]]
    with pytest.raises(ValueError, match="other tokens"):
        long = [np.zeros(999).tobytes()] * 4
        read_deviations({"found": [[long], [None]]}, checks)


async def test_the_process_answers_until_it_is_killed(tmp_path: Path) -> None:
    world, of = AuditWorld(tmp_path, versions=2, now=time.time()), plan()
    process = AuditorProcess(world.settings(2).text(), tmp_path / "auditor.log")
    try:
        assert (await process.ready())["ready"]
        assert os.getpriority(os.PRIO_PROCESS, process.process.pid) >= 10
        for parts in world.parts:
            assert (await process.ask(follow_request(parts)))["ok"]
        checks = checks_of(of, world, range(4), [0, 1], every=6)
        found = read_deviations(await process.ask(score_request(checks)), checks)
        assert all(d is not None for of_check in found for d in of_check)
        os.kill(process.process.pid, signal.SIGKILL)
        with pytest.raises(AuditorGone, match="status -9"), trio.fail_after(30):
            await process.ask(score_request(checks))
    finally:
        process.end()
    process = AuditorProcess(dataclasses.replace(world.settings(2), model=str(tmp_path)).text(), tmp_path / "auditor.log")
    try:
        with pytest.raises(AuditorRefused, match="cannot be built"):
            await process.ready()
    finally:
        process.end()


def test_an_auditor_that_rounds_does_not_take_its_own_rounding_for_the_nodes(tmp_path: Path) -> None:
    """It called each honest float32 node wrong within ten tokens: by the bounds of an auditor that does not round."""
    world = AuditWorld(tmp_path, versions=4, now=time.time())
    auditor = Auditor(dataclasses.replace(world.settings(4), dtype="bfloat16"))
    of = plan(Calibration.of("", lambda text: None, exact=False))
    for parts in world.parts:
        auditor.follow(parts)
    checks = checks_of(of, world, range(60), [0, 1, 2, 3], every=6)
    assert of.wants_own(checks) == 0
    found = read_deviations(asked(auditor, score_request(checks)), checks)
    judged = [j for check, of_check in zip(checks, found, strict=True) for j in of.found(check, of_check)]
    assert sum(j.tokens for j in judged) > 1_000 and not any(j.verdict.caught for j in judged)
