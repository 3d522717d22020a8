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
from netem.bench.chaos.replay import GameReplay
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
    orphaned: int = 0
    """tokens in the journal, of groups that go on, that were made under versions which a kill took back"""
    accepted: int = 0
    aborted: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    consumed: int = 0
    journal_s: dict[str, float] = field(default_factory=dict)
    """from a token's making to the end of the transaction that holds it: p50, p99, max"""
    episodes: int = 0
    """that were finished and played once more by their tokens, where the task has turns"""
    turns: int = 0
    """of the model, in these"""
    mid_episode: int = 0
    """episodes that had been answered at least once when a learner died, and were not over"""
    moved: int = 0
    """episodes finished by another node than the one that began them"""
    seconds: float = 0.0


class Books:
    """The account of one run, kept from life to life of its learner.

    ShoalError when something happened that must not: a position accepted twice or left out, the same sample in two ways.
    """

    def __init__(self, root: Path, run_dir: Path, frozen: bool, replay: GameReplay | None = None) -> None:
        self.account = ChaosAccount()
        self.trajectories: dict[Key, Trajectory] = {}
        """by (task index, member), of every group that was finished"""
        self.left: dict[Key, int] = {}
        """(group, member) -> tokens that the last dead learner's journal held"""
        self._root, self._run_dir, self._frozen, self._replay = root, run_dir, frozen, replay
        self.given_up: list[int] = []
        """groups that were finished and whose prompts were drawn again: the journal must have them as orphaned"""
        self._group_of: dict[Key, int] = {}
        """(task index, member) -> the group that was finished with it last"""
        self._ids: dict[Key, dict[int, int]] = {}
        """(group, member) -> position -> the token id that was accepted there last"""
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
        # Versions that were published and not committed are lost with this life: what is of them is not gone on with.
        (committed,) = db.execute("SELECT coalesce(max(step), 0) FROM commits").fetchone()
        reserved = {
            group: samples
            for group, samples, lost in db.execute(
                "SELECT group_id, samples, epoch = ? AND step > ? FROM groups WHERE state = 'reserved'", (life, committed)
            )
            if not lost
        }
        cut = dict[Key, int]()
        for group, member, start in db.execute(
            "SELECT group_id, member, min(start) FROM pieces WHERE epoch = ? AND step > ? GROUP BY group_id, member",
            (life, committed),
        ):
            cut[group, member] = start
        journaled: dict[Key, int] = defaultdict(int)
        for group, member, stop in db.execute(
            "SELECT group_id, member, max(start + length(ids) / 4) FROM pieces GROUP BY group_id, member"
        ):
            journaled[group, member] = stop
        answered = {(g, m) for g, m in db.execute("SELECT DISTINCT group_id, member FROM pieces WHERE epoch IS NULL")}
        db.close()
        accepted, sent = dict(journaled), dict(journaled)
        for kind in ("accepted", "given"):
            for key, _, start, count, _ in self._taps(f"learner-{life}", kind):
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
        whole = {(g, m): journaled[g, m] for g, n in reserved.items() for m in range(n)}
        self.left = {key: min(count, cut.get(key, count)) for key, count in whole.items()}
        account.orphaned += sum(whole.values()) - sum(self.left.values())
        account.mid_episode += len(answered & set(self.left))

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
                taken = self._ids[group.group_id, member]
                if t.completion_ids != tuple(taken[at] for at in range(len(taken))):
                    raise ShoalError(f"member {member} of group {group.group_id} has other tokens than were accepted")
                if self._replay is not None and (group.task_index, member) not in self.trajectories:
                    self.account.turns += self._replay.check(group.task_index, t)
                    self.account.episodes += 1
                    self.account.moved += len(t.makers) > 1
                key = group.task_index, member
                if self._group_of.setdefault(key, group.group_id) != group.group_id:
                    # PlayedToken again, since a kill took back the version that made it: the journal must say so.
                    self.given_up.append(self._group_of[key])
                    self._group_of[key], self.trajectories[key] = group.group_id, t
                known = self.trajectories.setdefault(key, t)
                same = known.completion_ids == t.completion_ids and known.seed == t.seed
                if self._frozen and not same:
                    raise ShoalError(f"sample {member} of task {group.task_index} came out in two ways")

    def _check_continued(self, life: int) -> None:
        """In one life no position is accepted twice or left out; a resumed one begins just where the journal ended, so what that
        holds stays as it is. With frozen weights what is made again is the same."""
        at = dict(self.left)
        for kind, *values in self._lines(f"learner-{life}"):
            if kind not in ("accepted", "given"):
                continue
            name, start, count, ids = values
            group, member, _ = (int(part) for part in name.split("."))
            key = group, member
            if start != at.get(key, 0):
                raise ShoalError(f"{key} goes on at {start}, it stood at {at.get(key, 0)}")
            at[key] = start + count
            taken = self._ids.setdefault(key, {})
            if self._frozen and any(taken.get(start + i, new) != new for i, new in enumerate(ids)):
                raise ShoalError(f"{key} has other tokens from {start} on than in the life before")
            for position in [position for position in taken if position >= start]:
                del taken[position]
            taken.update(enumerate(ids, start))
            self.account.accepted += count if kind == "accepted" else 0

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
