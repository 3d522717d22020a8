"""Generates groups: asks the pure cores what to do, sends it to nodes, feeds back the tokens that come. A thin shell.

Ledger (may this group exist), collector (whose tokens are these), dispatcher (which node), journal (what survives a crash). What
becomes of a group once it is whole is `buffers`. Must not know how weights travel or how the trainer trains.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio

from learner.dispatch.dispatcher import NodeView
from learner.environments.port import EpisodeRunner, TurnAnswer
from learner.journal.journal import Journal
from learner.journal.records import ReservedGroup, UnfinishedGroup
from learner.journal.token_writer import TokenJournal
from learner.rewards.group_scorer import PooledScorer
from learner.rewards.port import GroupScorer
from learner.rollouts.beside import BesideTraining, NothingBeside
from learner.rollouts.buffers import TrainingBuffers
from learner.rollouts.collector import Collector
from learner.rollouts.durations import Durations
from learner.rollouts.group import first_attempt
from learner.rollouts.group_spec import GroupSpec, RolloutSettings, make_spec
from learner.rollouts.idle_runs import IdleRuns
from learner.rollouts.outcomes import Accepted, BegunAnew, Cancel, EventRefused, GroupAborted, Ignored, Requeued, WholeGroup
from learner.rollouts.recovery import LeftOver, place, plan_resume
from learner.rollouts.redundancy import Redundancy
from learner.rollouts.rescue import Rescue, hedge_pause_s
from learner.rollouts.rewarding import scored_by
from learner.rollouts.steering import Steering
from learner.standing.port import NobodyDoubted, NodeConduct
from learner.tasks.port import Task
from learner.tasks.prompting import decode_completion
from learner.trajectory import Group
from p2p.errors import Refusal, ShoalError
from p2p.protocol.generation import Abort, Assign, GenerateRequest, Rejected, Tokens
from p2p.protocol.rollout import BEHIND, RESTING, UPDATING
from p2p.protocol.wire import FEW
from p2p.version import Version

log = logging.getLogger("shoal.rollouts")

DISPATCH_SHARE = 19.0
DISPATCH_LEAST_S = 0.02
DISPATCH_MOST_S = 0.5
"""The dispatcher looks at every node and every waiting sequence, so it is not called for each event. It pauses DISPATCH_SHARE
times as long as it took (it may have 5 % of the time), at least DISPATCH_LEAST_S and at most DISPATCH_MOST_S."""

FAILED_GROUPS = 16
"""Groups in a row that their environment may lose before the run stops, as `task.reward_failures` is of rewards: nodes would
generate for nothing for an environment that always fails."""

LOOK_S = 1.0
LOOK_SHARE = 50.0
"""All that is outstanding is looked at every LOOK_S, and no oftener than LOOK_SHARE times as long as that takes: 2 % of the
time."""


class Rollouts:
    """One epoch's trajectories.

    `send(peer, message)` queues a control message to a node; `nodes()` is the dispatcher's view of them;
    `report(peer, refusal)` hears about nodes that break the protocol, `conduct` what follows for their standing. `runner` answers
    the model's turns, where the settings say that completions are episodes (`Sampling.turns`).
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
        conduct: NodeConduct | None = None,
        scorer: GroupScorer | None = None,
        runner: EpisodeRunner | None = None,
        in_thread: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        if (runner is None) != (settings.sampling.turns is None):
            raise ValueError("a runner of episodes goes with limits of their turns, and neither without the other")
        self._runner = runner
        self.settings, self.journal, self._task, self.tokenizer = settings, journal, task, tokenizer
        self.epoch, self._send, self._nodes, self._report = epoch, send, nodes, report
        self._conduct = conduct or NobodyDoubted()
        self._now, self._scorer = now, scorer or PooledScorer(task, in_thread=in_thread)
        self._make_spec = partial(make_spec, settings, task, tokenizer, vocab_size)
        self.collector = Collector(vocab_size, first_group=journal.groups_so_far, first_attempt=first_attempt(epoch))
        self.beside: BesideTraining = NothingBeside()
        """what nodes hold that is not training's; the head puts it here"""
        self.tokens = TokenJournal(journal, self.collector.unwritten)
        # Nothing is moved where sequences are to end under the weights that they began with: elsewhere there may be newer ones.
        chosen = settings.strategies.model_copy(update={"migration": False}) if settings.finish_s else settings.strategies
        members, step = settings.samples + settings.extra_samples, settings.groups_per_step * settings.samples
        proven = self._conduct.anybody_proven
        self.steering = Steering(members, settings.sampling.max_new_tokens, settings.max_staleness, chosen, proven, step=step)
        self.resumed_groups = self.resumed_tokens = 0
        """unfinished groups taken over from the epoch before, and the tokens that they had"""
        self.durations, self.idle_runs = Durations(), IdleRuns()
        self._failed_in_a_row = 0
        """groups lost by their environment since one was whole"""
        self._published: set[Version] = set()
        self._dispatch_due = trio.Event()
        redundancy = Redundancy(journal.surplus_tasks() if settings.extra_groups else set())
        left = self._left_over(redundancy)
        self.ledger = left.ledger
        self.buffers = TrainingBuffers(
            settings, journal, ledger=self.ledger, finished=left.finished, collector=self.collector,
            forecast=self.steering.forecast, durations=self.durations, redundancy=redundancy, score=self._score,
            in_thread=in_thread, cancel=self.cancel, changed=self.need_dispatch, now=now,
        )  # fmt: skip
        self.collector.credible = self._conduct.credible
        self.rescue = Rescue(
            self.collector, self.buffers, self._conduct, stall_s=settings.stall_s, beside=lambda: self.beside, report=report,
            cancel=self.cancel, send=send, giving_way=self.steering.giving_way, moves_slow=not settings.finish_s,
        )  # fmt: skip
        for group in left.go_on:
            self._take_up(group)
        if left.finished or left.go_on or any(left.abort.values()):
            log.info(
                "resumed at step %d: kept %d finished groups and %d tokens of %d unfinished ones, aborted %s", self.ledger.step,
                len(left.finished), self.resumed_tokens, self.resumed_groups, {r: len(i) for r, i in left.abort.items() if i},
            )  # fmt: skip
        self.buffers.drop_surplus()
        self._tell_runner()

    def _left_over(self, redundancy: Redundancy) -> LeftOver:
        """What a crash left and this epoch goes on with; the journal has the rest as aborted, by reason."""
        s, journal = self.settings, self.journal
        last = journal.last_commit()
        step = last.step if last else 0
        plan = plan_resume(journal.epochs(), step, journal.unconsumed(), journal.unfinished(), s.max_staleness)
        left = place(plan, step, lambda group: self._group_spec(group).spec_digest == group.spec_digest, s)
        for group in left.surplus:
            redundancy.surplus_group(group.group.task_index, (), [sum(map(len, pieces)) for pieces in group.members])
        for reason, ids in left.abort.items():
            if ids:
                journal.record_aborted(ids, reason)
        journal.cut_tokens(plan.cut)
        return left

    def _take_up(self, left: UnfinishedGroup) -> None:
        """Go on with a group of the epoch before, from its last journaled tokens."""
        whole = self.collector.restore_group(left, self._group_spec(left.group), self.settings.sampling)
        self.resumed_groups += 1
        self.resumed_tokens += left.tokens
        if whole is not None:  # it had its last token and no reward yet
            self.buffers.whole(whole)

    def _group_spec(self, group: ReservedGroup) -> GroupSpec:
        return self._make_spec(group.task_index, group.group_id, group.samples, group.extra)

    async def _score(self, group: Group) -> Group:
        texts = [decode_completion(self.tokenizer, t.completion_ids, self._task.stop) for t in group.trajectories]
        return await scored_by(self._scorer, group, texts)

    # --- work out ----------------------------------------------------------------------------------------------------

    def published(self, version: Version) -> None:
        """Groups may be generated under `version` from now on."""
        self._published.add(version)
        self.collector.published(version)
        self.beside.published(version)

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
            await trio.sleep(min(max(DISPATCH_SHARE * took, DISPATCH_LEAST_S), DISPATCH_MOST_S))

    def dispatch(self) -> None:
        """Give every waiting sequence a node, and open as many groups as the ledger and the nodes have room for."""
        out: dict[str, list[GenerateRequest]] = {}
        now = self._now()
        while True:
            plan = self.steering.plan(
                now, self.ledger.step, self._nodes(), self.collector, self._room
            )  # fmt: skip
            for request_id, peer in plan.assign:
                out.setdefault(peer, []).append(GenerateRequest.of(self.collector.assign(request_id, peer, now)))
            opened = sum(self._open_group(opening.version) for opening in plan.open for _ in range(opening.groups))
            if not opened:
                break
        self.beside.given(out)
        for peer, requests in out.items():
            self.idle_runs.allowed(peer, self.load(peer))
            for i in range(0, len(requests), FEW):  # with prompts of some thousand tokens that stays far below a frame
                self._send(peer, Assign(tuple(requests[i : i + FEW]), self.settings.finish_s))

    async def keep_migrating(self) -> None:
        """For ever: look at everything outstanding, and have nodes hand back what would be in time elsewhere. It comes back with
        all its tokens and waits first in line."""
        while True:
            began = self._now()
            for move in self.steering.look(began, self.ledger.step, self._nodes(), self.collector):
                self.rescue.ask_back(move.source, (move.request_id,), began)
            await trio.sleep(max(LOOK_S, LOOK_SHARE * (self._now() - began)))

    async def keep_hedged(self) -> None:
        """For ever: nothing that the trainer waits for stays with a node that need not be waited for."""
        while True:
            began, taken = self._now(), self.rescue.taken
            self.rescue.hedge(began, self._nodes)
            if self.rescue.taken > taken:
                self.need_dispatch()
            await trio.sleep(hedge_pause_s(self._now() - began))

    @property
    def held_back(self) -> bool:
        """Whether nodes could do more than training may use: the ledger has no room and nothing waits for a node."""
        newest = max(self._published, default=None)
        return newest is not None and not self._room(newest) and not self.collector.pending()

    def _room(self, version: Version) -> int:
        if version.epoch != self.epoch or version not in self._published:
            return 0
        return max(0, min(self.ledger.room(version.step), self.buffers.wanted()))

    def _open_group(self, version: Version) -> bool:
        if not self.ledger.reserve(self.journal.groups_so_far, version.step):
            return False
        # Ids are given out without gaps: so a prompt's group, and with it its seeds, does not depend on who died when.
        group_id = self.journal.next_group_id()
        task_index = self.buffers.retry.pop(0) if self.buffers.retry else self.journal.next_task_index()
        s = self.settings
        spec = self._make_spec(task_index, group_id, s.samples, s.extra_samples)
        reserved = ReservedGroup(
            group_id, task_index, version, samples=s.samples, spec_digest=spec.spec_digest, extra=s.extra_samples
        )
        self.journal.record_reserved([reserved])
        self.collector.open_group(reserved, spec, s.sampling)
        self.durations.opened(group_id, self._now())
        return True

    def load(self, peer: str) -> int:
        """How many requests `peer` holds, of all classes."""
        return self.collector.load(peer) + self.beside.load(peer)

    def working(self, peer: str) -> list[str]:
        """Request ids that `peer` holds, of all classes."""
        return self.collector.working(peer) + self.beside.working(peer)

    # --- episodes ----------------------------------------------------------------------------------------------------

    async def keep_answered(self) -> None:
        """For ever: take what environments answer. Returns at once where nothing has turns."""
        if self._runner is not None:
            async for answer in self._runner.answers:
                self.on_answer(answer)

    def on_answer(self, answer: TurnAnswer) -> None:
        """An environment answered the last turn of an episode. ShoalError when FAILED_GROUPS groups in a row were lost so."""
        outcome = self.collector.episodes.answered(answer)
        match outcome:
            case Accepted(whole=WholeGroup() as whole):
                self._failed_in_a_row = 0
                self.buffers.whole(whole)
            case BegunAnew():
                log.warning("group %d, member %d is begun anew: %.500s", outcome.group_id, outcome.member, outcome.reason)
                self.journal.cut_tokens([(outcome.group_id, outcome.member, 0)])
            case GroupAborted():
                self._aborted(outcome)
                self._failed_in_a_row += 1
                if self._failed_in_a_row >= FAILED_GROUPS:
                    why = f"{FAILED_GROUPS} groups in a row failed in their environment; the last: {outcome.reason:.500}"
                    raise ShoalError(why)
        self.tokens.grown()
        self._tell_runner()
        self.need_dispatch()

    def _tell_runner(self) -> None:
        """Ask it for answers to turns that ended, and tell it which episodes are over."""
        if self._runner is None:
            return
        work = self.collector.episodes.take_work()
        if work.forget:
            self._runner.forget(work.forget)
        for episode in work.ask:
            self._runner.respond(episode)

    # --- work in -----------------------------------------------------------------------------------------------------

    def on_tokens(self, peer: str, message: Tokens) -> int:
        """Tokens from a node; returns how many were accepted. The first run that no honest node sends ends the message: a
        Refusal, once what came before it is taken."""
        accepted, idle, ended = 0, 0, False
        refused: Refusal | None = None
        now, may_idle = self._now(), self.idle_runs.allowed(peer, self.load(peer))
        for run in message.runs:
            if refused is None and idle > may_idle:
                refused = Refusal(f"{idle} runs in a message that bring nothing", version=run.version)
            if refused is not None:
                break
            if not run.start and not self.beside.owns(peer, run.request_id):
                self.durations.began(run.request_id, now)
            if taken := self.collector.extend(peer, run):
                accepted += taken
                continue
            if self.beside.owns(peer, run.request_id):
                said = self.beside.on_tokens(peer, run)
                accepted += said.tokens
                ended = ended or bool(run.finish)
                idle += not said.tokens
                if said.made:
                    self.rescue.request_ended(peer, run.request_id, said.made, now)
                if said.refusal is not None and run.finish in ("error", "abort"):  # it gives it up, and no more
                    self._report(peer, said.refusal)
                else:
                    refused = said.refusal
                continue
            outcome = self.collector.tokens(peer, run)
            if run.finish:
                ended = True
                self.durations.ended(run.request_id, now)
            match outcome:
                case Accepted():
                    accepted += outcome.tokens
                    if not self.collector.holds(peer, run.request_id):
                        self.rescue.ended_at(peer, run.request_id, outcome, now)
                    if outcome.cancel:  # a stop string ended what the node goes on with: its place is free
                        self.cancel(outcome.cancel)
                        ended = True
                        self.durations.ended(run.request_id, now)
                    if outcome.whole is not None:
                        self.buffers.whole(outcome.whole)
                    idle += not outcome.tokens
                case Ignored():
                    idle += 1
                case EventRefused():
                    refused = outcome.refusal
                case Requeued():
                    accepted += outcome.tokens
                    self.cancel((outcome.cancel,))
                    if outcome.breach:
                        refused = outcome.refusal
                    else:
                        self.rescue.requeued(peer, run.request_id, outcome, now)
                case GroupAborted():
                    self._aborted(outcome)
                    refused = outcome.refusal if outcome.breach else None
        self.rescue.moved(peer, accepted, now)
        self.tokens.grown()
        self._tell_runner()
        if ended or refused is not None:
            self.need_dispatch()
        if refused is not None:
            self.rescue.take_all(peer, now)
            raise refused.at(peer=peer)
        return accepted

    def on_rejected(self, peer: str, message: Rejected) -> None:
        """`peer` did not take a request, or gave it back."""
        if self.beside.owns(peer, message.request_id):
            self.beside.on_rejected(peer, message)
            return
        avoid = message.cause not in (BEHIND, UPDATING, RESTING)
        outcome = self.collector.declined(peer, message.request_id, message.reason, retryable=message.retryable, avoid=avoid)
        if isinstance(outcome, GroupAborted):
            self._aborted(outcome)
        elif isinstance(outcome, Requeued):
            self.rescue.requeued(peer, message.request_id, outcome, self._now())

    def on_node_lost(self, peer: str) -> int:
        """What the node held goes to others, with its tokens so far. A dead node is never a reason to abort."""
        moved = len(self.collector.node_lost(peer)) + self.beside.on_node_lost(peer)
        self.steering.forecast.forget(peer)
        self.idle_runs.forget(peer)
        self.need_dispatch()
        return moved

    def _aborted(self, outcome: GroupAborted) -> None:
        log.error("group %d aborted: %.500s", outcome.group_id, outcome.reason)
        if outcome.refusal is not None and not outcome.breach:
            self._report(outcome.refusal.peer, outcome.refusal)
        self.cancel(outcome.cancel)
        self.buffers.failed(outcome.group_id, outcome.task_index)

    def cancel(self, pairs: Cancel) -> None:
        """Tell nodes to stop these."""
        for peer, request_id in pairs:
            self._send(peer, Abort((request_id,)))
        self._tell_runner()  # whatever stops at nodes may be an episode that is over, or was cut
