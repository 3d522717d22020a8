"""Which nodes of a simulated fleet are there, which are active and why, and what that costs: production's Activation, NodeRates
and Bill.

Both simulators keep one. It is told which nodes come and go and what they made, and says which are to generate. Nodes are
numbers: places in the list that it was given. Must not know groups or sequences.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from learner.economy.activation import Activation
from learner.economy.bill import Bill, NodeBill
from learner.economy.candidates import ASLEEP, Candidate, Decision, Rules
from learner.economy.demand import Demand, choose_kappa
from learner.economy.rates import Estimate, NodeRates
from netem.planning.cost_scenario import CostScenario
from netem.planning.dissemination import Dissemination
from netem.planning.outcome import Paid
from netem.planning.priced_fleet import FleetNode
from p2p.protocol.prices import State

LEARNER = "learner"
"""Name of the learner's own account in the bill."""

KNOWN_SD = 0.1
"""Standard deviation of a kind's rate that is known from earlier runs, as a share of the rate."""

COPIES_SENT = 1.05
"""Copies of a version that the learner itself sends where nodes relay: about one where its uplink is scarce (see
docs/design/broadcast.md)."""

GENERATION_WEIGHT = 0.02
"""Weight of the latest group in the mean time that a group takes: some fifty groups count."""

TOKENS_WEIGHT = 0.2
"""Weight of the latest step in the mean number of tokens that a step takes: some five steps count."""


