"""Groups from their last token to the trainer: their reward, their place in a step's buffer, what has no place. A thin shell.

Scorer (what are they worth), ledger (which step trains on them), journal (what survives a crash). Must not know nodes, requests
or how weights travel.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import trio

from learner.dispatch.forecast import Forecast
from learner.journal.journal import CAUGHT, SURPLUS, Journal
from learner.rewards.port import GroupUnscored
from learner.rollouts.collector import Collector
from learner.rollouts.durations import Durations
from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.ledger import Ledger
from learner.rollouts.outcomes import Cancel, WholeGroup
from learner.rollouts.redundancy import Patience, Redundancy, to_cut
from learner.trajectory import Group
from p2p.errors import ShoalError

log = logging.getLogger("shoal.rollouts")

SCORE_QUEUE = 100_000
"""Whole groups that may wait for their reward; the ledger bounds them far below."""

MOST_WHY = 400
"""Characters that are kept of why a reward could not be had: two lines of a wide terminal."""

ENDLESS = 1 << 62
"""Groups that training can still consume while nobody has said where it ends."""


class StepGroups(NamedTuple):
    """Some groups of a step's buffer, and whether they are its last."""

    groups: tuple[Group, ...]
    last: bool


class TrainedStep(NamedTuple):
    """What one optimizer step trained on."""

    step: int
    """optimizer steps done with it: 1 is the run's first, as in metrics.jsonl"""
    groups: tuple[Group, ...]


