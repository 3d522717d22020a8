"""Noise of logits in audits: kinds of node are told apart by it, what is asked hardly moves it, suspects are found in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.audit.bets import NOISE_SCALES, HonestMeans, logit_differences
from learner.audit.calibration import WHOLE, Calibration, DrawnAt, NodeArithmetic, from_json, to_json, widest
from learner.audit.kinds import KindsTest
from learner.audit.measuring import LEAST, measure
from learner.audit.sequential import NodeTest
from p2p.errors import UsageError
from tests.support.nightly import examples

EXACT, ROUNDS = NodeArithmetic("transformers", "float32", "cpu"), NodeArithmetic("vllm", "bfloat16", "cpu")


def tokens(
    rng: np.random.Generator, n: int, noise: float, *, nats: float = 1.0, toward: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distances, claimed and recomputed log probabilities of a node whose logits have noise of this standard deviation, and move
    by `toward` on top of it."""
    recomputed = -rng.exponential(nats, n)
    logits = noise * rng.standard_normal(n) + (0.0 if toward is None else toward)
    return np.zeros(n), recomputed - np.expm1(recomputed) * logits, recomputed


def calibrated(noise: float, nats: float = 1.0, seed: int = 0) -> HonestMeans:
    return measure(*tokens(np.random.default_rng(seed), 40_000, noise, nats=nats), np.zeros(40_000))


def test_a_difference_of_logits_is_that_of_log_probabilities_where_a_token_is_in_doubt() -> None:
    recomputed = np.log(np.array([0.5, 0.25, 0.999, 0.5, 0.5]))
    claimed = recomputed + np.array([0.01, -0.03, 0.5, np.nan, -np.inf])
    np.testing.assert_allclose(logit_differences(claimed, recomputed), [0.02, -0.04, np.nan, 1.0, -1.0])


def test_evidence_is_known_after_each_token() -> None:
    rng = np.random.default_rng(3)
    columns = tokens(rng, 300, 0.05)
    whole, single = NodeTest(calibrated(0.01)), NodeTest(calibrated(0.01))
    path = whole.log_path(*columns)
    for i in range(300):
        single.look(*(column[i : i + 1] for column in columns))
        assert path[i] == pytest.approx(single.log_evidence)
    assert whole.caught_at == single.caught_at and whole.most_evidence == pytest.approx(path.max())
    assert whole.caught_at == int((path >= np.log(1e4)).argmax()) + 1
    assert len(whole.log_path(*(column[:0] for column in columns))) == 0


def test_honest_nodes_at_the_edge_of_their_kind_are_not_caught() -> None:
    """50 nodes (nightly 200) of 10,000 tokens, whose noise is as much, and lacks as much, as is honest in the mean: one in 10,000
    may be."""
    rng, caught = np.random.default_rng(0), 0
    logits = np.abs(logit_differences(*tokens(rng, 200_000, 0.01)[1:]))
    logits = logits[~np.isnan(logits)]
    shares = [np.minimum(logits / scale, 1.0) for scale in NOISE_SCALES]
    edge = HonestMeans(noise=tuple(float(s.mean()) for s in shares), quiet=tuple(float(1 - s.mean()) for s in shares))
    for _ in range(examples(50, 200)):
        test = NodeTest(edge)
        test.look(*tokens(rng, 10_000, 0.01))
        caught += bool(test.caught_at)
    assert caught <= 1


