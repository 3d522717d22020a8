"""The audit bench without engines: what cheats change, what is kept in files, how tokens are judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from learner.audit.calibration import Calibration, NodeArithmetic
from learner.audit.deviations import Deviations
from learner.audit.repeats import UNASKED
from learner.audit.scorer import Claim
from learner.audit.sequential import FALSE_ALARM, NodeTest
from netem.bench.audit.bench import AuditBench, bench_audit
from netem.bench.audit.cheats import cheats, likelier
from netem.bench.audit.in_run import Spent, cost
from netem.bench.audit.judging import (
    AMONG,
    ELSEWHERE,
    KNOWN,
    NOBODY_TRUSTED,
    UNKNOWN,
    Sample,
    calibrate,
    detected,
    facts,
    honest_row,
    percentile,
    ways,
)
from netem.bench.audit.making import HONEST, stream_of
from netem.bench.audit.store import Column, TokenFiles, claims_of
from netem.bench.audit.table import cost_line, tables
from netem.bench.audit.world import (
    EIGHT,
    EXAMPLE_EVERY,
    MEMBERS,
    MOST_SEED,
    NOW,
    OTHER,
    SEED_APART,
    STRANGE_EVERY,
    World,
)
from p2p.errors import ShoalError, UsageError
from p2p.layout import Layout

ROUNDS, EXACT = NodeArithmetic("vllm", "bfloat16", "cpu"), NodeArithmetic("transformers", "float32", "cpu")


def world_in(folder: Path, seed: int = 0) -> World:
    return World(
        "tiny", folder, Layout.build([]), prompt_of=lambda index: (7, index), most=5, stop=(), context=64, seed=seed
    )  # fmt: skip


def claims(first: int, groups: int) -> list[Claim]:
    rng, world = np.random.default_rng(first), world_in(Path())
    return [
        Claim((7, first + g), tuple(rng.integers(0, 9, 5).tolist()), tuple(-rng.exponential(1, 5)), world.seed_of(first + g, m))
        for g in range(groups) for m in range(MEMBERS)
    ]  # fmt: skip


def column(n: int, noise: float, seed: int = 0, far: float = 0.0) -> Column:
    rng = np.random.default_rng(seed)
    recomputed = -rng.exponential(1, n)
    claimed = recomputed - np.expm1(recomputed) * noise * rng.standard_normal(n)
    distance = np.where(rng.random(n) < far, 0.4, 0.0)
    return Column(distance, claimed, recomputed, distance, again=np.full(n, np.nan), prompts=np.arange(n) // 48.0)


def test_each_cheat_of_words_changes_what_it_says_and_nothing_else() -> None:
    made, rng = claims(0, 40), np.random.default_rng(0)
    changes = {name: cheat.change for name, cheat in cheats((NOW,)).items() if cheat.change is not None}
    assert len(changes) == 8
    for name, change in changes.items():
        got = change(list(made), rng)
        assert [(c.prompt_ids, c.seed) for c in got] == [(c.prompt_ids, c.seed) for c in made]
        words = [c.completion_ids for c in got] != [c.completion_ids for c in made]
        assert words == (not name.startswith("log probabilities")), name
        if "1 in" not in name:
            assert [c.logprobs for c in got] != [c.logprobs for c in made], name
    shuffled = changes["shuffled answers"](list(made), rng)
    assert all(a.completion_ids != b.completion_ids for a, b in zip(made, shuffled, strict=True))


def test_a_cheat_is_made_of_each_other_state() -> None:
    found = cheats((EIGHT, NOW, OTHER))
    assert found[OTHER].state == OTHER and not found[OTHER].mild and found[EIGHT].mild
    assert NOW not in found and found["best of two seeds"].shop == 2 and found["greedy"].temperature == 0


def test_of_two_tries_the_likelier_one_is_sent_under_the_first_ones_seed() -> None:
    first, second = claims(0, 1), claims(8, 1)
    for one, other, got in zip(first, second, likelier([first, second]), strict=True):
        assert got.seed == one.seed and sum(got.logprobs) == max(sum(one.logprobs), sum(other.logprobs))


def test_tokens_are_kept_and_a_half_written_batch_is_none(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    files = TokenFiles(tmp_path / "honest", world)
    assert files.tokens == files.next_group == files.read().tokens == 0
    for first in (3, 5):
        made = claims(first, 2)
        files.add(first, 2, made, [Deviations(np.zeros(5), np.array(c.logprobs), np.full(5, -1.0), np.zeros(5)) for c in made])
    (tmp_path / "honest" / "000000007-80-2.half").write_bytes(b"PK")
    assert files.tokens == 160 and files.next_group == 7 and files.read(50).tokens == 50
    same = claims(7, 1)[:1] * MEMBERS
    files.add(7, 1, same, [Deviations(np.zeros(5), np.array(c.logprobs), np.full(5, -1.0), np.zeros(5)) for c in same])
    found = files.read()
    assert found.repeated[:160].sum() < 16 and found.repeated[160:].tolist() == [False] * 5 + [True] * 35
    assert (found.again[165:170] == 0).all() and set(found.again[165:]) == {0.0, UNASKED}
    for want, got in zip(claims(5, 2), claims_of(files.batches()[1], world), strict=True):
        assert (got.prompt_ids, got.completion_ids, got.seed) == (want.prompt_ids, want.completion_ids, want.seed)
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-6)


def test_of_another_seed_are_all_prompts_and_draws_and_where_they_are_kept(tmp_path: Path) -> None:
    one, other = world_in(tmp_path), world_in(tmp_path, seed=3)
    assert one.prompt(5) == (7, 5) and other.prompt(5) == (7, 30_000_000_005)
    mine = {one.seed_of(i, m, shop) for i in range(50) for m in range(MEMBERS) for shop in (0, 1)}
    assert len(mine) == 100 * MEMBERS and not mine & {other.seed_of(i, m) for i in range(50) for m in range(MEMBERS)}
    assert stream_of(one, EXACT, HONEST).folder != stream_of(other, EXACT, HONEST).folder
    assert world_in(tmp_path, MOST_SEED).seed_of(800_000_000, MEMBERS - 1, 1) < 1 << 63
    assert SEED_APART % STRANGE_EVERY == SEED_APART % EXAMPLE_EVERY == 0, "which groups are strange follows from the number alone"


def test_tokens_are_judged_and_shown() -> None:
    samples = {EXACT: Sample(column(20_000, 1e-6), {}), ROUNDS: Sample(column(20_000, 0.02, 1), {})}
    means = calibrate(samples)
    made = ways(means, ROUNDS)
    honest = {"engine": str(ROUNDS), **facts(samples[ROUNDS].column), "other prompts": None, "with suspects": None}
    assert list(made) == [KNOWN, AMONG, UNKNOWN, NOBODY_TRUSTED, ELSEWHERE]
    for known in made:
        honest[known] = honest_row(samples[ROUNDS], made[known])
        assert honest[known]["nodes"] == 1 and honest[known]["caught"] == 0 and honest[known]["most_evidence"] >= 1
    rows = []
    for name, sample in (("far", column(3_000, 0.02, 2, far=0.3)), ("nothing", column(3_000, 0.02, 3))):
        rows.append({"engine": str(ROUNDS), "cheat": name} | {
            known: detected(Sample(sample, {}), make, repeats=5) for known, make in made.items()
        })  # fmt: skip
    assert all(0 < rows[0][known]["median"] <= rows[0][known]["p90"] < 100 for known in made)
    assert all(rows[1][known]["median"] is None and rows[1][known]["of"] == 3_000 for known in made)
    honest["beginnings"] = {way: honest_row(samples[ROUNDS], made[way], 300) for way in (KNOWN, NOBODY_TRUSTED)}
    assert honest["beginnings"][KNOWN]["nodes"] == 67
    text = tables({"honest": [honest], "cheats": rows})
    shipped = made[NOBODY_TRUSTED]()
    assert isinstance(shipped, NodeTest) and shipped.honest == Calibration().honest(ROUNDS) and shipped.false_alarm < FALSE_ALARM
    assert f"| {ROUNDS} | 0 of 67 |" in text
    assert f"90th percentile): {NOBODY_TRUSTED}" in text
    assert "| nothing | not in 3,000 |" in text and f"| {ROUNDS} | 20,000 |" in text


def test_a_percentile_counts_those_that_were_not_found() -> None:
    assert percentile([30, 10, 20, None], 0.5) == 20
    assert percentile([30, None, None], 0.9) is None


def test_an_engine_that_is_none_is_refused(tmp_path: Path) -> None:
    for engine in ("fake/float32", "vllm", "transformers/float64"):
        with pytest.raises(UsageError, match="no engine and type"):
            bench_audit(AuditBench(engines=(engine,)), tmp_path, print)


def test_what_an_audit_costs_is_counted_from_the_same_step_for_both() -> None:
    spent = [Spent(10, 1.0, 5.0, 900.0), Spent(60, 3.0, 6.0, 1000.0), Spent(61, 3.1, 6.0, 1000.0), Spent(160, 13.0, 6.2, 2000.0)]
    lines = [{"step": step, "perf/tokens": 500} for step in range(1, 171)]
    found = cost(spent, lines)
    assert (found["steps"], found["tokens"], found["checked"]) == (100, 50_000, 1000)
    assert found["cost"] == pytest.approx(0.02) and found["checked_share"] == pytest.approx(0.02) and found["before_s"] == 6.0
    assert "1,000 of 50,000 tokens checked (2.00%); engines 10.00 s of a core, the auditor 0.20 s: **2.00%**" in cost_line(
        {**found, "load": [0.5, 2.0]}
    )
    with pytest.raises(ShoalError, match="no steps were seen"):
        cost(spent[:1], lines)
