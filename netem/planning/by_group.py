"""The simulator for large fleets: group by group. A node is a server of whole groups by its kind's throughput model; who may
begin what is production's Ledger, who is active production's Activation.

A full node runs so many groups at once that as many sequences run as its memory takes, in the mean over a group's life; a group
takes its longest member's tokens at the pace that a sequence then has. So a full node makes the tokens per second that its
throughput model says, and groups end out of order with the long tail that the lengths have. What it lacks beside the
sequence-level simulator (netem.rollout_sim): members of a group on several nodes (so a group moves whole to where it is faster),
and the learner's own engines. A lost node's groups go on elsewhere with what they have (`policy.migration`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from netem.planning.cost_scenario import CostScenario
from netem.planning.group_nodes import LONGEST_S, GroupNodes
from netem.planning.outcome import Result
from p2p.errors import ShoalError

AT_ONCE = 0.01
"""Of the active nodes: when so many are lost, who replaces them is decided at once, and not at the next regular look."""


class GroupSimulation(GroupNodes):
    def __init__(self, scenario: CostScenario, tell: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(scenario)
        self.tell = tell
        self.version = 0
        self._trained_until, self._current = 0.0, 0
        self._surplus = False
        self._gone = 0
        """active nodes that were lost since the last decision"""
        self._marks: list[tuple[float, float, float]] = []
        self._ages: list[Counter[int]] = []
        self._stepped: list[float] = []
        self._spreads: list[float] = []
        self._mark: tuple[dict, list[float], float, list[float]] | None = None
        for i, node in enumerate(self.places):
            for start, end in node.there:
                if start < self.horizon:
                    self.at(start, lambda i=i: self._come(i))  # type: ignore[misc]
                    if end < self.horizon:
                        self.at(end, lambda i=i: self._go(i))  # type: ignore[misc]

    # ---- running

    def run(self) -> Result:
        file = self.scenario.file
        self.at(0.0, self._decide)
        self.at(0.0, self.balance)
        while self.step < file.steps:
            if not self.events or self.now > LONGEST_S:
                raise ShoalError(f"{self.step} steps in {self.now:.0f} simulated seconds, then nothing more: {self._why()}")
            self.next()
        return self._result()

    # ---- nodes

    def _come(self, i: int) -> None:
        self.crew.came(i, self.now)
        if self.now > 0 and self.scenario.file.activation.all:
            self._decide(again=False)

    def _go(self, i: int) -> None:
        was_on = self.nodes[i].on
        self.off(i, flushed=False)
        self.crew.left(i, self.now)
        self._gone += was_on
        if self._gone >= max(1.0, AT_ONCE * self.crew.active_by_row.total()):
            self._decide(again=False)

    # ---- the learner

    def arrived(self) -> None:
        """It is trained on at once, after those before it."""
        self._current += 1
        self._trained_until = max(self._trained_until, self.now) + self.w.train_s / self.w.groups
        if self._current == self.w.groups:
            self.at(self._trained_until + self.w.update_s, self._updated)

    def waits_for(self) -> bool:
        return self._current < self.w.groups

    def look(self) -> None:
        for _ in range(len(self.ledger.occupied(self.step)) - self._current):
            self.arrived()

    def _updated(self) -> None:
        taken = self.ledger.occupied(self.step)
        versions = dict(self.ledger._buffers[self.step])
        ages = Counter(self.step - versions[g] for g in taken)
        self.ledger.consume(self.step)
        tokens = sum(self.tokens.pop(g) for g in taken)
        self.crew.trained(tokens)
        self._ages.append(ages)
        self._stepped.append(tokens)
        self.step += 1
        self._marks.append((self.now, self.finished_tokens, self.lost))
        self.tell(self.step)
        if self.step == self.scenario.file.warm:
            self._mark = self.crew.mark(self.now), self.crew.there_hours(self.now), self.now, [n.made for n in self.nodes]
        self._trained_until = self.now
        self._current = 0
        self.look()
        if self.step - self.version >= self.crew.choose_kappa():
            self._publish()
        self.feed()

    def _publish(self) -> None:
        self.version = version = self.step
        self.crew.published()
        common = self.crew.spread.common(self.crew.active_by_row)
        self._spreads.append(self.crew.spread_now())
        for row in range(len(self.serves)):
            spread = self.crew.spread.of(row, common)
            held = 0.0 if self.scenario.file.policy.overlap else spread
            self.at(self.now + spread, lambda row=row, held=held: self._install(row, version, held))  # type: ignore[misc]

    def _install(self, row: int, version: int, held_s: float) -> None:
        if version <= self.serves[row]:
            return
        self.serves[row] = version
        delta = self.scenario.file.delta
        self.debts[row] += held_s + (self.kinds[row].recompute_s if delta.recompute else 0.0)
        self.feed()

    # ---- who is active

    def _decide(self, again: bool = True) -> None:
        def made(i: int) -> float:
            self.advance(self.nodes[i])
            return self.nodes[i].made

        surplus, self.refused, self._gone = self.refused, False, 0
        self._surplus = surplus
        for i, active in self.crew.decide(self.now, made, self._busy, surplus=surplus):
            if active:
                self.at(max(self.now, self.crew.ready_at[i]), lambda i=i: self._ready(i))  # type: ignore[misc]
            else:
                self.off(i, flushed=True)
        if again and (not self.scenario.file.activation.all):
            self.at(self.now + self.scenario.file.activation.every_s, self._decide)

    def _ready(self, i: int) -> None:
        there = i in self.crew.here and self.crew.state[i] == "active" and self.crew.ready_at[i] <= self.now + 1e-6
        if there and not self.nodes[i].on:
            self.on(i)

    def _busy(self, i: int) -> bool:
        node = self.nodes[i]
        waits = self.waits_for() and self._trained_until <= self.now and not self._surplus
        return node.on and (waits or len(node.groups) == self.kinds[node.row].slots)

    # ---- what came of it

    def _why(self) -> str:
        decision = self.crew.decision
        on = sum(node.on for node in self.nodes)
        return (decision.blocked if decision is not None and decision.blocked else "") or f"{on} nodes generate"

    def _result(self) -> Result:
        file, crew, warm = self.scenario.file, self.crew, self.scenario.file.warm
        assert self._mark is not None
        before, there, t0, made = self._mark
        took = self.now - t0
        _, m0, _ = self._marks[warm - 1]
        steps = self.step - warm
        ages: Counter[int] = sum(self._ages[warm:], Counter())
        kinds = crew.paid(self.now, before)
        for row, (a, b) in zip(self.scenario.rows, zip(there, crew.there_hours(self.now), strict=True), strict=True):
            kinds[row.kind].there_hours = b - a
        for i, node in enumerate(self.nodes):
            self.advance(node)
            kinds[self.scenario.rows[node.row].kind].tokens += node.made - made[i]
        usd_learner = file.learner.usd_per_hour * took / 3600
        trained, bound = sum(self._stepped[warm:]), self.w.train_s + self.w.update_s
        at = [t for t, _, _ in self._marks]
        decision = crew.decision
        after = crew.mark(self.now)
        return Result(
            "groups", file.policy.name, steps, took, bound * steps / took, bound * steps / took, trained, self.w.groups * steps,
            usd_learner, sum(p.usd for p in kinds.values()), max(0.0, after["learner"][1] - before["learner"][1] - usd_learner),
            {age: n / sum(ages.values()) for age, n in ages.items()}, crew.kappa,
            float(np.mean(self._spreads)) if self._spreads else 0.0, (self.finished_tokens + self.lost - m0) / trained, self.lost,
            kinds, decision.blocked if decision else "", decision.required if decision else 0.0,
            decision.supply if decision else 0.0, 0.0,
            [{"step": i + 1, "step_s": b - a} for i, (a, b) in enumerate(zip([0.0, *at], at, strict=False))],
        )  # fmt: skip
