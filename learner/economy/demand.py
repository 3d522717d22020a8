"""How much the learner needs so that it never waits: ECHO-2's capacity model, with our ledger's window. Pure.

ECHO-2 (arXiv 2602.02192, the condition that its text states in words; R = tokens of a step, mu = accepted tokens per second):

    serial    kappa*R / mu + spread <= kappa*train        a node makes nothing while it receives and installs
    overlap   mu >= R / train  and  spread <= kappa*train   it goes on with the old version, and that is still inside S

"Still inside S" is a premise there. Here it follows from when work is reserved (StaleFlow's bound, `learner.rollouts.ledger`):
what is reserved at v is for steps v .. v+S. Versions come every kappa steps; so the steps v+S-kappa+1 .. v+S can only be made
after v is installed, the first of them S-kappa+1 steps after v was published, and for the k-th of them

    window    spread + generation + k*R / mu <= (S-kappa+k) * train       k = 1 .. kappa

With kappa <= S-1, spread + generation <= train it says no more than ECHO-2 does. With S=1, kappa=1 it asks for more; with S=0
(synchronous) nothing meets it: the learner waits for what it has not yet published. Where a condition fails the learner
waits, and how long a step takes then is the largest mean of the circuits of who waits for whom (`period`). With overlap that
is exact: 1,500 random settings simulated group by group differ by nothing. Serial it is the least: a learner that waits
publishes at uneven times, and each publication stops the nodes; 95 in 100 settings agree, the worst waited 0.23 of its time
longer. Must not know nodes or prices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

UPLINK_SHARE = 0.8
"""Share of the time between two publications that a dissemination may take where we choose kappa: a slow version must not meet
the next."""

SERIAL_FACTOR = 2.0
"""Where nodes stop while they install, kappa is chosen so that this many times the tokens per second of a step are enough."""

REACH = 1.1
"""Where no capacity suffices, we aim at the least with which a step takes at most this many times what it would with endless
capacity."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the learner consumes, and by what rules."""

    tokens: float
    """accepted completion tokens that a step takes"""
    train_s: float
    """seconds of a step of a learner that never waits"""
    staleness: int
    """the bound S: a step trains on what was reserved at most so many versions before"""
    kappa: int
    """steps between publications"""
    generation_s: float = 0.0
    """seconds from a group's reservation until it is accepted, on the nodes as they are"""

    def __post_init__(self) -> None:
        if self.staleness < 0 or self.kappa < 1:
            raise ValueError(f"staleness {self.staleness} must be at least 0, kappa {self.kappa} at least 1")

    @property
    def known(self) -> bool:
        """False before the first step, when nobody knows what a step takes. That is not a demand of nothing."""
        return self.tokens > 0 and 0 < self.train_s < math.inf


def required(demand: Demand, spread_s: float, *, overlap: bool = True) -> float:
    """Tokens per second that keep the learner from waiting; inf when no capacity does. `spread_s`: seconds that a version takes
    to all nodes; `overlap`: nodes generate meanwhile."""
    if demand.tokens <= 0:
        return 0.0
    d, lag = demand, spread_s + demand.generation_s
    if d.train_s <= 0 or spread_s > d.kappa * d.train_s or d.kappa > d.staleness + 1:
        return math.inf
    times = [d.train_s if overlap else d.train_s - spread_s / d.kappa]
    times += [((d.staleness - d.kappa + k) * d.train_s - lag) / k for k in range(1, d.kappa + 1)]
    return d.tokens / min(times) if min(times) > 0 else math.inf


def period(demand: Demand, supply: float, spread_s: float, *, overlap: bool = True) -> float:
    """Seconds that a step takes in the long run: `train_s` when the rule holds, inf when nothing moves.

    Step b begins after step b-1 and after its batch is there. The k-th batch of version v is there spread + generation +
    k*R/mu after v was published, which is when step v-1 ended; it is for step v+S-kappa+k. From there the learner goes on
    step by step to the next publication, and round. The longest mean over such a circuit is how long a step takes. """
    d = demand
    if d.tokens <= 0:
        return d.train_s
    if supply <= 0 or d.kappa > d.staleness + 1 or not spread_s < math.inf:
        return math.inf
    batch = d.tokens / supply
    out = max(d.train_s, batch if overlap else batch + spread_s / d.kappa, spread_s / d.kappa)
    for k in range(1, d.kappa + 1):
        steps = d.staleness - d.kappa + 1 + k
        more = -steps % d.kappa
        out = max(out, (spread_s + d.generation_s + k * batch + (1 + more) * d.train_s) / (steps + more))
    return out


def stall(demand: Demand, supply: float, spread_s: float, *, overlap: bool = True) -> float:
    """The share of its time that the learner is predicted to wait."""
    takes = period(demand, supply, spread_s, overlap=overlap)
    return max(0.0, 1.0 - demand.train_s / takes) if takes > 0 else 0.0


