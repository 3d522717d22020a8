"""The simulator for large fleets: group by group. A node is a server of whole groups by its kind's throughput model; production's
Ledger says what may begin, production's Activation which nodes are active.

A full node runs so many groups at once that as many sequences run as its memory takes, in the mean over a group's life; a group
takes its longest member's tokens at the pace that a sequence then has. So a full node makes the tokens per second that its
throughput model says, and groups end out of order with the long tail that the lengths have. What it lacks beside the
sequence-level simulator (netem.rollout_sim): members of a group on several nodes (so a group moves whole to where it is faster),
and local engines. A lost node's groups go on elsewhere with what they have (`policy.migration`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from netem.planning.account import Account
from netem.planning.cost_scenario import CostScenario
from netem.planning.group_nodes import MAX_SIMULATED_S, GroupNodes
from netem.planning.outcome import Result
from p2p.errors import ShoalError

LOST_SHARE = 0.01
"""When this share of the active nodes is lost, their replacement is decided at once and not at the next regular decision. For one
node of ten thousand a decision is not worth its computing time."""


class GroupSimulation(GroupNodes):
    """The learner's side, and the run. `tell` is called with the number of steps done."""

    def __init__(self, scenario: CostScenario, tell: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(scenario)
        self.tell = tell
        self.version = 0
        self._trained_until, self._current = 0.0, 0
        self._held_back = False
        self._gone = 0
        """active nodes that were lost since the last decision"""
        self.account = Account(scenario, self.autoscaler)
        self._made_before = 0.0
        """tokens of groups that ended in the warm-up"""
        for i, node in enumerate(self.fleet_nodes):
            for start, end in node.there:
                if start < self.horizon:
                    self.at(start, partial(self._come, i))
                    if end < self.horizon:
                        self.at(end, partial(self._go, i))

    # ---- running

    def run(self) -> Result:
        """Run to the end. ShoalError when nothing more happens before it."""
        file = self.scenario.file
        self.at(0.0, self._decide)
        self.at(0.0, self.migrate)
        while self.step < file.steps:
            if not self.events or self.now > MAX_SIMULATED_S:
                raise ShoalError(f"{self.step} steps in {self.now:.0f} simulated seconds, then nothing more: {self._why()}")
            self.next()
        return self._result()

    # ---- nodes

    def _come(self, i: int) -> None:
        self.autoscaler.came(i, self.now)
        if self.now > 0 and self.scenario.file.activation.all:
            self._decide(again=False)

    def _go(self, i: int) -> None:
        was_on = self.nodes[i].on
        self.off(i, flushed=False)
        self.autoscaler.left(i, self.now)
        self._gone += was_on
        if self._gone >= max(1.0, LOST_SHARE * self.autoscaler.active_by_row.total()):
            self._decide(again=False)

    # ---- the learner

    def arrived(self) -> None:
        """A group of the current step is there. It is trained on after those before it, without a pause."""
        self._current += 1
        self._trained_until = max(self._trained_until, self.now) + self.workload.train_s / self.workload.groups
        if self._current == self.workload.groups:
            self.at(self._trained_until + self.workload.update_s, self._updated)

    def waits_for(self) -> bool:
        return self._current < self.workload.groups

    def look(self) -> None:
        for _ in range(len(self.ledger.occupied(self.step)) - self._current):
            self.arrived()

    def _updated(self) -> None:
        taken = self.ledger.occupied(self.step)
        versions = dict(self.ledger._buffers[self.step])
        ages = Counter(self.step - versions[g] for g in taken)
        self.ledger.consume(self.step)
        tokens = sum(self.tokens.pop(g) for g in taken)
        self.autoscaler.trained(tokens)
        self.step += 1
        self.account.stepped(self.now, ages, tokens)
        self.tell(self.step)
        if self.step == self.scenario.file.warm:
            self._made_before = self.finished_tokens
            self.account.begin(self.now, [node.made for node in self.nodes])
        self._trained_until = self.now
        self._current = 0
        self.look()
        if self.step - self.version >= self.autoscaler.choose_kappa():
            self._publish()
        self.feed()

    def _publish(self) -> None:
        self.version = version = self.step
        self.autoscaler.published()
        common = self.autoscaler.dissemination.common(self.autoscaler.active_by_row)
        self.account.spreads.append(self.autoscaler.spread_now())
        for row in range(len(self.serves)):
            spread = self.autoscaler.dissemination.of(row, common)
            held = 0.0 if self.scenario.file.policy.overlap else spread
            self.at(self.now + spread, partial(self._install, row, version, held))

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

        self._held_back, self.refused, self._gone = self.refused, False, 0
        for i, active in self.autoscaler.decide(self.now, made, self._busy, held_back=self._held_back):
            if active:
                self.at(max(self.now, self.autoscaler.ready_at[i]), partial(self._ready, i))
            else:
                self.off(i, flushed=True)
        if again and (not self.scenario.file.activation.all):
            self.at(self.now + self.scenario.file.activation.every_s, self._decide)

    def _ready(self, i: int) -> None:
        if self.autoscaler.generates(i, self.now) and not self.nodes[i].on:
            self.on(i)

    def _busy(self, i: int) -> bool:
        node = self.nodes[i]
        waits = self.waits_for() and self._trained_until <= self.now and not self._held_back
        return node.on and (waits or len(node.groups) == self.kinds[node.row].slots)

    # ---- what came of it

    def _why(self) -> str:
        decision = self.autoscaler.decision
        on = sum(node.on for node in self.nodes)
        return (decision.blocked if decision is not None and decision.blocked else "") or f"{on} nodes generate"

    def _result(self) -> Result:
        for node in self.nodes:
            self.advance(node)
        steps = self.step - self.scenario.file.warm
        took = self.now - self.account.ended[self.scenario.file.warm - 1]
        return self.account.result(
            self.now, [node.made for node in self.nodes], detail="groups",
            busy=(self.workload.train_s + self.workload.update_s) * steps / took,
            made_a_token=(self.finished_tokens + self.lost - self._made_before) / self.account.trained, lost=self.lost,
        )  # fmt: skip
