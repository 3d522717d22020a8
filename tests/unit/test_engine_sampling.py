"""Sampling: the draws follow the distribution they report, and depend on nothing else."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.sampling import SamplingParams, _read_off, log_probs, sample
from p2p.protocol.seeded import seed_keys, uniforms


def draws(
    logits: torch.Tensor, n: int, temperature: float, top_p: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """n draws from one row of logits at positions 0..n-1 of one seed."""
    params = SamplingParams.build([seed] * n, [temperature] * n, [top_p] * n)
    return sample(logits[None].expand(n, -1), params, np.arange(n))


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    expected = p * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.floats(-3, 3), min_size=2, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**70),
)
def test_draws_follow_the_filtered_softmax(logits: list[float], temperature: float, top_p: float, seed: int) -> None:
    row = torch.tensor(logits, dtype=torch.float32)
    ids, logprobs = draws(row, 4000, temperature, top_p, seed)
    p = np.exp((row.double() / temperature).numpy())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    support = order[: 1 + int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-12))] if top_p < 1 else order
    assert set(ids.tolist()) <= set(support.tolist())
    kept = np.zeros_like(p)
    kept[support] = p[support] / p[support].sum()
    np.testing.assert_allclose(logprobs, np.log(kept[ids]), atol=1e-5)
    counts = np.bincount(ids, minlength=len(p))[support]
    k = len(support) - 1
    # Wilson-Hilferty's bound of the chi-square quantile at z = 4.5 (3e-6): 30 fixed cases, so it never fires by luck.
    bound = max(k, 1) * (1 - 2 / (9 * max(k, 1)) + 4.5 * (2 / (9 * max(k, 1))) ** 0.5) ** 3
    assert k == 0 or chi_square(counts, kept[support]) < bound


def test_uniforms_are_uniform_and_differ_between_neighbouring_seeds_and_positions() -> None:
    keys = seed_keys(range(400))
    table = np.stack([uniforms(keys, np.full(400, i)) for i in range(100)])
    assert table.min() >= 0 and table.max() < 1 and len(np.unique(table)) == table.size
    counts, _ = np.histogram(table, bins=50, range=(0, 1))
    assert chi_square(counts, np.full(50, 1 / 50)) < 110
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02


def test_a_rows_draw_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(16, 30)
    heat, nucleus = [0.0, 0.7, 1.0, 1.3] * 4, [1.0, 0.8, 1.0, 0.6] * 4
    positions = np.arange(16) * 3
    ids, logprobs = sample(logits, SamplingParams.build(range(16), heat, nucleus), positions)
    for i in range(16):
        one = SamplingParams.build([i], [heat[i]], [nucleus[i]])
        id1, lp1 = sample(logits[i : i + 1], one, positions[i : i + 1])
        assert id1[0] == ids[i]
        assert abs(lp1[0] - logprobs[i]) < 1e-6


def test_greedy_takes_the_largest_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.1, 3.0, -1.0, 2.9]])
    ids, logprobs = sample(logits, SamplingParams.build([5], [0.0], [0.3]), np.array([7]))
    assert ids[0] == 1
    assert abs(logprobs[0] - float(torch.log_softmax(logits, -1)[0, 1])) < 1e-6


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((64,), -torch.inf)
    logits[[3, 40]] = torch.tensor([0.0, -30.0])
    ids, logprobs = draws(logits, 5000, 1.0, 1.0)
    assert set(ids.tolist()) == {3}
    assert np.isfinite(logprobs).all()


def test_top_p_keeps_at_least_the_most_probable_token_and_renormalises() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    tiny = log_probs(logits, SamplingParams.build([0], [1.0], [1e-9])).exp()
    np.testing.assert_allclose(tiny.numpy(), [[0, 1, 0]], atol=1e-12)
    two = log_probs(logits, SamplingParams.build([0], [1.0], [0.6])).exp()
    np.testing.assert_allclose(two.numpy(), [[0, 0.625, 0.375]], atol=1e-7)


def test_broken_logits_show_as_a_log_probability_that_is_not_finite() -> None:
    logits = torch.tensor([[0.0, torch.nan], [0.0, 1.0]])
    _, logprobs = sample(logits, SamplingParams.build([0, 1], [1.0, 1.0], [1.0, 1.0]), np.array([0, 0]))
    assert not np.isfinite(logprobs[0]) and np.isfinite(logprobs[1])


def by_scanning(logp: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """What `_read_off` does where the cumulative sum is a parallel one: the first token that qualifies, looked for at each."""
    p = logp.exp()
    cdf = p.cumsum(-1)
    ids = ((cdf > u * cdf[:, -1:]) & (p > 0)).to(torch.uint8).argmax(-1)
    return torch.where(p.gather(-1, ids[:, None])[:, 0] > 0, ids, p.argmax(-1))


def test_the_binary_search_finds_the_token_that_a_scan_finds() -> None:
    """Flat and peaked rows, tokens of probability zero, the ends of the unit interval, rows that are not numbers."""
    random = torch.Generator().manual_seed(0)
    for vocabulary in (1, 2, 48, 5000):
        for scale in (0.1, 3.0, 300.0):
            logits = torch.randn(64, vocabulary, generator=random).double() * scale
            logits[::2][torch.rand(32, vocabulary, generator=random) < 0.7] = -torch.inf
            logits[::2, vocabulary // 2] = 0.0
            logp = torch.log_softmax(logits, -1)
            logp[5] = torch.nan
            logp[7, vocabulary - 1] = torch.nan
            u = torch.rand(64, 1, generator=random, dtype=torch.float64)
            u[:8], u[8:16] = 0.0, 1 - 2.0**-53
            assert torch.equal(_read_off(logp, u), by_scanning(logp, u))
