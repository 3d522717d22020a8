"""Prompts differ in how loud rounding is in their answers: a calibration counts them, and no single one calls a node wrong."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from learner.audit.bets import FAR, HonestMeans, grossness, logit_differences
from learner.audit.calibration import ENOUGH, MOST_OF_FEW, PLENTY, Calibration, NodeArithmetic
from learner.audit.deviations import Deviations
from learner.audit.measuring import STRETCH, measure
from learner.audit.sequential import FALSE_ALARM, MOST_OF_PROMPT, NodeTest

VOCABULARY = 24
SPREAD = 0.43
"""Of the log of prompts' loudness: that of a small model's (bench/audit.md)."""

KIND = NodeArithmetic("vllm", "bfloat16", "cpu")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def answers(rng: np.random.Generator, tokens: int, noise: float | np.ndarray, entropy: float = 2.0) -> Deviations:
    """Tokens that an honest node drew whose logits are off by `noise` nats ([tokens, 1] or all), in contexts of their own."""
    right = entropy * rng.standard_normal((tokens, VOCABULARY))
    exact, rounded = log_softmax(right), log_softmax(right + noise * rng.standard_normal(right.shape))
    u, sums, at = rng.random(tokens), np.exp(rounded).cumsum(axis=1), np.arange(tokens)
    drawn = np.minimum((sums <= (u * sums[:, -1])[:, None]).sum(axis=1), VOCABULARY - 1)
    upper = np.exp(exact).cumsum(axis=1)[at, drawn]
    lower = upper - np.exp(exact[at, drawn])
    with np.errstate(divide="ignore"):
        u_at, low, high = (np.log(x) - np.log1p(-x) for x in (u, lower.clip(1e-12), upper.clip(max=1 - 1e-12)))
    shift = np.maximum(np.maximum(u_at - high, low - u_at), 0.0) / 2
    return Deviations(np.maximum(np.maximum(lower - u, u - upper), 0.0), rounded[at, drawn], exact[at, drawn], shift)


class Asked(NamedTuple):
    found: Deviations
    prompts: np.ndarray


def asked(rng: np.random.Generator, prompts: int, tokens: int, noise: float) -> Asked:
    """So many tokens of each of some prompts."""
    each = np.repeat(np.exp(SPREAD * rng.standard_normal(prompts)), tokens)[:, None]
    return Asked(answers(rng, prompts * tokens, noise * each), np.repeat(np.arange(prompts), tokens))


def called_wrong(seeds: range, measured: tuple[int, int], *, by_prompt: bool) -> int:
    """Of honest nodes with a calibration of their own, so many prompts of so many tokens, that then answer eight prompts."""
    caught = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        trusted, judged = asked(rng, *measured, 0.06), asked(rng, 8, 64 * 24, 0.06)
        test = NodeTest(measure(*trusted.found, prompts=trusted.prompts if by_prompt else None))
        caught += test.look(*judged.found, prompts=judged.prompts if by_prompt else None).caught
    return caught


def test_loud_prompts_call_no_honest_node_wrong() -> None:
    assert called_wrong(range(30), (3, ENOUGH // 3), by_prompt=False) > 0, "what this test is for does not happen"
    assert called_wrong(range(30), (ENOUGH // STRETCH, STRETCH), by_prompt=True) == 0


@pytest.mark.parametrize("longer", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_short_answers_tell_how_prompts_differ_too(tokens: int, longer: int) -> None:
    """A kind is measured on answers of a few tokens, and of `longer` prompts on eight. Then a node's first prompt is a thousand
    tokens, three standard deviations louder or more exact than most."""
    caught = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        short, long = asked(rng, ENOUGH // tokens, tokens, 0.03), asked(rng, longer, 8, 0.03)
        found = Deviations(*(np.concatenate(both) for both in zip(short.found, long.found, strict=True)))
        honest = measure(*found, prompts=np.concatenate([short.prompts, -1 - long.prompts]))
        for apart in (-3.0, 3.0):
            test = NodeTest(honest)
            test.look(*answers(rng, 1_000, 0.03 * float(np.exp(SPREAD * apart))), prompts=np.zeros(1_000))
            caught += bool(test.caught_at)
    assert caught == 0


def test_of_one_prompt_nothing_is_known_of_others() -> None:
    rng = np.random.default_rng(0)
    honest = measure(*answers(rng, 100, 0.02), prompts=np.zeros(100))
    assert honest.noise == honest.quiet == (1.0,) * len(honest.noise) and honest.far == honest.gross == 1.0
    exact = measure(np.zeros(600), np.full(600, -1.0), np.full(600, -1.0), np.zeros(600), prompts=np.arange(600) // 60)
    assert max(exact.noise) < 0.05 and exact.far < 0.02 and exact.gross == 1e-5, "what never rounds is as loud for each"


@pytest.mark.parametrize("entropy", [1.0, 2.0, 4.0])
def test_a_loud_prompt_has_no_more_far_and_gross_tokens_than_is_allowed_for(entropy: float) -> None:
    rng = np.random.default_rng(int(entropy))
    for noise in (0.02, 0.05, 0.1):
        usual = [answers(rng, 2_000, noise * louder, entropy) for louder in (0.7, 1.0, 1.3, 1.6)]
        prompts, columns = np.repeat(np.arange(4), 2_000), Deviations(*map(np.concatenate, zip(*usual, strict=True)))
        honest = measure(*columns, prompts=prompts)
        levels = [np.nanmean(np.abs(logit_differences(found.claimed, found.recomputed))) for found in usual]
        factor = (np.mean(levels) + 4 * np.std(levels)) / levels[1]
        loud = answers(rng, 40_000, noise * factor, entropy)
        assert (loud.distance > FAR).mean() <= honest.far, noise
        assert grossness(loud.distance, loud.shift).mean() <= honest.gross, noise


def test_tokens_of_few_prompts_say_less() -> None:
    rng = np.random.default_rng(0)
    found, prompts = asked(rng, 8, 1_000, 0.02)
    few, many = measure(*found, prompts=prompts), measure(*found)
    assert few.off > 1.15 * many.off and few.noise[3] > 1.1 * many.noise[3] and few.level == many.level


def test_a_kind_is_measured_on_enough_prompts_or_on_plenty_of_tokens() -> None:
    rng, told = np.random.default_rng(0), list[str]()
    calibration, found = Calibration(changed=told.append), answers(rng, 1_000, 0.02)
    for i in range(PLENTY // 1_000):
        calibration.add(KIND, *found, prompts=np.full(1_000, i % 3))
        assert calibration.counted(KIND) == STRETCH * min(3, i + 1) and not told
        assert calibration.wants_own(KIND) and calibration.counted(KIND) < ENOUGH and not calibration.stands(KIND)
    calibration.add(KIND, *found, prompts=np.full(1_000, 0))
    assert len(told) == 1 and calibration.stands(KIND) and not calibration.wants_own(KIND)
    while calibration.wants(KIND):  # others may come yet
        calibration.add(KIND, *found, prompts=np.full(1_000, 0))
    assert len(told) == 3 and MOST_OF_FEW <= calibration.tokens(KIND) < MOST_OF_FEW + 1_000
    calibration, told[:] = Calibration(changed=told.append), []
    for i in range(ENOUGH // STRETCH):
        assert not told
        calibration.add(KIND, *found, prompts=np.full(1_000, i))
    assert len(told) == 1 and calibration.wants(KIND), "and measured again when there are twice as many"


def test_the_noise_of_one_prompt_is_not_enough() -> None:
    rng = np.random.default_rng(0)
    measured = asked(rng, 100, STRETCH, 0.02)
    honest = measure(*measured.found, prompts=measured.prompts)
    level = honest.noise[3] * 0.1
    found = answers(rng, 2_000, 2.2 * level)  # louder than the bounds, and not three times as loud
    alone, by_prompts = NodeTest(honest), NodeTest(honest)
    alone.look(*found)
    by_prompts.look(*found, prompts=np.zeros(2_000))
    assert alone.caught_at and "noise" in alone.verdict().why and not by_prompts.caught_at
    assert np.log(2) < by_prompts.most_evidence < -MOST_OF_PROMPT * np.log(FALSE_ALARM)
    by_parts = NodeTest(honest)
    for first in range(0, 2_000, 37):  # as answers come, one after the other
        part = [column[first : first + 37] for column in found]
        by_parts.look(*part, prompts=np.zeros(len(part[0])))
    assert by_parts.most_evidence == pytest.approx(by_prompts.most_evidence)
    by_prompts.look(*found, prompts=np.arange(2_000) // 250)
    assert 2_000 + 250 < by_prompts.caught_at <= 2_000 + 1_000, "that of some prompts is"


def test_what_is_far_beyond_the_bounds_is_found_within_a_group() -> None:
    rng, honest = np.random.default_rng(0), HonestMeans(noise=(1.0, 1.0, 0.9, 0.2, 0.03), off=1.0, bias=1.0)
    for noise, most in ((0.5, 100), (3.0, 30)):
        test = NodeTest(honest)
        test.look(*answers(rng, 400, noise)._replace(distance=np.zeros(400), shift=np.zeros(400)), prompts=np.zeros(400))
        assert 0 < test.caught_at < most, noise


def test_a_prompt_that_comes_again_says_nothing_more() -> None:
    rng, measured = np.random.default_rng(1), asked(np.random.default_rng(0), 100, STRETCH, 0.02)
    honest = measure(*measured.found, prompts=measured.prompts)
    found, test = answers(rng, 2_000, 2.2 * honest.noise[3] * 0.1), NodeTest(honest)
    usual = answers(rng, 50, 0.02)
    for again in range(6):  # as one whose group is made again and again, between other prompts
        test.look(*found, prompts=np.zeros(2_000))
        test.look(*usual, prompts=np.full(50, 1 + again))
    assert not test.caught_at
