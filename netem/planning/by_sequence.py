"""The simulator for small fleets: netem.rollout_sim, sequence by sequence, with prices. The autoscaler says which nodes are
active. The learner may have local engines, which generate while it does not train.

Must not know policies (netem.planning.policies) beyond the port `RolloutPolicy`.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from netem.planning.cost_scenario import CostScenario
from netem.planning.outcome import Result
from netem.planning.priced_fleet import engine_of
from netem.planning.simulated_fleet import SimulatedFleet, Tell
from netem.rollout_sim.sim import OpenedGroup, RolloutPolicy, RolloutSimulation, SimSettings

LOCAL = "local-"
"""Prefix of the local engines' names, which tells them from nodes."""

HORIZON = 40.0
"""Comings and goings are drawn for a run in which every step takes this many times the learner's own time."""

BUSY_SHARE = 0.9
"""A node counts as busy from this share of the sequences that it runs at once when it never lacks work."""

TICKS = 200
"""Times that a policy is asked in a step that never waits, within the bounds of TICK_RANGE_S."""

TICK_RANGE_S = (1.0, 4.0)
"""Fewest and most seconds between two such times: more often costs only computing time, more rarely leaves engines idle."""


class PricedSimulation(RolloutSimulation):
    """`local_engines` are up while `local_turn`, and the learner does not train then."""

    def __init__(self, scenario: CostScenario, policy: RolloutPolicy, tell: Tell = lambda step: None) -> None:
        file = scenario.file
        settings = SimSettings(file.policy.staleness, file.steps, file.warm, file.seed, recompute=file.delta.recompute)
        super().__init__((), scenario.workload, policy, settings, file.model)
        self.scenario = scenario
        self.tick_s = min(TICK_RANGE_S[1], max(TICK_RANGE_S[0], (file.learner.train_s + file.learner.update_s) / TICKS))
        self.kinds = [row.engine(self.model) for row in scenario.rows]
        held = held_of(scenario)
        self.full_engines = [engine.full(held) for engine in self.kinds]
        self.fleet = SimulatedFleet(
            self, scenario, [full.tokens_per_s for full in self.full_engines],
            horizon_s=HORIZON * file.steps * (file.learner.train_s + file.learner.update_s), lost_share=0.0, on_arrival=True,
            tell=tell,
        )  # fmt: skip
        self.nodes, self.autoscaler = self.fleet.nodes, self.fleet.autoscaler
        learner = file.learner
        self.local_kind = engine_of(learner.gpu, learner.per_engine, self.model, learner.memory_share) if learner.gpu else None
        self.local_engines = [f"{LOCAL}{i}" for i in range(learner.gpus // learner.per_engine)] if learner.gpu else []
        self.local_turn = False
        self.generated_s: list[float] = []
        """seconds of the local engines' turns, a step"""
        self.published = 0
        self._totals: dict[int, float] = defaultdict(float)

    def result(self) -> Result:
        """Run to the end."""
        self.fleet.start()
        self.run()
        return self.account()

    def account(self) -> Result:
        """The steps that count and are done; at least one is."""
        outcome = self._outcome()
        turns = self.generated_s[self.settings.warm :]
        return self.fleet.result(
            detail="sequences", busy=1 - outcome.idle, made_a_token=outcome.made, lost=self.lost,
            local_engine_s=float(np.mean(turns)) if turns else 0.0,
        )  # fmt: skip

    # ---- for policies

    def take_turn(self, on: bool) -> None:
        """The local engines generate from now on, or hand over what they have and the learner may train."""
        if on == self.local_turn or not self.local_kind:
            return
        self.local_turn = on
        for name in self.local_engines:
            if on:
                self.add(name, self.local_kind, self.step)
            else:
                self._down(name, flushed=True)
        if not on:
            self.look()

    @property
    def remote(self) -> list[str]:
        return [name for name in self.engines if not name.startswith(LOCAL)]

    # ---- hooks

    def look(self) -> None:
        if not self.local_turn or self.busy:
            super().look()

    def _finished(self, prompt: OpenedGroup) -> None:
        super()._finished(prompt)
        self.autoscaler.generated(self.now - prompt.since)

    def _publish(self, version: int) -> None:
        self.fleet.stepped(Counter(self._ages[-1]), self._tokens[-1])
        if self.step == self.settings.warm:
            self.fleet.begin(self.fleet.made())
        every = self.autoscaler.choose_kappa() if self.scenario.file.policy.name in ("shoal", "echo2") else 1
        for name in self.local_engines:
            if name in self.engines:
                self.serves[name] = version
        if version - self.published < every:
            return
        self.published = version
        spreads = self.fleet.publish()
        if not self.scenario.rows or not self.autoscaler.active_by_row.total():
            self.version = version
        for row, spread_s in enumerate(spreads):
            self.after(spread_s, self._serve_row, row, version)

    def _serve_row(self, row: int, version: int) -> None:
        self.version = max(self.version, version)
        for name in self.remote:
            if self.nodes[self.autoscaler.index[name]].row == row and self.serves[name] < version:
                self._install(name, version)

    # ---- for the fleet

    def begin(self, i: int) -> None:
        node = self.nodes[i]
        if node.name not in self.engines:
            self.add(node.name, self.kinds[node.row], self.version)

    def end(self, i: int) -> None:
        self._stop(i, flushed=True)

    def lose(self, i: int) -> bool:
        self._stop(i, flushed=False)
        return self.autoscaler.state[i] == "active"

    def _stop(self, i: int, *, flushed: bool) -> None:
        """`flushed`: it hands over its last tokens, so none is lost."""
        if self.nodes[i].name in self.engines:
            self._totals[i] += self._down(self.nodes[i].name, flushed=flushed)

    def made(self, i: int) -> float:
        name = self.nodes[i].name
        return self._totals[i] + (self.touch(name).total if name in self.engines else 0.0)

    def full(self, i: int) -> bool:
        """Whether a node has all the work that it can take, or all that there is since the learner waits."""
        engine = self.engines.get(self.nodes[i].name)
        if engine is None:
            return False
        waits = not self.busy and not self.local_turn and not self.fleet.was_held_back
        return waits or bool(engine.waiting) or len(engine.running) >= BUSY_SHARE * self.full_engines[self.nodes[i].row].sequences


def held_of(scenario: CostScenario) -> float:
    """Tokens of context that a running sequence holds, in the mean over all sequences and their lives."""
    w = scenario.workload
    lengths = np.array([n for i in range(400) for n in w.group(i, scenario.file.seed).lengths], float)
    return w.prompt + float((lengths**2).sum() / lengths.sum()) / 2
