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

from learner.audit.bets import LATE, Bets, HonestMeans, bets_on, in_words, logit_differences, means_of, values_of
from p2p.forgetting import forget_oldest

FALSE_ALARM = 1e-4
"""Chance that an honest node is ever called wrong, however long it is looked at."""

NOTABLE = 0.5
"""Part of the log of the evidence that calls a node wrong from which all of its tokens are looked at: 100 where 10,000 is needed.
An honest node comes so far with a chance of 1 in 100 at most, and loses nothing by it."""

AT_FIRST = 0.5
"""Part of the money of bets on what begins late that is there at the beginning: they find soon what is far beyond the bounds."""

HANDED_OUT_EVERY = 128
"""Tokens after which some of the rest is handed out."""

MOST_OF_PROMPT, PROMPTS = 0.5, 32
"""What part of the log of the evidence that calls a node wrong a bet OF_A_PROMPT gains from one prompt, at most and
but for its last token; and how many prompts a test remembers. Each bet is a small share of the mixture, so two or three are
needed. No sample tells how loud the loudest of a thousand prompts is, and the answers to one that is a little louder than the
bounds would be enough (bench/audit.md). What is more than LATE_MARGIN times as loud as they are is found within a prompt all the
same."""

RECENT = 128
"""Tokens that are called the last ones, where an operator is told what speaks against a node that was honest before."""

NOTHING = 1.0
"""Log of the money up to which a bet says nothing against a node."""

