"""How long a version takes to reach nodes of a kind. Pure: the fluid bound (netem.networks.bound), per kind.

Nodes share the learner's uplink and, where they relay, all uplinks together; each has its own downlink. So no node waits for
another's slow downlink.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from netem.planning.cost_scenario import CostScenario
from netem.planning.priced_fleet import NodeKind


class Dissemination:
    """Of a scenario's versions to the rows of its fleet."""

    def __init__(self, scenario: CostScenario) -> None:
        delta = scenario.file.delta
        self.rows: Sequence[NodeKind] = scenario.rows
        self.bits = 8.0 * scenario.delta_bytes
        self.relayed = delta.relayed
        self.source = 1e6 * scenario.file.learner.up_mbit
        self.overhead, self.fixed = delta.overhead, delta.latency_s + delta.install_s

    def common(self, active: Mapping[int, int]) -> float:
        """Seconds that the uplinks take for all active nodes; `active`: row -> how many. 0 for none."""
        nodes = sum(active.values())
        if not nodes:
            return 0.0
        if not self.relayed:
            return nodes * self.bits / self.source
        up = math.fsum([self.source, *(1e6 * self.rows[i].up_mbit * n for i, n in active.items())])
        return max(self.bits / self.source, nodes * self.bits / up)

    def of(self, row: int, common: float) -> float:
        """Seconds from publication until a node of the row serves the version; `common`: what `common()` said."""
        return max(common, self.bits / (1e6 * self.rows[row].down_mbit)) * self.overhead + self.fixed

    def last(self, active: Mapping[int, int]) -> float:
        """Seconds until the last active node serves the version, ECHO-2's T_bcast(A) (arXiv 2602.02192). 0 for none."""
        common = self.common(active)
        return max((self.of(i, common) for i, n in active.items() if n), default=0.0)

    def catch_up(self, row: int, whole_bytes: float) -> float:
        """Seconds that a node of the row, which has nothing, takes to fetch a model of `whole_bytes` and install it."""
        return 8.0 * whole_bytes / (1e6 * self.rows[row].down_mbit) * self.overhead + self.fixed
