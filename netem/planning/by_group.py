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
from functools import partial

from netem.planning.cost_scenario import CostScenario
from netem.planning.group_nodes import MAX_SIMULATED_S, GroupNodes
from netem.planning.outcome import Result
from netem.planning.simulated_fleet import Tell
from p2p.errors import ShoalError


class GroupSimulation(GroupNodes):
    """The learner's side, and the run. `tell` is called with the number of steps done."""

    def __init__(self, scenario: CostScenario, tell: Tell = lambda step: None) -> None:
        super().__init__(scenario, tell)
        self.version = 0
        self._trained_until, self._current = 0.0, 0
        self._made_before = 0.0
        """tokens of groups that ended in the warm-up"""

    # ---- running

    def run(self) -> Result:
        """Run to the end. ShoalError when nothing more happens before it."""
        self.fleet.start()
        self.at(0.0, self.migrate)
        while self.step < self.scenario.file.steps:
            if not self.events or self.now > MAX_SIMULATED_S:
                raise ShoalError(f"{self.step} steps in {self.now:.0f} simulated seconds, then nothing more: {self._why()}")
            self.next()
        made = self.finished_tokens + self.lost - self._made_before
        return self.fleet.result(detail="groups", made_a_token=made / self.fleet.trained, lost=self.lost)

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
        self.step += 1
        self.fleet.stepped(ages, sum(self.tokens.pop(g) for g in taken))
        if self.step == self.scenario.file.warm:
            self._made_before = self.finished_tokens
            self.fleet.begin([node.made for node in self.nodes])
        self._trained_until = self.now
        self._current = 0
        self.look()
        if self.step - self.version >= self.autoscaler.choose_kappa():
            self.version = self.step
            for row, spread_s in enumerate(self.fleet.publish()):
                held = 0.0 if self.scenario.file.policy.overlap else spread_s
                self.after(spread_s, partial(self._install, row, self.step, held))
        self.feed()

    def _install(self, row: int, version: int, held_s: float) -> None:
        if version <= self.serves[row]:
            return
        self.serves[row] = version
        delta = self.scenario.file.delta
        self.debts[row] += held_s + (self.kinds[row].recompute_s if delta.recompute else 0.0)
        self.feed()

    def full(self, i: int) -> bool:
        node = self.nodes[i]
        waits = self.waits_for() and self._trained_until <= self.now and not self.fleet.was_held_back
        return node.on and (waits or len(node.groups) == self.kinds[node.row].slots)

    # ---- what came of it

    def _why(self) -> str:
        decision = self.autoscaler.decision
        on = sum(node.on for node in self.nodes)
        return (decision.blocked if decision is not None and decision.blocked else "") or f"{on} nodes generate"
