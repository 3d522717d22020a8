"""The simulator for small fleets: netem.rollout_sim, sequence by sequence, with prices. Who is active is the Crew's; the
learner may
have engines of its own, which generate while it does not train.

Must not know policies (netem.planning.policies) beyond the port `RolloutPolicy`. """

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial

import numpy as np

from netem.planning.autoscaler import Autoscaler
from netem.planning.cost_scenario import CostScenario
from netem.planning.outcome import Result
from netem.planning.priced_fleet import EngineKind, engine_of, nodes_of
from netem.rollout_sim.engine import SimEngine
from netem.rollout_sim.sim import OpenedGroup, RolloutPolicy, RolloutSimulation, SimSettings

OWN = "own-"

HORIZON = 40.0
"""Steps' worth of training time, for each step, in which comings and goings are drawn."""

BUSY = 0.9
"""Of the sequences that a node runs at once in the mean when it never lacks work."""

TICKS = 200
"""Of a policy, in a step that never waits."""

TICKS_S = (1.0, 4.0)
"""Seconds between them, at the least and the most."""


class PricedSimulation(RolloutSimulation):
    """`own`: names of the learner's engines; they are up while `seeding`, and the learner does not train then."""

    def __init__(self, scenario: CostScenario, policy: RolloutPolicy, tell: Callable[[int], None] = lambda step: None) -> None:
        file = scenario.file
        settings = SimSettings(file.policy.staleness, file.steps, file.warm, file.seed, recompute=file.delta.recompute)
        super().__init__((), scenario.workload, policy, settings, file.model.served())
        self.scenario, self.tell = scenario, tell
        self.tick_s = min(TICKS_S[1], max(TICKS_S[0], (file.learner.train_s + file.learner.update_s) / TICKS))
        engines = [row.engine(self.model) for row in scenario.rows]
        held = held_of(scenario)
        horizon = HORIZON * file.steps * (file.learner.train_s + file.learner.update_s)
        self.nodes = nodes_of(scenario.rows, scenario.folder, horizon, file.seed)
        self.crew = Autoscaler(scenario, self.nodes, engines, [engine.full(held)[1] for engine in engines])
        self.at_once = [engine.full(held)[0] for engine in engines]
        self.horizon = horizon
        learner = file.learner
        self.own_kind = engine_of(learner.gpu, learner.per_engine, self.model, learner.memory_share) if learner.gpu else None
        self.own = [f"{OWN}{i}" for i in range(learner.gpus // learner.per_engine)] if learner.gpu else []
        self.seeding = False
        self.generated_s: list[float] = []
        """a step"""
        self.kept_back = False
        """the ledger refused since the last decision"""
        self._surplus = False
        self.published = 0
        self._since: dict[int, float] = {}
        self._totals: dict[int, float] = defaultdict(float)
        self._spreads: list[float] = []
        self._mark: tuple | None = None

    def result(self) -> Result:
        file, crew, warm = self.scenario.file, self.crew, self.scenario.file.warm
        for i, node in enumerate(self.nodes):
            for start, end in node.there:
                if start < self.horizon:
                    self.after(start, partial(self._come, i))
                    if end < self.horizon:
                        self.after(end, partial(self._go, i))
        self.after(0.0, self._decide)
        outcome = self.run()
        assert self._mark is not None
        before, there, made = self._mark
        t0, w0, _ = self._marks[warm - 1]
        took, steps = self.now - t0, self.step - warm
        ages = Counter(age for step in self._ages[warm:] for age in step)
        kinds, after = crew.paid(self.now, before), crew.mark(self.now)
        for row, a, b in zip(self.scenario.rows, there, crew.there_hours(self.now), strict=True):
            kinds[row.kind].there_hours = b - a
        for i, node in enumerate(self.nodes):
            kinds[self.scenario.rows[node.row].kind].tokens += self._made(i) - made[i]
        usd_learner = file.learner.usd_per_hour * took / 3600
        decision, at = crew.decision, [t for t, _, _ in self._marks]
        usd_egress = max(0.0, after["learner"][1] - before["learner"][1] - usd_learner)
        return Result(
            "sequences", file.policy.name, steps, took, (self._marks[-1][1] - w0) / took, outcome.learner_bound,
            float(sum(self._tokens[warm:])), self.workload.groups * steps, usd_learner, sum(p.usd for p in kinds.values()),
            usd_egress, {a: n / sum(ages.values()) for a, n in ages.items()},
            crew.kappa, float(np.mean(self._spreads)) if self._spreads else 0.0, outcome.made, self.lost, kinds,
            decision.blocked if decision else "", decision.required if decision else 0.0,
            decision.supply if decision else 0.0, float(np.mean(self.generated_s[warm:])) if self.generated_s[warm:] else 0.0,
            [{"step": i + 1, "step_s": b - a} for i, (a, b) in enumerate(zip([0.0, *at], at, strict=False))],
        )  # fmt: skip

    # ---- for policies

    @property
    def training(self) -> bool:
        """The learner computes."""
        return self._busy

    def seed(self, on: bool) -> None:
        """The learner's own engines generate, or hand over what they have and the learner may train."""
        if on == self.seeding or not self.own_kind:
            return
        self.seeding = on
        for name in self.own:
            if on:
                self._add(name, self.own_kind, self.step)
            else:
                self._down(name, flushed=True)
        if not on:
            self.look()

    @property
    def remote(self) -> list[str]:
        return [name for name in self.engines if not name.startswith(OWN)]

    # ---- hooks

    def look(self) -> None:
        if not self.seeding or self._busy:
            super().look()

    def open(self, version: int) -> OpenedGroup:
        prompt = super().open(version)
        self._since[prompt.group_id] = self.now
        return prompt

    def abort(self, prompt: OpenedGroup) -> None:
        self._since.pop(prompt.group_id, None)
        super().abort(prompt)

    def ended(self, prompt: OpenedGroup) -> None:
        """A policy's `finished` calls it."""
        self.crew.generated(self.now - self._since.pop(prompt.group_id))

    def _publish(self, version: int) -> None:
        self.crew.trained(self._tokens[-1])
        self.tell(self.step)
        if self.step == self.settings.warm:
            made = [self._made(i) for i in range(len(self.nodes))]
            self._mark = self.crew.mark(self.now), self.crew.there_hours(self.now), made
        every = self.crew.choose_kappa() if self.scenario.file.policy.name in ("shoal", "echo2") else 1
        for name in self.own:
            if name in self.engines:
                self.serves[name] = version
        if version - self.published < every:
            return
        self.published = version
        self.crew.published()
        common = self.crew.spread.common(self.crew.active_by_row)
        self._spreads.append(self.crew.spread_now())
        if not self.scenario.rows or not self.crew.active_by_row.total():
            self.version = version
            self.policy.served(version)
        for row in range(len(self.scenario.rows)):
            self.after(self.crew.spread.of(row, common), partial(self._serve_row, row, version))

    def _serve_row(self, row: int, version: int) -> None:
        self.version = max(self.version, version)
        for name in self.remote:
            if self.nodes[self.crew.index[name]].row == row and self.serves[name] < version:
                engine = self.touch(name)
                self.serves[name] = version
                if self.settings.recompute and self.policy.updates_in_flight:
                    engine.debt += engine.prefill_s * engine.context
                self._arm(engine)
        self.policy.served(version)

    def _down(self, name: str, flushed: bool = False) -> None:
        if name in self.engines and not name.startswith(OWN):
            self._totals[self.crew.index[name]] += self.touch(name).total
        super()._down(name, flushed)

    # ---- comings, goings, decisions

    def _come(self, i: int) -> None:
        self.crew.came(i, self.now)
        if self.now > 0:
            self._decide(again=False)

    def _go(self, i: int) -> None:
        name = self.nodes[i].name
        if name in self.engines:
            self._down(name)
        was = self.crew.state[i]
        self.crew.left(i, self.now)
        if was == "active":
            self._decide(again=False)

    def _decide(self, again: bool = True) -> None:
        surplus, self.kept_back = self.kept_back, False
        self._surplus = surplus
        for i, active in self.crew.decide(self.now, self._made, self._full, surplus=surplus):
            if active:
                self.after(max(0.0, self.crew.ready_at[i] - self.now), partial(self._ready, i))
            elif self.nodes[i].name in self.engines:
                self._down(self.nodes[i].name, flushed=True)
        if again:
            self.after(self.scenario.file.activation.every_s, self._decide)

    def _ready(self, i: int) -> None:
        node = self.nodes[i]
        if i in self.crew.here and self.crew.state[i] == "active" and self.crew.ready_at[i] <= self.now + 1e-6:
            if node.name not in self.engines:
                self._add(node.name, self.crew.engines[node.row], self.version)

    def _add(self, name: str, kind: EngineKind, version: int) -> None:
        self.engines[name] = SimEngine(name, kind.model, kind.prefill_s, kind.room, kind.limit, at=self.now)
        self.serves[name] = version

    def _made(self, i: int) -> float:
        name = self.nodes[i].name
        return self._totals[i] + (self.touch(name).total if name in self.engines else 0.0)

    def _full(self, i: int) -> bool:
        """It runs as many sequences as its memory takes in the mean, or the learner waits: it has all the work that there is."""
        engine = self.engines.get(self.nodes[i].name)
        if engine is None:
            return False
        waits = not self._busy and not self.seeding and not self._surplus
        return waits or bool(engine.waiting) or len(engine.running) >= BUSY * self.at_once[self.nodes[i].row]


def held_of(scenario: CostScenario) -> float:
    """Tokens of context of a running sequence, in the mean over its life and weighted with how long that is."""
    w = scenario.workload
    lengths = np.array([n for i in range(400) for n in w.group(i, scenario.file.seed)[1]], float)
    return w.prompt + float((lengths**2).sum() / lengths.sum()) / 2


__all__: Many[str] = ["OWN", "PricedSimulation", "held_of"]