class Autoscaler:
    """The activation of a simulated fleet, fed by a simulator."""

    def __init__(self, scenario: CostScenario, nodes: Sequence[FleetNode], full: Sequence[float]) -> None:
        """`full`: tokens per second of a full node, by row of the fleet."""
        self.scenario, self.nodes, self.full = scenario, nodes, full
        a, file = scenario.file.activation, scenario.file
        self.rules = Rules(
            margin=a.margin, release=a.release, dwell_s=a.dwell_s, explore_share=a.explore_share,
            max_usd_per_hour=a.max_usd_per_hour or math.inf, budget_usd=a.budget_usd or math.inf, overlap=file.policy.overlap,
        )  # fmt: skip
        self.activation, self.rates, self.bill = Activation(self.rules), NodeRates(), Bill()
        self.dissemination = Dissemination(scenario)
        self.index = {node.name: i for i, node in enumerate(nodes)}
        self.here: dict[int, float] = {}
        """node -> since when it is there"""
        self.state: list[State] = [ASLEEP] * len(nodes)
        self.ready_at = [math.inf] * len(nodes)
        self.active_by_row: Counter[int] = Counter()
        self.changes: list[Counter[str]] = [Counter() for _ in scenario.rows]
        self.whole = 2 * file.model.parameters
        self.bytes_a_version = scenario.delta_bytes
        self.generation_s = 0.0
        self.tokens_a_step = scenario.workload.mean_length() * file.learner.groups * file.learner.samples
        self.decision: Decision | None = None
        self.kappa = file.policy.kappa or max(1, file.policy.staleness - 1)
        self._made: dict[int, float] = {}
        self._fresh: list[int] = []
        """nodes that came since the last decision"""
        self._looked = 0.0
        self._there: list[float] = [0.0] * len(scenario.rows)
        self.bill.state(LEARNER, 0.0, "active", file.learner.usd_per_hour, usd_per_gb=a.egress_usd_per_gb)

    # ---- what happens

    def came(self, i: int, now: float) -> None:
        """Node `i` is there from now on, asleep."""
        self.here[i] = now
        self._fresh.append(i)
        self._set(i, "asleep", now)

    def left(self, i: int, now: float) -> None:
        """Node `i` is gone."""
        self._there[self.nodes[i].row] += now - self.here.pop(i)
        if self.state[i] == "active":
            self.active_by_row[self.nodes[i].row] -= 1
        self.state[i] = "asleep"
        self.ready_at[i] = math.inf
        self._made.pop(i, None)
        self.bill.left(self.nodes[i].name, now)

    def generated(self, seconds: float) -> None:
        """A group was accepted, so long after it was reserved."""
        weight = GENERATION_WEIGHT if self.generation_s else 1.0
        self.generation_s += weight * (seconds - self.generation_s)

    def trained(self, tokens: float) -> None:
        """A step was taken on so many tokens."""
        self.tokens_a_step += TOKENS_WEIGHT * (tokens - self.tokens_a_step)

    def published(self) -> None:
        """The learner sent a version: its egress is charged."""
        copies = COPIES_SENT if self.dissemination.relayed else self.active_by_row.total()
        self.bill.egress(LEARNER, int(copies * self.bytes_a_version))

    # ---- what it says

    def generates(self, i: int, now: float) -> bool:
        """Whether node `i` is there, active, and has caught up."""
        return i in self.here and self.state[i] == "active" and self.ready_at[i] <= now + 1e-6

    @property
    def demand(self) -> Demand:
        learner, policy = self.scenario.file.learner, self.scenario.file.policy
        return Demand(self.tokens_a_step, learner.train_s + learner.update_s, policy.staleness, self.kappa, self.generation_s)

    def spread_of(self, peers: Collection[str]) -> float:
        return self.dissemination.last(Counter(self.nodes[self.index[p]].row for p in peers))

    def spread_now(self) -> float:
        """Seconds that a version takes to all active nodes."""
        return self.dissemination.last(self.active_by_row)

    def choose_kappa(self) -> int:
        """Steps between publications: as the scenario says, or else as the capacity model says now."""
        policy, demand = self.scenario.file.policy, self.demand
        if not policy.kappa:
            self.kappa = choose_kappa(
                policy.staleness, demand.train_s, self.spread_now(), self.generation_s, overlap=policy.overlap
            )
        return self.kappa

    def decide(
        self, now: float, made: Callable[[int], float], busy: Callable[[int], bool], *, held_back: bool = False
    ) -> list[tuple[int, bool]]:
        """(node, whether it is active from now on) of those that change. `made(i)`: tokens that node `i` has made so far;
        `busy(i)`: it has all the work that it can take; `held_back`: work is held back, since the learner could not use more."""
        activation = self.scenario.file.activation
        if activation.all:
            new, self._fresh = [i for i in self._fresh if i in self.here and self.state[i] != "active"], []
            for i in new:
                self._set(i, "active", now)
                self.changes[self.nodes[i].row]["active: everybody is"] += 1
            return [(i, True) for i in new]
        self._observe(now, made, busy)
        candidates = [self._candidate(i, now) for i in self.here]
        spent = self.bill.spent(now) - self._learner_usd(now)
        self.decision = decision = self.activation.decide(
            now, self.demand, candidates, self.spread_of, max(0.0, spent), held_back=held_back
        )
        out = []
        for i in self.here:
            name, was = self.nodes[i].name, self.state[i]
            to: State = "active" if name in decision.active else "warm"
            if to == was:
                continue
            self._set(i, to, now)
            if "active" in (to, was):
                out.append((i, to == "active"))
        for change in decision.changes:
            if change.peer in self.index:
                why = re.sub(r"[\d.,]*\d", "#", change.why)
                self.changes[self.nodes[self.index[change.peer]].row][f"{change.to}: {why}"] += 1
        return out

    def paid(self, now: float, since: dict[str, NodeBill]) -> dict[str, Paid]:
        """What each kind was paid and was active, less what `mark` said when counting began."""
        rows = self.scenario.rows
        out = {row.kind: Paid(nodes=row.count, changes=self.changes[i]) for i, row in enumerate(rows)}
        for name, charged in self.mark(now).items():
            if name in self.index:
                paid = out[rows[self.nodes[self.index[name]].row].kind]
                active_s, usd = (since[name].active_s, since[name].usd) if name in since else (0.0, 0.0)
                paid.active_hours += charged.active_s / 3600 - active_s / 3600
                paid.usd += charged.usd - usd
        return out

    def mark(self, now: float) -> dict[str, NodeBill]:
        """What every account stands at, the learner's among them; dollars include egress."""
        return {row.peer: row for row in self.bill.rows(now)}

    def there_hours(self, now: float) -> list[float]:
        """Node hours that each row of the fleet was there, active or not."""
        hours = list(self._there)
        for i, since in self.here.items():
            hours[self.nodes[i].row] += now - since
        return [h / 3600 for h in hours]

    # ---- inside

    def _set(self, i: int, state: State, now: float) -> None:
        """Unless asleep it receives versions from now on; a fleet that is there at the beginning has the first one."""
        place = self.nodes[i].row
        row = self.scenario.rows[place]
        if state == "asleep":
            self.ready_at[i] = math.inf
        elif math.isinf(self.ready_at[i]):
            self.ready_at[i] = now + (self.dissemination.catch_up(place, self.whole) if now > 0 else 0.0)
        if state == "active":
            self.active_by_row[place] += 1
            self._made.pop(i, None)
        elif self.state[i] == "active":
            self.active_by_row[place] -= 1
        self.state[i] = state
        self.bill.state(self.nodes[i].name, now, state, row.usd_per_hour, row.idle_usd_per_hour or 0.0)

    def _observe(self, now: float, made: Callable[[int], float], busy: Callable[[int], bool]) -> None:
        seconds, self._looked = now - self._looked, now
        for i in self.here:
            if self.state[i] != "active" or self.ready_at[i] > now:
                continue
            total = made(i)
            before = self._made.get(i)
            self._made[i] = total
            if before is not None and seconds > 0:
                node = self.nodes[i]
                self.rates.observe(node.name, now, seconds, total - before, busy(i), kind=self.scenario.rows[node.row].kind)

    def _candidate(self, i: int, now: float) -> Candidate:
        node = self.nodes[i]
        row = self.scenario.rows[node.row]
        estimate = self.rates.estimate(node.name, row.kind)
        if not estimate.known and self.scenario.file.activation.known:
            full = self.full[node.row]
            estimate = Estimate(full, KNOWN_SD * full, True)
        return Candidate(
            node.name, row.usd_per_hour, estimate, self.state[i], self.ready_at[i] <= now,
            idle_usd_per_hour=row.idle_usd_per_hour or 0.0, catch_up_s=self.dissemination.catch_up(node.row, self.whole),
            download=1e6 * row.down_mbit / 8,
        )  # fmt: skip

    def _learner_usd(self, now: float) -> float:
        return self.scenario.file.learner.usd_per_hour * now / 3600
