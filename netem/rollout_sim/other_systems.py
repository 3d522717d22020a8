"""How other systems run rollouts, by their papers, on the same engines: synchronous, one step off, a quota, a buffer.

What a paper leaves open is decided in its favour: sequences go to the node with the most free memory, one after another as
places come free, and none is tied to a node beforehand. The sequences of a lost node lose their tokens, since none of the four
papers says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from collections.abc import Sequence as Many

from netem.rollout_sim.engine import FILL, Sequence, SimEngine
from netem.rollout_sim.sim import OpenedGroup, RolloutPolicy, RolloutSimulation

MOST_PASSED = 64
"""Sequences that are passed over, for want of an engine with their version, before a search of the queue ends: the rest of the
queue is likely to want the same versions."""


class Queued(RolloutPolicy):
    """One queue of sequences; the emptiest engine takes the next."""

    def start(self) -> None:
        self.queue: deque[Sequence] = deque()
        self.done: list[OpenedGroup] = []

    def tick(self) -> None:
        self.refill()
        self.spread()

    def refill(self) -> None:
        """Open the groups that may be opened now."""

    def open(self, version: int) -> None:
        self.queue.extend(self.sim.open(version).members)

    def spread(self) -> None:
        """Hand the queue to the engines with the most free memory, whatever version they serve."""
        hand_out(self.sim, self.queue, any_version=True)

    def finished(self, prompt: OpenedGroup) -> None:
        self.done.append(prompt)

    def batch(self, step: int) -> Many[OpenedGroup]:
        return self.done

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        self.done = [p for p in self.done if p not in taken]

    def returned(self, sequences: Many[Sequence]) -> None:
        self.queue.extendleft(s for s in reversed(sequences) if s.group in self.sim.groups)


def has_place(engine: SimEngine, context: float) -> bool:
    """Whether an engine would run one more sequence that holds `context` tokens at once."""
    return not engine.waiting and len(engine.running) < engine.limit and engine.context + context <= FILL * engine.room


def hand_out(
    sim: RolloutSimulation, queue: deque[Sequence], names: Container[str] | None = None, *, held: float = 0.0,
    any_version: bool = False,
) -> None:  # fmt: skip
    """Hand sequences from the queue to the engines (those called `names`, or all) with the most free memory. `held`: tokens of KV
    that an engine must have for each sequence it runs. A sequence goes to an engine that serves its version or a newer one, or
    to any with `any_version`."""
    place = lambda e: has_place(e, sim.workload.prompt) and len(e.running) * held < e.room
    free = {n: sim.touch(n) for n in sim.engines if names is None or n in names}
    free = {n: e for n, e in free.items() if place(e)}
    passed: list[Sequence] = []
    while queue and free:
        sequence = queue.popleft()
        least = max(sim.groups[sequence.group].version, sequence.oldest)
        able = [n for n in free if any_version or sim.serves[n] >= least]
        if not able:
            passed.append(sequence)
            if len(passed) > MOST_PASSED:
                break
            continue
        name = min(able, key=lambda n: free[n].context / free[n].room)
        sim.place(sequence, name)
        if not place(free[name]):
            del free[name]
    queue.extendleft(reversed(passed))


class Synchronous(Queued):
    """verl, colocated or not: generate a batch under the newest version, then train on it."""

    name = "synchronous"
    ahead = 0
    updates_in_flight = False

    def start(self) -> None:
        super().start()
        self.batches = 0

    def refill(self) -> None:
        """Batch k is generated under version k - ahead, once that is served and the batch before is generated."""
        if self.sim.version >= self.batches - self.ahead and not any(p.left for p in self.sim.groups.values()):
            for _ in range(self.sim.workload.groups):
                self.open(self.sim.version)
            self.batches += 1


class OneStepOff(Synchronous):
    """Train on one batch while the next is generated under the version before."""

    name = "one-step-off"
    ahead = 1


class Quota(Queued):
    """AReaL (arXiv 2505.24298): at most (S + t + 1) * B groups opened when t steps are done; finished ones are taken oldest
    first. It bounds how much is under way, not how old each becomes."""

    name = "areal-quota"

    def refill(self) -> None:
        """Open groups up to the quota, as fast as their members find engines."""
        s = self.sim
        while s.opened < (s.settings.staleness + s.step + 1) * s.workload.groups and len(self.queue) < s.workload.samples:
            self.open(s.version)
            self.spread()


class Buffer(Queued):
    """ROLL's buffer: (1 + S) * B groups at once, begun, finished or waiting; what has become older than S is thrown away, begun
    or not, and its room given to a new group."""

    name = "roll-buffer"

    def refill(self) -> None:
        """Open groups until the buffer is full, as fast as their members find engines."""
        s = self.sim
        while len(s.groups) < (1 + s.settings.staleness) * s.workload.groups and len(self.queue) < s.workload.samples:
            self.open(s.version)
            self.spread()

    def stepped(self, step: int, taken: Many[OpenedGroup]) -> None:
        """Throw away what has become older than S."""
        super().stepped(step, taken)
        s = self.sim
        for prompt in list(s.groups.values()):
            begun = [m.oldest for m in prompt.members if m.oldest >= 0]
            if begun and min(begun) < step - s.settings.staleness:
                s.abort(prompt)
        self.queue = deque(q for q in self.queue if q.group in s.groups)
        self.done = [p for p in self.done if p.group_id in s.groups]