def within_reach(demand: Demand, spread_s: float, *, overlap: bool = True) -> float:
    """`required`, or, where no capacity suffices, the least that comes near to what endless capacity would give (`REACH`)."""
    wanted = required(demand, spread_s, overlap=overlap)
    best = period(demand, math.inf, spread_s, overlap=overlap)
    if wanted < math.inf or demand.train_s <= 0:
        return wanted
    if best == math.inf:
        return demand.tokens / demand.train_s
    low, high = 0.0, demand.tokens / (best * (REACH - 1)) * 2 * (demand.staleness + 2)
    for _ in range(60):
        middle = (low + high) / 2
        if period(demand, middle, spread_s, overlap=overlap) <= REACH * best:
            high = middle
        else:
            low = middle
    return high


def choose_kappa(staleness: int, train_s: float, spread_s: float, generation_s: float, *, overlap: bool = True) -> int:
    """The publish period to use: the smallest that dissemination allows, so that nodes are as fresh as can be.

    - at most S-1 (at least 1): a version must be everywhere, and have made something, while what its predecessor made can still
      be used (ECHO-2's default is S-1 itself);
    - a version is through before the next is published (`UPLINK_SHARE`), else they queue up at the learner's uplink;
    - a larger kappa does not always help: it takes from the window (see above) what it gives to dissemination.

    So it is the smallest with which a step takes least, for nodes that are just fast enough. """
    def takes(kappa: int) -> float:
        demand = Demand(1.0, train_s, staleness, kappa, generation_s)
        return period(demand, (1.0 if overlap else SERIAL_FACTOR) / train_s, spread_s / UPLINK_SHARE, overlap=overlap)

    choices = range(1, max(1, staleness - 1) + 1)
    if train_s <= 0:
        return choices[-1]
    best = min(takes(kappa) for kappa in choices)
    return next((kappa for kappa in choices if takes(kappa) <= best * (1 + 1e-9)), choices[-1])


@dataclass(frozen=True, slots=True)
class Slack:
    """The largest value of each knob with which the learner does not wait, the others as they are. Below zero: not even 0 would
    do."""

    holds: bool
    """whether the capacity rule holds as things are"""
    spread_s: float
    kappa: int
    """0: no kappa would do"""
    tokens: float
    generation_s: float
    supply: float
    """the smallest one, in tokens per second; inf: none would do"""
    sentences: tuple[str, ...]
    """the same for people"""


def slack(demand: Demand, supply: float, spread_s: float, *, overlap: bool = True) -> Slack:
    """How far each knob may go until the learner waits."""
    d, m = demand, demand.staleness - demand.kappa
    batch = d.tokens / supply if supply > 0 else math.inf if d.tokens > 0 else 0.0
    lag = spread_s + d.generation_s

    def holds(other: Demand) -> bool:
        return required(other, spread_s, overlap=overlap) <= supply * (1 + 1e-9)

    window = min((m + k) * d.train_s - k * batch for k in range(1, d.kappa + 1))
    enough = batch <= d.train_s * (1 + 1e-9)
    spread = min(d.kappa * d.train_s, window - d.generation_s, math.inf if overlap else d.kappa * (d.train_s - batch))
    times = [d.train_s if overlap else d.train_s - spread_s / d.kappa]
    times += [((m + k) * d.train_s - lag) / k for k in range(1, d.kappa + 1)]
    fits = [kappa for kappa in range(1, d.staleness + 2) if holds(replace(d, kappa=kappa))]
    out = Slack(
        holds=holds(d),
        spread_s=spread if enough else -math.inf,
        kappa=max(fits, default=0),
        tokens=supply * min(times) if spread_s <= d.kappa * d.train_s else -math.inf,
        generation_s=window - spread_s if enough and spread_s <= d.kappa * d.train_s else -math.inf,
        supply=required(d, spread_s, overlap=overlap),
        sentences=(),
    )
    return replace(out, sentences=_sentences(d, supply, spread_s, out, overlap))


def _sentences(d: Demand, supply: float, spread_s: float, s: Slack, overlap: bool) -> tuple[str, ...]:
    rules = f"with S={d.staleness}, kappa={d.kappa}"
    if not s.holds:
        waits = f"the learner is predicted to wait {100 * stall(d, supply, spread_s, overlap=overlap):.0f} % of its time"
        need = f"{s.supply:,.0f} tokens/s are required" if s.supply < math.inf else f"no capacity suffices {rules}"
    else:
        waits, need = "the learner does not wait", f"{s.supply:,.0f} tokens/s are required"
    out = [f"{waits}: {need}, there are {supply:,.0f}"]
    if s.spread_s >= 0:
        out.append(f"{rules} you can afford {s.spread_s:.3g} s of dissemination (it takes {spread_s:.3g} s)")
    elif supply * d.train_s >= d.tokens:
        out.append(f"{rules} no dissemination is fast enough")
    if s.generation_s >= 0:
        out.append(f"a group may take {s.generation_s:,.0f} s to generate (it takes {d.generation_s:,.0f} s)")
    if s.kappa and s.kappa != d.kappa:
        out.append(f"kappa may be {s.kappa} at the most" if s.holds else f"kappa={s.kappa} would do")
    if s.tokens > 0:
        out.append(f"a step may take {s.tokens:,.0f} tokens (it takes {d.tokens:,.0f})")
    return tuple(out)