@pytest.mark.parametrize("noise", [1e-6, 0.01])
def test_what_is_asked_does_not_make_an_honest_node_wrong(noise: float) -> None:
    """Calibrated where a token has 0.1 nats, looked at where it has 2."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        test = NodeTest(calibrated(noise, nats=0.1))
        test.look(*tokens(rng, 20_000, noise, nats=2.0))
        assert not test.caught_at


KINDS = {str(EXACT): calibrated(1e-6), str(ROUNDS): calibrated(0.02)}


def test_of_a_known_kind_means_like_one_of_them() -> None:
    """Rounded weights in exact arithmetic: too noisy for the one kind, too exact for the other. Not for unknown kinds."""
    rng = np.random.default_rng(5)
    for noise in (1e-6, 0.02):
        test = KindsTest(KINDS)
        test.look(*tokens(rng, 50_000, noise))
        assert not test.caught_at and test.most_evidence < 5
    between = KindsTest(KINDS)
    between.look(*tokens(rng, 5_000, 0.003))
    assert 0 < between.caught_at < 1000
    assert "does not round as its kind does" in between.verdict().why and str(ROUNDS) in between.verdict().why
    anything = NodeTest(widest({EXACT: KINDS[str(EXACT)], ROUNDS: KINDS[str(ROUNDS)]}))
    anything.look(*tokens(rng, 5_000, 0.003))
    assert not anything.caught_at


def test_a_suspect_is_found_in_noise_that_is_louder() -> None:
    """The weights that it serves move logits by about what its arithmetic does."""
    rng = np.random.default_rng(6)
    moves = 0.02 * rng.standard_normal(20_000)
    columns = tokens(rng, 20_000, 0.02, toward=moves)
    under = {"8-bit weights": columns[2] - np.expm1(columns[2]) * moves}
    honest = tokens(np.random.default_rng(7), 40_000, 0.02)
    rounded = honest[2] - np.expm1(honest[2]) * 0.02 * rng.standard_normal(40_000)
    means = measure(*honest, np.zeros(40_000), {"8-bit weights": rounded})
    assert means.level == pytest.approx(0.016, rel=0.05) and means.toward == 0.15
    blind, named = NodeTest(means), NodeTest(means, suspects=("8-bit weights",))
    blind.look(*columns)
    named.look(*columns, suspected=under)
    assert not blind.caught_at and 0 < named.caught_at < 5000
    assert "deviate toward those of 8-bit weights" in named.verdict().why
    for others in (None, {"8-bit weights": np.full(20_000, np.nan)}):  # nobody computed it: there is no bet
        test = NodeTest(means, suspects=("8-bit weights",))
        test.look(*columns, suspected=others)
        assert not test.caught_at


def test_honest_nodes_do_not_look_like_suspects() -> None:
    """50 nodes (nightly 200) whose products are, in the mean, what is honest at most."""
    rng, caught = np.random.default_rng(8), 0
    for _ in range(examples(50, 200)):
        moves = 0.007 * rng.standard_normal(10_000)
        columns = tokens(rng, 10_000, 0.02, toward=0.02 * moves)
        test = NodeTest(HonestMeans(level=0.016, toward=0.02), suspects=("older",))
        test.look(*columns, suspected={"older": columns[2] - np.expm1(columns[2]) * moves})
        caught += bool(test.caught_at)
    assert caught <= 1


@pytest.mark.parametrize(("then", "now"), [(WHOLE, DrawnAt(0.5)), (WHOLE, DrawnAt(top_p=0.9)), (DrawnAt(top_p=0.9), WHOLE)])
def test_what_was_measured_where_nodes_drew_otherwise_is_refused(then: DrawnAt, now: DrawnAt) -> None:
    """At half the temperature each nat of rounding is two: 45 of 192 honest nodes were called wrong by bounds of temperature 1,
    119 of 152 with a nucleus by bounds without; and with bounds of a nucleus no gross token counts."""
    text = to_json({EXACT: KINDS[str(EXACT)]}, then)
    assert from_json(text, then)
    with pytest.raises(UsageError, match="was measured where nodes draw at temperature"):
        from_json(text, now)
    with pytest.raises(UsageError, match="was measured where nodes draw at temperature"):
        Calibration.of(text, print, drawn=now)


def test_what_was_measured_on_another_model_is_refused() -> None:
    small, large = DrawnAt(model="qwen3, 2 layers of 64, 48 token ids"), DrawnAt(model="llama, 30 layers of 576, 49152 token ids")
    text = to_json({EXACT: KINDS[str(EXACT)]}, small)
    assert from_json(text, small) == from_json(text, WHOLE) == {EXACT: KINDS[str(EXACT)]}
    assert from_json(to_json({EXACT: KINDS[str(EXACT)]}, WHOLE), large), "a file of before says nothing of it"
    with pytest.raises(UsageError, match=r"measured on qwen3, 2 layers of 64, .* this model is llama, 30 layers of 576"):
        Calibration.of(text, print, drawn=large)


def test_a_calibration_of_noise_is_kept_and_one_of_another_form_is_refused() -> None:
    kept = {EXACT: KINDS[str(EXACT)], ROUNDS: KINDS[str(ROUNDS)]}
    assert from_json(to_json(kept, WHOLE), WHOLE) == kept
    head = '"rule": 1, "temperature": 1, "top_p": 1'
    one = {NodeArithmetic("a", "b", "c"): HonestMeans(far=0.01)}
    assert from_json(f'{{{head}, "kinds": {{"a/b/c": {{"far": 0.01}}}}}}', WHOLE) == one
    others = (
        '{"a/b/c": {"far": 0.01}}', '{"rule": 2, "kinds": {}}', f"{{{head}}}", f'{{{head}, "kinds": [1]}}', "[1]", "1",
        '{"rule": 1, "kinds": {}}', f'{{{head}, "kinds": {{"a/b/c": {{"far": 1{"0" * 400}}}}}}}', "[" * 100_000,
    )  # fmt: skip
    for other in others:
        with pytest.raises(UsageError, match="no calibration of audits"):
            from_json(other, WHOLE)
    wide = widest(kept)
    assert wide.noise[0] == 1.0 and wide.quiet == (1.0,) * len(NOISE_SCALES)
    assert widest({EXACT: LEAST}).noise == (1.0,) * len(NOISE_SCALES)
    with pytest.raises(UsageError):
        from_json(to_json({EXACT: replace(HonestMeans(), noise=(0.1, 0.2))}, WHOLE), WHOLE)
    certain = measure(np.zeros(100), np.full(100, -1e-6), np.full(100, -1e-6), np.zeros(100))
    assert certain.noise == certain.quiet == (1.0,) * len(NOISE_SCALES) and certain.level == 0
