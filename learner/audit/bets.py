"""What is bet on of a node's tokens: statistics, what honest nodes have of each, and the shares that are staked. Pure.

A statistic has a value in [0, 1] for each token, or none. A bet is that the mean of one is above what honest nodes have; there
are two on most of them, one for what begins late. Each bet is made with several stakes.

Must not know how money grows, or what follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

STAKES = (0.02, 0.1, 0.3, 0.7, 0.95)
"""Shares of the most that may be staked without ever losing all: small ones find small deviations in many tokens."""

RARE, RARE_STAKES = ("far", "gross"), (5e-4, 2e-3, 8e-3)
"""Statistics of what hardly ever happens, and the shares that are staked on them beside STAKES. A stake of a fiftieth is lost on
the honest tokens before the next such event: with STAKES alone one wrong token in 300 was never found (bench/audit.md)."""

FAR = 0.05
"""A distance beyond which a token counts as far: of honest nodes hardly any are, whatever they compute in."""

NEAR = 0.005
"""A distance beyond which a token counts as near: rounding moves an interval's edge by less."""

GROSS = 1.0
"""Nats of a shift (see `learner.audit.statistic`) from which on a token is grossly off: no rounding draws it (bench/audit.md has
what honest nodes' shifts are)."""

GROSS_POWER = 4
"""Smaller shifts count as this power of their share of GROSS: a half as a sixteenth. So the mean of what rounding does, which is
all but nothing, can be measured with some thousand tokens, where none of them is gross."""

GROSS_DISTANCE = 1e-3
"""Distance that such a token has at the least: of what is nearer the sums of the probabilities themselves may be rounded."""

LOGPROB_SCALE = 1.0
"""Nats: differences of log probabilities are counted up to this."""

NOISE_SCALES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Differences of logits (nats) up to which noise is counted: float32's is far below the least, bfloat16's between the others;
the last one is for what is louder than any rounding.
Such a difference is that of log probabilities divided by 1 - p of the token: a likely token's log probability hardly moves,
whatever its logit does. So the noise of a kind of node is about the same for prompts of low and of high entropy."""

LEAST_DOUBT = 0.05
"""Tokens of a probability above one less this say nothing about noise."""

LATE, LATE_MARGIN = "late ", 3.0
"""Bets on what begins late: half their money is not there at the beginning, but handed out bit by bit as tokens come, so that
what was staked on a node's honest tokens does not count. Fresh money finds each stretch that is out of the ordinary, and an
honest node's are so for all answers to one prompt, by up to twice the bounds (bench/audit.md): such bets have bounds so many
times as wide."""

TOWARD = "toward"
"""The first word of a bet on a suspect, before its name: see `NodeTest`."""

STATISTICS = (
    "far", "near", "gross", "off", "above", "below", "again", *(f"noise {scale:g}" for scale in NOISE_SCALES),
    *(f"quiet {scale:g}" for scale in NOISE_SCALES),
)  # fmt: skip
"""In the order of their values. What each is: WORDS."""

NEVER_LATE = ("quiet", "toward")
"""Statistics without such a bet: what an honest node's rounding lacks, and agrees with, by chance, goes by prompt alone."""

OF_A_PROMPT = ("noise", "far", "gross")
"""Statistics that go with how loud a prompt is: what a bet on one of them gains from one prompt is bounded (`NodeTest`)."""

_N = len(NOISE_SCALES)


@dataclass(frozen=True, slots=True)
class HonestMeans:
    """What the means of the statistics are at most for honest nodes, of one kind of engine, type and device."""

    far: float = 2e-3
    """share of tokens whose draw is further than FAR from its interval"""
    near: float = 1e-2
    """the same for NEAR"""
    gross: float = 1.0
    """mean of `grossness`; 1: not measured, and any is honest"""
    off: float = 0.05
    """mean of |claimed - recomputed log probability|, in nats, up to LOGPROB_SCALE"""
    bias: float = 0.01
    """mean of the signed difference, in nats, its amount"""
    noise: tuple[float, ...] = (1.0,) * _N
    """for each of NOISE_SCALES: mean of the difference of logits, up to the scale, as a share of it; 1: any noise is honest"""
    quiet: tuple[float, ...] = (1.0,) * _N
    """the mean of what is missing to the scale, as a share of it: a kind that always rounds is never exact; 1: it may be"""
    level: float = 0.0
    """mean difference of logits up to 1 nat; 0: not measured, and then nothing is suspected by name"""
    toward: float = 1.0
    """mean of how far differences go toward what other weights would give, see `NodeTest`; 1: any is honest"""


@dataclass(frozen=True, slots=True)
class Bets:
    """All bets with their stakes, in their order."""

    names: tuple[str, ...]
    statistics: np.ndarray
    """[bets] row of each one's statistic in what `values_of` returns"""
    first: np.ndarray
    """[bets] the first stake of each"""
    of: np.ndarray
    """[stakes] the bet that each belongs to"""
    stakes: np.ndarray
    """[stakes] shares of the most that may be staked"""
    late: np.ndarray
    """[stakes] whether it is on what begins late"""
    of_a_prompt: np.ndarray
    """[stakes that are bounded] which ones gain no more than so much from a prompt"""


