"""The nodes of the group-level simulator: which node works on which group, until when. The ledger says what they may take.

Each node's clock counts the tokens that one running sequence makes, so groups end in the order of their clocks whatever the pace;
events are a heap. The learner's side is in `by_group`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np

from learner.rollouts.ledger import Ledger
from netem.planning.cost_scenario import CostScenario
from netem.planning.group_server import BLOCK, SQUEEZED, DrawnLengths, Servers, SimGroup, SimNode
from netem.planning.simulated_fleet import SimulatedFleet, Tell
from node.serving.batcher import FLUSH_S

MIGRATIONS_A_STEP = 20
"""Times that groups are moved in a step that never waits. What the learner waits for must move while it still helps."""

MOST_MOVES = 256
"""Groups that are looked at for a move at one time. It bounds the computing time; the next look follows soon."""

SAMPLED_NODES = 32
"""Nodes, drawn at random, that are looked at for one on which a group may be squeezed in. Looking at all of ten thousand would
take too long."""

WORTHWHILE_SHARE = 0.7
"""A group moves only where it takes at most this share of the time that it would still take: a move costs a prefill."""

LEAST_SAVED_S = 20.0
"""A group moves only where it ends at least so many seconds sooner."""

LOST_SHARE = 0.01
"""When this share of the active nodes is lost, their replacement is decided at once and not at the next regular decision. For one
node of ten thousand a decision is not worth its computing time."""

HORIZON_STEPS = 20.0
"""Comings and goings are drawn for a run in which every step takes this many times the learner's own time."""

MAX_SIMULATED_S = 60 * 86_400.0
"""Simulated seconds, 60 days, after which a run counts as stuck."""


