"""The rule of `learner.audit.sequential` said once more, a token and a stake at a time: what the fast one is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from learner.audit.bets import HonestMeans, bets_on, means_of


@dataclass
class PlainTest:
    """Money of each stake after each token, of tokens whose values are given by statistic (None: it says nothing)."""

    honest: HonestMeans
    bound: float
    """log of the evidence that calls a node wrong"""
    money: dict[tuple[str, float], float] = field(default_factory=dict)
    gained: dict[tuple[int, str, float], float] = field(default_factory=dict)
    done: set[tuple[int, str, float]] = field(default_factory=set)
    tokens: int = 0

    def token(self, values: dict[str, float | None], prompt: int) -> float:
        """Log of the mean money after one more token."""
        bets = bets_on(())
        means = dict(zip(bets.names, means_of(self.honest, ()), strict=True))
        every = []
        for stake, bet in zip(bets.stakes, bets.of, strict=True):
            name = bets.names[bet]
            every.append(self._stake(name, float(stake), float(means[name]), values[name.removeprefix("late ")], prompt))
        self.tokens += 1
        most = max(every)
        return most + math.log(sum(math.exp(log - most) for log in every) / len(every))

    def _stake(self, name: str, stake: float, mean: float, value: float | None, prompt: int) -> float:
        late = name.startswith("late ")
        if mean >= 1:
            return self.money.get((name, stake), 0.0)
        money = self.money.get((name, stake), math.log(0.5) if late else 0.0)
        if late and self.tokens and self.tokens % 128 == 0:
            block = self.tokens // 128
            more = 0.5 / (2.2 * (block + 1) * math.log(block + 1) ** 2)
            money += math.log1p(more * math.exp(-money))
        gain = 0.0 if value is None else math.log1p(max(stake / mean * (value - mean), -1 + 1e-12))
        if name.startswith(("noise", "far", "gross")):
            gain = self._of_prompt((prompt, name, stake), gain)
        self.money[name, stake] = money + gain
        return money + gain

    def _of_prompt(self, key: tuple[int, str, float], gain: float) -> float:
        if key in self.done:
            return 0.0
        self.gained[key] = max(0.0, self.gained.get(key, 0.0) + gain)
        if self.gained[key] >= self.bound / 2:
            self.done.add(key)
        return gain
