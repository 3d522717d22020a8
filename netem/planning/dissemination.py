"""How long a version takes to reach nodes of a kind. Pure: the fluid bound (netem.networks.bound), per kind.

No node waits for another one's slow downlink: what is common is the learner's uplink and everybody's together, what is its own
is the downlink. """

from __future__ import annotations

from collections.abc import Mapping, Sequence

from netem.planning.cost_scenario import CostScenario
from netem.planning.priced_fleet import NodeKind


class Dissemination:
    """Of a scenario's versions to its rows."""

    def __init__(self, scenario: CostScenario) -> None:
        delta = scenario.file.delta
        self.rows: Sequence[NodeKind] = scenario.rows
        self.bits = 8.0 * scenario.delta_bytes
        self.relayed = delta.relayed
        self.source = 1e6 * scenario.file.learner.up_mbit
        self.overhead, self.fixed = delta.overhead, delta.latency_s + delta.install_s

    def common(self, active: Mapping[int, int]) -> float:
        """Seconds by the uplinks; `active`: row -> nodes."""
        nodes = sum(active.values())
        if not nodes:
            return 0.0
        if not self.relayed:
            return nodes * self.bits / self.source
        up = self.source + sum(1e6 * self.rows[i].up_mbit * n for i, n in active.items())
        return max(self.bits / self.source, nodes * self.bits / up)

    def of(self, row: int, common: float) -> float:
        """Seconds from publication until a node of the row serves it."""
        return max(common, self.bits / (1e6 * self.rows[row].down_mbit)) * self.overhead + self.fixed

    def last(self, active: Mapping[int, int]) -> float:
        """Until the last of them serves it: T_bcast(A). 0 of none."""
        common = self.common(active)
        return max((self.of(i, common) for i, n in active.items() if n), default=0.0)

    def catch_up(self, row: int, whole_bytes: float) -> float:
        """Of a node that has nothing, to a whole model."""
        return 8.0 * whole_bytes / (1e6 * self.rows[row].down_mbit) * self.overhead + self.fixed
