"""Engines' coefficients, found again from what they report."""

from __future__ import annotations

import os
import random
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from learner.dispatch.throughput import KEPT_OBSERVATIONS, MIN_OBSERVATIONS, Fit, Throughput, fit
from netem.rollout_sim.fleet import KINDS, QWEN3_8B


def reports(model: Throughput, count: int, noise: float, seed: int) -> list[tuple[float, float, float]]:
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        running = rng.randint(1, 90)
        context = running * rng.uniform(300, 6000)
        out.append((running, context, model.step_s(running, context) * rng.uniform(1 - noise, 1 + noise)))
    return out


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 1000))
def test_a_fit_foretells_what_it_has_not_seen(kind: str, seed: int) -> None:
    model = KINDS[kind].throughput(QWEN3_8B)
    found = fit(reports(model, 48, 0.05, seed))
    errors = [abs(found.step_s(n, kv) / step - 1) for n, kv, step in reports(model, 200, 0.0, seed + 1)]
    assert sum(errors) / len(errors) < 0.05  # StaleFlow reports about 10 %
    assert min(found.k1, found.k2, found.k3, found.k4) >= 0


def test_where_a_batch_begins_to_cost() -> None:
    model = Throughput(0.0, 0.02, 0.001, 0.004)  # flat up to 20 sequences
    found = fit([(n, 0.0, model.step_s(n, 0.0)) for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)])
    assert abs(found.step_s(10, 0) - 0.024) < 0.002 and abs(found.step_s(60, 0) - 0.064) < 0.004
    assert found.gain(4, 0, 0) > 0.8 * found.rate(1, 0) and found.gain(60, 0, 0) < 0.3 * found.rate(1, 0)


def test_a_fit_waits_and_forgets_evenly() -> None:
    one = Fit()
    for k in range(MIN_OBSERVATIONS - 1):
        one.observe(1 + k, 1000.0 * (k + 1), 50.0)
        one.observe(0, 10.0, 50.0)
        one.observe(3, 10.0, 0.0)  # says nothing
        assert one.model is None
    for _ in range(1000):
        one.observe(1, 1000.0, 50.0)  # an idle night must not push out what was seen under load
    one.observe(30, 90_000.0, 600.0)
    assert one.model is not None and len(one._seen) <= KEPT_OBSERVATIONS  # memory
    assert abs(one.model.step_s(30, 90_000) - 0.05) < 0.01


def test_what_cannot_be_is_not_believed() -> None:
    for claim in (1e308, 1e-300, float("inf"), float("nan"), -1.0):
        one = Fit()
        for running in (1, 2, 4, 8, 16):
            one.observe(running, 1000.0 * running, claim)
        assert one.model is None


OTHER_PROCESSORS = (
    {"OPENBLAS_CORETYPE": "Prescott"},
    {"OPENBLAS_CORETYPE": "Haswell"},
    {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"},
)
"""Environments in which numpy computes as on a processor without the newest vector instructions."""


def test_a_fit_is_the_same_to_the_last_bit_on_every_processor() -> None:
    """Exact reports leave many knees that fit equally well: which one is taken must not hang on how a kernel adds up."""
    program = (
        "from learner.dispatch.throughput import fit\n"
        "from netem.rollout_sim.fleet import KINDS, QWEN3_8B\n"
        "for kind in KINDS.values():\n"
        "    model = kind.throughput(QWEN3_8B)\n"
        "    print(fit([(n, 2500 * n, model.step_s(n, 2500 * n)) for n in range(3, 60)]))\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], env={**os.environ, **processor}, capture_output=True, check=True
        ).stdout
        for processor in ({}, *OTHER_PROCESSORS)
    }
    assert len(said) == 1
