"""Tests of a node that may be looked at after each token, for ever, and wrong an honest one with a bounded chance only. Pure.

Each test bets that the mean of a statistic in [0, 1] is above what honest nodes have. A gambler who stakes a share of his money
on each token, at odds that are fair while the mean is at most `mean`, cannot grow rich in the long run: his money is a
supermartingale, so the chance that it ever reaches 1 / a is at most a (Ville's inequality; Waudby-Smith and Ramdas, "Estimating
means of bounded random variables by betting", arXiv 2010.09686). The stakes are a mixture of a few, so that gross and mild
deviations are both found soon. The statistics' mixture is a bet as well, so there is one chance for all of them. Some bets are
given their money bit by bit as tokens come (as in the e-detectors of Shin, Ramdas and Rinaldo, arXiv 2203.03532, but no more than
one has in all, so that the chance of ever being wrong stays bounded): who begins to cheat late is found as well.

Must not know what a token is, or what follows from a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from p2p.forgetting import forget_oldest, renewed

STAKES = (0.02, 0.1, 0.3, 0.7, 0.95)
"""Shares of the most that may be staked without ever losing all: small ones find small deviations in many tokens."""

RARE, RARE_STAKES = ("far", "gross"), (5e-4, 2e-3, 8e-3)
"""Statistics of what hardly ever happens, and the shares that are staked on them beside STAKES. A stake of a fiftieth is lost on
the honest tokens before the next such event: with STAKES alone one wrong token in 300 was never found (bench/audit.md)."""

FALSE_ALARM = 1e-4
"""Chance that an honest node is ever called wrong, however long it is looked at."""

NOTABLE = 0.5
"""Part of the log of the evidence that calls a node wrong from which all of its tokens are looked at: 100 where 10,000 is needed.
An honest node comes so far with a chance of 1 in 100 at most, and loses nothing by it."""

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

AT_FIRST = 0.5
"""Part of the money of such bets that is there at the beginning: they find soon what is far beyond the bounds."""

HANDED_OUT_EVERY = 128
"""Tokens after which some of it is handed out."""

NEVER_LATE = ("quiet", "toward")
"""Statistics without such a bet: what an honest node's rounding lacks, and agrees with, by chance, goes by prompt alone."""

OF_A_PROMPT, MOST_OF_PROMPT, PROMPTS = ("noise", "far", "gross"), 0.5, 16
"""Statistics that go with how loud a prompt is; what part of the log of the evidence that calls a node wrong a bet on one of them
gains from one prompt, at the most and but for its last token; and how many prompts a test remembers. Each bet is a small share
of the mixture, so two or three are needed. No sample tells how loud the loudest of a thousand prompts is, and the answers to
one that is a little louder than the bounds would be enough (bench/audit.md). What is more than LATE_MARGIN times as loud as they
are is found within a prompt all the same."""

RECENT = 128
"""Tokens that are called the last ones, where an operator is told what speaks against a node that was honest before."""

_ALL_OF_IT = 2.2
"""More than the sum of 1 / ((b + 1) ln(b + 1) ** 2) over b from 1 on (2.11): the money must last for ever."""

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
class Verdict:
    """What a node's tokens have come to."""

    caught: bool
    tokens: int
    """that were looked at until now, or until it was caught"""
    why: str
    """the statistic that says most against it, with its mean and the honest one; "" where none does"""
    notable: bool = False
    """there is evidence against it now, and not enough: a NOTABLE part of the log"""
    gross: int = 0
    """tokens of the last ones that are grossly off, where its kind has hardly any: it is not believed for a while"""


