"""The staleness ledger: tables, brute force against matching, and a stateful property test."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from learner.rollouts.ledger import Ledger, StalenessViolation, Surplus


class Entries(NamedTuple):
    """How the entries of one buffer stand; they sum to G, with E more while it is not full."""

    empty: int
    reserved: int
    occupied: int


def entries(ledger: Ledger, step: int) -> Entries:
    """The buffer's entries, with reservations placed as late as their deadlines allow: the paper's view of the books."""
    last, full = ledger.step + ledger.max_staleness, ledger.groups_per_step
    assert ledger.step <= step <= last
    due = Counter(min(version, ledger.step) + ledger.max_staleness for version in reserved(ledger).values())
    carry = held = places = 0
    for b in range(last, step - 1, -1):
        carry += due[b]
        places = 0 if ledger.ready(b) else full + ledger.extra_groups - len(ledger.occupied(b))
        held = min(carry, places)
        carry -= held
    return Entries(places - held, held, len(ledger.occupied(step)))


def reserved(ledger: Ledger) -> dict[int, int]:
    """group id -> the version that it was reserved at"""
    return dict(ledger._reserved)  # nobody in production asks for all of them


class Snapshot(NamedTuple):
    """All that a resume needs. Occupied groups are (group id, oldest step), in order of buffer and arrival."""

    step: int
    occupied: tuple[tuple[int, int], ...]
    reserved: tuple[tuple[int, int], ...]


def snapshot(ledger: Ledger) -> Snapshot:
    buffers = ledger._buffers  # in production the journal knows what is in them
    return Snapshot(ledger.step, tuple(e for b in sorted(buffers) for e in buffers[b]), tuple(reserved(ledger).items()))


def test_reservation_goes_to_the_latest_buffer_and_the_finished_group_to_the_earliest() -> None:
    ledger = Ledger(2, 1, 5)
    assert ledger.reserve(1, 5)
    assert [entries(ledger, b) for b in (5, 6, 7)] == [Entries(1, 0, 0), Entries(1, 0, 0), Entries(0, 1, 0)]
    assert ledger.occupy(1, 5) == 5
    assert ledger.ready(5) and ledger.consume(5) == (1,)
    assert ledger.step == 6 and entries(ledger, 8) == Entries(1, 0, 0)


def test_a_full_ledger_refuses() -> None:
    ledger = Ledger(1, 2, 0)
    assert all(ledger.reserve(g, 0) for g in range(4))
    assert ledger.room(0) == 0
    assert not ledger.reserve(4, 0)
    assert ledger.outstanding == 4
    ledger.abort([2])
    assert ledger.reserve(4, 0)


def test_an_old_version_may_only_use_near_buffers() -> None:
    ledger = Ledger(2, 1, 5)
    assert ledger.reserve(1, 3)  # may only be trained on at step 5
    assert not ledger.reserve(2, 3)
    assert not ledger.reserve(2, 2)
    assert ledger.reserve(2, 4) and ledger.reserve(3, 5)
    # 3 and 2 finish first, and cannot take the entry that 1 needs.
    assert ledger.stuck() and ledger.blockers() == [1]
    assert ledger.occupy(3, 5) == 7
    assert ledger.occupy(1, 3) == 5
    assert ledger.consume(5) == (1,)


def test_back_fill_moves_chains_of_reservations() -> None:
    """Full: deadlines 2 and 3 in buffer 2, 3 and 4 in buffer 3, 4 and 4 in buffer 4. When a deadline 4 completes, the
    other 4 moves from 3 to 4 and a 3 from 2 to 3; one move, as in the paper, would only open buffer 3."""
    ledger = Ledger(2, 2, 2)
    for group, version in enumerate((2, 2, 2, 1, 1, 0)):
        assert ledger.reserve(group, version)
    assert ledger.room(2) == 0 and ledger.stuck()
    assert ledger.occupy(0, 2) == 2


def test_wrong_calls_are_named() -> None:
    ledger = Ledger(1, 1, 3)
    assert ledger.reserve(1, 3)
    with pytest.raises(ValueError, match="already"):
        ledger.reserve(1, 3)
    with pytest.raises(ValueError, match="does not exist"):
        ledger.reserve(2, 4)
    with pytest.raises(ValueError, match="reserved at version 3"):
        ledger.occupy(1, 2)
    with pytest.raises(ValueError, match="does not exist"):
        ledger.occupy(1, 4)
    with pytest.raises(KeyError):
        ledger.occupy(7, 3)
    with pytest.raises(ValueError, match="holds 0 of 1"):
        ledger.consume(3)
    with pytest.raises(ValueError, match="not current"):
        ledger.consume(4)
    assert ledger.occupy(1, 3) == 3
    with pytest.raises(ValueError, match="already"):
        ledger.reserve(1, 3)
    with pytest.raises(ValueError, match="finished"):
        ledger.abort([1])
    assert ledger.reserve(2, 3)
    with pytest.raises(KeyError):
        ledger.abort([2, 99])
    assert ledger.occupied(3) == [1] and ledger.outstanding == 2  # all or nothing
    with pytest.raises(ValueError):
        Ledger(-1, 1, 0)


def test_a_version_published_before_its_consume_is_accepted() -> None:
    """The trainer may publish step+1 before the head hears the commit; buffer step is full by then."""
    ledger = Ledger(1, 1, 0)
    ledger.reserve(1, 0)
    ledger.reserve(2, 0)
    assert ledger.occupy(1, 0) == 0
    assert ledger.newest_version == 1
    assert ledger.occupy(2, 1) == 1
    assert not ledger.reserve(3, 1)
    ledger.consume(0)
    assert ledger.reserve(3, 1)


def test_an_abort_pulls_finished_groups_forward() -> None:
    ledger = Ledger(1, 1, 1)
    ledger.reserve(1, 0)
    ledger.reserve(2, 1)
    assert ledger.occupy(2, 1) == 2  # buffer 1 is kept for group 1, which fits nowhere else
    ledger.abort([1])
    assert ledger.ready(1) and ledger.consume(1) == (2,)


def test_consume_checks_the_bound_again() -> None:
    ledger = Ledger(1, 1, 5)
    ledger.reserve(1, 5)
    ledger.occupy(1, 5)
    ledger._buffers[5] = [(1, 3)]  # a fault that no call brings about
    with pytest.raises(StalenessViolation, match="version 3 at step 5"):
        ledger.consume(5)


def test_restore_keeps_what_fits() -> None:
    ledger, misfits = Ledger.restore(1, 2, 5, [(1, 5), (2, 4), (3, 3), (4, 6), (5, 4), (6, 4), (7, 5), (8, 5)])
    assert misfits == (3, 6, 8, 4)  # stale; no room by its deadline; no room at all; newer than the learner
    assert ledger.occupied(5) == [2, 5] and ledger.occupied(6) == [1, 7]
    assert ledger.outstanding == 4
    again, none = Ledger.restore(1, 2, 5, snapshot(ledger).occupied)
    assert none == () and snapshot(again) == snapshot(ledger)
    with pytest.raises(ValueError, match="twice"):
        Ledger.restore(1, 2, 5, [(1, 5), (1, 5)])


def test_restore_makes_room_for_reservations_that_go_on() -> None:
    """Placed as early as it could be, the finished group would take the one entry that the reservation can still use."""
    ledger, misfits = Ledger.restore(1, 1, 5, [(1, 5)], [(2, 4)])
    assert misfits == () and ledger.occupied(6) == [1] and 2 in reserved(ledger)
    assert ledger.occupy(2, 5) == 5 and ledger.consume(5) == (2,)
    ledger, misfits = Ledger.restore(1, 1, 5, [(1, 4)], [(2, 4), (3, 5), (4, 5), (5, 3), (6, 6)])
    assert misfits == (5, 2, 4, 6)  # stale; its only entry is taken by a finished group; too many; newer than the learner
    assert ledger.occupied(5) == [1] and 3 in reserved(ledger)
    assert ledger.outstanding == 2
    with pytest.raises(ValueError, match="twice"):
        Ledger.restore(1, 2, 5, [(1, 5)], [(1, 5)])


def test_whichever_groups_end_first_fill_a_buffer_and_the_others_are_surplus() -> None:
    ledger = Ledger(1, 2, 5, extra_groups=1)
    assert all(ledger.reserve(g, 5) for g in range(6))
    assert not ledger.reserve(6, 5) and ledger.room(5) == 0
    assert entries(ledger, 5) == Entries(0, 3, 0) and ledger.stuck()
    assert ledger.occupy(4, 5) == 5 and ledger.surplus() is None
    assert ledger.occupy(2, 5) == 5 and ledger.ready(5)
    assert entries(ledger, 5) == Entries(0, 0, 2) and ledger.surplus() == Surplus(1, (0, 1, 3, 5))
    with pytest.raises(ValueError, match="surplus groups are still reserved"):
        ledger.consume(5)
    ledger.abort([3])
    assert ledger.surplus() is None and ledger.consume(5) == (4, 2)
    with pytest.raises(KeyError):
        ledger.occupy(3, 5)
    assert entries(ledger, 6) == Entries(0, 3, 0) and ledger.room(6) == 3


def test_surplus_is_of_those_that_fit_nowhere_else() -> None:
    ledger = Ledger(1, 1, 5, extra_groups=1)
    for group, version in ((1, 4), (2, 5), (3, 5)):
        assert ledger.reserve(group, version)
    assert ledger.occupy(2, 5) == 5
    assert ledger.surplus() == Surplus(1, (1,))  # step 5 alone may train on it; 3 has step 6
    ledger.abort([1])
    assert ledger.surplus() is None and ledger.consume(5) == (2,)


def test_pulling_forward_may_make_more_surplus() -> None:
    """An abort opens an entry of step 5 that a finished group fills, and what else was to go there has no place then."""
    ledger = Ledger(1, 1, 5, extra_groups=1)
    for group, version in ((1, 4), (2, 4), (3, 5)):
        assert ledger.reserve(group, version)
    assert ledger.occupy(3, 5) == 6  # both places of step 5 are needed
    ledger.abort([1])
    assert ledger.ready(5) and ledger.surplus() == Surplus(1, (2,))
    ledger.abort([2])
    assert ledger.surplus() is None and ledger.consume(5) == (3,)


def test_fillers_are_those_that_would_land_in_the_current_buffer_one_after_another() -> None:
    ledger = Ledger(1, 2, 5)
    for group, version in ((1, 4), (2, 5), (3, 5), (4, 5)):
        ledger.reserve(group, version)
    assert ledger.blockers() == [1, 2, 3, 4]  # whichever is the next
    assert ledger.fillers([2, 3, 4, 1]) == [2, 1]  # after it, only 1 may take what is left of step 5
    assert ledger.fillers([3]) == [3] and ledger.fillers([1, 4, 2]) == [1, 4] and ledger.fillers([]) == []


def test_restore_in_the_midst_of_surplus() -> None:
    """A crash after the group that filled a buffer was written down, and before the abort of what is surplus by that."""
    ledger, misfits = Ledger.restore(1, 1, 5, [(2, 5)], [(1, 4), (3, 5)], extra_groups=1)
    assert misfits == () and ledger.ready(5) and ledger.surplus() == Surplus(1, (1,))
    ledger, misfits = Ledger.restore(0, 1, 5, [(1, 5)], [(2, 5), (3, 5)], extra_groups=2)
    assert misfits == (2, 3) and ledger.ready(5) and ledger.surplus() is None
    ledger, misfits = Ledger.restore(0, 1, 5, [], [(2, 5), (3, 5), (4, 5)], extra_groups=1)
    assert misfits == (4,) and ledger.room(5) == 0 and ledger.occupy(3, 5) == 5
    assert ledger.surplus() == Surplus(1, (2,))


def fits(step: int, last: int, size: int, occupied: dict[int, int], deadlines: list[int]) -> bool:
    """Independent oracle: earliest deadline first into the earliest open entry."""
    free = [b for b in range(step, last + 1) for _ in range(size - occupied[b])]
    return all(k < len(free) and free[k] <= d for k, d in enumerate(sorted(deadlines)))


@pytest.mark.parametrize(("staleness", "size"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)])
def test_every_short_history_against_an_oracle(staleness: int, size: int) -> None:
    """All reservation sequences, all completion orders: reserve grants exactly what can be placed, and occupy always
    succeeds in the earliest buffer that leaves the others placeable."""
    step, histories = staleness, 0
    last = step + staleness
    versions = range(step - staleness, step + 1)
    for count in range(1, min(4, size * (staleness + 1)) + 1):
        for wanted in itertools.product(versions, repeat=count):
            probe = Ledger(staleness, size, step)
            granted: list[tuple[int, int]] = []
            for group, version in enumerate(wanted):
                nothing = dict.fromkeys(range(step, last + 1), 0)
                possible = fits(step, last, size, nothing, [v + staleness for v in (version, *dict(granted).values())])
                assert probe.reserve(group, version) == possible
                if possible:
                    granted.append((group, version))
            for order in itertools.permutations(granted):
                histories += 1
                ledger = Ledger(staleness, size, step)
                for group, version in granted:
                    ledger.reserve(group, version)
                left = dict(granted)
                for group, version in order:
                    occupied = {b: len(ledger.occupied(b)) for b in range(step, last + 1)}
                    del left[group]
                    legal = [
                        b
                        for b in range(step, version + staleness + 1)
                        if occupied[b] < size
                        and fits(
                            step, last, size, occupied | {b: occupied[b] + 1}, [v + staleness for v in left.values()]
                        )
                    ]
                    assert ledger.occupy(group, version) == legal[0]
                assert ledger.outstanding == len(granted)
    assert histories > 0


class LedgerMachine(RuleBasedStateMachine):
    """Random reservations, late completions, aborts, lagging publications; a model that knows only the rules."""

    @initialize(staleness=st.integers(0, 4), size=st.integers(1, 4), step=st.integers(0, 6), extra=st.integers(0, 3))
    def start(self, staleness: int, size: int, step: int, extra: int) -> None:
        self.ledger = Ledger(staleness, size, step, extra)
        self.S, self.G, self.E = staleness, size, extra
        self.published = step
        self.next_id = 0
        self.reserved: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.streamed: list[int] = []

    @rule(lag=st.integers(0, 5))
    def reserve(self, lag: int) -> None:
        version = max(0, self.published - lag)
        room = self.ledger.room(version)
        got = self.ledger.reserve(self.next_id, version)
        assert got == (room > 0)
        if got:
            self.reserved[self.next_id] = version
        self.next_id += 1

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(sorted(self.reserved)))
        version = self.reserved.pop(group)
        oldest = data.draw(st.integers(version, max(version, self.published)))
        could_fill = group in self.ledger.blockers()
        buffer = self.ledger.occupy(group, oldest)
        assert max(self.ledger.step, oldest) <= buffer <= version + self.S
        if could_fill and oldest <= self.ledger.step:
            assert buffer == self.ledger.step  # liveness: a blocker always fills the current buffer
        self.finished[group] = oldest
        self.drop_surplus(data.draw)

    def drop_surplus(self, draw: Callable[[Any], list[int]]) -> None:
        """As the caller must: any of those that it may choose from."""
        while (surplus := self.ledger.surplus()) is not None:
            assert self.E and 0 < surplus.count <= len(surplus.of) and set(surplus.of) <= set(self.reserved)
            groups = draw(st.lists(st.sampled_from(surplus.of), min_size=surplus.count, max_size=surplus.count, unique=True))
            self.ledger.abort(groups)
            for group in groups:
                del self.reserved[group]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        groups = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), min_size=1, max_size=3, unique=True))
        self.ledger.abort(groups)
        for group in groups:
            del self.reserved[group]
        self.drop_surplus(data.draw)

    @precondition(lambda self: self.ledger.ready(self.ledger.step))
    @rule(publish=st.booleans())
    def consume(self, publish: bool) -> None:
        step = self.ledger.step
        taken = self.ledger.consume(step)
        assert len(taken) == self.G and list(taken)[: len(self.streamed)] == self.streamed
        self.streamed = []
        for group in taken:
            assert 0 <= step - self.finished.pop(group) <= self.S
        if publish:
            self.published = self.ledger.step

    @rule()
    def publish(self) -> None:
        """Versions may lag the learner by any amount, or be one ahead of a commit the head has not heard of."""
        self.published = self.ledger.newest_version

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        before = snapshot(self.ledger)
        if any(version > before.step for _, version in (*before.occupied, *before.reserved)):
            return
        again, misfits = Ledger.restore(self.S, self.G, before.step, before.occupied, before.reserved, self.E)
        assert sorted(snapshot(again).occupied) == sorted(before.occupied)  # no finished group is ever lost
        assert again.outstanding == self.ledger.outstanding - len(misfits)
        assert len(misfits) <= self.E * (self.S + 1)  # what one ledger held, the next one holds, less what is surplus
        for group in misfits:
            del self.reserved[group]
        if not self.E:
            assert snapshot(again).reserved == tuple(sorted(before.reserved, key=lambda entry: entry[1]))
        self.ledger, self.streamed = again, []
        self.drop_surplus(data.draw)

    @rule(data=st.data())
    def drains(self, data: st.DataObject) -> None:
        """Liveness: from any state, resolving what is reserved and reserving anew fills the current buffer."""
        step = self.ledger.step
        version = min(self.published, step)
        if version < step - self.S:
            return
        for _ in range(10_000):
            if self.ledger.ready(step):
                break
            blockers = self.ledger.blockers()
            if not blockers:
                got = self.ledger.reserve(self.next_id, version)
                assert got
                self.reserved[self.next_id] = version
                self.next_id += 1
                continue
            before = len(self.ledger.occupied(step))
            group = blockers[-1]
            oldest = self.reserved.pop(group)
            assert self.ledger.occupy(group, oldest) == step
            assert len(self.ledger.occupied(step)) == before + 1
            self.finished[group] = oldest
            self.drop_surplus(data.draw)
        assert self.ledger.ready(step)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.outstanding == len(self.reserved) + len(self.finished)

    @invariant()
    def buffers_hold(self) -> None:
        if not hasattr(self, "ledger"):
            return
        step = self.ledger.step
        seen: list[int] = []
        waiting = 0
        for b in range(step, step + self.S + 1):
            found = entries(self.ledger, b)
            assert min(found) >= 0
            assert found.occupied <= self.G
            assert sum(found) == self.G + (not self.ledger.ready(b)) * self.E
            waiting += found.reserved
            seen += self.ledger.occupied(b)
            for group in self.ledger.occupied(b):
                assert 0 <= b - self.finished[group] <= self.S
        assert +self.ledger._by_version == Counter(self.reserved.values())  # a sum beside the books
        current = entries(self.ledger, step)
        assert self.ledger.stuck() == (not current.empty and current.reserved > 0)
        assert waiting == len(self.reserved)  # every reservation has an entry to go to
        assert sorted(seen) == sorted(self.finished)
        assert self.ledger.occupied(step)[: len(self.streamed)] == self.streamed
        self.streamed = self.ledger.occupied(step)

    @invariant()
    def nothing_waits_that_could_be_used_now(self) -> None:
        if not hasattr(self, "ledger"):
            return
        before = snapshot(self.ledger)
        self.ledger._pull_forward()  # once more changes nothing
        assert snapshot(self.ledger) == before


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_finished_groups_are_withdrawn_and_others_move_up() -> None:
    ledger = Ledger(1, 2, 3)
    for group_id in range(4):
        assert ledger.reserve(group_id, 3)
    for group_id in range(4):
        ledger.occupy(group_id, 3)
    assert ledger.occupied(3) == [0, 1] and ledger.occupied(4) == [2, 3] and not ledger.room(3)
    for wrong in ([9], [0, 9]):
        with pytest.raises(KeyError, match="not finished"):
            ledger.withdraw(wrong)
    ledger.withdraw([1])
    assert ledger.occupied(3) == [0, 2] and ledger.occupied(4) == [3] and ledger.room(3) == 1
    assert sorted(ledger.waiting_for_training) == [0, 2, 3]
    ledger.withdraw([0, 2, 3])
    assert ledger.occupied(3) == [] and ledger.room(3) == 4 and ledger.outstanding == 0


def test_withdrawing_keeps_every_reservation_placed() -> None:
    """Random lives: whatever is withdrawn, what was reserved lands in time, and a full buffer is taken."""
    taken = 0
    for seed in range(300):
        rng = random.Random(seed)
        ledger, next_id, versions = Ledger(rng.randint(0, 3), rng.randint(1, 3), 0, rng.randint(0, 2)), 0, dict[int, int]()
        for _ in range(120):
            dice = rng.random()
            if dice < 0.4:
                version = rng.randint(max(0, ledger.step - ledger.max_staleness), ledger.step)
                if ledger.reserve(next_id, version):
                    versions[next_id] = version
                next_id += 1
            elif dice < 0.7 and versions:
                group_id = rng.choice(list(versions))
                ledger.occupy(group_id, rng.randint(versions.pop(group_id), ledger.step))  # raises where it has no place
            elif dice < 0.85 and ledger.waiting_for_training:
                ledger.withdraw(rng.sample(ledger.waiting_for_training, rng.randint(1, len(ledger.waiting_for_training))))
            elif ledger.ready(ledger.step):
                ledger.consume(ledger.step)
                taken += 1
            while (surplus := ledger.surplus()) is not None:
                gone = surplus.of[: surplus.count]
                ledger.abort(gone)
                for group_id in gone:
                    del versions[group_id]
    assert taken > 1000
