"""Which nodes are active, and why: the cheapest that are enough, changed rarely. Pure: told the time, gives a decision.

ECHO-2 (arXiv 2602.02192): the cheapest workers per unit of throughput that satisfy the capacity rule with a margin, release
above a higher mark after a dwell, replacement on loss, T_bcast(A) evaluated again. What is ours: the cheapest set is solved
for (`cover`), not sorted for; rates are lower bounds (`rates`), unknown nodes are tried on an allowance (`exploration`), and

- **added** at once when someone left or much less is there than is required; for a little less when it stays so for a quarter
  of a dwell, for a lack of margin when for a whole one: one estimate that dips is no reason;
- **released** when those that stay make (1 + release) of what is required, and **swapped** for a set as strong that is
  cheaper by a share: either only when it was so at every decision of a dwell. A swap makes before it breaks: new ones catch
  up first;
- **a joiner** counts for nothing until it is ready, and is given up for a while, each time longer, when it never is;
- **before the first step** nobody knows what is required: everything within the caps works, which measures it all as well;
- **work held back** (`held_back`) proves that the set is enough, whatever the estimates say: nothing is added. The learner then
  has in hand what the ledger allows, which is margin enough: until a step later those stay that make what is required;
- **caps** come last. Those that work go on as far as the cap allows, and it is said what it allows. A budget that is spent
  stays spent; nodes that cost nothing go on. What a stopped node was doing is the caller's: it drains, and others go on.

Must not know the network, the journal, or how a node is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from learner.economy.candidate_set import Spread, View
from learner.economy.candidates import ACTIVE, ASLEEP, WARM, Candidate, Change, Decision, Rules
from learner.economy.cover import EXACT, cheapest
from learner.economy.demand import Demand
from learner.economy.exploration import Exploration, promise
from p2p.forgetting import forget_oldest, renewed

DIP_SHARE = 0.8
"""A supply under this share of what is required is more than the dip of an estimate: nodes are added at once."""

LACK_DWELLS = 0.25
"""Dwells that a smaller lack must last before nodes are added."""

REGRET_DWELLS = 20
"""A node that has to be added within so many dwells after a release shows that the release was too much."""

MAX_CALM = 16
"""After such a release the next one must be called for twice as long, and up to so many dwells."""


@dataclass
class Activation:
    """Decides again and again, and remembers for how long reasons hold."""

    rules: Rules = field(default_factory=Rules)
    _since: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    """when each active node became so"""
    _lasting: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    """reason -> since when it holds without a break"""
    _refused: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    """joiners that never were ready -> (not before, seconds of the last pause)"""
    _plan: frozenset[str] = frozenset()
    """the set that a swap in progress leads to"""
    _released: float = -math.inf
    _calm: float = 1.0
    """dwells until a release"""
    _in_hand_until: float = -math.inf
    _spent: bool = False
    _barred: set[str] = field(default_factory=set, init=False, repr=False)
    """nodes that cost something, when the budget is spent"""
    _why: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.exploration = Exploration(self.rules)

    def decide(
        self, now: float, demand: Demand | None, candidates: Iterable[Candidate], spread: Spread, spent_usd: float = 0.0, *,
        held_back: bool = False,
    ) -> Decision:  # fmt: skip
        """What is to be active now. `demand` is None before the first step; `spread(peers)`: seconds that a version takes to
        reach all of them; `spent_usd`: by the whole run; `held_back`: work is held back, since the learner could not use more. To
        be called every few seconds, and when a node left."""
        pool = {c.peer: c for c in candidates}
        self._why = {}
        lost = self._look(now, pool)
        before = {p for p, c in pool.items() if c.state == ACTIVE} - self._given_up(now, pool)
        view = View(pool, spread, demand, self.rules)
        self._barred = {p for p in pool if view.costs(p)} if self._spent else set()
        before -= self._barred
        trying = set(self.exploration.trials)
        self.exploration.proceed(now, pool, view.price(before - trying))
        active = before - trying
        blocked = ""
        if view.demand is None:
            active = {p for p in pool if self._may(now, p)}
            self._say(active - before, "at first all generate, to learn what a step takes")
        else:
            active = self._needed(now, view, active, lost, held_back)
            if view.unreachable(active):
                blocked = f"no capacity suffices {view.rules_said}: {view.aim(active):,.0f} tokens/s are aimed at"
            elif view.supply(active) < view.aim(active) * (1 - EXACT) and not held_back:
                blocked = f"all there are make {view.supply(active):,.0f} of {view.aim(active):,.0f} tokens/s"
        active, capped = self._afford(view, active, before, {p for p in pool if self._may(now, p)})
        active, no_room = self._within_budget(view, active, spent_usd)
        blocked, spent = no_room or capped or blocked, self._spent
        # What is needed may have grown since the trials under way began: those go on for which the cap still leaves room.
        under_way, cap = set(self.exploration.trials) - active, self.rules.max_usd_per_hour
        trials = set() if spent else view.fits(cap, active, under_way)
        if not spent:
            self._say(under_way - trials, f"max_usd_per_hour {cap:.2f} leaves no room for a trial")
        if not (spent or capped) and view.demand is not None:
            trials |= self._try_some(now, view, active)
        for peer in [p for p in self.exploration.trials if p not in trials]:  # in order: what they give back is summed up
            self.exploration.end(peer, now, tried=False)
        return self._decision(now, view, frozenset(active | trials), blocked, held_back)

    # ---- what moved

    def _look(self, now: float, pool: dict[str, Candidate]) -> list[str]:
        """Who left that was active; the clocks of those that are."""
        lost = [p for p in self._since if p not in pool]
        active = {p for p, c in pool.items() if c.state == ACTIVE}
        self._since = {p: self._since.get(p, now) for p in pool if p in active}
        self._plan = self._plan if self._plan <= pool.keys() else frozenset()
        return lost

    def _given_up(self, now: float, pool: dict[str, Candidate]) -> set[str]:
        """Joiners that took too long."""
        out = set()
        for peer, since in self._since.items():
            c = pool[peer]
            if c.ready:
                self._refused.pop(peer, None)
                continue
            patience = max(self.rules.join_s, 2 * c.catch_up_s if c.catch_up_s < math.inf else 0.0)
            if now - since >= patience:
                pause = 2 * self._refused[peer][1] if peer in self._refused else patience
                self._refused[peer] = now + pause, pause
                renewed(self._refused, peer)
                forget_oldest(self._refused)
                self._why[peer] = f"was not ready within {patience:.0f} s: not asked again for {pause:.0f} s"
                self._plan = frozenset() if peer in self._plan else self._plan
                out.add(peer)
        return out

    def _may(self, now: float, peer: str) -> bool:
        return peer not in self._barred and now >= self._refused.get(peer, (-math.inf, 0.0))[0]

    def _lasts(self, now: float, reason: str, holds: bool, dwells: float = 1.0) -> bool:
        """Whether it has held at every decision for a dwell."""
        if not holds:
            self._lasting.pop(reason, None)
            return False
        return now - self._lasting.setdefault(reason, now) >= dwells * self.rules.dwell_s

    def _say(self, peers: Iterable[str], why: str) -> None:
        for peer in peers:
            self._why[peer] = why

    # ---- what is needed

    def _needed(self, now: float, view: View, active: set[str], lost: list[str], held_back: bool) -> set[str]:
        mark, have = view.aim(active), view.supply(active)
        self._in_hand_until = now + view.demand.train_s if held_back and view.demand is not None else self._in_hand_until
        able = {p for p in view.pool if p in active or (view.value(p) > 0 and self._may(now, p))}
        level = mark * (1 if (full := now < self._in_hand_until) else 1 + self.rules.margin)
        short = self._lasts(now, "short", have < mark * (1 - EXACT), LACK_DWELLS) or have < DIP_SHARE * mark
        lacks_margin = self._lasts(now, "margin", have < level * (1 - EXACT))
        if view.unreachable(active) and active:
            # Perhaps it is only that some of these are reached too late.
            other = view.cover(able, 1 + self.rules.margin)
            if not other.short:
                chosen = {view.names[i] for i in other.chosen}
                self._say(chosen ^ active, "a version reaches these in time")
                return chosen
        if (lost and have < level) or ((short or lacks_margin) and not held_back):
            if not lost and now - self._released < REGRET_DWELLS * self.rules.dwell_s:
                self._calm, self._released = min(2 * self._calm, MAX_CALM), -math.inf
            return self._add(now, view, active, able=able, lost=lost, mark=mark)
        stays = self._release(now, view, active, full)
        return stays if stays != active else self._swap(now, view, active, able, mark)

    def _add(self, now: float, view: View, active: set[str], able: set[str], lost: list[str], mark: float) -> set[str]:
        self._lasting.clear()
        cover = None
        if view.supply(p for p in active if view.pool[p].ready) < mark:  # who can work now comes first; cheaper ones may follow
            cover = view.cover({p for p in able if p in active or view.pool[p].ready}, 1 + self.rules.margin, fixed=active)
        if cover is None or cover.short:
            cover = view.cover(able, 1 + self.rules.margin, fixed=active)
        chosen = {view.names[i] for i in cover.chosen}
        new = sorted(chosen - active)
        for k, peer in enumerate(new):
            cost = f"cheapest: {view.value(peer):,.0f} tokens/s for ${view.pool[peer].usd_per_hour:.2f}/h"
            self._why[peer] = f"replaces {lost[k]}, which left ({cost})" if k < len(lost) else cost
        if cover.short:
            lacks = cover.short if cover.short < math.inf else (1 + self.rules.margin) * view.aim(chosen) - view.supply(chosen)
            for c in sorted((c for p, c in view.pool.items() if p not in chosen and self._may(now, p)), key=promise):
                if lacks <= 0:
                    break
                if not c.rate.known:
                    chosen.add(c.peer)
                    lacks -= c.rate.mean
                    self._why[c.peer] = f"unknown, and the known ones make {view.supply(active):,.0f} of {mark:,.0f} tokens/s"
        return chosen

    def _release(self, now: float, view: View, active: set[str], full: bool) -> set[str]:
        ready = [p for p in sorted(active) if view.pool[p].ready and p not in self._plan]
        price, value = [view.pool[p].usd_per_hour for p in ready], [view.value(p) for p in ready]
        beyond = 0.0 if self._lasts(now, "full", full) else self.rules.release
        keep = cheapest(price, value, (1 + beyond) * view.aim(active))
        gone = set(ready) - {ready[i] for i in keep.chosen} if not keep.short else set()
        lasted = self._lasts(now, "release", bool(gone), self._calm)
        gone = {p for p in gone if now - self._since.get(p, now) >= self.rules.dwell_s}
        if not lasted or not gone:
            return active
        self._lasting.clear()
        self._released = now
        self._say(gone, f"not needed: {view.supply(active - gone):,.0f} of {view.aim(active):,.0f} tokens/s without it")
        return active - gone

    def _swap(self, now: float, view: View, active: set[str], able: set[str], mark: float) -> set[str]:
        if self._plan:
            if view.supply(p for p in self._plan if view.pool[p].ready) < (1 + self.rules.margin) * mark * (1 - EXACT):
                return active | self._plan
            plan, self._plan = self._plan, frozenset()
            self._say(active - plan, f"cheaper without it: ${view.price(plan):.2f}/h instead of ${view.price(active):.2f}/h")
            return set(plan)
        # As strong as what is there, up to the mark of release: a swap must not be what makes the next addition necessary.
        strong = max(1 + self.rules.margin, min(1 + self.rules.release, view.supply(active) / mark if mark > 0 else 1.0))
        costs = view.extra(active)
        known = {p for p in able if p in active or view.pool[p].rate.known}  # of a cheap promise a trial is enough
        better = view.cover(known, strong) if costs > 0 else None
        worth = better is not None and not better.short and better.price < costs * (1 - self.rules.swap_share)
        settled = all(now - self._since.get(p, now) >= self.rules.dwell_s for p in active)
        if not self._lasts(now, "swap", worth) or not settled or better is None:
            return active
        self._lasting.clear()
        chosen = {view.names[i] for i in better.chosen}
        cheaper = f"cheaper: ${view.price(chosen):.2f}/h instead of ${view.price(active):.2f}/h"
        if all(view.pool[p].ready for p in chosen):
            self._say(chosen ^ active, cheaper)
            return chosen
        if view.idle() + view.extra(active | chosen) > self.rules.max_usd_per_hour:
            return active
        self._plan = frozenset(chosen)
        self._say(chosen - active, f"{cheaper}, once it has caught up")
        return active | chosen

    # ---- what may be spent

    def _afford(self, view: View, active: set[str], before: set[str], able: set[str]) -> tuple[set[str], str]:
        """What the cap allows, when it does not allow those that are wanted: those that work first, then by value."""
        cap = self.rules.max_usd_per_hour
        if view.idle() + view.extra(active) <= cap * (1 + EXACT):
            return active, ""
        useful = {p for p in able if view.value(p) > 0 or view.demand is None}
        kept = view.fits(cap, set(), active | useful, active & before)
        for peer in active - kept:
            self._why[peer] = f"max_usd_per_hour {cap:.2f} leaves no room for ${view.pool[peer].usd_per_hour:.2f}/h"
        said = f" of {view.aim(kept):,.0f}" if view.demand is not None else ""
        return kept, f"max_usd_per_hour {cap:.2f} allows {view.supply(kept):,.0f}{said} tokens/s"

    def _within_budget(self, view: View, active: set[str], spent_usd: float) -> tuple[set[str], str]:
        """The budget must outlast the time that nodes still cost after they were told to stop. It is spent when it does not for
        those whose worth is known; what others ask for is no reason, they only find no room."""
        budget = self.rules.budget_usd
        left = budget - spent_usd
        hourly = max(0.0, left) * 3600 / self.rules.drain_s if self.rules.drain_s else math.inf
        known, kept = {p for p in active if view.pool[p].rate.known}, active
        if view.idle() + view.extra(active) >= hourly:
            kept = view.fits(hourly, set(), active, known)
        self._spent = self._spent or left <= 0 or not known <= kept
        if not self._spent:
            no_room = f"the budget of ${budget:,.2f}, of which ${left:,.2f} are left, leaves no room for"
            for peer in active - kept:
                self._why[peer] = f"{no_room} ${view.pool[peer].usd_per_hour:,.2f}/h"
            return kept, f"{no_room} {len(active - kept)} nodes" if kept != active else ""
        said = f"budget of ${budget:,.2f} is spent"
        self._say((p for p in view.pool if view.costs(p)), said)
        return {p for p in active if not view.costs(p)}, said

    def _try_some(self, now: float, view: View, active: set[str]) -> set[str]:
        """Begin trials beside those under way; who is tried from now on."""
        room = self.rules.max_usd_per_hour - view.idle() - view.extra(active | set(self.exploration.trials))
        unknown = (c for p, c in view.pool.items() if p not in active and self._may(now, p))
        slowest = min((view.pool[p].download for p in active), default=0.0)
        enough = max(view.supply(active) / (1 + self.rules.margin), view.aim(active))

        def harmless(c: Candidate) -> bool:  # a version has to reach it, too
            return c.download >= slowest or view.required(active | {c.peer}) <= enough * (1 + EXACT)

        begun = self.exploration.begin(now, unknown, len(active), room, harmless)
        for peer in begun:
            self._why[peer] = f"unknown: tried for up to ${self.exploration.trials[peer].usd:.3f}"
        return set(begun)

    # ---- what is said

    def _decision(self, now: float, view: View, active: frozenset[str], blocked: str, held_back: bool) -> Decision:
        changes = []
        for peer, c in view.pool.items():
            let_go = self._spent and c.own_price and view.costs(peer)
            state = ACTIVE if peer in active else ASLEEP if let_go else WARM
            if state != c.state:
                why = "cheapest" if state == ACTIVE else "warm: its versions cost less than a catch-up"
                if c.state == ACTIVE:
                    why = f"was tried: {c.rate.mean:,.0f} tokens/s for ${c.usd_per_hour:.2f}/h"
                changes.append(Change(peer, state, self._why.get(peer) or why))
        # In the candidates' order, not the set's: who is lost is told in this order, and Python's hashes differ by process.
        self._since = {p: self._since.get(p, now) for p in view.pool if p in active}
        supply = view.supply(p for p in active if view.pool[p].ready)
        aim = view.aim(active) if view.demand is not None else math.inf
        return Decision(
            active, changes=tuple(changes), required=view.required(active), supply=supply,
            usd_per_hour=view.idle() + view.extra(active), spread_s=view.spread(active),
            short_by=max(0.0, aim - supply) if aim < math.inf else 0.0, blocked=blocked,
        )  # fmt: skip
