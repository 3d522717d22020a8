"""Wires a run's evaluations to its head: which version the nodes serve, where results go, how long the run's end waits.

When an evaluation is due and what it asks for is `learner.evaluation`'s business. Must not know torch, tasks or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from learner.evaluation.plan import Schedule
from learner.evaluation.problems import Evaluation
from learner.evaluation.runner import Evaluations
from learner.head.node_state import NodeState
from learner.head.trainer_requests import TrainerRequests
from learner.publish.publisher import Publisher
from learner.requests.port import Requests
from p2p.version import Version

ARRIVE_S = 300.0
"""Seconds that a node may take, when training is complete, until it serves the last version. Only then does the run end without
the last evaluation: a large model over a slow link takes minutes."""


class EvaluatingParts(Protocol):
    """The parts of a run that its evaluations rest on, as the head holds them."""

    epoch: int
    nodes: dict[str, NodeState]
    trainer_requests: TrainerRequests
    publisher: Publisher
    now: Callable[[], float]

    @property
    def requests(self) -> Requests:
        """Through which they ask."""

    def generates(self, peer: str) -> bool:
        """Whether this node is given work."""

    def still_follows(self, node: NodeState) -> bool:
        """Whether this node goes on taking versions."""


class HeadEvaluations:
    """The evaluations of one epoch of a run."""

    def __init__(self, parts: EvaluatingParts, those: Iterable[Evaluation]) -> None:
        self._parts, trainer = parts, parts.trainer_requests
        pairs = [(one, Schedule(one.plan, last=trainer.steps, done=trainer.evaluated(one.plan))) for one in those]
        self.runner = Evaluations(pairs, parts.requests, served=self.served, write=trainer.on_evaluated, now=parts.now)

    def served(self) -> Version | None:
        """The newest version that nodes which are given work serve; None while none does. A node that says that it serves a
        version which is not published yet is not believed."""
        parts, now, current = self._parts, self._parts.now(), self._parts.publisher.current
        if current is None:
            return None
        nodes: Mapping[str, NodeState] = parts.nodes
        serving = (node.version for peer, node in nodes.items() if node.serves(parts.epoch, now) and parts.generates(peer))
        return max((version for version in serving if version <= current), default=None)

    async def settled(self) -> None:
        """When training is complete: until the last version is evaluated, or it will not be."""
        parts, began = self._parts, self._parts.now()
        last = parts.publisher.current

        def hope() -> bool:
            served = self.served()
            if last is None or last.step < parts.trainer_requests.steps:
                return False  # a trainer of the user's own did not publish it
            if served is not None and served >= last:
                return True
            return parts.now() - began < ARRIVE_S and any(parts.still_follows(node) for node in parts.nodes.values())

        await self.runner.settled(hope)
