"""The simulator for large fleets: group by group. A node is a server of whole groups by its kind's throughput model; who may
begin what is production's Ledger, who is active production's Activation.

A full node runs so many groups at once that as many sequences run as its memory takes, in the mean over a group's life; a group
takes its longest member's tokens at the pace that a sequence then has. So a full node makes the tokens per second that its
throughput model says, and groups end out of order with the long tail that the lengths have. What it lacks beside the
sequence-level simulator (netem.rollouts): members of a group on several nodes (so a group moves whole to where it is faster),
and the learner's own engines. A lost node's groups go on elsewhere with what they have (`policy.migration`).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from learner.ledger import Ledger, Refused
from netem.planning.crew import Crew
from netem.planning.outcome import Result
from netem.planning.pool import nodes_of
from netem.planning.scenario import Scenario
from netem.planning.servers import BLOCK, SQUEEZED, Lengths, Servers
from node.batcher import FLUSH_S
from p2p.errors import ShoalError

AT_ONCE = 0.01
"""Of the active nodes: when so many are lost, who replaces them is decided at once, and not at the next regular look."""

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


@dataclass(slots=True)
class _Group:
    """Under way."""

    version: int
    since: float
    """reserved"""
    longest: float
    """tokens that its longest member still makes, when it began on its node"""
    tokens: float
    """of all its members"""
    end: float = 0.0
    """on its node's clock"""


@dataclass(slots=True)
class _Node:
    """Its clock counts the tokens that each running sequence makes; a group ends `longest` of them after it began."""

    row: int
    groups: dict[int, _Group] = field(default_factory=dict)
    ends: list[tuple[float, int]] = field(default_factory=list)
    """heap of (clock, group)"""
    on: bool = False
    stamp: int = 0
    """of the one event that counts"""
    clock: float = 0.0
    at: float = 0.0
    stall: float = 0.0
    """seconds until it decodes again"""
    paid: float = 0.0
    """of its row's stalls, what it has taken notice of"""
    made: float = 0.0


