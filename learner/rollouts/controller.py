"""Runs the trajectories: asks the pure cores what to do, sends it, feeds back what comes. A thin shell.

Ledger (may this group exist), collector (whose tokens are these), dispatcher (which node), journal (what survives a
crash), task (what is it worth). Must not know how weights travel or how the trainer trains.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import trio

from learner.dispatch.dispatcher import NodeView
from learner.journal.journal import SURPLUS, Journal
from learner.journal.records import ReservedGroup, UnfinishedGroup
from learner.journal.token_writer import TokenJournal
from learner.rewards.scoring import Scorer
from learner.rollouts.collector import Collector
from learner.rollouts.durations import Durations
from learner.rollouts.group import first_attempt
from learner.rollouts.group_spec import GroupSpec, RolloutSettings, make_work
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger import NoRoom as NoRoom
from learner.rollouts.outcomes import Accepted, EventRefused, GroupAborted, Requeued, WholeGroup
from learner.rollouts.recovery import plan_resume
from learner.rollouts.redundancy import Patience, Redundancy, to_cut
from learner.rollouts.stalls import StallWatch
from learner.rollouts.steering import Steering
from learner.tasks.port import Task
from learner.tasks.prompting import decode_completion
from learner.trajectory import Group
from p2p.errors import Refusal, ShoalError
from p2p.protocol.messages import Abort, Assign, GenerateRequest, Interrupt, Rejected, Tokens
from p2p.protocol.rollout import BEHIND, UPDATING
from p2p.version import Version

log = logging.getLogger("shoal.rollouts")

REQUESTS_PER_MESSAGE = 256
DISPATCH_S = (0.02, 0.5)
"""The dispatcher looks at every node and every waiting sequence. So it is not called for each event but at most so often, and
less often where it takes long: DISPATCH_SHARE times as long as it took, at least the first and at most the second of these."""

DISPATCH_SHARE = 19.0

LOOK_S = 1.0
LOOK_SHARE = 50.0
"""Everything outstanding is looked at so often, and no oftener than so many times as long as that takes."""

SCORE_QUEUE = 100_000
"""Finished groups that may wait for their reward; the ledger bounds them far below."""


class Rollouts:
    """One epoch's trajectories.

    `send(peer, message)` queues a control message to a node; `nodes()` is the dispatcher's view of them;
    `report(peer, refusal)` hears about nodes that break the protocol.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        journal: Journal,
        task: Task,
        tokenizer: object,
        vocab_size: int,
        *,
        epoch: int,
        send: Callable[[str, object], None],
        nodes: Callable[[], Sequence[NodeView]],
        report: Callable[[str, Refusal], None],
        scorer: Scorer | None = None,
        in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self.settings, self.journal, self._task, self._tokenizer = settings, journal, task, tokenizer
        self.epoch, self._send, self._nodes, self._report = epoch, send, nodes, report
        self._in_thread, self._now = in_thread, now
        self._scorer = scorer or Scorer(task)
        self.collector = Collector(
            vocab_size, first_group=journal.groups_so_far, first_attempt=first_attempt(epoch)
        )
        self.tokens = TokenJournal(journal, self.collector.unwritten)
        # Nothing is moved where sequences are to end under the weights that they began with: elsewhere there may be newer ones.
        chosen = replace(settings.strategies, balance=False) if settings.finish_s else settings.strategies
        members = settings.samples + settings.extra_samples
        self.steering = Steering(members, settings.sampling.max_new_tokens, settings.max_staleness, chosen)
        self.finished: dict[int, Group] = {}
        self.max_staleness_seen = 0
        self.dropped = 0
        self.resumed_groups = self.resumed_tokens = 0
        """unfinished groups taken over from the epoch before, and the tokens that they had"""
        self._vocab_size = vocab_size
        self._published: set[Version] = set()
        self._retry: list[int] = []
        self._target_step: int | None = None
        self._consumed: list[int] = []
        self._stalls = StallWatch(settings.stall_s)
        self.redundancy = Redundancy(journal.surplus_tasks() if settings.extra_groups else set())
        self._scoring: dict[int, Group] = {}
        """groups that wait for their reward"""
        self.durations = Durations()
        self._awaited: int | None = None
        """the step that the trainer waits for"""
        self._patience = Patience(settings.truncate_stuck_s)
        self._score_in, self._score_out = trio.open_memory_channel[Group](SCORE_QUEUE)
        self._changed = trio.Event()
        self._dispatch_due = trio.Event()
        self.ledger = self._resume()
        self._drop_surplus()

    def _resume(self) -> Ledger:
        """The ledger as a crash left it: finished groups that are still legal stay, unfinished ones go on from their last
        journaled token, the rest is aborted by reason."""
        s, journal = self.settings, self.journal
        last = journal.last_commit()
        step = last.step if last else 0
        plan = plan_resume(journal.epochs(), step, journal.unconsumed(), journal.unfinished(), s.max_staleness)
        abort = {reason: list(ids) for reason, ids in plan.abort.items()}
        work = {g.group_id: self._work(g.group.task_index, g.group_id, g.group.samples, g.group.extra) for g in plan.go_on}
        go_on = [g for g in plan.go_on if work[g.group_id].recipe == g.group.recipe]
        abort["restart"] = [g.group_id for g in plan.go_on if work[g.group_id].recipe != g.group.recipe]
        ledger, misfits = Ledger.restore(
            s.max_staleness,
            s.groups_per_step,
            step,
            [(g.group_id, g.oldest.step) for g in plan.keep],
            [(g.group_id, g.group.version.step) for g in go_on],
            s.extra_groups,
        )
        # With extra groups, unfinished ones that have no place are surplus: the crash came between a full buffer and their abort.
        surplus = [g for g in go_on if g.group_id in misfits] if s.extra_groups else []
        abort[SURPLUS] = [g.group_id for g in surplus]
        abort.setdefault("stale", []).extend(group_id for group_id in misfits if group_id not in abort[SURPLUS])
        for left in surplus:
            self.redundancy.surplus_group(left.group.task_index, (), [sum(map(len, pieces)) for pieces in left.members])
        for reason, ids in abort.items():
            if ids:
                journal.record_aborted(ids, reason)
        journal.cut_tokens(plan.cut)
        self.finished = {g.group_id: g for g in plan.keep if g.group_id not in misfits}
        for left in go_on:
            if left.group_id not in misfits:
                self._take_up(left, work[left.group_id])
        self._retry = list(journal.tasks_to_retry())
        if self.finished or self.resumed_groups or any(abort.values()):
            log.info(
                "resumed at step %d: kept %d finished groups and %d tokens of %d unfinished ones, aborted %s",
                step, len(self.finished), self.resumed_tokens, self.resumed_groups, {r: len(i) for r, i in abort.items() if i},
            )  # fmt: skip
        return ledger

    def _take_up(self, left: UnfinishedGroup, work: GroupSpec) -> None:
        group = left.group
        whole = self.collector.restore_group(
            group.group_id, group.task_index, work.prompt_ids, group.version, work.seeds, self.settings.sampling, left.members,
            extra=group.extra,
        )  # fmt: skip
        self.resumed_groups += 1
        self.resumed_tokens += left.tokens
        if whole is not None:  # it had its last token and no reward yet
            self._whole(whole)

    def _work(self, task_index: int, group_id: int, samples: int, extra: int) -> GroupSpec:
        return make_work(self.settings, self._task, self._tokenizer, self._vocab_size, task_index, group_id, samples, extra)

    # --- work out ----------------------------------------------------------------------------------------------------

    def published(self, version: Version) -> None:
        """Groups may be generated under `version` from now on."""
        self._published.add(version)
        self.collector.published(version)

    def stop_at(self, step: int) -> None:
        """Training ends at `step`: no group is opened that could only be consumed then or later."""
        self._target_step = step

    def need_dispatch(self) -> None:
        """Something moved: the dispatcher is to look again, soon."""
        self._dispatch_due.set()

    async def keep_dispatched(self) -> None:
        """For ever: dispatch when it is needed, once for whatever moved in the meantime."""
        while True:
            await self._dispatch_due.wait()
            self._dispatch_due = trio.Event()
            began = self._now()
            self.dispatch()
            took = self._now() - began
            await trio.sleep(min(max(DISPATCH_SHARE * took, DISPATCH_S[0]), DISPATCH_S[1]))

    def dispatch(self) -> None:
        """Give every waiting sequence a node, and open as many groups as the ledger and the nodes have room for."""
        out: dict[str, list[GenerateRequest]] = {}
        while True:
            plan = self.steering.plan(
                self._now(), self.ledger.step, self._nodes(), self.collector, self._room
            )  # fmt: skip
            for request_id, peer in plan.assign:
                out.setdefault(peer, []).append(GenerateRequest.of(self.collector.assign(request_id, peer)))
            opened = sum(self._open_group(opening.version) for opening in plan.open for _ in range(opening.groups))
            if not opened:
                break
        for peer, requests in out.items():
            for i in range(0, len(requests), REQUESTS_PER_MESSAGE):
                self._send(peer, Assign(tuple(requests[i : i + REQUESTS_PER_MESSAGE]), self.settings.finish_s))

    async def keep_balanced(self) -> None:
        """For ever: look at everything outstanding, and have nodes hand back what would be in time elsewhere. It comes back with
        all its tokens and waits first in line."""
        while True:
            began = self._now()
            for move in self.steering.look(began, self.ledger.step, self._nodes(), self.collector):
                self._send(move.source, Interrupt((move.request_id,)))
            await trio.sleep(max(LOOK_S, LOOK_SHARE * (self._now() - began)))

    @property
    def held_back(self) -> bool:
        """Whether nodes could do more than training may use: the ledger has no room and nothing waits for a node."""
        newest = max(self._published, default=None)
        return newest is not None and not self._room(newest) and not self.collector.pending()

    def _room(self, version: Version) -> int:
        if version.epoch != self.epoch or version not in self._published:
            return 0
        return max(0, min(self.ledger.room(version.step), self._wanted()))

    def _wanted(self) -> int:
        """How many more groups training can still consume: the rest would be generated for nothing."""
        if self._target_step is None:
            return 1 << 62
        s, ledger = self.settings, self.ledger
        left = self._target_step - ledger.step
        full = sum(ledger.ready(b) for b in range(ledger.step, ledger.step + min(left, s.max_staleness + 1)))
        return left * s.groups_per_step + (left - full) * s.extra_groups - ledger.counts().outstanding

    def _open_group(self, version: Version) -> bool:
        if isinstance(self.ledger.reserve(self.journal.groups_so_far, version.step), NoRoom):
            return False
        # Ids are given out without gaps: so a prompt's group, and with it its seeds, does not depend on who died when.
        group_id = self.journal.next_group_id()
        task_index = self._retry.pop(0) if self._retry else self.journal.next_task_index()
        s = self.settings
        extra = s.extra_samples
        work = self._work(task_index, group_id, s.samples, extra)
        self.journal.record_reserved([ReservedGroup(group_id, task_index, version, s.samples, work.recipe, extra)])
        self.collector.open_group(group_id, task_index, work.prompt_ids, version, work.seeds, s.sampling, extra=extra)
        self.durations.opened(group_id, self._now())
        return True

    # --- work in -----------------------------------------------------------------------------------------------------

    def on_tokens(self, peer: str, message: Tokens) -> int:
        """Tokens from a node; returns how many were accepted."""
        accepted = 0
        ended = False
        now = self._now()
        for run in message.runs:
            if not run.start:
                self.durations.began(run.request_id, now)
            if taken := self.collector.extend(peer, run):
                accepted += taken
                continue
            try:
                event = run.event()
            except ValueError as error:
                self._report(
                    peer, Refusal(f"tokens of {run.request_id!r:.60}: {error}", peer=peer, version=run.version)
                )
                continue
            outcome = self.collector.tokens(peer, event)
            if event.finish:
                ended = True
                self.durations.ended(run.request_id, now)
            match outcome:
                case Accepted():
                    accepted += outcome.tokens
                    if outcome.whole is not None:
                        self._whole(outcome.whole)
                case EventRefused():
                    self._report(peer, outcome.refusal)
                case Requeued():
                    accepted += outcome.tokens
                    self._cancel([outcome.cancel])
                    if outcome.refusal is not None:
                        self._report(peer, outcome.refusal)
                case GroupAborted():
                    self._aborted(outcome)
        self.tokens.grown()
        if ended:
            self.need_dispatch()
        return accepted

    def on_rejected(self, peer: str, message: Rejected) -> None:
        """`peer` did not take a request, or gave it back."""
        outcome = self.collector.declined(
            peer, message.request_id, message.reason, retryable=message.retryable, avoid=message.cause not in (BEHIND, UPDATING)
        )
        if isinstance(outcome, GroupAborted):
            self._aborted(outcome)
        elif isinstance(outcome, Requeued) and outcome.refusal is not None:
            self._report(peer, outcome.refusal)

    def take_from_stalled(self, now: float) -> list[str]:
        """Move what makes no progress where it is; the nodes concerned, for the head to keep work from."""
        stalls = self._stalls.look(self.collector.progress(), now)
        for stall in stalls:
            self._report(stall.node, Refusal(f"{stall.reason}: {len(stall.request_ids)} sequences go elsewhere"))
            for request_id in stall.request_ids:
                self.collector.declined(stall.node, request_id, stall.reason, retryable=True)
            self._cancel([(stall.node, request_id) for request_id in stall.request_ids])
        return [stall.node for stall in stalls]

    def on_node_lost(self, peer: str) -> int:
        """What the node held goes to others, with its tokens so far. A dead node is never a reason to abort."""
        moved = len(self.collector.node_lost(peer))
        self.steering.outlook.forget(peer)
        self.need_dispatch()
        return moved

    def _aborted(self, outcome: GroupAborted) -> None:
        log.error("group %d aborted: %s", outcome.group_id, outcome.reason)
        self._report(outcome.refusal.peer, outcome.refusal)
        self.durations.dropped(outcome.group_id)
        self.ledger.abort([outcome.group_id], "failures")
        self.journal.record_aborted([outcome.group_id], "failures")
        self._cancel(outcome.cancel)
        # Finished groups moved up into its place: the current buffer may be complete now.
        self._drop_surplus()
        self._wake()
        self.need_dispatch()

    def _cancel(self, pairs: Sequence[tuple[str, str]]) -> None:
        for peer, request_id in pairs:
            self._send(peer, Abort((request_id,)))

    def _whole(self, whole: WholeGroup) -> None:
        """Its group waits for its reward now, and nodes stop what they do for members that it did not need."""
        group = whole.group
        self._scoring[group.group_id] = group
        self.durations.whole(group.group_id)
        self.redundancy.surplus_members(whole.surplus)
        self._cancel(whole.cancel)
        self._score_in.send_nowait(group)

    # --- what is too much, and what takes too long ---------------------------------------------------------------------

    @property
    def redundant(self) -> bool:
        """Whether anything is opened beyond need, or may be cut."""
        return bool(self.settings.extra_groups or self.settings.extra_samples or self.settings.truncate_stuck_s)

    def _drop_surplus(self) -> None:
        """Abort what full buffers have left without a place. Nodes hear of it at once; the prompts are drawn again."""
        while (surplus := self.ledger.surplus()) is not None:
            ids = self.redundancy.choose(surplus, self.collector)
            self.ledger.abort(ids, SURPLUS)
            self.journal.record_aborted(ids, SURPLUS)
            for group_id in ids:
                self.durations.dropped(group_id)
                stands = self.collector.standing(group_id)
                if stands is not None:
                    task_index, _ = self.collector.task_of(group_id)
                    self.redundancy.surplus_group(task_index, stands.ended, stands.running)
                    self._cancel(self.collector.abort_group(group_id))
                else:
                    whole = self._scoring.pop(group_id)
                    task_index = whole.task_index
                    self.redundancy.surplus_group(task_index, [len(t.completion_ids) for t in whole.trajectories], ())
                    self.collector.unwritten.drop(group_id)
                self._retry.append(task_index)

    def truncate_stuck(self, now: float) -> None:
        """Cut what alone keeps the trainer waiting, when it has for `truncate_stuck_s`: as many groups as its step lacks. To be
        called every now and then."""
        if not self._patience.over(self._stuck_step(), now):
            return
        cut = to_cut(self.ledger, self.collector, self.steering.outlook.lengths)
        for group_id in cut:
            self._whole(self.collector.cut(group_id))
        if cut:
            log.info("step %d has waited too long: groups %s are cut where they are", self.ledger.step, cut)
            self.need_dispatch()

    def _stuck_step(self) -> int | None:
        """The step that the trainer waits for, if only groups that are under way can complete it."""
        step = self._awaited
        if step is None or step != self.ledger.step or self.ledger.ready(step):
            return None
        return step if self.ledger.stuck(step) or self._wanted() < 1 else None

    # --- rewards -----------------------------------------------------------------------------------------------------

    async def score_finished(self) -> None:
        """Rewards, off the event loop (a task may take milliseconds an answer), then into the ledger."""
        async for group in self._score_out:
            self._rewarded(await self._in_thread(self._score, group))

    def _rewarded(self, group: Group) -> None:
        # What was cut counts with what it had: too little, but what takes long would not be heard of at all without.
        lengths = [len(t.completion_ids) for t in group.trajectories]
        self.steering.outlook.ended(group.task_index, float(len(group.trajectories[0].prompt_ids)), lengths)
        if self._scoring.pop(group.group_id, None) is None:
            return  # surplus by now: others filled its buffer while it waited for its reward
        if not self.settings.keep_equal and group.equal:
            # A new group takes its room.
            self.ledger.abort([group.group_id], "equal")
            self.journal.record_aborted([group.group_id], "equal")
            self.collector.unwritten.drop(group.group_id)
            self._drop_surplus()
            self._wake()
            self.need_dispatch()
            return
        self.journal.record_finished(group)
        self.collector.unwritten.drop(group.group_id)
        self.ledger.occupy(group.group_id, group.oldest.step)
        self.finished[group.group_id] = group
        self.redundancy.finished(group)
        self._drop_surplus()
        self._wake()
        self.need_dispatch()

    def _score(self, group: Group) -> Group:
        prompt = self._task.prompt(group.task_index)
        answers = [decode_completion(self._tokenizer, t.completion_ids) for t in group.trajectories]
        return group.scored([self._scorer.score(prompt, answer) for answer in answers])

    # --- the trainer -------------------------------------------------------------------------------------------------

    async def next_groups(self, step: int, seen: int) -> tuple[tuple[Group, ...], bool]:
        """Groups of this step's buffer after the first `seen`, once there are enough; and whether they are its last."""
        self.advance(step)
        while True:
            ids = self.ledger.occupied(step)
            last = self.ledger.ready(step)
            if last or len(ids) - seen >= self.settings.micro_batch_groups:
                groups = tuple(self.finished[i] for i in ids[seen:])
                for group in groups:
                    self.max_staleness_seen = max(self.max_staleness_seen, step - group.oldest.step)
                return groups, last
            changed, self._awaited = self._changed, step
            try:
                await changed.wait()
            finally:
                self._awaited = None

    def advance(self, step: int) -> None:
        """The trainer took every optimizer step before `step`. ShoalError, and nothing has changed, when it cannot have."""
        at = self.ledger.step
        if step != at and not (step == at + 1 and self.ledger.ready(at)):
            what = "all" if self.ledger.ready(at) else "not all"
            raise ShoalError(f"step {step} is out of order: the run stands at step {at}, whose groups are {what} finished")
        if at < step or not self.steering.outlook.began:
            self.steering.outlook.stepped(self._now())
        while self.ledger.step < step:
            self._consumed.extend(self.ledger.consume(self.ledger.step))
            self._wake()

    def commit(self, step: int, checkpoint: str) -> None:
        """The checkpoint after `step` steps is durable: what led to it is trained on, once and for all."""
        last = self.journal.last_commit()
        if last is not None and step <= last.step:
            raise ShoalError(f"commit of step {step} comes after that of step {last.step}")
        self.advance(step)
        consumed, self._consumed = self._consumed, []
        self.journal.commit(step, checkpoint, consumed)
        for group_id in consumed:
            del self.finished[group_id]
        self.need_dispatch()

    def discard(self, group_ids: Sequence[int]) -> None:
        """The trainer failed on these finished groups and stops: no later epoch is given them again."""
        ids = [i for i in group_ids if i in self.finished]
        self.journal.record_aborted(ids, "diverged")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
