"""How the rate that a host takes is divided among those who send to it. Pure; it is told the time and what came from whom.

A sender paces itself by the share that it is told. Who sends little is told what it sends and some room to grow; what that
leaves is divided evenly among the others (max-min fairness; Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). So one
sender can have most of it, and a new one begins at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

GROWTH = 1.5
"""A sender's share is at most so many times what it lately sent: the rest is for those who could send more."""

FLOOR = 0.1
"""Part of the rate that is divided evenly among all, whatever they send, so that one that was quiet can begin."""

TAKES = 0.97
"""Part of the limit that is given out: the rest is control messages, and what several senders begin at once."""

NEWS = 0.15
"""A share that moved by less than this part of what a sender was told is no news."""

LOOK_S = 1.0
"""Seconds over which is measured what each sends, and between two times that shares are told."""


class DownShares:
    """`told` holds the share of each sender, in bytes a second, as it was last told."""

    def __init__(self) -> None:
        self.told: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        self._before: dict[str, int] = {}
        self._at = float("-inf")

    def divide(self, now: float, rate: float, received: Mapping[str, int]) -> dict[str, float]:
        """The shares that are news, by sender. `received`: bytes that came from each sender so far, the links that there are.
        `rate`: bytes a second for all of them; 0 for no limit, which has no shares."""
        if not rate or now - self._at < LOOK_S:
            return {}
        seconds = min(now - self._at, 10 * LOOK_S)
        for name, total in received.items():
            came = max(0, total - self._before.get(name, total)) / seconds
            self._sent[name] = (self._sent.get(name, 0.0) + came) / 2
        self._sent = {name: self._sent[name] for name in received}
        self._before, self._at = dict(received), now
        shares = divided(TAKES * rate, self._sent)
        news = {n: s for n, s in shares.items() if abs(s - self.told.get(n, 0.0)) > NEWS * self.told.get(n, 0.0)}
        self.told = {n: news.get(n, self.told.get(n, 0.0)) for n in shares}
        return news

    def forget(self, names: Iterable[str]) -> None:
        """Their links are new: they know nothing of what was told."""
        for name in names:
            self.told.pop(name, None)


def divided(rate: float, sent: Mapping[str, float]) -> dict[str, float]:
    """`rate` bytes a second among those who lately `sent` so much a second each. The shares sum up to `rate`."""
    if not sent:
        return {}
    floor = FLOOR * rate / len(sent)
    left, shares = rate * (1 - FLOOR), dict.fromkeys(sent, floor)
    rest = sorted(sent, key=lambda name: sent[name])
    for place, name in enumerate(rest):
        wants = min(GROWTH * sent[name], left / (len(rest) - place))
        shares[name] += wants
        left -= wants
    return {name: share + left / len(shares) for name, share in shares.items()}
