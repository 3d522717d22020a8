"""The simulator for large fleets: group by group. A node is a server of whole groups by its kind's throughput model; production's
Ledger says what may begin, production's Activation which nodes are active.

A full node runs so many groups at once that as many sequences run as its memory takes, in the mean over a group's life; a group
takes its longest member's tokens at the pace that a sequence then has. So a full node makes the tokens per second that its
throughput model says, and groups end out of order with the long tail that the lengths have. What it lacks beside the
sequence-level simulator (netem.rollout_sim): members of a group on several nodes (so a group moves whole to where it is faster),
and local engines. A lost node's groups go on elsewhere with what they have (`policy.migration`).

Each node's clock counts the tokens that one running sequence makes, so its groups end in the order of their ends on that clock,
whatever the pace.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from math import isinf

import numpy as np

from learner.rollouts.ledger import Ledger
from netem.planning.cost_scenario import CostScenario
from netem.planning.group_server import BLOCK, SQUEEZED, DrawnLengths, Servers, SimGroup, SimNode
from netem.planning.outcome import Result
from netem.planning.simulated_fleet import SimulatedFleet, Tell
from netem.timeline import Timeline
from node.serving.batcher import FLUSH_S
from p2p.errors import ShoalError

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


class GroupSimulation(Timeline):
    """Which node works on which group, until when, and the learner that trains on them. `tell` is called with the number of steps
    done."""

    def __init__(self, scenario: CostScenario, tell: Tell = lambda step: None) -> None:
        super().__init__()
        self.scenario = scenario
        file = scenario.file
        self.workload = scenario.workload
        self.lengths = DrawnLengths(scenario)
        sample = self.lengths.block(2 * BLOCK)
        engines = [row.engine(file.model) for row in scenario.rows]
        self.kinds = [Servers.of(engine, sample, self.workload.prompt, self.workload.samples) for engine in engines]
        horizon_s = min(MAX_SIMULATED_S, HORIZON_STEPS * file.steps * (self.workload.train_s + self.workload.update_s))
        self.fleet = SimulatedFleet(
            self, scenario, [kind.full for kind in self.kinds], horizon_s=horizon_s, lost_share=LOST_SHARE, on_arrival=False,
            tell=tell,
        )  # fmt: skip
        self.autoscaler = self.fleet.autoscaler
        self.nodes = [SimNode(node.row) for node in self.fleet.nodes]
        self.ledger = Ledger(file.policy.staleness, file.learner.groups, 0)
        self.step = self.version = 0
        self.serves = [0] * len(scenario.rows)
        """row -> version"""
        self.debts = [0.0] * len(scenario.rows)
        """row -> seconds for which versions have held up everything that runs there, in all"""
        self.tokens: dict[int, float] = {}
        """group -> its tokens, of groups that have ended and were not trained on"""
        self.finished_tokens = self.lost = 0.0
        self._made_before = 0.0
        """tokens of groups that ended in the warm-up"""
        self._trained_until, self._current = 0.0, 0
        self._offers: list[list[deque[int]]] = [[deque() for _ in range(kind.slots)] for kind in self.kinds]
        """row -> number of groups -> nodes that had so many when they were put there; entries that no longer hold are dropped
        late"""
        self._orphans: deque[tuple[int, SimGroup]] = deque()
        self._opened = 0
        self._rng = np.random.default_rng((file.seed, 78))

    # ---- running

    def run(self) -> Result:
        """Run to the end. ShoalError when nothing more happens before it."""
        self.fleet.start()
        self.at(0.0, self._migrate)
        while self.step < self.scenario.file.steps:
            if isinf(self.next_at) or self.now > MAX_SIMULATED_S:
                raise ShoalError(f"{self.step} steps in {self.now:.0f} simulated seconds, then nothing more: {self._why()}")
            self.next()
        return self.account()

    def account(self) -> Result:
        """The steps that count and are done; at least one is."""
        made = self.finished_tokens + self.lost - self._made_before
        return self.fleet.result(detail="groups", made_a_token=made / self.fleet.trained, lost=self.lost)

    def _why(self) -> str:
        decision = self.autoscaler.decision
        on = sum(node.on for node in self.nodes)
        return (decision.blocked if decision is not None and decision.blocked else "") or f"{on} nodes generate"

    # ---- the learner

    def _arrived(self) -> None:
        """A group of the current step is there. It is trained on after those before it, without a pause."""
        self._current += 1
        self._trained_until = max(self._trained_until, self.now) + self.workload.train_s / self.workload.groups
        if self._current == self.workload.groups:
            self.at(self._trained_until + self.workload.update_s, self._updated)

    @property
    def _waits(self) -> bool:
        """Groups of the current step are missing."""
        return self._current < self.workload.groups

    def _look(self) -> None:
        """Groups may have come into the current step's buffer without ending now."""
        for _ in range(len(self.ledger.occupied(self.step)) - self._current):
            self._arrived()

    def _updated(self) -> None:
        taken = self.ledger.occupied(self.step)
        versions = dict(self.ledger._buffers[self.step])
        ages = Counter(self.step - versions[g] for g in taken)
        self.ledger.consume(self.step)
        self.step += 1
        self.fleet.stepped(ages, sum(self.tokens.pop(g) for g in taken))
        if self.step == self.scenario.file.warm:
            self._made_before = self.finished_tokens
            self.fleet.begin([node.made for node in self.nodes])
        self._trained_until = self.now
        self._current = 0
        self._look()
        if self.step - self.version >= self.autoscaler.choose_kappa():
            self.version = self.step
            for row, spread_s in enumerate(self.fleet.publish()):
                held = 0.0 if self.scenario.file.policy.overlap else spread_s
                self.after(spread_s, self._install, row, self.step, held)
        self._feed()

    def _install(self, row: int, version: int, held_s: float) -> None:
        if version <= self.serves[row]:
            return
        self.serves[row] = version
        delta = self.scenario.file.delta
        self.debts[row] += held_s + (self.kinds[row].recompute_s if delta.recompute else 0.0)
        self._feed()

    # ---- for the fleet

    def made(self, i: int) -> float:
        self._advance(self.nodes[i])
        return self.nodes[i].made

    def full(self, i: int) -> bool:
        node = self.nodes[i]
        waits = self._waits and self._trained_until <= self.now and not self.fleet.was_held_back
        return node.on and (waits or len(node.groups) == self.kinds[node.row].slots)

    def begin(self, i: int) -> None:
        """Offer the node, with nothing on it, for groups."""
        node = self.nodes[i]
        if node.on:
            return
        node.on, node.at, node.stall, node.paid = True, self.now, 0.0, self.debts[node.row]
        self._offers[node.row][0].append(i)
        self._feed()

    def end(self, i: int) -> None:
        self._stop(i, flushed=True)

    def lose(self, i: int) -> bool:
        was_on = self.nodes[i].on
        self._stop(i, flushed=False)
        return was_on

    def _stop(self, i: int, *, flushed: bool) -> None:
        """Its groups wait for others. `flushed`: it hands over its last tokens, so none is lost."""
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
                self.ledger.abort([group_id])
        node.groups.clear()
        self._look()
        self._feed()

    # ---- groups on nodes

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
        """The node, of rows not in `without`, whose tokens per second grow most by one more group."""
        best, found = -1.0, None
        for row, kind in enumerate(self.kinds):
            if row in without:
                continue
            for busy, i in self._offered(row):
                if kind.gains[busy] > best:
                    best, found = kind.gains[busy], i
                break  # the fewest groups: more gain less
        return found

    def _next(self, i: int) -> bool:
        """Give a node one more group: one that waits, or a new one. False when there is none for its version."""
        version = self.serves[self.nodes[i].row]
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
        self._put(i, group_id, group)
        return True

    def _put(self, i: int, group_id: int, group: SimGroup) -> None:
        """A node works on one more group."""
        node = self.nodes[i]
        self._advance(node)
        node.groups[group_id] = group
        group.end = node.clock + group.longest
        self._loaded(i)

    def _loaded(self, i: int) -> None:
        """A node's load has changed: offer what room it has, and say when its next group ends."""
        node = self.nodes[i]
        busy = len(node.groups)
        kind = self.kinds[node.row]
        if busy < kind.slots:
            self._offers[node.row][busy].append(i)
        node.stamp += 1
        if busy:
            ends = min(group.end for group in node.groups.values())
            when = self.now + node.stall + max(0.0, ends - node.clock) / kind.paces[busy]
            self.at(when, self._due, i, node.stamp)

    def _migrate(self) -> None:
        """Move groups that the current step waits for to where they are much faster, as production does with sequences."""
        self.after((self.workload.train_s + self.workload.update_s) / MIGRATIONS_A_STEP, self._migrate)
        where = {g: i for i in self.autoscaler.here for g in self.nodes[i].groups} if self._waits else {}
        for group_id in self.ledger.blockers()[:MOST_MOVES] if where else ():
            i, target = where.get(group_id), self._fastest()
            if i is None or target is None or target == i:
                continue
            node, other = self.nodes[i], self.nodes[target]
            self._advance(node)
            group = node.groups[group_id]
            left = group.end - node.clock
            here = left / self.kinds[node.row].paces[len(node.groups)]
            there = left / self.kinds[other.row].paces[len(other.groups) + 1]
            if there > WORTHWHILE_SHARE * here or here - there < LEAST_SAVED_S or group.version > self.serves[other.row]:
                continue
            group.longest = left
            del node.groups[group_id]
            self._loaded(i)
            self._put(target, group_id, group)
        self._feed()

    def _fastest(self) -> int | None:
        """The node on which one more group would be fastest."""
        best, found = 0.0, None
        for row, kind in enumerate(self.kinds):
            for busy, i in self._offered(row):
                if kind.paces[busy + 1] > best:
                    best, found = kind.paces[busy + 1], i
        for i in self._rng.integers(len(self.nodes), size=SAMPLED_NODES).tolist():  # a full one may yet be faster
            node = self.nodes[i]
            kind, busy = self.kinds[node.row], len(node.groups) + 1
            if node.on and busy <= kind.slots + SQUEEZED and kind.paces[busy] > best:
                best, found = kind.paces[busy], i
        return found

    def _offered(self, row: int) -> Iterator[tuple[int, int]]:
        """(groups, node) of the first node of the row with so many groups and room for one more, fewest groups first."""
        for busy, nodes in enumerate(self._offers[row]):
            while nodes and not (self.nodes[nodes[0]].on and len(self.nodes[nodes[0]].groups) == busy):
                nodes.popleft()
            if nodes:
                yield busy, nodes[0]

    def _advance(self, node: SimNode) -> None:
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

    def _due(self, i: int, stamp: int) -> None:
        """A group of node `i` should have ended, unless its load changed or it was held up since that was said."""
        node = self.nodes[i]
        if node.stamp != stamp:
            return
        self._advance(node)
        ended = sorted((group.end, group_id) for group_id, group in node.groups.items() if group.end <= node.clock + 1e-6)
        for _, group_id in ended:
            group = node.groups.pop(group_id)
            self.finished_tokens += group.tokens
            self.tokens[group_id] = group.tokens
            self.autoscaler.generated(self.now - group.since)
            if self.ledger.occupy(group_id, group.version) == self.step:
                self._arrived()
        self._loaded(i)
        if ended:
            self._feed()
