"""Random lives of a learner that is killed at any transaction: nothing consumed twice, lost, stale or mixed.

`tests/support/learner_twin.py` is the world; the operations and their order are hypothesis's. SHOAL_NIGHTLY=1 looks at 10,000.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from learner.rollouts.outcomes import TurnLimits
from tests.support.learner_twin import Killed, World
from tests.support.nightly import cases, examples

SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A killed process loses no page it wrote, so syncing to a real disk would only cost time."""

NAMES = st.sampled_from("abc")


class LearnerLives(RuleBasedStateMachine):
    world: World | None = None

    @initialize(
        staleness=st.integers(0, 3), groups=st.integers(1, 3), samples=st.integers(1, 3), length=st.integers(1, 12),
        every=st.integers(1, 3), nodes=st.integers(1, 3), extra_groups=st.integers(0, 2), extra_samples=st.integers(0, 2),
        truncate=st.booleans(), beside=st.booleans(), catches=st.sampled_from([0.0, 0.1]),
    )  # fmt: skip
    def start(
        self, staleness: int, groups: int, samples: int, length: int, every: int, nodes: int, extra_groups: int,
        extra_samples: int, truncate: bool, beside: bool, catches: float,
    ) -> None:  # fmt: skip
        self.folder = Path(tempfile.mkdtemp(dir=SHM, prefix="shoal-lives-"))
        self.world = World(
            self.folder, staleness=staleness, groups_per_step=groups, samples=samples, length=length, every=every,
            extra_groups=extra_groups, extra_samples=extra_samples, truncate=truncate, beside=beside, catches=catches,
        )  # fmt: skip
        for name in "abc"[:nodes]:
            self.world.join(name)

    def do(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except Killed:
            self.world.crash()

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        self.do(lambda: self.world.join(name))

    @rule(name=NAMES, forget=st.booleans())
    def lose(self, name: str, forget: bool) -> None:
        self.do(lambda: self.world.lose(name, forget=forget))

    @rule(name=NAMES)
    def caught(self, name: str) -> None:
        self.do(lambda: self.world.caught(name))

    @rule(name=NAMES)
    def install(self, name: str) -> None:
        self.do(lambda: self.world.install(name))

    @rule(name=NAMES, which=st.integers(0, 8), count=st.integers(1, 20))
    def work(self, name: str, which: int, count: int) -> None:
        self.do(lambda: self.world.work(name, which, count))

    @rule(seed=st.integers(0, 1 << 16), turns=st.integers(1, 12))
    def run(self, seed: int, turns: int) -> None:
        self.do(lambda: self.world.run(random.Random(seed), turns))

    @rule(seed=st.integers(0, 1 << 16), transactions=st.integers(0, 30), after=st.booleans())
    def run_until_killed(self, seed: int, transactions: int, after: bool) -> None:
        """A kill before, or right after, one of the next transactions, in the midst of whatever does it."""
        self.world.journal.fuse, self.world.journal.fuse_after = transactions, after
        self.do(lambda: self.world.run(random.Random(seed), 10))
        self.world.journal.fuse = None

    @rule(name=NAMES, which=st.integers(0, 2))
    def deliver(self, name: str, which: int) -> None:
        self.do(lambda: self.world.deliver(name, which, again=False))

    @rule(name=NAMES, which=st.integers(0, 20))
    def deliver_again(self, name: str, which: int) -> None:
        self.do(lambda: self.world.deliver(name, which, again=True))

    @rule()
    def write_tokens(self) -> None:
        self.do(self.world.rollouts.tokens.write)

    @rule()
    def reward(self) -> None:
        self.do(self.world.reward)

    @rule()
    def wait(self) -> None:
        self.do(self.world.wait)

    @rule()
    def train(self) -> None:
        self.do(self.world.reward)
        self.do(self.world.train)

    @rule()
    def durable(self) -> None:
        self.do(self.world.durable)

    @rule(forget=st.booleans(), power=st.booleans())
    def crash(self, forget: bool, power: bool) -> None:
        self.world.crash(forget=forget, power=power)

    @rule()
    def sync(self) -> None:
        self.world.save()

    @invariant()
    def holds(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            self.world.crash()
            self.world.drain()
        finally:
            self.world.journal.close()
            shutil.rmtree(self.folder, ignore_errors=True)


TestLearnerLives = LearnerLives.TestCase
TestLearnerLives.settings = settings(
    max_examples=examples(60), stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)


class EpisodeLives(LearnerLives):
    """The same, where completions are episodes: an environment answers late, twice, or not at all before the next crash."""

    @initialize(
        staleness=st.integers(0, 3), groups=st.integers(1, 2), samples=st.integers(1, 3), length=st.integers(3, 24),
        extra_groups=st.integers(0, 1), extra_samples=st.integers(0, 2), truncate=st.booleans(),
        limits=st.builds(TurnLimits, st.integers(1, 4), st.integers(0, 4)),
    )  # fmt: skip
    def start(  # type: ignore[override]
        self, staleness: int, groups: int, samples: int, length: int, extra_groups: int, extra_samples: int, truncate: bool,
        limits: TurnLimits,
    ) -> None:  # fmt: skip
        self.folder = Path(tempfile.mkdtemp(dir=SHM, prefix="shoal-lives-"))
        self.world = World(
            self.folder, staleness=staleness, groups_per_step=groups, samples=samples, length=length, every=1,
            extra_groups=extra_groups, extra_samples=extra_samples, truncate=truncate, turns=limits,
        )  # fmt: skip
        for name in "ab":
            self.world.join(name)

    @rule(which=st.integers(0, 8), how=st.sampled_from([0, 0, 0, 0, 1, 2]))
    def answer(self, which: int, how: int) -> None:
        self.do(lambda: self.world.answer(which, how))

    @rule(which=st.integers(0, 30))
    def answer_again(self, which: int) -> None:
        self.do(lambda: self.world.answer_again(which))


TestEpisodeLives = EpisodeLives.TestCase
TestEpisodeLives.settings = settings(
    max_examples=examples(60), stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow]
)


def test_episodes_are_trained_on_in_many_lives(tmp_path: Path) -> None:
    """What the machine above relies on does happen: several turns, answers, cuts, crashes in mid-episode."""
    world = World(
        tmp_path, staleness=1, groups_per_step=2, samples=2, length=40, every=1, extra_samples=1, truncate=True,
        turns=TurnLimits(4, 6),
    )  # fmt: skip
    rng = random.Random(2)
    for life in range(30):
        for name in "abc":
            world.join(name)
        world.journal.fuse, world.journal.fuse_after = (rng.randrange(80) if life % 2 else None), bool(life % 4 == 1)
        with contextlib.suppress(Killed):
            world.run(rng, 12)
        world.crash()
        world.check()
    assert world.episodes > 40 and world.most_turns == 4 and world.kept > 20 and world.regenerated > 0
    assert world.truncated > 0 and world.answered > 2 * world.episodes
    world.drain()
    world.journal.close()


def test_the_world_is_not_a_quiet_one(tmp_path: Path) -> None:
    """What the machine above relies on does happen: tokens are kept, cut, ignored; groups go on and are consumed."""
    world = World(tmp_path, staleness=2, groups_per_step=2, samples=2, length=12, every=2)
    for life in range(6):
        world.join("a")
        world.join("b")
        for turn in range(40):
            for name in "ab":
                world.install(name)
                world.work(name, turn, 2)
                world.deliver(name, 0, again=False)
            world.reward()
            world.train()
            if turn % 7 == 0:
                world.rollouts.tokens.write()
        world.crash(forget=bool(life % 2), power=life == 3)
    world.check()
    assert world.lives == 7 and world.kept > 20 and world.regenerated > 0 and len(world.disk.consumed) > 10
    while world.nodes["b"].wire:
        world.deliver("b", 0, again=False)
    world.work("b", 0, 1)
    world.deliver("b", 0, again=False)
    assert world.ignored > 0 and any(b.state == "orphaned" for b in world.disk.groups.values())
    world.drain()
    world.journal.close()


@pytest.mark.parametrize(
    ("extra_groups", "extra_samples", "truncate"), cases([(2, 1, True), (0, 2, False)], (2, 0, False), (0, 0, True))
)
def test_what_is_beyond_need_is_cut_in_many_lives(
    extra_groups: int, extra_samples: int, truncate: bool, tmp_path: Path
) -> None:
    """Surplus and truncation do happen here, between crashes and in the midst of them, and training goes on."""
    world = World(
        tmp_path, staleness=1, groups_per_step=2, samples=2, length=12, every=1,
        extra_groups=extra_groups, extra_samples=extra_samples, truncate=truncate,
    )  # fmt: skip
    rng, account = random.Random(1), Counter[str]()
    for life in range(40):
        for name in "abc":
            world.join(name)
        world.journal.fuse, world.journal.fuse_after = (rng.randrange(80) if life % 2 else None), bool(life % 4 == 1)
        with contextlib.suppress(Killed):
            world.run(rng, 12)
        account.update({k: int(v) for k, v in world.rollouts.buffers.redundancy.total.values().items()})
        world.crash()
    states = Counter(b.state for b in world.disk.groups.values())
    assert states["consumed"] > 40
    assert (states["surplus"] > 20) == (extra_groups > 0)
    assert (account["surplus_sequences"] > account["surplus_groups"] * (2 + extra_samples)) == (extra_samples > 0)
    assert (world.truncated > 0) == truncate and (account["truncated"] > 0) == truncate
    world.drain()
    world.journal.close()


@pytest.mark.parametrize("every", cases([3], 1))
def test_commits_that_come_late_in_many_lives(every: int, tmp_path: Path) -> None:
    """Checkpoints beside training: commits of steps that training has left behind, and crashes that take published versions
    back. `World` sees that nothing is consumed twice, and nothing trained on of a version that was taken back."""
    world = World(tmp_path, staleness=2, groups_per_step=2, samples=2, length=12, every=every, beside=True)
    rng = random.Random(3)
    for life in range(40 * every):
        for name in "abc":
            world.join(name)
        world.journal.fuse, world.journal.fuse_after = (rng.randrange(120) if life % 2 else None), bool(life % 4 == 1)
        with contextlib.suppress(Killed):
            world.run(rng, 14)
        world.crash()
        world.check()
    orphaned = sum(b.state == "orphaned" for b in world.disk.groups.values())
    assert world.dead and orphaned > 0 and (world.late_commits > 10) == (every > 1), "with 1 they come before the next is taken"
    assert world.most_behind == 2 * every - 1, "how far training was past the last commit, at the most"
    assert len(world.disk.consumed) > 60
    world.drain()
    world.journal.close()


@pytest.mark.parametrize("episodes", [False, True])
def test_what_a_caught_node_made_is_made_again_in_many_lives(episodes: bool, tmp_path: Path) -> None:
    """Nodes are caught between crashes and in the midst of them; nothing is trained on twice, and training goes on."""
    world = World(
        tmp_path, staleness=2, groups_per_step=2, samples=2, length=12, every=2, extra_groups=1, catches=0.15,
        turns=TurnLimits(4, 6) if episodes else None,
    )  # fmt: skip
    rng = random.Random(4)
    for life in range(20):
        for name in "abc":
            world.join(name)
        world.journal.fuse, world.journal.fuse_after = (rng.randrange(80) if life % 2 else None), bool(life % 4 == 1)
        with contextlib.suppress(Killed):
            world.run(rng, 12)
        world.crash()
        world.check()
    states = Counter(b.state for b in world.disk.groups.values())
    assert world.taken_back > 20 and states["caught"] > 10 and states["consumed"] > 10
    world.drain()
    world.journal.close()
