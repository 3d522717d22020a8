"""The staleness ledger: no group is generated unless there is room to train on it in time.

One room: half of it is the proof, and every method keeps the one invariant that the proof is about. A part of it elsewhere
would be code without its reason.

Pure: no clock, disk, network, trajectory contents or epochs (steps are plain ints; a new epoch restores a new ledger).

The protocol is StaleFlow's (arXiv 2601.12784, section 3): one buffer per future learner step, reserve at dispatch,
occupy when generated and rewarded, consume when full. Buffer `b` holds what the optimizer step from version `b` to
`b + 1` trains on; an entry is one whole GRPO group, EMPTY, RESERVED or OCCUPIED. Invariant: `b - oldest <= S`.

**Placement.** The paper gives each reservation a slot (the latest with room), and repairs that choice at each
completion by back-filling one hole. Two reservations differ only in their deadline `v + S`, so this ledger keeps
deadlines and derives slots: RESERVED entries lie as late as their deadlines allow. That is the closure of "latest
candidate" and "back-fill" under any number of moves, so a slot is never lost to the order in which things happened.

**Redundancy** (the paper's B' > B). A buffer takes G groups, and up to E more may be reserved for it: whichever G end first fill
it, and what then has no place left is **surplus** and aborted. E = 0 is the protocol without it, and every statement below then
reads as if E were not there. With O[b] occupied entries and R[d] reservations of deadline d, all is decided by

    places(b) = G + E - O[b] while O[b] < G, and 0 once b is full
    slack(j) = sum over b <= j of places(b)  -  sum over d <= j of R[d]      for j = step .. step + S

Slack is >= 0 for every j exactly when every reservation still has a place (Hall's condition for deadlines).

    reserve at v     iff slack(j) >= 1 for every j >= v + S
    occupy           frees deadline d, takes the earliest b in [oldest, d] with O[b] < G and slack(j) >= 1 on [b, d)
    surplus          where slack(j) < 0: so many of the reservations with a deadline <= j must go

Only a buffer that becomes full makes slack negative: its last entry takes 1 + E places. It owes E groups at the most, and
the caller aborts them, of its choice, before anything else happens. Aborting the smallest j's debt first is aborting as few as
can be, since the sets of reservations that may pay are nested. After that slack >= 0 again, which is what follows assumes.

**Safe.** Some b <= d always fits: if buffer d has an open entry, b = d does. If it is full, it has no places, so slack(d) >= 0
implies slack(d - 1) >= R[d] >= 1, and the same argument holds at d - 1; it ends since slack(step - 1) = 0. So a reserved
group is never refused unless it was aborted, as surplus or otherwise, and lands no later than v_reserved + S <= oldest + S.
Extra places bear reservations only: an entry is taken where O[b] < G, so no buffer holds more than G.

**Live.** Let buffer t be the current one, not full, so places(t) >= 1 + E; no weights newer than t exist then (they come from
training on t). (1) If slack(j) >= 1 for every j, any reservation with v >= t - S is granted, and any completion lands in t, since
t <= every deadline and [t, d) has slack. (2) If slack(j) = 0 for a smallest j, the reservations with deadline <= j
are as many as the places of t..j, so at least one exists; the completion of any of them lands in t, and the
abort of one makes slack. (3) With nothing reserved, slack(j) >= places(t) >= 1 for all j, so (1) holds even when every later
buffer is full: latest-first placement cannot starve t. (4) An abort may open an entry of t while groups that t could take sit in
later buffers; they are pulled forward, so t never waits for new work that is already done. This pull is the one rule the paper
lacks: without it t still fills, but only by generating anew. Every reservation resolves in the end, so there is always a
next completion, and each either lands in t or makes one more finished group, of which the buffers hold (S + 1) * G at the most.
Surplus cannot hold this up: it is made where a buffer is filled, at most E each time, and finished groups only come, or move
forward. So t fills. What stays outside: nodes whose weights are older than t - S get nothing until they install newer ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class StalenessViolation(RuntimeError):
    """A group was about to be trained on outside the bound: a bug in the ledger or its caller, never load."""


@dataclass(frozen=True, slots=True)
class Surplus:
    """`count` of the reserved groups `of` have no place any more: the caller chooses which, and aborts them."""

    count: int
    of: tuple[int, ...]


class RestoredLedger(NamedTuple):
    """A ledger made from what an earlier one held."""

    ledger: Ledger
    misfits: tuple[int, ...]
    """groups that have no place in it"""


@dataclass
class Ledger:
    """Buffers for learner steps `step` .. `step + max_staleness`, each of `groups_per_step` groups. For one that is not full,
    `extra_groups` more may be reserved: then `surplus` is asked for after whatever finishes or aborts a group. With
    `groups_per_step` = 0 every buffer is full from the start: nothing is reserved, and each step may be taken at once.

    `step` is the number of optimizer steps done: the version that trains next. Group ids are the caller's, unique.
    """

    max_staleness: int
    groups_per_step: int
    step: int
    extra_groups: int = 0
    _reserved: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    """group id -> version it was reserved at"""
    _by_version: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    """how many of `_reserved` have each version"""
    _buffers: dict[int, list[tuple[int, int]]] = field(init=False, repr=False)
    """step -> (group id, oldest step) in arrival order"""
    _home: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    """group id -> the buffer that it occupies"""

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.groups_per_step < 0 or self.step < 0 or self.extra_groups < 0:
            what = f"S={self.max_staleness}, G={self.groups_per_step}, E={self.extra_groups}, step={self.step}"
            raise ValueError(f"no ledger with {what}")
        self._buffers = {b: [] for b in range(self.step, self.step + self.max_staleness + 1)}

    # ---- the protocol

    def reserve(self, group_id: int, version_step: int) -> bool:
        """Room for a group that will be generated under `version_step` or newer, at the latest for step `version_step` + S. False
        where there is none, to be tried again when the ledger or the weights have moved.

        ValueError for an id already in the ledger, or a version that cannot exist yet.
        """
        if group_id in self._reserved or group_id in self._home:
            raise ValueError(f"group {group_id} is already in the ledger")
        self._check_exists(group_id, version_step)
        if self.room(version_step) < 1:
            return False
        self._reserved[group_id] = version_step
        self._by_version[version_step] += 1
        return True

    def room(self, version_step: int) -> int:
        """How many reservations at `version_step` would be granted now."""
        last = self.step + self.max_staleness
        if not self.step - self.max_staleness <= version_step <= self.newest_version or version_step > last:
            return 0
        slack = self._slack()
        return min(slack[b] for b in slack if b >= self._deadline(version_step))

    def occupy(self, group_id: int, oldest_step: int) -> int:
        """The reserved group is generated and rewarded, its oldest span made by `oldest_step`. The buffer it fills.

        It may fill the buffer, and then others may be `surplus`. KeyError when it holds no reservation (it was aborted, as
        surplus perhaps, or is already here: the caller drops it). ValueError when
        it is older than it was reserved at, or newer than any version that can exist; the reservation then stands.
        """
        version = self._reserved.get(group_id)
        if version is None:
            raise KeyError(f"group {group_id} holds no reservation")
        if oldest_step < version:
            raise ValueError(f"group {group_id} was reserved at version {version} and has a span of {oldest_step}")
        self._check_exists(group_id, oldest_step)
        deadline = self._deadline(version)
        del self._reserved[group_id]
        self._by_version[version] -= 1
        slack = self._slack()
        # Freeing the deadline raised slack from there on; the new entry lowers it from its buffer on.
        for b in range(max(self.step, oldest_step), deadline + 1):
            if self._open(b) and all(slack[j] >= 1 for j in range(b, deadline)):
                self._buffers[b].append((group_id, oldest_step))
                self._home[group_id] = b
                return b
        self._reserved[group_id] = version
        self._by_version[version] += 1
        raise StalenessViolation(f"group {group_id}, oldest {oldest_step}, fits no buffer up to {deadline}")

    def surplus(self) -> Surplus | None:
        """What must be aborted before anything else happens, since a buffer was filled. None when nothing must; ask again after
        each abort, which may fill another one."""
        if not self.extra_groups:
            return None
        for j, slack in self._slack().items():
            if slack < 0:
                return Surplus(-slack, tuple(g for g, version in self._reserved.items() if self._deadline(version) <= j))
        return None

    def ready(self, step: int) -> bool:
        """Whether buffer `step` is full of finished groups."""
        return step in self._buffers and not self._open(step)

    def occupied(self, step: int) -> list[int]:
        """Finished groups of buffer `step` in order of arrival. For the current step it only ever grows, unless
        the caller aborts finished groups, so what was streamed to the trainer stays a prefix of it."""
        return [group_id for group_id, _ in self._buffers.get(step, ())]

    def consume(self, step: int) -> tuple[int, ...]:
        """The trainer took the optimizer step on buffer `step`: drop it, open `step + 1 + S`. The groups, in order.

        ValueError unless `step` is current, its buffer full and no surplus left. StalenessViolation if the bound is broken after
        all.
        """
        if step != self.step:
            raise ValueError(f"step {step} is not current: the ledger stands at {self.step}")
        if not self.ready(step):
            raise ValueError(f"step {step} holds {len(self._buffers[step])} of {self.groups_per_step} groups")
        if self.surplus() is not None:
            raise ValueError(f"step {step} is full and surplus groups are still reserved")
        for group_id, oldest in self._buffers[step]:
            if not 0 <= step - oldest <= self.max_staleness:
                raise StalenessViolation(f"group {group_id} of version {oldest} at step {step}, S={self.max_staleness}")
        taken = tuple(self.occupied(step))
        for group_id in taken:
            del self._home[group_id]
        del self._buffers[step]
        self.step += 1
        self._buffers[self.step + self.max_staleness] = []
        self._by_version = +self._by_version  # versions nobody holds any more
        return taken

    def abort(self, group_ids: Iterable[int]) -> None:
        """Give up reservations. All or nothing: KeyError for an id not here, ValueError for a finished one."""
        ids = list(dict.fromkeys(group_ids))
        for group_id in ids:
            if group_id in self._home:
                raise ValueError(f"group {group_id} is finished: it waits in buffer {self._home[group_id]}")
            if group_id not in self._reserved:
                raise KeyError(f"group {group_id} is not in the ledger")
        for group_id in ids:
            self._by_version[self._reserved.pop(group_id)] -= 1
        self._pull_forward()

    def withdraw(self, group_ids: Iterable[int]) -> None:
        """Take finished groups out of their buffers, as if they had never been reserved. All or nothing: KeyError for an id that
        is not finished here.

        The trainer must have none of them, so no version past `step` exists while the current buffer is open again. That keeps
        every statement above: a buffer's places grow by that, so slack only rises, and what can move up into the room does.
        """
        ids = list(dict.fromkeys(group_ids))
        if missing := [group_id for group_id in ids if group_id not in self._home]:
            raise KeyError(f"group {missing[0]} is not finished in the ledger")
        for group_id in ids:
            home = self._home.pop(group_id)
            self._buffers[home] = [entry for entry in self._buffers[home] if entry[0] != group_id]
        self._pull_forward()

    # ---- what it can say

    @property
    def newest_version(self) -> int:
        """The newest version that can exist: one past `step` when the trainer has all it needs to make it."""
        return self.step + 1 if self.ready(self.step) else self.step

    def stuck(self) -> bool:
        """Whether the current buffer is not full and no entry of it is left to reserve: only unfinished work can fill it (see
        `blockers`). With reservations as late as their deadlines allow, the smallest slack is the number of its empty entries."""
        return not self.ready(self.step) and min(self._slack().values()) < 1

    def blockers(self) -> list[int]:
        """Reserved groups of which the next to finish fills the current buffer; others go to later buffers.
        Oldest first. Empty when the current buffer is full."""
        if self.ready(self.step):
            return []
        tight = [j for j, slack in self._slack().items() if slack <= 0]
        until = min(tight) if tight else self.step + self.max_staleness
        ids = [g for g, version in self._reserved.items() if self._deadline(version) <= until]
        return sorted(ids, key=lambda g: self._reserved[g])

    def fillers(self, group_ids: Iterable[int]) -> list[int]:
        """Of these reserved groups, as many as the current buffer still takes, and only such as would land in it if they finished
        now, in this order (a completion takes slack from those that follow)."""
        slack, taken = self._slack(), list[int]()
        missing = self.groups_per_step - len(self._buffers[self.step])
        for group_id in group_ids:
            before = range(self.step, self._deadline(self._reserved[group_id]))
            if len(taken) < missing and all(slack[j] >= 1 for j in before):
                taken.append(group_id)
                for j in before:
                    slack[j] -= 1
        return taken

    @property
    def waiting_for_training(self) -> list[int]:
        """Finished groups, in no order."""
        return list(self._home)

    @property
    def outstanding(self) -> int:
        """Groups reserved or occupied now."""
        return len(self._reserved) + sum(len(entries) for entries in self._buffers.values())

    # ---- resume

    @classmethod
    def restore(
        cls,
        max_staleness: int,
        groups_per_step: int,
        step: int,
        finished: Sequence[tuple[int, int]],
        reserved: Sequence[tuple[int, int]] = (),
        extra_groups: int = 0,
    ) -> RestoredLedger:
        """A ledger at `step` holding finished groups (group_id, oldest_step) and reservations (group_id, version_step)
        that go on, and the ids that do not fit.

        It goes by the protocol: everything is reserved at its step, finished groups first, the stalest first, and then
        those are occupied. So slack >= 0 holds throughout, and what was granted always finds its buffer (**Safe**, above).
        Any set that can be placed at all keeps slack >= 0 and is granted whole; one that cannot loses as few as must be, for
        sets of unit jobs with deadlines are a matroid. What an earlier ledger held can always be placed, less what was of
        lost weights: what is left has steps <= `step`, and its old buffers, none of them before `step`, still suit it.

        All that is without extra places, so that finished groups, of which no buffer ever held more than G, find theirs
        whatever else was reserved. Then there are extra places: what was not granted is asked for again, and finished groups move
        forward as after an abort, which may fill a buffer: the caller aborts the `surplus` then. So after a crash between a group
        that filled a buffer and the abort of what is surplus by that, nothing waits for those. (Buffers are not in the journal,
        and finished groups may lie in others than before: up to E reservations a buffer may be surplus that were not yet.)

        Those left over are stale, newer than `step`, or too many (S or the batch was made smaller, or surplus); the caller aborts
        them in its journal. ValueError for a group listed twice.
        """
        ledger = cls(max_staleness, groups_per_step, step)
        misfits: list[int] = []
        stalest_first = sorted(finished, key=lambda entry: entry[1])
        unfinished = sorted(reserved, key=lambda entry: entry[1])
        for group_id, version in [*stalest_first, *unfinished]:
            if group_id in ledger._reserved:
                raise ValueError(f"group {group_id} is listed twice")
            if version > step or not ledger.reserve(group_id, version):
                misfits.append(group_id)
        for group_id, oldest in stalest_first:
            if group_id in ledger._reserved:
                ledger.occupy(group_id, oldest)
        if extra_groups:
            ledger.extra_groups = extra_groups
            for group_id, version in unfinished:
                if group_id in misfits and version <= step and ledger.reserve(group_id, version):
                    misfits.remove(group_id)
            ledger._pull_forward()
        return RestoredLedger(ledger, tuple(misfits))

    # ---- inside

    def _open(self, b: int) -> bool:
        return len(self._buffers[b]) < self.groups_per_step

    def _places(self, b: int) -> int:
        """How many more reservations buffer `b` can bear, whatever their deadlines."""
        return self.groups_per_step + self.extra_groups - len(self._buffers[b]) if self._open(b) else 0

    def _deadline(self, version: int) -> int:
        """The last open buffer that may take a group of `version` (one ahead of `step`: the last that is open)."""
        return min(version, self.step) + self.max_staleness

    def _slack(self) -> dict[int, int]:
        due: Counter[int] = Counter()
        for version, count in self._by_version.items():
            due[self._deadline(version)] += count
        slack, total = {}, 0
        for b in range(self.step, self.step + self.max_staleness + 1):
            total += self._places(b) - due[b]
            slack[b] = total
        return slack

    def _check_exists(self, group_id: int, version: int) -> None:
        if version < 0 or version > self.newest_version:
            raise ValueError(f"group {group_id}: version {version} does not exist (newest is {self.newest_version})")

    def _pull_forward(self) -> None:
        """Move finished groups into entries that an abort opened in earlier buffers, where no reservation needs them.

        Only aborts call for it (and extra places, when they are there at once): reserve and occupy never raise slack, and
        consume raises none but the last buffer's. With extra places it may fill a buffer: see `surplus`.
        """
        last = self.step + self.max_staleness
        for b in range(self.step, last):
            while self._open(b):
                slack = self._slack()
                source = self._pullable(b, last, slack)
                if source is None:
                    break
                home, entry = source
                self._buffers[home].remove(entry)
                self._buffers[b].append(entry)
                self._home[entry[0]] = b

    def _pullable(self, b: int, last: int, slack: dict[int, int]) -> tuple[int, tuple[int, int]] | None:
        """The nearest finished group that may move to buffer `b` without taking the place of a reservation."""
        for later in range(b + 1, last + 1):
            if slack[later - 1] < 1:
                return None
            for entry in self._buffers[later]:
                if entry[1] <= b:
                    return later, entry
        return None
