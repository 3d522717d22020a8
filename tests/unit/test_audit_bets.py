"""Bets on many statistics at once come to what each would by itself, and their values are what they say."""

from __future__ import annotations

import numpy as np
import pytest

from learner.audit.bets import NOISE_SCALES, STATISTICS, HonestMeans, bets_on, logit_differences, means_of, values_of
from learner.audit.sequential import FALSE_ALARM, NodeTest
from tests.support.plain_bets import PlainTest

KINDS = {
    "all is bet on": HonestMeans(
        gross=1e-3, noise=(0.9, 0.8, 0.5, 0.1, 0.02), quiet=(0.9, 0.9, 0.8, 0.95, 0.99), level=0.02, toward=0.1
    ),
    "nothing is measured": HonestMeans(),
    "exact": HonestMeans(far=1e-4, near=1e-3, off=1e-3, bias=1e-4, noise=(0.3, 0.05, 0.01, 1e-3, 1e-4)),
}


def columns(seed: int, tokens: int, loud: float) -> tuple[np.ndarray, ...]:
    """Distances, claimed, recomputed, shifts, again, prompts: of tokens of which some repeat and some are no numbers."""
    rng = np.random.default_rng(seed)
    some = lambda share: rng.random(tokens) < share
    distance = np.where(some(0.02), rng.random(tokens), 0.0)
    distance[some(0.002)] = np.nan
    recomputed = np.log(rng.random(tokens))
    claimed = recomputed + loud * rng.standard_normal(tokens)
    claimed[some(0.002)] = np.nan
    shift = np.where(some(0.3), np.nan, rng.exponential(0.2, tokens))
    again = np.where(some(0.8), np.nan, rng.exponential(0.01, tokens))
    return distance, claimed, recomputed, shift, again, np.sort(rng.integers(0, 6, tokens))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "loud"), [(1, 0.003), (2, 0.03), (3, 0.3)])
def test_the_money_is_what_each_stake_makes_by_itself(kind: str, seed: int, loud: float) -> None:
    honest, tokens = KINDS[kind], 400
    distance, claimed, recomputed, shift, again, prompts = columns(seed, tokens, loud)
    fast, path, first = NodeTest(honest), [], 0
    for last in (1, 8, 8, 40, 200, tokens):  # as answers come
        now = slice(first, last)
        path.append(
            fast.log_path(distance[now], claimed[now], recomputed[now], shift[now], again=again[now], prompts=prompts[now])
        )
        first = last
    values = values_of(distance, claimed, recomputed, shift, again=again)
    plain = PlainTest(honest, -np.log(FALSE_ALARM))
    told = [
        plain.token(
            {name: None if np.isnan(v) else float(v) for name, v in zip(STATISTICS, values[:, i], strict=True)}, int(prompts[i])
        )
        for i in range(tokens)
    ]
    assert np.concatenate(path) == pytest.approx(told, rel=1e-9, abs=1e-9)
    assert fast.log_evidence == pytest.approx(told[-1], rel=1e-9, abs=1e-9)
    over = np.array(told) >= -np.log(FALSE_ALARM)
    assert fast.caught_at == (int(over.argmax()) + 1 if over.any() else 0)


def test_values_are_what_their_names_say() -> None:
    nan = np.nan
    claimed, recomputed = np.log(np.array([0.5, 0.6, 0.5, nan, 0.5])), np.log(np.array([0.5, 0.5, 0.5, 0.5, 0.5]))
    found = values_of(np.array([0.0, 0.01, 0.2, nan, 0.0]), claimed, recomputed, np.array([nan, 0.5, 2.0, nan, 0.1]),
                      again=np.array([nan, nan, nan, nan, 0.25]))  # fmt: skip
    value = dict(zip(STATISTICS, found, strict=True))
    assert value["far"].tolist() == [0, 0, 1, 1, 0] and value["near"].tolist() == [0, 1, 1, 1, 0]
    assert value["gross"][1:3] == pytest.approx([0.5**4, 1]) and np.isnan(value["gross"][[0, 3]]).all() and not value["gross"][4]
    lie = np.log(0.6 / 0.5)
    assert value["off"][:4] == pytest.approx([0, lie, 0, 1]) and value["above"][:4] == pytest.approx([0.5, (1 + lie) / 2, 0.5, 1])
    assert value["below"][:4] == pytest.approx([0.5, (1 - lie) / 2, 0.5, 0])
    repeated = [name for name in STATISTICS if not name.startswith(("far", "near", "gross", "again"))]
    assert all(np.isnan(value[name][4]) for name in repeated) and value["again"][4] == 0.25
    noise = np.minimum(logit_differences(claimed, recomputed)[1] / np.array(NOISE_SCALES), 1)
    assert [value[f"noise {scale:g}"][1] for scale in NOISE_SCALES] == pytest.approx(noise)
    assert [value[f"quiet {scale:g}"][1] for scale in NOISE_SCALES] == pytest.approx(1 - noise)


def test_every_bet_has_its_stakes_and_its_mean() -> None:
    bets = bets_on(("a", "b"))
    means = dict(zip(bets.names, means_of(KINDS["all is bet on"], ("a", "b")), strict=True))
    assert means["noise 0.01"] == 0.5 and means["late noise 0.01"] == 1.0 and means["late noise 0.1"] == pytest.approx(0.3)
    assert means["toward a"] == means["toward b"] == 0.55 and "late toward a" not in means and "late quiet 1" not in means
    assert means["late above"] == pytest.approx(0.5 + 3 * (means["above"] - 0.5))
    for i, name in enumerate(bets.names):
        mine = np.flatnonzero(bets.of == i)
        assert mine[0] == bets.first[i] and len(mine) == (8 if "far" in name or "gross" in name else 5)
        assert bets.late[mine].all() == bets.late[mine].any() == name.startswith("late ")
        assert np.isin(mine, bets.of_a_prompt).all() == name.startswith(("noise", "far", "gross"))
