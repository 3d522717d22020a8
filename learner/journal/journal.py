"""The learner's memory on disk: one SQLite file in the run directory, from which any crash is recovered.

Must not know the network, torch, or where a group sits in the ledger. It stores decisions after they were made and
before they are acted on: a group is recorded before its first request is sent, a commit before its step counts as done.

Exactly once: `commit` is one transaction that names the checkpoint and marks its groups consumed, and it is on the disk
when the call returns (synchronous=FULL; everything else is NORMAL: in WAL mode a power cut may take back the newest
writes but never part of a transaction, and the kill of a process takes back none). SQLite itself forbids a second
consumption, or a step back in a group's life (`journal_schema`).

Tokens: `record_tokens` keeps what unfinished trajectories have so far, a batch a transaction, without a sync: kill -9 takes
back none of it. A group's pieces go in the transaction that finishes or aborts it.

Epochs: a version is (epoch, step). When epoch e + 1 starts at step s, the weights (e, s') with s' > s are lost for
ever, also when epoch e + 1 later reaches s' itself. So the epochs table keeps each epoch's start step, and
`learner/rollouts/recovery.py` decides from it what may still be trained on.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from learner.journal.records import Piece, ReservedGroup, UnfinishedGroup
from learner.journal.schema import prepare
from learner.trajectory import Group, pack_groups, unpack_groups
from p2p.errors import UsageError
from p2p.files import make_private, take_lock
from p2p.forgetting import forget_oldest
from p2p.version import Version

SURPLUS = "surplus"
"""The reason of an abort because others filled the buffer first."""

CAUGHT = "caught"
"""The reason of an abort because a node that was caught cheating had made some of it."""

RETRY_REASONS = ("restart", "orphaned", "stale", SURPLUS, CAUGHT)
"""Aborts that were no fault of the prompt: it is generated again, under a new group id. Also what was surplus: that is often what
takes long, and a run that passed it over would learn from prompts with short answers alone."""

MOST_ROWS = 100_000
"""Nodes that are remembered, as many as identities in the books of who may come: a ticket may bring new ones for ever."""

FORGET_EVERY = 1_000
"""Nodes are counted each time that so many were recorded: a count looks at all of them."""


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """The last step whose checkpoint is whole: where a resume starts."""

    step: int
    epoch: int
    checkpoint: str
    time: float


@dataclass(frozen=True, slots=True)
class JournalTally:
    """Groups or trajectories over the whole run, every epoch."""

    reserved: int
    """ever, from a running total and not from the rows"""
    outstanding: int
    """reserved, not finished"""
    finished: int
    """waiting to be trained on"""
    consumed: int
    """from the table of consumptions, not from the groups' states"""
    aborted: dict[str, int]
    """by reason"""

    @property
    def lost(self) -> int:
        """What no state accounts for: 0, or the journal has a bug."""
        return self.reserved - self.outstanding - self.finished - self.consumed - sum(self.aborted.values())


@dataclass(frozen=True, slots=True)
class JournalCounts:
    groups: JournalTally
    trajectories: JournalTally