class TrainingBuffers:
    """One epoch's whole groups.

    `score(group)` gives a group its rewards, or says with GroupUnscored why it gets none; `in_thread` is for others that write
    what is committed; `cancel(pairs)` tells nodes to stop; `changed()` hears that there may be room for new groups.
    `retry` are prompts to draw again, `finished` the rewarded groups by their id.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        journal: Journal,
        *,
        ledger: Ledger,
        finished: dict[int, Group],
        collector: Collector,
        forecast: Forecast,
        durations: Durations,
        redundancy: Redundancy,
        score: Callable[[Group], Awaitable[Group]],
        in_thread: Callable[..., Awaitable[Any]],
        cancel: Callable[[Cancel], None],
        changed: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.settings, self.journal, self.ledger, self.finished = settings, journal, ledger, finished
        self._collector, self._forecast, self._durations, self.redundancy = collector, forecast, durations, redundancy
        self.score, self.in_thread, self._cancel, self._room_changed, self._now = score, in_thread, cancel, changed, now
        self.retry: list[int] = list(journal.tasks_to_retry())
        self._failed: set[int] = set()
        """prompts that nodes failed at in this epoch"""
        self.max_staleness_seen = 0
        self.unscored_groups = 0
        """given up in this epoch because their reward could not be had"""
        self.unscored_last = ""
        """why the newest of them was"""
        self.awaited: int | None = None
        """the step that the trainer waits for"""
        self.scoring: dict[int, Group] = {}
        """groups that wait for their reward"""
        self._score_in, self.to_score = trio.open_memory_channel[Group](SCORE_QUEUE)
        self._patience = Patience(settings.truncate_stuck_s)
        self._target_step: int | None = None
        self._handed: set[int] = set()
        """finished groups that the trainer has, of the step that it is at"""
        self.on_whole: Callable[[Group], None] | None = None
        """hears of each group once its completions have ended"""
        self._consumed: dict[int, tuple[int, ...]] = {}
        """groups of each step that was taken and is not committed, by optimizer steps done with it"""
        self._moved = trio.Event()

    # --- whole groups ------------------------------------------------------------------------------------------------

    def whole(self, whole: WholeGroup) -> None:
        """Its group waits for its reward now, or has it already, and nodes stop what they do for members that it did not
        need."""
        group = whole.group
        self.scoring[group.group_id] = group
        self._durations.whole(group.group_id)
        if self.on_whole is not None:
            self.on_whole(group)
        self.redundancy.surplus_members(whole.surplus)
        self._cancel(whole.cancel)
        if group.is_scored:  # episodes, by their environment
            self.rewarded(group)
        else:
            self._score_in.send_nowait(group)

    def failed(self, group_id: int, task_index: int | None = None) -> None:
        """A group that was not whole yet is given up. Finished ones move up into its place: a buffer may be complete by that. Its
        prompt comes again, once: nodes see prompts first, and none of them is to choose which are trained on."""
        self._durations.dropped(group_id)
        self._abort([group_id], "failures")
        if task_index is not None and task_index not in self._failed:
            self._failed.add(task_index)
            self.retry.append(task_index)
        self.settle()

    async def score_whole(self) -> None:
        """For ever: rewards, several groups at once, then into the ledger. Groups ask for them in the order in which they became
        whole."""
        async with trio.open_nursery() as nursery:
            async for group in self.to_score:
                await nursery.start(self._score_one, group)

    async def _score_one(self, group: Group, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            scored = await self.score(group)
        except GroupUnscored as error:
            self.unscored(group, str(error))
        else:
            self.rewarded(scored)

    def rewarded(self, group: Group) -> None:
        """A group has its reward: it takes its place in a buffer, unless it is surplus or teaches nothing."""
        # What was cut counts with what it had: too little, but what takes long would not be heard of at all without.
        lengths = [len(t.completion_ids) for t in group.trajectories]
        self._forecast.ended(group.task_index, float(len(group.trajectories[0].prompt_ids)), lengths)
        if self.scoring.pop(group.group_id, None) is None:
            return  # surplus by now: others filled its buffer while it waited for its reward
        if not self.settings.takes(group):
            self._abort([group.group_id], "equal")  # a new group takes its room
        else:
            self.journal.record_finished(group)
            self.ledger.occupy(group.group_id, group.oldest.step)
            self.finished[group.group_id] = group
            self.redundancy.finished(group)
        self._collector.unwritten.drop(group.group_id)
        self.settle()

    def unscored(self, group: Group, why: str = "") -> None:
        """A group's reward cannot be had: a new group, of another prompt, takes its room. Whoever scores has logged why."""
        self.unscored_groups += 1
        self.unscored_last = why[:MOST_WHY]
        if self.scoring.pop(group.group_id, None) is None:
            return  # surplus by now
        self._abort([group.group_id], "unscored")
        self._collector.unwritten.drop(group.group_id)
        self.settle()

    # --- what is too much, and what takes too long ---------------------------------------------------------------------

    @property
    def redundant(self) -> bool:
        """Whether anything is opened beyond need, or may be cut."""
        return bool(self.settings.extra_groups or self.settings.extra_samples or self.settings.truncate_stuck_s)

    def settle(self) -> None:
        """Groups took places, or left them: drop what has none now, and wake who waits for groups or for room."""
        self.drop_surplus()
        self.wake()
        self._room_changed()

    def drop_surplus(self) -> None:
        """Abort what full buffers have left without a place. Nodes hear of it at once; the prompts are drawn again."""
        while (surplus := self.ledger.surplus()) is not None:
            ids = self.redundancy.choose(surplus, self._collector)
            self._abort(ids, SURPLUS)
            for group_id in ids:
                self._durations.dropped(group_id)
                progress = self._collector.progress_of(group_id)
                if progress is not None:
                    task_index, _ = self._collector.task_of(group_id)
                    self.redundancy.surplus_group(task_index, progress.ended, progress.running)
                    self._cancel(self._collector.abort_group(group_id))
                else:
                    group = self.scoring.pop(group_id)
                    task_index = group.task_index
                    self.redundancy.surplus_group(task_index, [len(t.completion_ids) for t in group.trajectories], ())
                    self._collector.unwritten.drop(group_id)
                self.retry.append(task_index)

    def truncate_stuck(self, now: float) -> None:
        """Truncate sequences that alone keep the trainer waiting for `truncate_stuck_s`, in as many groups as its step lacks.
        To be called every now and then."""
        if not self._patience.over(self._stuck_step(), now):
            return
        cut = []
        for group_id in to_cut(self.ledger, self._collector, self._forecast.lengths):
            if self.settings.sampling.turns is None:
                self.whole(self._collector.cut(group_id))
            elif (cancel := self._collector.episodes.cut(group_id)) is not None:
                self._cancel(cancel)  # whole once their environment has scored what there is
            else:
                continue
            cut.append(group_id)
        if cut:
            log.info("step %d has waited too long: groups %s are cut where they are", self.ledger.step, cut)
            self._room_changed()

    def _stuck_step(self) -> int | None:
        """The step that the trainer waits for, if only groups that are under way can complete it."""
        step = self.awaited
        if step is None or step != self.ledger.step or self.ledger.ready(step):
            return None
        return step if self.ledger.stuck() or self.wanted() < 1 else None

    def stop_at(self, step: int) -> None:
        """Training ends at `step`: no group is opened that could only be consumed then or later."""
        self._target_step = step

    def wanted(self) -> int:
        """How many more groups training can still consume: the rest would be generated for nothing."""
        if self._target_step is None:
            return ENDLESS
        s, ledger = self.settings, self.ledger
        left = self._target_step - ledger.step
        full = sum(ledger.ready(b) for b in range(ledger.step, ledger.step + min(left, s.max_staleness + 1)))
        return left * s.groups_per_step + (left - full) * s.extra_groups - ledger.outstanding

    # --- the trainer -------------------------------------------------------------------------------------------------

    async def next_groups(self, step: int, seen: int) -> StepGroups:
        """Groups of this step's buffer after the first `seen`, once there are enough of them."""
        self.advance(step)
        while True:
            ids = self.ledger.occupied(step)
            last = self.ledger.ready(step)
            if last or len(ids) - seen >= self.settings.micro_batch_groups:
                groups = tuple(self.finished[i] for i in ids[seen:])
                self._handed.update(ids[seen:])
                for group in groups:
                    self.max_staleness_seen = max(self.max_staleness_seen, step - group.oldest.step)
                return StepGroups(groups, last)
            moved, self.awaited = self._moved, step
            try:
                await moved.wait()
            finally:
                self.awaited = None

    def advance(self, step: int) -> None:
        """The trainer took every optimizer step before `step`. ShoalError, and nothing has changed, when it cannot have."""
        at = self.ledger.step
        any_step = not self.settings.groups_per_step  # a trainer that samples itself takes steps of which nobody here is told
        if step != at and not (self.ledger.ready(at) and (step == at + 1 or (any_step and step > at))):
            what = "all" if self.ledger.ready(at) else "not all"
            raise ShoalError(f"step {step} is out of order: the run stands at step {at}, whose groups are {what} finished")
        if at < step or not self._forecast.began:
            self._forecast.stepped(self._now())
        while self.ledger.step < step:
            taken = self.ledger.consume(self.ledger.step)
            self._handed.difference_update(taken)
            self._consumed[self.ledger.step] = tuple(taken)
            self.wake()

    def took(self, step: int) -> None:
        """As `advance`, from one who may be late: the trainer may have gone on while a checkpoint was written, or a version was
        encoded."""
        if step > self.ledger.step:
            self.advance(step)

    def commit(self, step: int, checkpoint: str) -> tuple[TrainedStep, ...]:
        """The checkpoint after `step` steps is durable: what led to it, which is returned, is trained on once and for all. What
        was taken for later steps waits for a later commit: a crash gives it back."""
        last = self.journal.last_commit()
        if last is not None and step <= last.step:
            raise ShoalError(f"commit of step {step} comes after that of step {last.step}")
        self.took(step)
        consumed = {done: ids for done, ids in self._consumed.items() if done <= step}
        self.journal.commit(step, checkpoint, [group_id for ids in consumed.values() for group_id in ids])
        self._consumed = {done: ids for done, ids in self._consumed.items() if done > step}
        trained = tuple(
            TrainedStep(done, tuple(self.finished.pop(group_id) for group_id in ids)) for done, ids in consumed.items()
        )
        self._room_changed()
        return trained

    def take_back(self, node: str) -> list[int]:
        """Whole groups with tokens of `node` that the trainer does not have are given up, and their prompts come again. Their
        ids. Call `settle` once everything of the node is taken back."""
        scoring = [i for i, group in self.scoring.items() if group.made_by(node)]
        in_ledger = set(self.ledger.waiting_for_training) - self._handed
        finished = [i for i, group in self.finished.items() if i in in_ledger and group.made_by(node)]
        ids = scoring + finished
        if not ids:
            return ids
        self.journal.record_aborted(ids, CAUGHT)  # first: a disk that is full ends the run here, and nothing has changed
        for group_id in ids:
            group = self.scoring.pop(group_id, None) or self.finished.pop(group_id)
            self.retry.append(group.task_index)
            self._collector.unwritten.drop(group_id)
        self.ledger.withdraw(finished)
        self.ledger.abort(scoring)
        return ids

    def give_up(self, group_id: int) -> None:
        """A group under way of which a caught node made something that cannot be cut off. Its prompt comes again."""
        task_index, _ = self._collector.task_of(group_id)
        self._durations.dropped(group_id)
        self._abort([group_id], CAUGHT)
        self._cancel(self._collector.abort_group(group_id))
        self.retry.append(task_index)

    def discard(self, group_ids: Sequence[int]) -> None:
        """The trainer failed on these finished groups and stops: no later epoch is given them again."""
        self.journal.record_aborted([i for i in group_ids if i in self.finished], "diverged")

    def _abort(self, ids: Sequence[int], reason: str) -> None:
        self.ledger.abort(ids)
        self.journal.record_aborted(ids, reason)

    def wake(self) -> None:
        """Whoever waits for groups of a step looks again."""
        self._moved.set()
        self._moved = trio.Event()
