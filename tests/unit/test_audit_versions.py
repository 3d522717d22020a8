"""Under which versions proven nodes' completions are checked, and by which way an auditor gets there."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from learner.audit.calibration import Calibration, NodeArithmetic
from learner.audit.opening import path_through
from learner.audit.plan import AuditPlan, ToldKind
from learner.audit.versions import MOST_BLOCK, REMEMBERED, ChosenVersions
from learner.standing.standing import Standing, StandingRules
from learner.trajectory import Group, Trajectory
from p2p.protocol.rollout import Span
from p2p.protocol.versions import Catalog, CatalogEntry
from p2p.version import Version


def chosen_of(secret: bytes, share: float, tokens: int, versions: int) -> tuple[list[int], ChosenVersions]:
    versions_of = ChosenVersions(secret)
    for step in range(versions):
        versions_of.made(tokens)
        versions_of.published(Version(1, step), share)
    return [versions_of.times(Version(1, step)) for step in range(versions)], versions_of


def test_one_version_of_each_block_is_looked_at_and_the_share_of_all_tokens_stays() -> None:
    times, _ = chosen_of(b"s" * 32, 0.02, 2800, 100)
    times = times[30:]  # what is usual is known by then: 56 tokens a version, so that ten are taken together
    assert set(times) <= {0, 10} and 0.7 <= sum(times) / len(times) <= 1.3
    at = [i for i, n in enumerate(times) if n]
    assert max(b - a for a, b in pairwise(at)) < 20, "looked at again in less than two blocks"
    other, _ = chosen_of(b"t" * 32, 0.02, 2800, 100)
    assert [bool(n) for n in times] != [bool(n) for n in other[30:]], "nobody knows which without the secret"
    assert len({at[i] % 10 for i in range(len(at))}) > 1, "nor is it the same place of each block"


@pytest.mark.parametrize("share, tokens, most", [
    (0.02, 32_768, 1), (0.02, 8_000, 4), (1.0, 10, 1), (0.0, 10, 1), (0.02, 0, 1), (0.3, 10, 3), (0.02, 1, MOST_BLOCK),
])  # fmt: skip
def test_blocks_are_as_small_as_they_can_be(share: float, tokens: int, most: int) -> None:
    times, versions = chosen_of(b"s" * 32, share, tokens, 200)
    assert max(times[100:]) == most and most * share <= 1
    assert versions.times(Version(2, 0)) == 1, "of what was never told nothing is left out"
    assert sum(1 for step in range(200) if versions.times(Version(1, step)) != 1) <= REMEMBERED


def test_a_proven_nodes_completions_are_chosen_under_chosen_versions_and_a_strangers_under_all() -> None:
    kind = ToldKind(NodeArithmetic("transformers", "float32", "cpu"))
    plan = AuditPlan(b"s" * 32, 1, Standing(StandingRules(checks=True, audit_share=0.02)), Calibration(), lambda peer: kind)
    plan.standing.ended("proven", 10_000)
    plan.standing.checked("proven", 10_000)
    found: dict[str, list[Version]] = {"proven": [], "stranger": []}
    count = 0
    for step in range(240):
        version = Version(1, step)
        plan.published(version)
        for node, many in (("proven", 200), ("stranger", 1)):
            for _ in range(many):
                count += 1
                plan.whole(Group(count, count, (Trajectory(
                    prompt_ids=(1,), completion_ids=(2,) * 7, logprobs=(-0.5,) * 7, spans=(Span(version, 0, 7),), finish="stop",
                    node=node, seed=1,
                ),)))  # fmt: skip
        assert plan.urgent and plan.all_of("stranger") and not plan.all_of("proven")
        assert plan.waits_for() == {version} and plan.waiting_tokens == 8 * plan.waiting
        for check in plan.next(1 << 30):
            found[check.parts[0].node].append(version)
    assert found["stranger"] == [Version(1, step) for step in range(240)]
    late = [v for v in found["proven"] if v.step >= 40]
    assert len({v.step for v in late}) <= 200 // 9, "a few versions"
    assert 0.014 < len(late) / (200 * 200) < 0.027, "and the same share of completions"


def entry(kind: str, step: int, base: int | None = None, size: int = 100_000) -> CatalogEntry:
    def digest(at: int) -> bytes:
        return at.to_bytes(32)

    return CatalogEntry(
        f"{kind}{step}".encode(), kind, Version(1, step), None if base is None else Version(1, base),
        b"" if base is None else digest(base), digest(step), size,
    )  # fmt: skip


def test_the_way_goes_through_each_stop_by_differences_and_is_short_between_them() -> None:
    deltas = [entry("delta", step, step - 1) for step in range(3, 21)]
    long = [entry("cumulative", step, step - 5) for step in (10, 15, 20)]
    unsealed = CatalogEntry(b"next", "delta", Version(1, 21), Version(1, 20), b"", b"", 0)
    catalog = Catalog(Version(1, 20), (*deltas, *long, entry("anchor", 20, size=1), unsealed))
    held = deltas[1]  # 4

    def way(*stops: int) -> list[str] | None:
        path = path_through(catalog, held, {Version(1, step) for step in stops})
        return None if path is None else [f"{e.kind[0]}{e.version.step}" for e in path]

    assert way(17) == ["d5", "c10", "c15", "d16", "d17"]
    assert way(12, 17) == ["d5", "c10", "d11", "d12", "d13", "d14", "d15", "d16", "d17"]
    assert way(20) == ["d5", "c10", "c15", "c20"], "no anchor, however small: the states before it would be lost"
    assert way() == [] and way(21) is None and way(2) is None


@pytest.mark.parametrize("seed", range(5))
def test_differences_are_told_once_with_the_next_version_that_is_looked_at(seed: int) -> None:
    versions, rng = ChosenVersions(bytes([seed]) * 16), random.Random(seed)
    sizes, told, since = list[int](), list[int](), 0
    for step in range(300):
        versions.made(rng.randrange(4_000))
        sizes.append(rng.randrange(1, 1_000))
        since += sizes[-1]
        passed = versions.published(Version(1, step), 0.02, sizes[-1])
        assert bool(passed) == bool(versions.times(Version(1, step))) and passed in (0, since)
        since = 0 if passed else since
        told.append(passed)
    assert sum(told) + since == sum(sizes) and 20 < sum(map(bool, told)) < 200
