"""Dispatch with foresight: what to assign, to open and to move, from the collector's books and the nodes' reports. Pure; told
the time.

Joins dispatcher, migration and forecast for the head. Must not know the network, the journal or how a move is carried out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from learner.dispatch.dispatcher import Dispatcher, DispatchPlan, Strategies, WaitingSequence
from learner.dispatch.forecast import Forecast
from learner.dispatch.giving_way import GivingWay
from learner.dispatch.migration import Move, migrate
from learner.dispatch.node_table import NodeView
from learner.rollouts.collector import Collector
from learner.rollouts.group import member_name, parse_request
from p2p.version import Version

MOVES_A_NODE = 2
"""that may be asked for at once: what they bring is only seen after the next look"""

MOVE_AGAIN_S = 30.0
"""A sequence that was moved stays for so long, whatever reports say: they are noisy, and each move costs a prefill."""


@dataclass
class Steering:
    """`samples` sequences a group, of `most` tokens at the most; staleness bound `max_staleness`."""

    samples: int
    most: int
    max_staleness: int
    strategies: Strategies
    anybody_proven: Callable[[], bool] = lambda: True
    """whether nodes are at work whose word counts because they are proven"""
    step: int = 0
    """sequences that a step takes; 0 where the trainer samples itself"""
    forecast: Forecast = field(init=False)
    moves: Counter[str] = field(default_factory=Counter, init=False)
    """sequences moved between living nodes, by reason"""
    giving_way: GivingWay = field(default_factory=GivingWay, init=False)
    _dispatcher: Dispatcher = field(init=False)
    _moved: dict[str, float] = field(default_factory=dict, init=False)
    """group.member -> when it was last moved"""

    def __post_init__(self) -> None:
        self.forecast = Forecast(self.most, self.max_staleness)
        self._dispatcher = Dispatcher(self.samples, self.strategies)

    @property
    def slow(self) -> frozenset[str]:
        """The nodes that give way to quicker ones."""
        return self.giving_way.speeds.slow

    def plan(
        self, now: float, step: int, nodes: Sequence[NodeView], collector: Collector, room: Callable[[Version], int]
    ) -> DispatchPlan:
        """As `Dispatcher.choose`, the learner being at `step`. The caller applies all of it."""
        asked = {r.request_id: self._foreseen(r, now, step, collector) for r in collector.pending()}
        known = [self.forecast.view(node) for node in nodes]
        if self.strategies.give_way:
            known = self._give_way(known, len(asked), now, collector, room)
        plan = self._dispatcher.choose(known, asked.values(), room, self.forecast.prompt_tokens, self.forecast.usual)
        for request_id, peer in plan.assign:
            self.forecast.put(peer, asked[request_id])
            self.giving_way.gave(peer, now)
        return plan

    def look(self, now: float, step: int, nodes: Sequence[NodeView], collector: Collector) -> list[Move]:
        """Go over everything outstanding; what to ask nodes to hand back, so that it goes on elsewhere."""
        self.forecast.look(now, step, collector.states())
        if not self.strategies.migration:
            return []
        self._moved = {name: at for name, at in self._moved.items() if now - at < MOVE_AGAIN_S}
        running = [r for r in self.forecast.running if member_name(r.request_id) not in self._moved]
        moves = migrate([self.forecast.view(node) for node in nodes], running, MOVES_A_NODE * len(nodes))
        for move in moves:
            self.moves[move.reason] += 1
            self._moved[member_name(move.request_id)] = now
        return moves

    def _give_way(
        self, nodes: list[NodeView], waiting: int, now: float, collector: Collector, room: Callable[[Version], int]
    ) -> list[NodeView]:
        outstanding = waiting
        for node in nodes:
            held = collector.load(node.peer)
            outstanding += held
            self.giving_way.count(node.peer, held, collector.tokens_by_node.get(node.peer, 0), now)
        if nodes:
            outstanding += self.samples * room(max(node.version for node in nodes))
        return self.giving_way.look(nodes, outstanding, now, proven=self.anybody_proven(), step=self.step)

    def _foreseen(self, request: WaitingSequence, now: float, step: int, collector: Collector) -> WaitingSequence:
        task_index, feature = collector.task_of(request.group_id)
        name = parse_request(request.request_id)
        assert name is not None  # the collector made it
        key = request.group_id, name.member
        return self.forecast.request(request, key, now, step=step, task_index=task_index, feature=feature)
