"""The fleet of a simulated run: nodes come and go, the autoscaler decides who generates, an account is kept. Pure.

Both simulators run on one. Must not know groups or sequences: what a node does is the simulator's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from netem.planning.autoscaler import LEARNER, Autoscaler
from netem.planning.cost_scenario import CostScenario
from netem.planning.outcome import Paid, Result
from netem.planning.priced_fleet import nodes_of

Tell = Callable[[int], None]
"""Hears how many learner steps are done."""


class FleetSimulator(Protocol):
    """What the fleet asks of the simulator that it belongs to. Nodes are places in the fleet's list."""

    now: float
    step: int

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None:
        """Do something at a simulated time, now if that has passed."""

    def after(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        """Do something so many simulated seconds from now."""

    def begin(self, i: int) -> None:
        """The node is active and has caught up: it generates from now on, if it does not yet."""

    def end(self, i: int) -> None:
        """The node is not active any more: it hands over what it has."""

    def lose(self, i: int) -> bool:
        """The node is gone with what it has. Returns whether that is a loss which calls for a decision."""

    def made(self, i: int) -> float:
        """Tokens that the node has made so far."""

    def full(self, i: int) -> bool:
        """Whether the node has all the work that it can take, or all that there is."""


class SimulatedFleet:
    """`full`: tokens per second of a full node, by row. `horizon_s`: comings and goings are drawn up to this time. `lost_share`:
    when this share of the active nodes is lost (one node at least), the next decision is made at once. `on_arrival`: so it is
    when a node comes; it always is where every node is to be active."""

    def __init__(
        self,
        simulator: FleetSimulator,
        scenario: CostScenario,
        full: Sequence[float],
        *,
        horizon_s: float,
        lost_share: float,
        on_arrival: bool,
        tell: Tell,
    ) -> None:
        self._simulator, self._scenario, self._horizon_s, self._tell = simulator, scenario, horizon_s, tell
        self._lost_share, self._on_arrival = lost_share, on_arrival or scenario.file.activation.all
        self.nodes = nodes_of(scenario.rows, scenario.folder, horizon_s, scenario.file.seed)
        self.autoscaler = Autoscaler(scenario, self.nodes, full)
        self._ended: list[float] = []
        """when each step ended, in simulated seconds"""
        self._ages: list[Counter[int]] = []
        """of each step: steps since what it trained on was begun -> how many"""
        self._tokens: list[float] = []
        """trained on in each step"""
        self._spreads: list[float] = []
        """seconds that each version took to the last active node"""
        self.held_back = False
        """work was held back since the last decision, because the ledger refused more"""
        self.was_held_back = False
        """it was held back before that decision"""
        self._lost = 0
        """active nodes that were lost since the last decision"""

    def start(self) -> None:
        """The run begins."""
        sim = self._simulator
        for i, node in enumerate(self.nodes):
            for start, end in node.there:
                if start < self._horizon_s:
                    sim.at(start, self._come, i)
                    if end < self._horizon_s:
                        sim.at(end, self._go, i)
        sim.at(0.0, self._decide_regularly)

    def made(self) -> list[float]:
        """Tokens that each node has made so far."""
        return [self._simulator.made(i) for i in range(len(self.nodes))]

    def stepped(self, ages: Counter[int], tokens: float) -> None:
        """The learner's step ended (`simulator.step` counts it), which trained on `tokens` tokens of these ages."""
        sim = self._simulator
        self._ended.append(sim.now)
        self._ages.append(ages)
        self._tokens.append(tokens)
        self.autoscaler.trained(tokens)
        self._tell(sim.step)

    def publish(self) -> list[float]:
        """The learner publishes a version now: seconds until the nodes of each row serve it."""
        scaler = self.autoscaler
        scaler.published()
        common = scaler.dissemination.common(scaler.active_by_row)
        self._spreads.append(scaler.spread_now())
        return [scaler.dissemination.of(row, common) for row in range(len(self._scenario.rows))]

    # ---- the account: what the warm-up steps cost and made is left out

    def begin(self, made: Sequence[float]) -> None:
        """The warm-up is over; `made`: tokens that each node has made so far."""
        now = self._simulator.now
        self._paid, self._there, self._made = self.autoscaler.mark(now), self.autoscaler.there_hours(now), made

    @property
    def counted(self) -> int:
        """Steps that count and are done."""
        return max(0, len(self._ended) - self._scenario.file.warm)

    @property
    def trained(self) -> float:
        """Tokens trained on in the steps that count."""
        return sum(self._tokens[self._scenario.file.warm :])

    def result(
        self, *, detail: Literal["sequences", "groups"], made_a_token: float, lost: float, busy: float | None = None,
        local_engine_s: float = 0.0,
    ) -> Result:  # fmt: skip
        """The account of the steps that count and are done, all as `Result` has it. `busy`: unless given, the learner worked for
        its own time in each step. Where the run was stopped within a step, what was spent since counting began is taken in
        proportion to the time of the steps that are done."""
        file, autoscaler, now = self._scenario.file, self.autoscaler, self._simulator.now
        steps, took = len(self._ended) - file.warm, self._ended[-1] - self._ended[file.warm - 1]
        done = took / (now - self._ended[file.warm - 1])
        bound = (file.learner.train_s + file.learner.update_s) * steps / took
        ages: Counter[int] = sum(self._ages[file.warm :], Counter())
        kinds = self._kinds(now)
        usd_learner = file.learner.usd_per_hour * took / 3600
        for paid in kinds.values():
            paid.scale(done)
        charged = done * (autoscaler.mark(now)[LEARNER].usd - self._paid[LEARNER].usd)
        decision = autoscaler.decision  # there is none where every node is always active
        last: dict[str, Any] = {} if decision is None else {
            "blocked": decision.blocked, "required": decision.required, "supply": decision.supply
        }  # fmt: skip
        return Result(
            detail=detail, policy=file.policy.name, steps=steps, seconds=took,
            busy=bound if busy is None else busy, bound=bound, tokens=float(self.trained),
            usd_learner=usd_learner, usd_nodes=sum(paid.usd for paid in kinds.values()),
            usd_egress=max(0.0, charged - usd_learner),
            staleness={age: n / sum(ages.values()) for age, n in ages.items()}, kappa=autoscaler.kappa,
            spread_s=float(np.mean(self._spreads)) if self._spreads else 0.0, made=made_a_token, lost=lost, kinds=kinds,
            **last, local_engine_s=local_engine_s,
            series=[
                {"step": i + 1, "step_s": b - a} for i, (a, b) in enumerate(pairwise([0.0, *self._ended]))
            ],
        )  # fmt: skip

    def _kinds(self, now: float) -> dict[str, Paid]:
        rows, kinds = self._scenario.rows, self.autoscaler.paid(now, self._paid)
        for row, before, hours in zip(rows, self._there, self.autoscaler.there_hours(now), strict=True):
            kinds[row.kind].there_hours = hours - before
        for node, before, total in zip(self.autoscaler.nodes, self._made, self.made(), strict=True):
            kinds[rows[node.row].kind].tokens += total - before
        return kinds

    # ---- comings, goings, decisions

    def _come(self, i: int) -> None:
        now = self._simulator.now
        self.autoscaler.came(i, now)
        if now > 0 and self._on_arrival:
            self._decide()

    def _go(self, i: int) -> None:
        self._lost += self._simulator.lose(i)
        self.autoscaler.left(i, self._simulator.now)
        if self._lost >= max(1.0, self._lost_share * self.autoscaler.active_by_row.total()):
            self._decide()

    def _decide_regularly(self) -> None:
        self._decide()
        if not self._scenario.file.activation.all:
            self._simulator.after(self._scenario.file.activation.every_s, self._decide_regularly)

    def _decide(self) -> None:
        sim, scaler = self._simulator, self.autoscaler
        self.was_held_back, self.held_back, self._lost = self.held_back, False, 0
        for i, active in scaler.decide(sim.now, sim.made, sim.full, held_back=self.was_held_back):
            if active:
                sim.at(scaler.ready_at[i], self._ready, i)
            else:
                sim.end(i)

    def _ready(self, i: int) -> None:
        if self.autoscaler.generates(i, self._simulator.now):
            self._simulator.begin(i)