_ALL_OF_IT = 2.2
"""More than the sum of 1 / ((b + 1) ln(b + 1) ** 2) over b from 1 on (2.11): the money must last for ever."""


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
    _bets: Bets = field(init=False, repr=False)
    _begun: np.ndarray = field(init=False, repr=False)
    """[bets] whether money was ever staked on it"""
    _money: np.ndarray = field(init=False, repr=False)
    """[stakes] log of the money of each"""
    _sums: np.ndarray = field(init=False, repr=False)
    """[statistics, 2] sum of its values, and how many tokens have one"""
    _recent: np.ndarray = field(init=False, repr=False)
    """[statistics, 2, 2] the same of the last tokens: of RECENT or some more, and of those that came since"""
    _gained: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """prompt -> [stakes that are bounded] what each gained from it since it was lowest"""
    _why: str = field(default="", init=False, repr=False)
    """what it was caught by"""
    _paces: dict[str, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """suspect -> sum of its differences' amounts, and their number"""

    def __post_init__(self) -> None:
        bets = self._bets = bets_on(self.suspects)
        statistics = int(bets.statistics.max()) + 1
        self._begun, self._money = np.zeros(len(bets.names), dtype=bool), np.zeros(len(bets.of))
        self._sums, self._recent = np.zeros((statistics, 2)), np.zeros((statistics, 2, 2))

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
                prompt = "" if prompts is None else str(prompts[first])
                path.append(self._path_of_block(*columns, under, again=again[part], prompt=prompt))
                first = part.stop
        return np.concatenate(path)

    def _path_of_block(
        self, distance: np.ndarray, claimed: np.ndarray, recomputed: np.ndarray, shift: np.ndarray,
        suspected: Mapping[str, np.ndarray], *, again: np.ndarray, prompt: str,
    ) -> np.ndarray:  # fmt: skip
        """Of tokens of one `prompt` ("": each of one of its own), between two tokens at which money is handed out."""
        bets, means = self._bets, means_of(self.honest, self.suspects)
        toward = [self.toward(name, claimed, recomputed, suspected.get(name)) for name in self.suspects]
        values = values_of(distance, claimed, recomputed, shift, again=again, toward=toward)
        known = ~np.isnan(values)
        self._count(np.where(known, values, 0.0).sum(axis=1), known.sum(axis=1))
        betting = means < 1.0
        self._money[bets.late & (betting & ~self._begun)[bets.of]] = math.log(AT_FIRST)
        self._begun |= betting
        ahead = np.where(known[bets.statistics] & betting[:, None], values[bets.statistics] - means[:, None], 0.0)
        gains = np.log1p(np.maximum((bets.stakes / means[bets.of])[:, None] * ahead[bets.of], -1 + 1e-12))
        if prompt:
            gains[bets.of_a_prompt] = self._of_prompt(prompt, gains[bets.of_a_prompt])
        block, done = divmod(self.tokens, HANDED_OUT_EVERY)
        if block and not done:
            handed = bets.late & betting[bets.of]
            self._money[handed] = np.logaddexp(self._money[handed], _handed_out(block))
        paths = self._money[:, None] + gains.cumsum(axis=1)
        self._money = paths[:, -1].copy()
        path = _log_mean(paths)
        self.most_evidence = max(self.most_evidence, float(path.max()))
        over = path >= -math.log(self.false_alarm)
        newly = not self.caught_at and bool(over.any())
        if newly:
            self.caught_at = self.tokens + int(over.argmax()) + 1
        self.tokens += len(path)
        if newly:  # what comes behind must not hide it
            self._why = self._why_now()
        return path

    def _count(self, sums: np.ndarray, known: np.ndarray) -> None:
        """Of each statistic: the sum of more values, and their number."""
        seen = np.stack([sums, known], axis=1)
        self._sums += seen
        self._recent[:, 1] += seen
        full = self._recent[:, 1, 1] >= RECENT
        self._recent[full, 0], self._recent[full, 1] = self._recent[full, 1], 0.0

    def _of_prompt(self, prompt: str, gains: np.ndarray) -> np.ndarray:
        """Log gains [stakes that are bounded, tokens]: none any more of a stake once it has gained its part from this prompt."""
        before, most = self._gained.get(prompt, np.zeros(len(gains))), -MOST_OF_PROMPT * math.log(self.false_alarm)
        path = before[:, None] + gains.cumsum(axis=1)
        rise = path - np.minimum(np.minimum.accumulate(path, axis=1), 0.0)
        over = np.maximum.accumulate(np.column_stack([before, rise]) >= most, axis=1)
        self._gained.pop(prompt, None)
        self._gained[prompt] = np.where(over[:, -1], most, rise[:, -1])
        forget_oldest(self._gained, PROMPTS)
        return np.where(over[:, :-1], 0.0, gains)

    @property
    def log_evidence(self) -> float:
        """Log of the money of the mixture of all bets. A bound on the log of the chance that an honest node gets so far, with its
        sign turned."""
        return float(_log_mean(self._money[:, None])[0])

    def verdict(self) -> Verdict:
        """By what was seen so far; of one that was caught, by what was seen until then."""
        notable = self.log_evidence >= -NOTABLE * math.log(self.false_alarm)
        why = self._why if self.caught_at else self._why_now()
        return Verdict(bool(self.caught_at), self.caught_at or self.tokens, why, notable)

    def _why_now(self) -> str:
        bets = self._bets
        money = np.maximum.reduceat(self._money, bets.first)
        most = int(money.argmax())
        if money[most] <= NOTHING:
            return ""
        name, statistic, last = bets.names[most], bets.statistics[most], ""
        (total, count), honest = self._sums[statistic], means_of(self.honest, self.suspects)[most]
        if name.startswith(LATE):  # what it was before hides what it is now
            (total, count), last = self._recent[statistic].sum(axis=0), "last "
        mean = total / max(count, 1)
        return f"{in_words(name)}: {mean:.3g} in {last}{int(count)} tokens, an honest node has {honest:.3g}"

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


def _handed_out(block: int) -> float:
    """Log of the money that each late bet is handed at the beginning of this block of tokens, from the second one (1) on."""
    return math.log(1 - AT_FIRST) - math.log(_ALL_OF_IT * (block + 1)) - 2 * math.log(math.log(block + 1))


def _log_mean(logs: np.ndarray) -> np.ndarray:
    """Log of the mean over rows."""
    top = logs.max(axis=0)
    found: np.ndarray = top + np.log(np.exp(logs - top).mean(axis=0))
    return found
