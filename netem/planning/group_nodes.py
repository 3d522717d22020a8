"""The nodes of the group-level simulator: who works on which group, until when. What they take is Ledger's to grant.

Each node's clock counts the tokens that a running sequence makes; events are a heap. The learner's side is in `groups`. """

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np

from learner.rollouts.ledger import Ledger, NoRoom
from netem.planning.autoscaler import Autoscaler
from netem.planning.cost_scenario import CostScenario
from netem.planning.group_server import BLOCK, SQUEEZED, DrawnLengths, Servers, SimGroup, SimNode
from netem.planning.priced_fleet import nodes_of
from node.serving.batcher import FLUSH_S

LOOKS = 20
"""In a step that never waits, at what it waits for."""

MOVES = 256
"""At once."""

LOOKED_AT = 32
"""Nodes, drawn at random, where a group may be squeezed in."""

MUCH = 0.7
"""Of the time that a group would still take, it moves for."""

LEAST_S = 20.0
"""Sooner done, it moves for."""

LONGEST_S = 60 * 86_400.0


class GroupNodes:
    """The learner's side says: `arrived` (a group of the current step has come), `look` (groups may have come into the current
    buffer otherwise), `waits_for` (groups of the current step are missing)."""

    def __init__(self, scenario: CostScenario) -> None:
        self.scenario = scenario
        file = scenario.file
        self.w = scenario.workload
        self.lengths = DrawnLengths(scenario)
        _, sample = self.lengths.block(2 * BLOCK)
        model = file.model.served()
        engines = [row.engine(model) for row in scenario.rows]
        self.kinds = [Servers.of(engine, sample, self.w.prompt, self.w.samples) for engine in engines]
        self.horizon = min(LONGEST_S, 20.0 * file.steps * (self.w.train_s + self.w.update_s))
        self.places = nodes_of(scenario.rows, scenario.folder, self.horizon, file.seed)
        self.crew = Autoscaler(scenario, self.places, engines, [kind.full for kind in self.kinds])
        self.nodes = [SimNode(node.row) for node in self.places]
        self.ledger = Ledger(file.policy.staleness, file.learner.groups, 0)
        self.now, self.step = 0.0, 0
        self.serves = [0] * len(scenario.rows)
        """row -> version"""
        self.debts = [0.0] * len(scenario.rows)
        """seconds that every running group of the row was held up, in all"""
        self.tokens: dict[int, float] = {}
        """group -> tokens, finished"""
        self.finished_tokens = self.lost = 0.0
        self.moved = 0
        self.refused = False
        """the ledger had no room for somebody since this was last set back"""
        self._offers: list[list[deque[int]]] = [[deque() for _ in range(kind.slots)] for kind in self.kinds]
        """row -> groups under way -> nodes that had so many when they were put there, with room for more"""
        self._orphans: deque[tuple[int, SimGroup]] = deque()
        self.events: list[tuple[float, int, int, int]] = []
        """(at, count, stamp, node), or an action: (at, count, -1, its number)"""
        self._actions: dict[int, Callable[[], None]] = {}
        self._count = self._opened = 0
        self._rng = np.random.default_rng((file.seed, 78))

    def arrived(self) -> None:
        raise NotImplementedError

    def look(self) -> None:
        raise NotImplementedError

    def waits_for(self) -> bool:
        raise NotImplementedError

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        self._actions[self._count] = action
        heapq.heappush(self.events, (when, self._count, -1, self._count))

    def next(self) -> None:
        """Let the next thing happen."""
        self.now, _, stamp, i = heapq.heappop(self.events)
        if stamp < 0:
            self._actions.pop(i)()
        elif self.nodes[i].stamp == stamp:
            self._due(i)

    def on(self, i: int) -> None:
        node = self.nodes[i]
        node.on, node.at, node.stall, node.paid = True, self.now, 0.0, self.debts[node.row]
        self._offers[node.row][0].append(i)
        self.feed()

    def off(self, i: int, *, flushed: bool) -> None:
        """Its groups wait for others. `flushed`: it hands over its last tokens."""
        node = self.nodes[i]
        node.stamp += 1
        if not node.on:
            return
        self.advance(node)
        node.on = False
        kind = self.kinds[node.row]
        flush = 0.0 if flushed or not node.groups else FLUSH_S * kind.paces[len(node.groups)]
        for group_id, group in node.groups.items():
            left = min(group.longest, max(1.0, group.end - node.clock) + flush)
            if self.scenario.file.policy.migration:
                self.lost += group.tokens * min(1.0, flush / group.longest)
                group.longest = left
                self._orphans.append((group_id, group))
            else:
                self.lost += group.tokens * (1.0 - left / group.longest)
                self.ledger.abort([group_id], "lost")
        node.groups.clear()
        node.ends.clear()
        self.look()
        self.feed()

    def feed(self) -> None:
        """Give what waits, then what the ledger has room for, to the nodes whose tokens per second grow most by it."""
        while self._orphans or any(self.ledger.room(v) for v in set(self.serves)):
            tried: set[int] = set()
            while True:
                i = self._best(tried)
                if i is None:
                    return
                if self._next(i):
                    break
                tried.add(self.nodes[i].row)

    def _best(self, without: set[int]) -> int | None:
        best, found = -1.0, None
        for row, offers in enumerate(self._offers):
            if row in without:
                continue
            for busy, nodes in enumerate(offers):
                self._drop(nodes, busy)
                if nodes:
                    gain = self.kinds[row].gains[busy]
                    if gain > best:
                        best, found = gain, nodes[0]
                    break
        return found

    def _next(self, i: int) -> bool:
        """One more group for a node: one that waits, or a new one. False when there is none for its version."""
        node = self.nodes[i]
        version = self.serves[node.row]
        for k, (_, waiting) in enumerate(self._orphans):
            if waiting.version <= version:
                group_id, group = self._orphans[k]
                del self._orphans[k]
                break
        else:
            if isinstance(self.ledger.reserve(self._opened, version), NoRoom):
                self.refused = True
                return False
            group_id, group = self._opened, SimGroup(version, self.now, *self.lengths.draw())
            self._opened += 1
        self.advance(node)
        node.groups[group_id] = group
        group.end = node.clock + group.longest
        heapq.heappush(node.ends, (group.end, group_id))
        self._loaded(i)
        return True

    def _loaded(self, i: int) -> None:
        """Its load has changed: offer what room it has, and say when its next group ends."""
        node = self.nodes[i]
        busy = len(node.groups)
        kind = self.kinds[node.row]
        if busy < kind.slots:
            self._offers[node.row][busy].append(i)
        node.stamp += 1
        if busy:
            when = self.now + node.stall + max(0.0, node.ends[0][0] - node.clock) / kind.paces[busy]
            self._count += 1
            heapq.heappush(self.events, (when, self._count, node.stamp, i))

    def balance(self) -> None:
        """As production does it with sequences: what the current step waits for moves to where it is much faster."""
        self.at(self.now + (self.w.train_s + self.w.update_s) / LOOKS, self.balance)
        where = {g: i for i in self.crew.here for g in self.nodes[i].groups} if self.waits_for() else {}
        for group_id in self.ledger.blockers()[:MOVES] if where else ():
            i, target = where.get(group_id), self._fastest()
            if i is None or target is None or target == i:
                continue
            node, other = self.nodes[i], self.nodes[target]
            self.advance(node)
            group = node.groups[group_id]
            left = group.end - node.clock
            here = left / self.kinds[node.row].paces[len(node.groups)]
            there = left / self.kinds[other.row].paces[len(other.groups) + 1]
            if there > MUCH * here or here - there < LEAST_S or group.version > self.serves[other.row]:
                continue
            del node.groups[group_id]
            node.ends = [end for end in node.ends if end[1] != group_id]
            heapq.heapify(node.ends)
            group.longest = left
            self.advance(other)
            other.groups[group_id] = group
            group.end = other.clock + left
            heapq.heappush(other.ends, (group.end, group_id))
            self.moved += 1
            self._loaded(i)
            self._loaded(target)
        self.feed()

    def _fastest(self) -> int | None:
        """Where one more group would be fastest."""
        best, found = 0.0, None
        for row, offers in enumerate(self._offers):
            for busy, nodes in enumerate(offers):
                self._drop(nodes, busy)
                if nodes and self.kinds[row].paces[busy + 1] > best:
                    best, found = self.kinds[row].paces[busy + 1], nodes[0]
        for i in self._rng.integers(len(self.nodes), size=LOOKED_AT).tolist():  # a full one may yet be faster
            node = self.nodes[i]
            kind, busy = self.kinds[node.row], len(node.groups) + 1
            if node.on and busy <= kind.slots + SQUEEZED and kind.paces[busy] > best:
                best, found = kind.paces[busy], i
        return found

    def _drop(self, nodes: deque[int], busy: int) -> None:
        while nodes and not (self.nodes[nodes[0]].on and len(self.nodes[nodes[0]].groups) == busy):
            nodes.popleft()

    def advance(self, node: SimNode) -> None:
        if not node.on:
            return
        left = self.now - node.at
        node.at = self.now
        node.stall += self.debts[node.row] - node.paid
        node.paid = self.debts[node.row]
        if node.stall:
            stalled = min(node.stall, left)
            node.stall -= stalled
            left -= stalled
        busy = len(node.groups)
        if busy and left > 0:
            kind = self.kinds[node.row]
            node.clock += left * kind.paces[busy]
            node.made += left * kind.rates[busy]

    def _due(self, i: int) -> None:
        """A group of it should have ended, unless it was held up since that was said."""
        node = self.nodes[i]
        self.advance(node)
        ended = False
        while node.ends and node.ends[0][0] <= node.clock + 1e-6:
            _, group_id = heapq.heappop(node.ends)
            group = node.groups.pop(group_id)
            self.finished_tokens += group.tokens
            self.tokens[group_id] = group.tokens
            self.crew.generated(self.now - group.since)
            if self.ledger.occupy(group_id, group.version) == self.step:
                self.arrived()
            ended = True
        self._loaded(i)
        if ended:
            self.feed()
