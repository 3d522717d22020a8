"""`shoal bench chaos --lives N`: N lives of a learner, each killed with SIGKILL at a random moment, and an account of them.

A life is a fork of a process that has imported everything, so that a kill costs a second or two and not a minute. It is the real
trainer with its checkpoints, and the real rollouts and journal; sockets, nodes and engines are played (`short_life`). Must not
take part in what it counts: it reads the journal and what the lives wrote down.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from learner.journal.journal import Journal
from learner.rollouts.recovery import survives
from netem.bench.chaos.run import random_model
from p2p.errors import ShoalError
from p2p.version import Version

LIFE = "netem.bench.chaos.short_life"
"""The module whose `run` is a life; imported by the process that all lives are forked from."""

MOST_TAPS = 16
"""A kill comes after so many lines of a life, at the most: a step writes five. By lines, and not by the clock, so that lives are
of the same lengths on a busy machine."""

SOON_S = 0.1
"""The latest moment of a kill after such a line: within what takes longest, writing a checkpoint."""

EARLY = 0.1
"""Share of the lives that are killed before they train: while they open the journal, load or resume."""

LAST_STEPS = 3
"""Steps of the last life, which nobody kills."""

WAIT_S = 300.0
"""Seconds of the longest wait: so long that only a hang reaches it."""


@dataclass
class LivesAccount:
    """What so many kills left behind."""

    lives: int = 0
    every: int = 1
    steps: int = 0
    """that were committed"""
    consumed: int = 0
    lost: int = 0
    twice: int = 0
    """groups that two steps of the surviving history trained on"""
    aborted: dict[str, int] = field(default_factory=dict)
    writing: int = 0
    """kills in the midst of a checkpoint: begun, and not committed"""
    half_written: int = 0
    """kills that left a folder half-written"""
    ahead: int = 0
    """kills that took back versions which were sealed"""
    taken_again: int = 0
    """steps that were trained and not committed, over all kills"""
    taken_again_max: int = 0
    """the most of one kill"""
    resumed: int = 0
    """lives that went on from a checkpoint, each the very bits that were begun"""
    seconds: float = 0.0


class ShortLives:
    """The lives of one run, and its books. ShoalError where something is not as it must be."""

    def __init__(self, root: Path, every: int, seed: int, say: Callable[[str], None]) -> None:
        self.root, self.rng, self.say = root, random.Random(seed), say
        self.account = LivesAccount(every=every)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([LIFE])
        self._read = 0
        self._taps: list[list[Any]] = []
        random_model(root / "model")

    def go(self, lives: int) -> LivesAccount:
        """`lives` kills, and a last life that ends by itself."""
        began = time.monotonic()
        for number in range(1, lives + 1):
            self._kill_one()
            self.account.lives = number
            if number % 10 == 0:
                done = self._committed()
                self.say(f"killed {number} of {lives}: {done} steps committed, {self.account.taken_again} taken again")
        last = self._start(self._committed() + LAST_STEPS)
        last.join(WAIT_S)
        if last.exitcode != 0:
            raise ShoalError(f"the last life ended with {last.exitcode}")
        self._new_taps()
        self._balance()
        self.account.seconds = time.monotonic() - began
        return self.account

    def _start(self, steps: int) -> ForkServerProcess:
        life = self._context.Process(target=_run, args=(str(self.root), steps, self.account.every))
        life.start()
        return life

    def _kill_one(self) -> None:
        life = self._start(1 << 14)
        before, deadline = len(self._taps), time.monotonic() + WAIT_S
        if self.rng.random() < EARLY:
            time.sleep(self.rng.random() * 0.5)
        else:
            lines = self.rng.randint(1, MOST_TAPS)
            while len(self._taps) < before + lines:
                self._new_taps()
                if not life.is_alive() or time.monotonic() > deadline:
                    raise ShoalError(f"a life ended by itself, or hangs ({life.exitcode}); what it said is above")
                time.sleep(0.005)
            time.sleep(self.rng.random() * SOON_S)
        assert life.pid is not None
        os.kill(life.pid, signal.SIGKILL)
        life.join(WAIT_S)
        if life.exitcode != -signal.SIGKILL:
            raise ShoalError(f"a life had ended with {life.exitcode} before it was killed; what it said is above")
        self._new_taps()
        self._count(self._taps[before:])

    def _count(self, taps: list[list[Any]]) -> None:
        """What one kill took back."""
        account, committed = self.account, self._committed()
        trained = [tap[2] for tap in taps if tap[0] == "trained"]
        again = max(0, max(trained, default=0) - committed)
        account.taken_again += again
        account.taken_again_max = max(account.taken_again_max, again)
        account.writing += any(tap[0] == "begun" and tap[2] > committed for tap in taps)
        account.half_written += bool(list((self.root / "checkpoints").glob(".step_*.tmp")))
        account.ahead += any(tap[0] == "sealed" and tap[2] > committed for tap in taps)

    def _journal(self) -> Journal:
        return Journal.open(self.root / "journal.sqlite", "lives")

    def _committed(self) -> int:
        if not (self.root / "journal.sqlite").exists():
            return 0
        with self._journal() as journal:
            last = journal.last_commit()
        return last.step if last else 0

    def _new_taps(self) -> None:
        """What was written down since the last look; a kill may cut a line off."""
        path = self.root / "taps.jsonl"
        if not path.exists():
            return
        with open(path, "rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read += whole
        for line in data[:whole].splitlines():
            try:
                self._taps.append(json.loads(line))
            except ValueError:  # the end of one life's last line is missing, and the next one's first follows
                self._taps.append(json.loads(line[line.rfind(b'["') :]))

    def _balance(self) -> None:
        """Everything that must hold at the end, from the journal and from what the lives wrote down."""
        account, every = self.account, self.account.every
        with self._journal() as journal:
            counts, epochs = journal.counts(), journal.epochs()
            commits = journal._db.execute("SELECT step, epoch FROM commits ORDER BY step").fetchall()
            consumed = journal._db.execute("SELECT group_id, step FROM consumed").fetchall()
        account.steps, account.consumed = commits[-1][0], len(consumed)
        account.lost = counts.groups.lost + counts.trajectories.lost
        account.aborted = dict(counts.groups.aborted)
        self._check_steps([step for step, _ in commits], every)
        if account.taken_again_max > every:
            raise ShoalError(f"a kill took {account.taken_again_max} steps back with a checkpoint every {every}")
        epoch_of, at = dict[int, int](), 0
        for step, epoch in commits:  # the life that took each step of the surviving history
            epoch_of |= dict.fromkeys(range(at + 1, step + 1), epoch)
            at = step
        trained = {(tap[1], tap[2]): tap[3] for tap in self._taps if tap[0] == "trained"}
        history = {step: trained[epoch, step] for step, epoch in epoch_of.items()}
        by_commit: dict[int, set[int]] = {}
        for group_id, step in consumed:
            by_commit.setdefault(step, set()).add(group_id)
        at = 0
        for step, _ in commits:
            if by_commit.get(step, set()) != {group for s in range(at + 1, step + 1) for group in history[s]}:
                raise ShoalError(f"commit of step {step}: the journal and the trainer have other groups")
            at = step
        all_trained = [group for groups in history.values() for group in groups]
        account.twice = len(all_trained) - len(set(all_trained))
        self._check_checkpoints(history)
        self._check_versions(epoch_of, epochs)

    def _check_steps(self, steps: list[int], every: int) -> None:
        between = (every + 1) // 2  # as TrainerSection.checkpoint_interval, beside training
        expected = [step for step in range(1, steps[-1] + 1) if step % between == 0 or step == steps[-1]]
        if steps != expected:
            raise ShoalError(f"the steps that were committed: {steps}")

    def _check_checkpoints(self, history: dict[int, list[int]]) -> None:
        """Each life went on from the bits that its forebear had when it began that checkpoint, and from its groups."""
        begun: dict[int, str] = {}
        for kind, _, step, *values in (tap for tap in self._taps if tap[0] in ("begun", "resumed")):
            if kind == "begun":
                begun[step] = values[0]
                continue
            digest, groups = values
            if digest != begun[step]:
                raise ShoalError(f"the checkpoint of step {step} is not the state that it was taken of")
            if [sorted(of) for of in groups] != [sorted(history[s]) for s in range(1, step + 1)]:
                raise ShoalError(f"the weights of step {step} were made of other groups than the journal says")
            self.account.resumed += 1

    def _check_versions(self, epoch_of: dict[int, int], epochs: dict[int, int]) -> None:
        """No step of the surviving history trained on a token of a version that a kill took back, or on one that is too old."""
        handed = {(tap[1], tap[2]): tap[3] for tap in self._taps if tap[0] == "handed"}
        for step, epoch in epoch_of.items():
            for group, versions in handed[epoch, step - 1].items():
                if not all(survives(Version(*v), epochs, self.account.steps) for v in versions):
                    raise ShoalError(f"step {step} trained on group {group} of {versions}, and a kill took one of these back")


def _run(root: str, steps: int, every: int) -> None:
    from netem.bench.chaos.short_life import run  # in the life: this process is better without torch

    run(root, steps, every)


def bench_lives(lives: int, every: int, seed: int, folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """What `shoal bench chaos --lives N --json` prints."""
    root = Path(tempfile.mkdtemp(prefix="shoal-lives-", dir=folder))
    try:
        account = ShortLives(root, every, seed, say).go(lives)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {"ok": not account.lost and not account.twice} | asdict(account)


def describe_lives(result: dict[str, Any]) -> str:
    """A few lines for people."""
    r = result
    return (
        f"{r['lives']} lives killed with SIGKILL, a checkpoint every {r['every']} steps; {r['seconds']:.0f} s\n"
        f"groups: {r['consumed']:,} consumed by {r['steps']:,} steps, {r['twice']} twice; {r['lost']} lost, aborted "
        f"{r['aborted'] or 'none'}\n"
        f"{r['writing']} kills between a checkpoint's beginning and its commit, {r['half_written']} of them left a folder "
        f"half-written; {r['ahead']} took published versions back\n"
        f"steps taken again: {r['taken_again']}, at most {r['taken_again_max']} after one kill; {r['resumed']} lives went on "
        f"from a checkpoint, each from the very bits that it was taken of"
    )
