"""Runs the trajectories: asks the pure cores what to do, sends it, feeds back what comes. A thin shell.

Ledger (may this group exist), collector (whose tokens are these), dispatcher (which node), journal (what survives a
crash), task (what is it worth). Must not know how weights travel or how the trainer trains.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from learner.collector import Collector
from learner.dispatch import Dispatcher, NodeView
from learner.journal import Journal, ReservedGroup
from learner.ledger import Ledger
from learner.ledger import Refused as NoRoom
from learner.outcomes import Accepted, FinishedGroup, GroupAborted, Refused, Requeued, Sampling
from learner.recovery import plan_resume
from learner.scoring import Scorer
from learner.stalls import StallWatch
from learner.tasks.base import Task
from learner.text import decode_completion, encode_prompt
from learner.trajectory import Group
from p2p.errors import Refusal
from p2p.protocol.messages import Abort, Assign, Rejected, Request, Tokens
from p2p.version import Version

log = logging.getLogger("shoal.rollouts")

REQUESTS_PER_MESSAGE = 256
SCORE_QUEUE = 100_000
"""Finished groups that may wait for their reward; the ledger bounds them far below."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    max_staleness: int
    groups_per_step: int
    samples: int
    seed: int
    sampling: Sampling
    micro_batch_groups: int
    """hand groups to the trainer once so many are there (or the step is complete)"""
    stall_s: float = 120.0
    """a node that has work and makes no token for so long loses it to others"""


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
    ) -> None:
        self.settings, self.journal, self._task, self._tokenizer = settings, journal, task, tokenizer
        self.epoch, self._send, self._nodes, self._report = epoch, send, nodes, report
        self._in_thread = in_thread
        self._scorer = scorer or Scorer(task)
        self.collector = Collector(vocab_size, first_group=journal.next_group_id())
        self.dispatcher = Dispatcher(settings.samples)
        self.finished: dict[int, Group] = {}
        self.max_staleness_seen = 0
        self.dropped = 0
        self._published: set[Version] = set()
        self._retry: list[int] = []
        self._target_step: int | None = None
        self._consumed: list[int] = []
        self._stalls = StallWatch(settings.stall_s)
        self._score_in, self._score_out = trio.open_memory_channel[FinishedGroup](SCORE_QUEUE)
        self._changed = trio.Event()
        self.ledger = self._resume()

    def _resume(self) -> Ledger:
        """The ledger as a crash left it: finished groups that are still legal stay, the rest is aborted by reason."""
        s, journal = self.settings, self.journal
        last = journal.last_commit()
        step = last.step if last else 0
        plan = plan_resume(journal.epochs(), step, journal.unconsumed(), journal.unfinished(), s.max_staleness)
        for reason, ids in plan.abort.items():
            journal.record_aborted(ids, reason)
        ledger, misfits = Ledger.restore(
            s.max_staleness, s.groups_per_step, step, [(g.group_id, g.oldest.step) for g in plan.keep]
        )
        if misfits:
            journal.record_aborted(misfits, "stale")
        self.finished = {g.group_id: g for g in plan.keep if g.group_id not in misfits}
        self._retry = list(journal.tasks_to_retry())
        if plan.keep or plan.abort:
            aborted = {reason: len(ids) for reason, ids in plan.abort.items()}
            log.info("resumed at step %d: kept %d finished groups, aborted %s", step, len(self.finished), aborted)
        return ledger

    # --- work out ----------------------------------------------------------------------------------------------------

    def published(self, version: Version) -> None:
        """Groups may be generated under `version` from now on."""
        self._published.add(version)
        self.collector.published(version)

    def stop_at(self, step: int) -> None:
        """Training ends at `step`: no group is opened that could only be consumed then or later."""
        self._target_step = step

    def dispatch(self) -> None:
        """Give every waiting sequence a node, and open as many groups as the ledger and the nodes have room for."""
        out: dict[str, list[Request]] = {}
        while True:
            plan = self.dispatcher.choose(self._nodes(), self.collector.pending(), self._room)
            for request_id, peer in plan.assign:
                out.setdefault(peer, []).append(Request.of(self.collector.assign(request_id, peer)))
            opened = sum(self._open_group(opening.version) for opening in plan.open for _ in range(opening.groups))
            if not opened:
                break
        for peer, requests in out.items():
            for i in range(0, len(requests), REQUESTS_PER_MESSAGE):
                self._send(peer, Assign(tuple(requests[i : i + REQUESTS_PER_MESSAGE])))

    def _room(self, version: Version) -> int:
        if version.epoch != self.epoch or version not in self._published:
            return 0
        room = self.ledger.room(version.step)
        if self._target_step is not None:
            # Only what training can still consume: the rest would be generated for nothing.
            held = self.ledger.counts().outstanding
            room = min(room, (self._target_step - self.ledger.step) * self.settings.groups_per_step - held)
        return max(0, room)

    def _open_group(self, version: Version) -> bool:
        group_id = self.journal.next_group_id()
        granted = self.ledger.reserve(group_id, version.step)
        if isinstance(granted, NoRoom):
            return False
        task_index = self._retry.pop(0) if self._retry else self.journal.next_task_index()
        s = self.settings
        self.journal.record_reserved([ReservedGroup(group_id, task_index, version, s.samples)])
        prompt_ids = encode_prompt(self._tokenizer, self._task.prompt(task_index))
        seeds = [mix(s.seed, task_index, group_id, member) for member in range(s.samples)]
        self.collector.open_group(group_id, task_index, prompt_ids, version, seeds, s.sampling)
        return True

    # --- work in -----------------------------------------------------------------------------------------------------

    def on_tokens(self, peer: str, message: Tokens) -> int:
        """Tokens from a node; returns how many were accepted."""
        accepted = 0
        ended = False
        for run in message.runs:
            try:
                event = run.event()
            except ValueError as error:
                self._report(
                    peer, Refusal(f"tokens of {run.request_id!r:.60}: {error}", peer=peer, version=run.version)
                )
                continue
            outcome = self.collector.tokens(peer, event)
            ended = ended or bool(event.finish)
            match outcome:
                case Accepted():
                    accepted += outcome.tokens
                    if outcome.finished is not None:
                        self._score_in.send_nowait(outcome.finished)
                case Refused():
                    self._report(peer, outcome.refusal)
                case Requeued():
                    accepted += outcome.tokens
                    self._cancel([outcome.cancel])
                    if outcome.refusal is not None:
                        self._report(peer, outcome.refusal)
                case GroupAborted():
                    self._aborted(outcome)
        if ended:
            self.dispatch()
        return accepted

    def on_rejected(self, peer: str, message: Rejected) -> None:
        """`peer` did not take a request, or gave it back."""
        outcome = self.collector.declined(peer, message.request_id, message.reason, retryable=message.retryable)
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
        self.dispatch()
        return moved

    def _aborted(self, outcome: GroupAborted) -> None:
        log.error("group %d aborted: %s", outcome.group_id, outcome.reason)
        self._report(outcome.refusal.peer, outcome.refusal)
        self.ledger.abort([outcome.group_id], "failures")
        self.journal.record_aborted([outcome.group_id], "failures")
        self._cancel(outcome.cancel)
        # Finished groups moved up into its place: the current buffer may be complete now.
        self._wake()
        self.dispatch()

    def _cancel(self, pairs: Sequence[tuple[str, str]]) -> None:
        for peer, request_id in pairs:
            self._send(peer, Abort((request_id,)))

    async def score_finished(self) -> None:
        """Rewards, off the event loop (a task may take milliseconds an answer), then into the ledger."""
        async for finished in self._score_out:
            group = await self._in_thread(self._score, finished)
            self.journal.record_finished(group)
            self.ledger.occupy(group.group_id, group.oldest.step)
            self.finished[group.group_id] = group
            self._wake()
            self.dispatch()

    def _score(self, finished: FinishedGroup) -> Group:
        prompt = self._task.prompt(finished.task_index)
        return finished.rewarded(
            [self._scorer.score(prompt, decode_completion(self._tokenizer, sample.ids)) for sample in finished.samples]
        )

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
            changed = self._changed
            await changed.wait()

    def advance(self, step: int) -> None:
        """The trainer took every optimizer step before `step`."""
        while self.ledger.step < step:
            self._consumed.extend(self.ledger.consume(self.ledger.step))
            self._wake()

    def commit(self, step: int, checkpoint: str) -> None:
        """The checkpoint after `step` steps is durable: what led to it is trained on, once and for all."""
        self.advance(step)
        consumed, self._consumed = self._consumed, []
        self.journal.commit(step, checkpoint, consumed)
        for group_id in consumed:
            del self.finished[group_id]
        self.dispatch()

    def discard(self, group_ids: Sequence[int]) -> None:
        """The trainer failed on these finished groups and stops: no later epoch is given them again."""
        ids = [i for i in group_ids if i in self.finished]
        self.journal.record_aborted(ids, "diverged")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def mix(*values: int) -> int:
    """A 63-bit seed from a few integers (splitmix64 over them in turn): same in every process, for ever."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