class Journal:
    """One run's journal, held by one learner at a time. Synchronous; not for use from two threads."""

    def __init__(self, path: Path, db: sqlite3.Connection, lock: int, clock: Callable[[], float]) -> None:
        self._path, self._db, self._lock, self._clock = path, db, lock, clock
        self._next_group = self._one("SELECT coalesce(max(group_id), -1) + 1 FROM groups")
        self._next_task = self._one("SELECT coalesce(max(task_index), -1) + 1 FROM groups")
        self._makers: dict[str, int] = {}
        self._seen = 0
        """how often a node was recorded in this life"""
        """peer -> its number in the table of pieces, of those that are in it for certain"""
        self.epoch = self._one("SELECT coalesce(max(epoch), 0) FROM epochs")
        """the newest epoch; 0 before the first `new_epoch`"""

    @classmethod
    def open(cls, path: Path, run_id: str, *, clock: Callable[[], float] = time.time) -> Journal:
        """Open or create the journal of run `run_id`.

        UsageError when another learner holds it, when the file is no journal, of another schema, or of another run.
        The lock is on a file beside it and goes with the process, however that ends.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, lock)
            try:
                held = not take_lock(lock)
            except OSError as error:
                raise UsageError(f"cannot lock {path}.lock: {error.strerror}") from None
            if held:
                raise UsageError(f"another learner is running on this directory: {path.parent}")
            try:
                with suppress(OSError):  # what stands in the way SQLite tells as well
                    make_private(path)  # prompts and answers; SQLite gives its two files beside this one the same mode
                db = sqlite3.connect(path, isolation_level=None)
                undo.callback(db.close)
                prepare(db, path, run_id)
                journal = cls(path, db, lock, clock)
            except sqlite3.OperationalError as error:  # a full disk, no permission: no fault of the file
                error.add_note(str(path))
                raise
            except sqlite3.DatabaseError as error:
                raise UsageError(f"{path} is not a journal: {error}") from error
            undo.pop_all()
            return journal

    def close(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            self._db.close()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- epochs and commits

    def new_epoch(self) -> int:
        """Begin an epoch at the last commit. On the disk before it returns: two epochs must never share a number."""
        with self._transaction(durable=True):
            last = self.last_commit()
            epoch = self._one("SELECT coalesce(max(epoch), 0) + 1 FROM epochs")
            self._db.execute("INSERT INTO epochs VALUES (?, ?, ?)", (epoch, last.step if last else 0, self._clock()))
        self.epoch = epoch
        return epoch

    def epochs(self) -> dict[int, int]:
        """Epoch -> the committed step it started from."""
        return dict(self._db.execute("SELECT epoch, start_step FROM epochs ORDER BY epoch"))

    def last_commit(self) -> CommittedStep | None:
        row = self._db.execute(
            "SELECT step, epoch, checkpoint, time FROM commits ORDER BY step DESC LIMIT 1"
        ).fetchone()
        return CommittedStep(*row) if row else None

    def commit(self, step: int, checkpoint: str, group_ids: Sequence[int]) -> None:
        """`step` optimizer steps are done and `checkpoint`, already synced, holds them; these groups made it so.

        One transaction, durable on return. ValueError, and nothing changed, when the step does not come after the last
        commit or a group is not finished (or already consumed, aborted, unknown, listed twice).
        """
        with self._transaction(durable=True):
            last = self.last_commit()
            if last is not None and step <= last.step:
                raise ValueError(f"commit of step {step} after step {last.step}")
            if not self.epoch:
                raise ValueError("commit before any epoch")
            self._db.execute("INSERT INTO commits VALUES (?, ?, ?, ?)", (step, self.epoch, checkpoint, self._clock()))
            for group_id in group_ids:
                self._move(group_id, "state = 'consumed', payload = NULL, consumed_step = ?", (step,), "finished")
                self._db.execute("INSERT INTO consumed VALUES (?, ?)", (group_id, step))

    # ---- groups

    def next_group_id(self) -> int:
        """A group id that this run never recorded."""
        self._next_group += 1
        return self._next_group - 1

    @property
    def groups_so_far(self) -> int:
        """What `next_group_id` gives next: every id that was given out is below."""
        return self._next_group

    def next_task_index(self) -> int:
        """The next prompt of the task: 0, 1, 2, ... over all epochs (`tasks_to_retry` has those to be made again)."""
        self._next_task += 1
        return self._next_task - 1

    def record_reserved(self, groups: Iterable[ReservedGroup]) -> None:
        """Write groups down before their first request is sent, in one transaction."""
        rows = [(g.group_id, g.task_index, g.samples, g.version.epoch, g.version.step, g.spec_digest, g.extra) for g in groups]
        with self._transaction():
            try:
                self._db.executemany(
                    "INSERT INTO groups (group_id, task_index, samples, epoch, step, spec_digest, extra, state) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, 'reserved')",
                    rows,
                )
            except sqlite3.IntegrityError as error:
                raise ValueError(f"reserved twice: {error}") from error
            self._db.execute(
                "UPDATE totals SET groups = groups + ?, trajectories = trajectories + ? WHERE name = 'reserved'",
                (len(rows), sum(row[2] for row in rows)),
            )

    def record_tokens(self, pieces: Iterable[Piece]) -> None:
        """Tokens of reserved groups, sampled and given, each piece beginning where the one before it ended, in one transaction.
        ValueError, and nothing written, for any other piece."""
        batch = list(pieces)
        if not batch:
            return
        with self._transaction():
            new = list(dict.fromkeys(p.node for p in batch if p.node and p.node not in self._makers))
            self._db.executemany("INSERT INTO makers (peer) VALUES (?) ON CONFLICT DO NOTHING", [(node,) for node in new])
            makers = self._makers | self._numbers_of(new) if new else self._makers
            rows = (
                (
                    p.group_id, p.member, p.start, p.version.epoch if p.version else None, p.version.step if p.version else None,
                    p.ids, p.logprobs, makers[p.node] if p.node else None,
                )
                for p in batch
            )  # fmt: skip
            try:
                self._db.executemany("INSERT INTO pieces VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            except sqlite3.IntegrityError as error:
                raise ValueError(f"tokens refused: {error}") from error
        self._makers = makers
        forget_oldest(self._makers)

    def _numbers_of(self, makers: Sequence[str]) -> dict[str, int]:
        query = "SELECT maker FROM makers WHERE peer = ?"
        return {peer: self._db.execute(query, (peer,)).fetchone()[0] for peer in makers}

    def cut_tokens(self, ends: Iterable[tuple[int, int, int]]) -> None:
        """Forget the pieces of (group id, member) from a position on: what a crash took the weights of, or a life of an episode
        that begins anew."""
        with self._transaction():
            self._db.executemany("DELETE FROM pieces WHERE group_id = ? AND member = ? AND start >= ?", ends)

    def record_finished(self, group: Group) -> None:
        """A group is whole and rewarded. From here a crash does not cost it. ValueError unless it is reserved."""
        with self._transaction():
            self._move(group.group_id, "state = 'finished', payload = ?", (pack_groups((group,)),), "reserved")

    def record_aborted(self, group_ids: Iterable[int], reason: str) -> None:
        """Reserved or finished groups will never be trained on. ValueError, and nothing changed, for any other."""
        if not reason:
            raise ValueError("an abort needs a reason")
        with self._transaction():
            for group_id in group_ids:
                self._move(
                    group_id, "state = 'aborted', reason = ?, payload = NULL", (reason,), "reserved", "finished"
                )

    def unconsumed(self) -> tuple[Group, ...]:
        """Finished groups that no commit consumed, in order of their ids."""
        rows = self._db.execute("SELECT payload FROM groups WHERE state = 'finished' ORDER BY group_id")
        return tuple(group for (payload,) in rows for group in unpack_groups(payload))

    def unfinished(self) -> tuple[UnfinishedGroup, ...]:
        """Groups that are reserved and not finished, with their tokens so far, in order of their ids."""
        rows = self._db.execute(
            "SELECT group_id, task_index, epoch, step, samples, spec_digest, extra FROM groups WHERE state = 'reserved' "
            "ORDER BY group_id"
        )
        groups = [ReservedGroup(g, task, Version(epoch, step), *rest) for g, task, epoch, step, *rest in rows]
        pieces: dict[int, list[list[Piece]]] = {g.group_id: [[] for _ in range(g.members)] for g in groups}
        for group_id, member, start, epoch, step, *rest in self._db.execute(
            "SELECT group_id, member, start, epoch, step, ids, logprobs, coalesce(peer, '') "
            "FROM pieces LEFT JOIN makers USING (maker) ORDER BY group_id, member, start"
        ):
            version = None if epoch is None else Version(epoch, step)
            pieces[group_id][member].append(Piece(group_id, member, start, version, *rest))
        return tuple(UnfinishedGroup(g, tuple(tuple(m) for m in pieces[g.group_id])) for g in groups)

    def tasks_to_retry(self) -> tuple[int, ...]:
        """Prompts whose every group was aborted, one at least through no fault of the prompt: to be drawn before new
        ones. Computed from the rows, so it survives any number of crashes and empties as they are reserved again."""
        marks = ",".join("?" * len(RETRY_REASONS))
        rows = self._db.execute(
            "SELECT task_index FROM groups GROUP BY task_index "
            f"HAVING sum(state <> 'aborted') = 0 AND sum(reason IN ({marks})) > 0 ORDER BY task_index",
            RETRY_REASONS,
        )
        return tuple(row[0] for row in rows)

    def surplus_tasks(self) -> set[int]:
        """Prompts of which a group was surplus and none was finished yet."""
        rows = self._db.execute(
            "SELECT task_index FROM groups GROUP BY task_index "
            "HAVING sum(reason = ?) > 0 AND sum(state IN ('finished', 'consumed')) = 0",
            (SURPLUS,),
        )
        return {row[0] for row in rows}

    def counts(self) -> JournalCounts:
        """Groups, and trajectories (each group's samples, without members beyond need), by what became of them."""
        return JournalCounts(self._tally("groups", "1"), self._tally("trajectories", "samples"))

    # ---- versions and nodes

    def record_version(self, version: Version, kind: str, mid: str, base: str, size: int) -> None:
        """A published version: its manifest's kind and id, its base's version ("" for none), and encoded bytes."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)",
                (version.epoch, version.step, kind, mid, base, size, self._clock()),
            )

    def record_node(self, peer: str, name: str, tokens: int = 0, size: int = 0) -> None:
        """A node was seen; `tokens` and `size` (bytes it sent) are added to what it had."""
        now = self._clock()
        with self._transaction():
            if self._seen % FORGET_EVERY == 0:
                self._forget_nodes()
            self._seen += 1
            self._db.execute(
                "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (peer) DO UPDATE SET name = excluded.name, "
                "last_seen = excluded.last_seen, tokens = tokens + excluded.tokens, bytes = bytes + excluded.bytes",
                (peer, name, now, now, tokens, size),
            )

    def node_name(self, peer: str) -> str:
        """The name that a node last gave; "" for one that was never seen."""
        row = self._db.execute("SELECT name FROM nodes WHERE peer = ?", (peer,)).fetchone()
        return str(row[0]) if row else ""

    # ---- inside

    def _forget_nodes(self) -> None:
        """Rows of those who made nothing first, then by when they were seen last; and the numbers of makers of no piece."""
        over = self._one("SELECT count(*) FROM nodes") + FORGET_EVERY - MOST_ROWS
        if over > 0:
            least = "SELECT peer FROM nodes ORDER BY tokens > 0, last_seen LIMIT ?"
            self._db.execute(f"DELETE FROM nodes WHERE peer IN ({least})", (over,))
        if self._one("SELECT count(*) FROM makers") > MOST_ROWS:
            self._db.execute("DELETE FROM makers WHERE maker NOT IN (SELECT maker FROM pieces WHERE maker IS NOT NULL)")
            self._makers = {}

    def _one(self, query: str) -> int:
        return self._db.execute(query).fetchone()[0]

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        if durable:
            self._db.execute("PRAGMA synchronous = FULL")
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite rolls back by itself when the disk is full
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            error.add_note(str(self._path))
            raise
        finally:
            if durable:
                self._db.execute("PRAGMA synchronous = NORMAL")

    def _move(self, group_id: int, change: str, values: tuple, *states: str) -> None:
        """One step in a group's life. ValueError when it is in none of `states`."""
        marks = ",".join("?" * len(states))
        cursor = self._db.execute(
            f"UPDATE groups SET {change} WHERE group_id = ? AND state IN ({marks})", (*values, group_id, *states)
        )
        if cursor.rowcount != 1:
            row = self._db.execute("SELECT state FROM groups WHERE group_id = ?", (group_id,)).fetchone()
            raise ValueError(f"group {group_id} is {row[0] if row else 'unknown'}, not {' or '.join(states)}")

    def _tally(self, column: str, weight: str) -> JournalTally:
        states: dict[str, int] = dict(
            self._db.execute(f"SELECT state, sum({weight}) FROM groups WHERE state <> 'consumed' GROUP BY state")
        )
        aborted: dict[str, int] = dict(
            self._db.execute(f"SELECT reason, sum({weight}) FROM groups WHERE state = 'aborted' GROUP BY reason")
        )
        consumed = self._one(f"SELECT coalesce(sum({weight}), 0) FROM consumed JOIN groups USING (group_id)")
        reserved = self._one(f"SELECT {column} FROM totals WHERE name = 'reserved'")
        return JournalTally(reserved, states.get("reserved", 0), states.get("finished", 0), consumed, aborted)
