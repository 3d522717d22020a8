"""What kills cost, by what the processes wrote down and the journal that a dead learner left. Must not start or kill anything."""

from __future__ import annotations

import base64
import json
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from learner.rollouts.group import ATTEMPTS
from learner.trajectory import Trajectory, unpack_groups
from p2p.errors import ShoalError

Key = tuple[int, int]
"""(group id, member), or (task index, member)"""


@dataclass
class EngineKill:
    """An engine killed under its node, which stays."""

    node: str
    at: float
    """CLOCK_MONOTONIC"""
    served: str
    """the version"""
    next: str = ""
    """the version that the next engine began with"""
    down_s: float = 0.0
    relayed: int = 0
    """chunks that the node passed on while it had no engine"""


@dataclass
class ChaosAccount:
    """What the kills cost."""

    node_kills: int = 0
    engine_kills: list[EngineKill] = field(default_factory=list)
    learner_kills: list[str] = field(default_factory=list)
    resumed_groups: int = 0
    resumed_tokens: int = 0
    regenerated: int = 0
    """tokens that a dead learner had accepted and its journal had not"""
    regenerated_max: int = 0
    """the most of one trajectory at one kill"""
    in_flight: int = 0
    """tokens that nodes had sent and a dead learner had not accepted"""
    accepted: int = 0
    aborted: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    consumed: int = 0
    journal_s: dict[str, float] = field(default_factory=dict)
    """from a token's making to the end of the transaction that holds it: p50, p99, max"""
    seconds: float = 0.0


class Books:
    """The account of one run, kept from life to life of its learner.

    ShoalError when something happened that must not: a position accepted twice or left out, the same sample in two ways.
    """

    def __init__(self, root: Path, run_dir: Path, frozen: bool) -> None:
        self.account = ChaosAccount()
        self.trajectories: dict[Key, Trajectory] = {}
        """by (task index, member), of every group that was finished"""
        self.left: dict[Key, int] = {}
        """(group, member) -> tokens that the last dead learner's journal held"""
        self._root, self._run_dir, self._frozen = root, run_dir, frozen
        self._journaled: list[tuple[Key, int, int, float]] = []

    def life_ended(self, life: int) -> None:
        """Learner `life` has ended: what it accepted, finished and journaled."""
        self._check_continued(life)
        for kind, *values in self._lines(f"learner-{life}"):
            if kind == "finished":
                self._finished(values[0])
            elif kind == "journaled":
                name, start, count, at = values
                group, member, _ = (int(part) for part in name.split("."))
                self._journaled.append(((group, member), start, count, at))

    def take_stock(self, life: int, nodes: Collection[str]) -> None:
        """What the learner killed as `life` had accepted, against what its journal holds."""
        copy = self._root / f"stock-{life}"
        copy.mkdir()
        for file in self._run_dir.glob("journal.sqlite*"):
            shutil.copy(file, copy)
        db = sqlite3.connect(copy / "journal.sqlite")
        reserved = {g: n for g, n in db.execute("SELECT group_id, samples FROM groups WHERE state = 'reserved'")}
        journaled: dict[Key, int] = defaultdict(int)
        for group, member, stop in db.execute(
            "SELECT group_id, member, max(start + length(ids) / 4) FROM pieces GROUP BY group_id, member"
        ):
            journaled[group, member] = stop
        db.close()
        accepted, sent = dict(journaled), dict(journaled)
        for key, _, start, count, _ in self._taps(f"learner-{life}", "accepted"):
            accepted[key] = max(accepted.get(key, 0), start + count)
        for name in nodes:
            for key, attempt, start, count, _ in self._taps(name, "sent"):
                if attempt // ATTEMPTS == life - 1:
                    sent[key] = max(sent.get(key, 0), start + count)
        account = self.account
        for key in ((group, member) for group, samples in reserved.items() for member in range(samples)):
            again = accepted.get(key, 0) - journaled[key]
            if again < 0:
                raise ShoalError(f"the journal holds more of {key} than was accepted")
            account.regenerated += again
            account.regenerated_max = max(account.regenerated_max, again)
            account.in_flight += max(0, sent.get(key, 0) - accepted.get(key, 0))
        self.left = {(g, m): journaled[g, m] for g, n in reserved.items() for m in range(n)}

    def time_to_journal(self, nodes: Collection[str]) -> None:
        """How long tokens took from their making to the journal, in `account.journal_s`. A position that was made twice counts
        from the last time before it was journaled."""
        made: dict[tuple[Key, int], list[float]] = defaultdict(list)
        for name in nodes:
            for key, _, start, count, at in self._taps(name, "made"):
                for position in range(start, start + count):
                    made[key, position].append(at)
        took = [
            at - max(before)
            for key, start, count, at in self._journaled
            for position in range(start, start + count)
            if (before := [made_at for made_at in made[key, position] if made_at <= at])
        ]
        if took:
            p50, p99 = np.percentile(took, [50, 99])
            self.account.journal_s = {"p50": float(p50), "p99": float(p99), "max": max(took)}

    def engines_back(self) -> bool:
        """Whether each engine that was killed has a successor; fills in what `account.engine_kills` lack."""
        for kill in self.account.engine_kills:
            lines = list(self._lines(kill.node))
            kill.next, back = next(((v, at) for k, v, at in (x for x in lines if x[0] == "attached") if at > kill.at), ("", 0.0))
            if not kill.next:
                return False
            kill.down_s = back - kill.at
            kill.relayed = sum(1 for kind, *values in lines if kind == "relayed" and kill.at < values[0] < back)
        return True

    def _finished(self, packed: str) -> None:
        """One that a kill kept from the journal is finished again by the next life."""
        for group in unpack_groups(base64.b64decode(packed)):
            for member, t in enumerate(group.trajectories):
                known = self.trajectories.setdefault((group.task_index, member), t)
                same = known.completion_ids == t.completion_ids and known.seed == t.seed
                if self._frozen and not same:
                    raise ShoalError(f"sample {member} of task {group.task_index} came out in two ways")

    def _check_continued(self, life: int) -> None:
        """In one life no position is accepted twice or left out; a resumed one begins just where the journal ended."""
        at = dict(self.left)
        for key, _, start, count, _ in self._taps(f"learner-{life}", "accepted"):
            if start != at.get(key, 0):
                raise ShoalError(f"{key} goes on at {start}, it stood at {at.get(key, 0)}")
            at[key] = start + count
            self.account.accepted += count

    def _lines(self, name: str) -> Iterator[list[Any]]:
        """What a process wrote down (the last line may be cut off)."""
        path = self._root / f"{name}.taps"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def _taps(self, name: str, kind: str) -> Iterator[tuple[Key, int, int, int, float]]:
        """((group, member), attempt, start, count, time or 0) of every run of tokens of which a process wrote down `kind`."""
        for found, *values in self._lines(name):
            if found == kind:
                request_id, start, count, *at = values
                group, member, attempt = (int(part) for part in request_id.split("."))
                yield (group, member), attempt, start, count, at[0] if at else 0.0


def differing(ours: dict[Key, Trajectory], others: dict[Key, Trajectory]) -> list[Key]:
    """Samples that both runs have, and that came out with other tokens, or under another seed. ShoalError when they have
    few in common."""
    both = sorted(set(ours) & set(others))
    if len(both) <= len(ours) / 2:
        raise ShoalError(f"{len(both)} samples in common of {len(ours)} and {len(others)}")
    return [k for k in both if (ours[k].completion_ids, ours[k].seed) != (others[k].completion_ids, others[k].seed)]