class GroupNodes:
    """A subclass is the learner's side. It says what `arrived`, `look`, `waits_for` and `full` do."""

    def __init__(self, scenario: CostScenario, tell: Tell) -> None:
        self.scenario = scenario
        file = scenario.file
        self.workload = scenario.workload
        self.lengths = DrawnLengths(scenario)
        sample = self.lengths.block(2 * BLOCK).members
        model = file.model.served()
        engines = [row.engine(model) for row in scenario.rows]
        self.kinds = [Servers.of(engine, sample, self.workload.prompt, self.workload.samples) for engine in engines]
        horizon_s = min(MAX_SIMULATED_S, HORIZON_STEPS * file.steps * (self.workload.train_s + self.workload.update_s))
        self.fleet = SimulatedFleet(
            self, scenario, engines, [kind.full for kind in self.kinds], horizon_s=horizon_s, lost_share=LOST_SHARE,
            on_arrival=False, tell=tell,
        )  # fmt: skip
        self.autoscaler = self.fleet.autoscaler
        self.nodes = [SimNode(node.row) for node in self.fleet.nodes]
        self.ledger = Ledger(file.policy.staleness, file.learner.groups, 0)
        self.now, self.step = 0.0, 0
        self.serves = [0] * len(scenario.rows)
        """row -> version"""
        self.debts = [0.0] * len(scenario.rows)
        """row -> seconds for which versions have held up everything that runs there, in all"""
        self.tokens: dict[int, float] = {}
        """group -> its tokens, of groups that have ended and were not trained on"""
        self.finished_tokens = self.lost = 0.0
        self.moved = 0
        self._offers: list[list[deque[int]]] = [[deque() for _ in range(kind.slots)] for kind in self.kinds]
        """row -> number of groups -> nodes that had so many when they were put there; entries that no longer hold are dropped
        late"""
        self._orphans: deque[tuple[int, SimGroup]] = deque()
        self.events: list[tuple[float, int, int, int]] = []
        """heap of (time, count, stamp, node): the node's next group ends, unless its stamp has changed. An action is (time,
        count, -1, its number); counts keep equal times in order"""
        self._actions: dict[int, Callable[[], object]] = {}
        self._count = self._opened = 0
        self._rng = np.random.default_rng((file.seed, 78))

    def arrived(self) -> None:
        """A group of the current step has ended."""
        raise NotImplementedError

    def look(self) -> None:
        """Groups may have come into the current step's buffer without ending now."""
        raise NotImplementedError

    def waits_for(self) -> bool:
        """Whether groups of the current step are missing."""
        raise NotImplementedError

    def full(self, i: int) -> bool:
        """Whether node `i` has all the work that it can take, or all that there is."""
        raise NotImplementedError

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something so many simulated seconds from now."""
        self.at(self.now + seconds, action)

    def at(self, when: float, action: Callable[[], object]) -> None:
        """Do something at a simulated time."""
        self._count += 1
        self._actions[self._count] = action
        heapq.heappush(self.events, (when, self._count, -1, self._count))

    def next(self) -> None:
        """Go to the next event and let it happen."""
        self.now, _, stamp, i = heapq.heappop(self.events)
        if stamp < 0:
            self._actions.pop(i)()
        elif self.nodes[i].stamp == stamp:
            self._due(i)

    def made(self, i: int) -> float:
        """Tokens that node `i` has made so far."""
        self.advance(self.nodes[i])
        return self.nodes[i].made

    def begin(self, i: int) -> None:
        """Node `i` generates from now on, if it does not yet."""
        node = self.nodes[i]
        if node.on:
            return
        node.on, node.at, node.stall, node.paid = True, self.now, 0.0, self.debts[node.row]
        self._offers[node.row][0].append(i)
        self.feed()

    def end(self, i: int) -> None:
        """Node `i` stops and hands over all that it has."""
        self._stop(i, flushed=True)

    def lose(self, i: int) -> bool:
        """Node `i` is gone. Returns whether it generated."""
        was_on = self.nodes[i].on
        self._stop(i, flushed=False)
        return was_on

    def _stop(self, i: int, *, flushed: bool) -> None:
        """Its groups wait for others. `flushed`: it hands over its last tokens, so none is lost."""
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
                self.ledger.abort([group_id])
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
        """The node, of rows not in `without`, whose tokens per second grow most by one more group."""
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
        """Give a node one more group: one that waits, or a new one. False when there is none for its version."""
        node = self.nodes[i]
        version = self.serves[node.row]
        for k, (_, waiting) in enumerate(self._orphans):
            if waiting.version <= version:
                group_id, group = self._orphans[k]
                del self._orphans[k]
                break
        else:
            if not self.ledger.reserve(self._opened, version):
                self.fleet.held_back = True
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
        """A node's load has changed: offer what room it has, and say when its next group ends."""
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

    def migrate(self) -> None:
        """Move groups that the current step waits for to where they are much faster, as production does with sequences."""
        self.at(self.now + (self.workload.train_s + self.workload.update_s) / MIGRATIONS_A_STEP, self.migrate)
        where = {g: i for i in self.autoscaler.here for g in self.nodes[i].groups} if self.waits_for() else {}
        for group_id in self.ledger.blockers()[:MOST_MOVES] if where else ():
            i, target = where.get(group_id), self._fastest()
            if i is None or target is None or target == i:
                continue
            node, other = self.nodes[i], self.nodes[target]
            self.advance(node)
            group = node.groups[group_id]
            left = group.end - node.clock
            here = left / self.kinds[node.row].paces[len(node.groups)]
            there = left / self.kinds[other.row].paces[len(other.groups) + 1]
            if there > WORTHWHILE_SHARE * here or here - there < LEAST_SAVED_S or group.version > self.serves[other.row]:
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
        """The node on which one more group would be fastest."""
        best, found = 0.0, None
        for row, offers in enumerate(self._offers):
            for busy, nodes in enumerate(offers):
                self._drop(nodes, busy)
                if nodes and self.kinds[row].paces[busy + 1] > best:
                    best, found = self.kinds[row].paces[busy + 1], nodes[0]
        for i in self._rng.integers(len(self.nodes), size=SAMPLED_NODES).tolist():  # a full one may yet be faster
            node = self.nodes[i]
            kind, busy = self.kinds[node.row], len(node.groups) + 1
            if node.on and busy <= kind.slots + SQUEEZED and kind.paces[busy] > best:
                best, found = kind.paces[busy], i
        return found

    def _drop(self, nodes: deque[int], busy: int) -> None:
        """Take offers that no longer hold from the front."""
        while nodes and not (self.nodes[nodes[0]].on and len(self.nodes[nodes[0]].groups) == busy):
            nodes.popleft()

    def advance(self, node: SimNode) -> None:
        """Bring a node's clock and count of tokens to the present."""
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
        """A group of node `i` should have ended, unless the node was held up since that was said."""
        node = self.nodes[i]
        self.advance(node)
        ended = False
        while node.ends and node.ends[0][0] <= node.clock + 1e-6:
            _, group_id = heapq.heappop(node.ends)
            group = node.groups.pop(group_id)
            self.finished_tokens += group.tokens
            self.tokens[group_id] = group.tokens
            self.autoscaler.generated(self.now - group.since)
            if self.ledger.occupy(group_id, group.version) == self.step:
                self.arrived()
            ended = True
        self._loaded(i)
        if ended:
            self.feed()