@dataclass
class NodeTest:
    """One node's tests. `honest` holds for its kind of engine.

    `suspects`: names of weights that it may serve in place of those that it claims (an older version's, rounded ones). For a
    token whose log probability under such weights is known as well, the test bets that the claimed one deviates toward it: the
    product of both differences from what is right, each as one of logits, the node's relative to twice its kind's level, the
    suspect's to twice its own mean until then (known before the token, so that it is a bet), each within [-1, 1]. An honest
    node's rounding knows nothing of those weights, so the mean of the product is near zero, however much it rounds.
    """

    honest: HonestMeans
    false_alarm: float = FALSE_ALARM
    suspects: tuple[str, ...] = ()
    tokens: int = field(default=0, init=False)
    caught_at: int = field(default=0, init=False)
    """tokens after which it was caught; 0: it was not"""
    most_evidence: float = field(default=0.0, init=False)
    """the most that `log_evidence` ever was"""
    _wealth: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """statistic -> log of the money of each stake"""
    _sums: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """statistic -> sum of its values, and how many tokens have one"""
    _recent: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """the same of the last tokens: of RECENT or some more, and of those that came since"""
    _prompt: str = field(default="", init=False, repr=False)
    """of which the last token was; "": of one of its own"""
    _gained: dict[str, dict[str, np.ndarray]] = field(default_factory=dict, init=False, repr=False)
    """prompt -> statistic -> what each stake gained from it since it was lowest"""
    _why: str = field(default="", init=False, repr=False)
    """what it was caught by"""
    _paces: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """suspect -> sum of its differences' amounts, and their number"""

    def look(
        self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray | None = None,
        suspected: Mapping[str, np.ndarray] | None = None, *, again: np.ndarray | None = None, prompts: np.ndarray | None = None,
    ) -> Verdict:  # fmt: skip
        """More of its tokens: distances, log probabilities (nats) as claimed and as they are, and shifts (None: nothing is known
        of them); of some suspects also what log probabilities would be under their weights. `again`: nan where a token is
        new, else what `SeenTokens.again` says; None: all are new. `prompts`: a number for each token's prompt; None: each has
        its own. No number is far off."""
        self.log_path(distance, claimed, recomputed, shift, suspected, again=again, prompts=prompts)
        return self.verdict()

    def log_path(
        self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray | None = None,
        suspected: Mapping[str, np.ndarray] | None = None, *, again: np.ndarray | None = None, prompts: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """As `look`; returns `log_evidence` after each of these tokens, for they may be looked at one by one."""
        suspected, path, first = suspected or {}, [np.empty(0)], 0
        shift = np.full(len(distance), np.nan) if shift is None else shift
        again = np.full(len(distance), np.nan) if again is None else again
        ends = [] if prompts is None else (np.flatnonzero(np.diff(prompts)) + 1).tolist()
        for end in [*ends, len(distance)]:
            while first < end:  # up to where money is handed out, or another prompt begins, or to the end
                part = slice(first, min(end, first + HANDED_OUT_EVERY - self.tokens % HANDED_OUT_EVERY))
                under = {name: values[part] for name, values in suspected.items()}
                columns = distance[part], claimed[part], recomputed[part], shift[part]
                self._prompt = "" if prompts is None else str(prompts[first])
                path.append(self._path_of_block(*columns, under, again=again[part]))
                first = part.stop
        return np.concatenate(path)

    def _of_prompt(self, name: str, gains: np.ndarray) -> np.ndarray:
        """Log gains [stakes, tokens] of a bet: none any more of a stake once it has gained its part from this prompt."""
        if not self._prompt or not name.startswith(OF_A_PROMPT):
            return gains
        gained = self._gained.setdefault(self._prompt, {})
        renewed(self._gained, self._prompt)
        forget_oldest(self._gained, PROMPTS)
        before, most = gained.get(name, np.zeros(len(gains))), -MOST_OF_PROMPT * math.log(self.false_alarm)
        path = before[:, None] + gains.cumsum(axis=1)
        rise = path - np.minimum(np.minimum.accumulate(path, axis=1), 0.0)
        over = np.maximum.accumulate(np.column_stack([before, rise]) >= most, axis=1)
        gained[name] = np.where(over[:, -1], most, rise[:, -1])
        return np.where(over[:, :-1], 0.0, gains)

    def _path_of_block(
        self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray,
        suspected: Mapping[str, np.ndarray], *, again: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        paths, idle = [np.empty((0, len(distance)))], 0
        block, done = divmod(self.tokens, HANDED_OUT_EVERY)
        handed_out = _handed_out(block) if block and not done else -math.inf
        for name, values, mean in self._statistics(distance, claimed, recomputed, shift, suspected, again=again):
            shares = _stakes(name)
            sums, recent = self._sums.setdefault(name, np.zeros(2)), self._recent.setdefault(name, np.zeros((2, 2)))
            known = ~np.isnan(values)
            seen = float(values[known].sum()), float(known.sum())
            sums += seen
            recent[1] += seen
            if recent[1, 1] >= RECENT:
                recent[...] = recent[1], (0.0, 0.0)
            before = self._wealth.get(name)
            if mean >= 1.0:  # nothing to bet on
                if before is None:
                    idle += len(shares)
                else:
                    paths.append(np.broadcast_to(before[:, None], (len(shares), len(values))))
                continue
            late_bet = name.startswith(LATE)
            if before is None:
                before = np.full(len(shares), math.log(AT_FIRST) if late_bet else 0.0)
            stakes = np.array(shares)[:, None] / mean
            gains = np.log1p(np.clip(stakes * np.where(known, values - mean, 0.0)[None, :], -1 + 1e-12, None))
            gains = self._of_prompt(name, gains)
            if late_bet:
                before = np.logaddexp(before, handed_out)
            paths.append(before[:, None] + gains.cumsum(axis=1))
            self._wealth[name] = paths[-1][:, -1]
        path = _log_mean(np.concatenate(paths), idle)
        self.most_evidence = max(self.most_evidence, float(path.max()))
        over = path >= -math.log(self.false_alarm)
        newly = not self.caught_at and bool(over.any())
        if newly:
            self.caught_at = self.tokens + int(over.argmax()) + 1
        self.tokens += len(path)
        if newly:  # what comes behind must not hide it
            self._why = self._why_now()
        return path

    @property
    def log_evidence(self) -> float:
        """Log of the money of the mixture of all bets. A bound on the log of the chance that an honest node gets so far, with its
        sign turned."""
        every = np.array([w for wealth in self._wealth.values() for w in wealth])
        idle = sum(len(_stakes(name)) for name in self._means()) - len(every)
        return float(_log_mean(every[:, None], idle)[0])

    def verdict(self) -> Verdict:
        """By what was seen so far; of one that was caught, by what was seen until then."""
        notable = self.log_evidence >= -NOTABLE * math.log(self.false_alarm)
        why = self._why if self.caught_at else self._why_now()
        return Verdict(bool(self.caught_at), self.caught_at or self.tokens, why, notable)

    def _why_now(self) -> str:
        most, why, means = 1.0, "", self._means()
        for name, wealth in self._wealth.items():
            if (log_money := float(wealth.max())) > most:
                (total, count), last = self._sums[name], ""
                if name.startswith(LATE):  # what it was before hides what it is now
                    (total, count), last = self._recent[name].sum(axis=0), "last "
                mean, most = total / max(count, 1), log_money
                why = f"{_words(name)}: {mean:.3g} in {last}{int(count)} tokens, an honest node has {means[name]:.3g}"
        return why

    def _means(self) -> dict[str, float]:
        h = self.honest
        shift = h.bias / LOGPROB_SCALE / 2
        means = {"far": h.far, "near": h.near, "gross": h.gross}
        means |= {"off": h.off / LOGPROB_SCALE, "above": 0.5 + shift, "below": 0.5 + shift}
        means["again"] = means["off"]
        means |= {f"noise {scale:g}": mean for scale, mean in zip(NOISE_SCALES, h.noise, strict=True)}
        means |= {f"quiet {scale:g}": mean for scale, mean in zip(NOISE_SCALES, h.quiet, strict=True)}
        wide = LATE_MARGIN * shift
        late = {f"{LATE}{name}": 0.5 + wide if name in ("above", "below") else min(1.0, LATE_MARGIN * mean)
                for name, mean in means.items() if not name.startswith(NEVER_LATE)}  # fmt: skip
        return means | late | {f"toward {name}": (1 + h.toward) / 2 for name in self.suspects}

    def _statistics(
        self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray,
        suspected: Mapping[str, np.ndarray], *, again: np.ndarray,
    ) -> list[tuple[str, np.ndarray, float]]:  # fmt: skip
        """Name, values in [0, 1] and nan where a token says nothing, and the honest mean. Always the same names: the mixture's
        shares may not depend on what is seen."""
        repeated = ~np.isnan(again)
        with np.errstate(invalid="ignore"):
            signed = np.clip((claimed - recomputed) / LOGPROB_SCALE, -1.0, 1.0)
        signed = np.where(repeated, np.nan, np.nan_to_num(signed, nan=1.0))
        distance = np.nan_to_num(distance, nan=1.0)
        values = {
            "far": (distance > FAR).astype(np.float64), "near": (distance > NEAR).astype(np.float64), "off": np.abs(signed),
            "above": (1 + signed) / 2, "below": (1 - signed) / 2,
            "gross": grossness(distance, shift),
            "again": np.where(np.isfinite(again), np.minimum(again / LOGPROB_SCALE, 1.0), np.nan),
        }  # fmt: skip
        logits = np.where(repeated, np.nan, logit_differences(claimed, recomputed))
        for scale in NOISE_SCALES:
            values[f"noise {scale:g}"] = share = np.minimum(np.abs(logits) / scale, 1.0)
            values[f"quiet {scale:g}"] = 1.0 - share
        for name in self.suspects:
            values[f"toward {name}"] = np.where(repeated, np.nan, self.toward(name, claimed, recomputed, suspected.get(name)))
        means = self._means()
        return [(name, values[name.removeprefix(LATE)], mean) for name, mean in means.items()]

    def toward(self, name: str, claimed: np.ndarray, recomputed: np.ndarray, suspected: np.ndarray | None) -> np.ndarray:
        """The product of differences with those of the suspect `name`, moved to [0, 1]: 0.5 is none. nan: there is no bet."""
        if suspected is None or not len(suspected) or not self.honest.level:
            return np.full(len(claimed), np.nan)
        logits, others = logit_differences(claimed, recomputed), logit_differences(suspected, recomputed)
        known = ~np.isnan(others)
        seen = self._paces.setdefault(name, np.zeros(2))
        amounts = np.where(known, np.abs(others), 0.0)
        before = seen[0] + amounts.cumsum() - amounts, seen[1] + known.cumsum() - known
        seen += amounts.sum(), known.sum()
        with np.errstate(invalid="ignore", divide="ignore"):
            pace = before[0] / before[1]  # not a number for the very first: it is no bet
            toward = np.clip(logits / (2 * self.honest.level), -1, 1) * np.clip(others / (2 * pace), -1, 1)
        return (1 + toward) / 2


def grossness(distance: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """How far beyond rounding tokens are, in [0, 1], one entry a token: 1 from a shift of GROSS on. nan where the shift is."""
    return np.where(distance <= GROSS_DISTANCE, 0.0 * shift, np.minimum(shift / GROSS, 1.0) ** GROSS_POWER)


def _stakes(name: str) -> tuple[float, ...]:
    """Shares that are staked on this statistic."""
    return (*RARE_STAKES, *STAKES) if name.removeprefix(LATE) in RARE else STAKES


def _handed_out(block: int) -> float:
    """Log of the money that each late bet is handed at the beginning of this block of tokens, from the second one (1) on."""
    return math.log(1 - AT_FIRST) - math.log(_ALL_OF_IT * (block + 1)) - 2 * math.log(math.log(block + 1))


def _log_mean(logs: np.ndarray, idle: int) -> np.ndarray:
    """Log of the mean over rows, and over so many more that are 0."""
    top = logs.max(axis=0, initial=0.0)
    found: np.ndarray = top + np.log((np.exp(logs - top).sum(axis=0) + idle * np.exp(-top)) / (len(logs) + idle))
    return found


def logit_differences(claimed: np.ndarray, recomputed: np.ndarray) -> np.ndarray:
    """Differences of log probabilities as ones of the token's logit against the others, in nats within [-1, 1]; nan for tokens
    that are all but certain."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        doubt = -np.expm1(np.minimum(recomputed, 0.0))
        found = np.clip((claimed - recomputed) / doubt, -1.0, 1.0)
    return np.where(doubt < LEAST_DOUBT, np.nan, np.where(np.isnan(found), 1.0, found))


def _words(name: str) -> str:
    """A statistic, for people."""
    what, _, of = name.removeprefix(LATE).partition(" ")
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