@lru_cache(maxsize=64)
def bets_on(suspects: tuple[str, ...]) -> Bets:
    """The bets of a test with these `suspects`. Always the same: the mixture's shares may not depend on what is seen."""
    late = [name for name in STATISTICS if not name.startswith(NEVER_LATE)]
    toward = [f"{TOWARD} {name}" for name in suspects]
    rows = {name: i for i, name in enumerate([*STATISTICS, *toward])}
    names = [*STATISTICS, *(f"{LATE}{name}" for name in late), *toward]
    staked = [(*RARE_STAKES, *STAKES) if name.removeprefix(LATE) in RARE else STAKES for name in names]
    of = np.repeat(np.arange(len(names)), [len(shares) for shares in staked])
    return Bets(
        names=tuple(names),
        statistics=np.array([rows[name.removeprefix(LATE)] for name in names]),
        first=np.searchsorted(of, np.arange(len(names))),
        of=of,
        stakes=np.concatenate(staked),
        late=np.array([names[bet].startswith(LATE) for bet in of]),
        of_a_prompt=np.array([i for i, bet in enumerate(of) if names[bet].startswith(OF_A_PROMPT)]),
    )


@lru_cache(maxsize=256)
def means_of(honest: HonestMeans, suspects: tuple[str, ...]) -> np.ndarray:
    """[bets] What the mean of each one's statistic is at most for honest nodes. 1: there is nothing to bet on."""
    shift = honest.bias / LOGPROB_SCALE / 2
    off = honest.off / LOGPROB_SCALE
    means = {"far": honest.far, "near": honest.near, "gross": honest.gross, "off": off, "above": 0.5 + shift,
             "below": 0.5 + shift, "again": off}  # fmt: skip
    means |= {f"noise {scale:g}": mean for scale, mean in zip(NOISE_SCALES, honest.noise, strict=True)}
    means |= {f"quiet {scale:g}": mean for scale, mean in zip(NOISE_SCALES, honest.quiet, strict=True)}
    wide = {name: LATE_MARGIN * mean for name, mean in means.items()}
    wide["above"] = wide["below"] = 0.5 + LATE_MARGIN * shift
    means |= {f"{LATE}{name}": min(1.0, mean) for name, mean in wide.items()}
    means |= {f"{TOWARD} {name}": (1 + honest.toward) / 2 for name in suspects}
    found = np.array([means[name] for name in bets_on(suspects).names])
    found.setflags(write=False)
    return found


def values_of(
    distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray, *, again: np.ndarray,
    toward: Sequence[np.ndarray] = (),
) -> np.ndarray:  # fmt: skip
    """[statistics, tokens] Values in [0, 1], and nan where a token says nothing: see `NodeTest.look` for the columns. `toward`:
    for each suspect its products, moved to [0, 1]."""
    repeated = ~np.isnan(again)
    with np.errstate(invalid="ignore"):
        signed = np.clip((claimed - recomputed) / LOGPROB_SCALE, -1.0, 1.0)
    signed = np.where(repeated, np.nan, np.nan_to_num(signed, nan=1.0))
    distance = np.nan_to_num(distance, nan=1.0)
    logits = np.where(repeated, np.nan, logit_differences(claimed, recomputed))
    noise = np.minimum(np.abs(logits) / np.array(NOISE_SCALES)[:, None], 1.0)
    values = [
        distance > FAR, distance > NEAR, grossness(distance, shift), np.abs(signed), (1 + signed) / 2, (1 - signed) / 2,
        np.where(np.isfinite(again), np.minimum(again / LOGPROB_SCALE, 1.0), np.nan), *noise, *(1.0 - noise),
        *(np.where(repeated, np.nan, products) for products in toward),
    ]  # fmt: skip
    return np.array(values, dtype=np.float64)


def grossness(distance: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """How far beyond rounding tokens are, in [0, 1], one entry a token: 1 from a shift of GROSS on. nan where the shift is."""
    return np.where(distance <= GROSS_DISTANCE, 0.0 * shift, np.minimum(shift / GROSS, 1.0) ** GROSS_POWER)


def logit_differences(claimed: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
    """Differences of log probabilities as ones of the token's logit against the others, in nats within [-1, 1]; nan for tokens
    that are all but certain."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        doubt = -np.expm1(np.minimum(recomputed, 0.0))
        found = np.clip((claimed - recomputed) / doubt, -1.0, 1.0)
    return np.where(doubt < LEAST_DOUBT, np.nan, np.where(np.isnan(found), 1.0, found))


def in_words(bet: str) -> str:
    """What its statistic is, for people."""
    what, _, of = bet.removeprefix(LATE).partition(" ")
    return WORDS[what].format(of)


WORDS = {
    "far": f"share of tokens further than {FAR} from their seeded draw",
    "near": f"share of tokens further than {NEAR} from their seeded draw",
    "gross": f"tokens that no rounding draws (logits would have to be off by {GROSS:g} nat)",
    "off": "mean difference of log probabilities (nats)",
    "again": "how much further off (nats) log probabilities are than the same tokens' in the same contexts were",
    "above": "claimed log probabilities are too high (0.5 is fair)",
    "below": "claimed log probabilities are too low (0.5 is fair)",
    "noise": "noise of logits, as a share of {} nats",
    "quiet": "what the noise of logits lacks of {} nats, as a share: it does not round as its kind does",
    "toward": "claimed log probabilities deviate toward those of {} (0.5 is fair)",
}
"""Statistic -> what it is, for people; {} is what it is of."""