class GroupSimulation:
    def __init__(self, scenario: Scenario, tell: Callable[[int], None] = lambda step: None) -> None:
        self.scenario, self.tell = scenario, tell
        file = scenario.file
        self.w = scenario.workload
        self.lengths = Lengths(scenario)
        _, sample = self.lengths.block(2 * BLOCK)
        model = file.model.served()
        engines = [row.engine(model) for row in scenario.rows]
        self.kinds = [Servers.of(engine, sample, self.w.prompt, self.w.samples) for engine in engines]
        horizon = min(LONGEST_S, 20.0 * file.steps * (self.w.train_s + self.w.update_s))
        places = nodes_of(scenario.rows, scenario.folder, horizon, file.seed)
        self.crew = Crew(scenario, places, engines, [kind.full for kind in self.kinds])
        self.nodes = [_Node(node.row) for node in places]
        self.ledger = Ledger(file.policy.staleness, file.learner.groups, 0)
        self.now, self.step, self.version = 0.0, 0, 0
        self.serves = [0] * len(scenario.rows)
        self.debts = [0.0] * len(scenario.rows)
        """seconds that every running group of the row was held up, in all"""
        self._offers: list[list[deque[int]]] = [[deque() for _ in range(kind.slots)] for kind in self.kinds]
        """row -> groups under way -> nodes that had so many when they were put there, with room for more"""
        self._orphans: deque[tuple[int, _Group]] = deque()
        self._tokens: dict[int, float] = {}
        """group -> tokens, finished"""
        self._events: list[tuple[float, int, int, int]] = []
        """(at, count, stamp, node), or an action: (at, count, -1, its number)"""
        self._actions: dict[int, Callable[[], None]] = {}
        self._count = self._opened = 0
        self._trained_until, self._began, self._current = 0.0, 0.0, 0
        self._refused = False
        self._surplus = False
        self._rng = np.random.default_rng((file.seed, 78))
        self._gone = self.moved = 0
        """active nodes that were lost since the last decision"""
        self.finished_tokens = self.lost = 0.0
        self._marks: list[tuple[float, float, float]] = []
        self._ages: list[Counter[int]] = []
        self._stepped: list[float] = []
        self._spreads: list[float] = []
        self._mark: tuple[dict, list[float], float, float, list[float]] | None = None
        for i, node in enumerate(places):
            for start, end in node.there:
                if start < horizon:
                    self._at(start, lambda i=i: self._come(i))  # type: ignore[misc]
                    if end < horizon:
                        self._at(end, lambda i=i: self._go(i))  # type: ignore[misc]

    # ---- running

    def run(self) -> Result:
        file = self.scenario.file
        self._at(0.0, self._decide)
        self._at(0.0, self._balance)
        while self.step < file.steps:
            if not self._events or self.now > LONGEST_S:
                raise ShoalError(f"{self.step} steps in {self.now:.0f} simulated seconds, then nothing more: {self._why()}")
            self.now, _, stamp, i = heapq.heappop(self._events)
            if stamp < 0:
                self._actions.pop(i)()
            elif self.nodes[i].stamp == stamp:
                self._due(i)
        return self._result()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._count += 1
        self._actions[self._count] = action
        heapq.heappush(self._events, (when, self._count, -1, self._count))

    # ---- nodes

    def _come(self, i: int) -> None:
        self.crew.came(i, self.now)
        if self.now > 0 and self.scenario.file.activation.all:
            self._decide(again=False)

    def _go(self, i: int) -> None:
        was_on = self.nodes[i].on
        self._off(i, flushed=False)
        self.crew.left(i, self.now)
        self._gone += was_on
        if self._gone >= max(1.0, AT_ONCE * self.crew.active_by_row.total()):
            self._decide(again=False)

    def _on(self, i: int) -> None:
        node = self.nodes[i]
        node.on, node.at, node.stall, node.paid = True, self.now, 0.0, self.debts[node.row]
        self._offers[node.row][0].append(i)
        self._feed()

    def _off(self, i: int, *, flushed: bool) -> None:
        """Its groups wait for others. `flushed`: it hands over its last tokens."""
        node = self.nodes[i]
        node.stamp += 1
        if not node.on:
            return
        self._advance(node)
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
        self._look()
        self._feed()

    def _feed(self) -> None:
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
            if isinstance(self.ledger.reserve(self._opened, version), Refused):
                self._refused = True
                return False
            group_id, group = self._opened, _Group(version, self.now, *self.lengths.draw())
            self._opened += 1
        self._advance(node)
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
            heapq.heappush(self._events, (when, self._count, node.stamp, i))

    def _balance(self) -> None:
        """As production does it with sequences: what the current step waits for moves to where it is much faster."""
        self._at(self.now + (self.w.train_s + self.w.update_s) / LOOKS, self._balance)
        where = {g: i for i in self.crew.here for g in self.nodes[i].groups} if self._current < self.w.groups else {}
        for group_id in self.ledger.blockers()[:MOVES] if where else ():
            i, target = where.get(group_id), self._fastest()
            if i is None or target is None or target == i:
                continue
            node, other = self.nodes[i], self.nodes[target]
            self._advance(node)
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
            self._advance(other)
            other.groups[group_id] = group
            group.end = other.clock + left
            heapq.heappush(other.ends, (group.end, group_id))
            self.moved += 1
            self._loaded(i)
            self._loaded(target)
        self._feed()

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

    def _advance(self, node: _Node) -> None:
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
        self._advance(node)
        ended = False
        while node.ends and node.ends[0][0] <= node.clock + 1e-6:
            _, group_id = heapq.heappop(node.ends)
            group = node.groups.pop(group_id)
            self.finished_tokens += group.tokens
            self._tokens[group_id] = group.tokens
            self.crew.generated(self.now - group.since)
            if self.ledger.occupy(group_id, group.version) == self.step:
                self._arrived()
            ended = True
        self._loaded(i)
        if ended:
            self._feed()

    # ---- the learner

    def _arrived(self) -> None:
        """One more group of the current step is there: it is trained on at once, after those before it."""
        self._current += 1
        self._trained_until = max(self._trained_until, self.now) + self.w.train_s / self.w.groups
        if self._current == self.w.groups:
            self._at(self._trained_until + self.w.update_s, self._updated)

    def _look(self) -> None:
        """After something other than an arrival moved groups into the current buffer."""
        for _ in range(len(self.ledger.occupied(self.step)) - self._current):
            self._arrived()

    def _updated(self) -> None:
        taken = self.ledger.occupied(self.step)
        versions = dict(self.ledger._buffers[self.step])
        ages = Counter(self.step - versions[g] for g in taken)
        self.ledger.consume(self.step)
        tokens = sum(self._tokens.pop(g) for g in taken)
        self.crew.trained(tokens)
        self._ages.append(ages)
        self._stepped.append(tokens)
        self.step += 1
        self._marks.append((self.now, self.finished_tokens, self.lost))
        self.tell(self.step)
        if self.step == self.scenario.file.warm:
            self._mark = self.crew.mark(self.now), self.crew.there_hours(self.now), self.now, 0.0, [n.made for n in self.nodes]
        self._began = self._trained_until = self.now
        self._current = 0
        self._look()
        if self.step - self.version >= self.crew.choose_kappa():
            self._publish()
        self._feed()

    def _publish(self) -> None:
        self.version = version = self.step
        self.crew.published()
        common = self.crew.spread.common(self.crew.active_by_row)
        self._spreads.append(self.crew.spread_now())
        for row in range(len(self.serves)):
            spread = self.crew.spread.of(row, common)
            held = 0.0 if self.scenario.file.policy.overlap else spread
            self._at(self.now + spread, lambda row=row, held=held: self._install(row, version, held))  # type: ignore[misc]

    def _install(self, row: int, version: int, held_s: float) -> None:
        if version <= self.serves[row]:
            return
        self.serves[row] = version
        delta = self.scenario.file.delta
        self.debts[row] += held_s + (self.kinds[row].recompute_s if delta.recompute else 0.0)
        self._feed()

    # ---- who is active

    def _decide(self, again: bool = True) -> None:
        def made(i: int) -> float:
            self._advance(self.nodes[i])
            return self.nodes[i].made

        surplus, self._refused, self._gone = self._refused, False, 0
        self._surplus = surplus
        for i, active in self.crew.decide(self.now, made, self._busy, surplus=surplus):
            if active:
                self._at(max(self.now, self.crew.ready_at[i]), lambda i=i: self._ready(i))  # type: ignore[misc]
            else:
                self._off(i, flushed=True)
        if again and (not self.scenario.file.activation.all):
            self._at(self.now + self.scenario.file.activation.every_s, self._decide)

    def _ready(self, i: int) -> None:
        there = i in self.crew.here and self.crew.state[i] == "active" and self.crew.ready_at[i] <= self.now + 1e-6
        if there and not self.nodes[i].on:
            self._on(i)

    def _busy(self, i: int) -> bool:
        node = self.nodes[i]
        waits = self._current < self.w.groups and self._trained_until <= self.now and not self._surplus
        return node.on and (waits or len(node.groups) == self.kinds[node.row].slots)

    # ---- what came of it

    def _why(self) -> str:
        decision = self.crew.decision
        on = sum(node.on for node in self.nodes)
        return (decision.blocked if decision is not None and decision.blocked else "") or f"{on} nodes generate"

    def _result(self) -> Result:
        file, crew, warm = self.scenario.file, self.crew, self.scenario.file.warm
        assert self._mark is not None
        before, there, t0, _, made = self._mark
        took = self.now - t0
        _, m0, _ = self._marks[warm - 1]
        steps = self.step - warm
        ages: Counter[int] = sum(self._ages[warm:], Counter())
        kinds = crew.paid(self.now, before)
        for row, (a, b) in zip(self.scenario.rows, zip(there, crew.there_hours(self.now), strict=True), strict=True):
            kinds[row.kind].there_hours = b - a
        for i, node in enumerate(self.nodes):
            self._advance(node)
            kinds[self.scenario.rows[node.row].kind].tokens += node.made - made[i]
        usd_learner = file.learner.usd_per_hour * took / 3600
        trained, bound = sum(self._stepped[warm:]), self.w.train_s + self.w.update_s
        at = [t for t, _, _ in self._marks]
        decision = crew.decision
        after = crew.mark(self.now)
        return Result(
            "groups", file.policy.name, steps, took, bound * steps / took, bound * steps / took, trained, self.w.groups * steps,
            usd_learner, sum(p.usd for p in kinds.values()), after["learner"][1] - before["learner"][1] - usd_learner,
            {age: n / sum(ages.values()) for age, n in ages.items()}, crew.kappa,
            float(np.mean(self._spreads)) if self._spreads else 0.0, (self.finished_tokens + self.lost - m0) / trained, self.lost,
            kinds, decision.blocked if decision else "", decision.required if decision else 0.0,
            decision.supply if decision else 0.0, 0.0,
            [{"step": i + 1, "step_s": b - a} for i, (a, b) in enumerate(zip([0.0, *at], at, strict=False))],
        )  # fmt: skip
