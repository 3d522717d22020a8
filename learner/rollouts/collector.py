"""Gathers the tokens of every outstanding trajectory, whichever nodes they come from.

Pure: no clock, network, ledger or tokenizer. Events in (`tokens`, `declined`, `node_lost`), outcomes out. What a group and its
members are, and what their requests are called, is in `group`; who holds which attempt of what, in `group_books`; what the
environments of episodes are asked and answer, in `episode_answers`.

A trajectory is a member of a group. It is worked on by at most one node at a time; each hand-over is a new **attempt**, so
tokens of an earlier attempt that are still under way are recognised and ignored. What a node sent before it was lost stays: the
next attempt carries it as a prefix (token-level collection and migration, RLBoost, arXiv 2510.19225), so a dead node costs one
prefill, never a token.

Whether a trajectory has ended follows from its tokens (a stop token, or the budget used up), never from a node's word
alone: a node that claims an end the tokens do not show is refused, and one that dies between its last token and its
last event costs nothing. Where completions are episodes of several turns (`Sampling.turns`), what ends so is a turn: the member
then waits for its environment, and neither for a node nor at one. The answer either gives tokens, after which it waits for a node
with all of them as a prefix, or its score, which ends it.

Two things end a trajectory that its tokens do not: a group with members beyond need (`extra`; StaleFlow's N' > N, arXiv
2601.12784) is whole with those that end first, and `cut` ends a group where it stands.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator

from learner.dispatch.dispatcher import WaitingSequence
from learner.dispatch.forecast import GroupState, MemberState
from learner.journal.records import ReservedGroup, UnfinishedGroup
from learner.rollouts.episode_answers import EpisodeAnswers
from learner.rollouts.episodes import over
from learner.rollouts.event_checks import MIN_LOGPROB, add_event
from learner.rollouts.group import (
    RunningGroup,
    RunningSample,
    expected,
    finish_of,
    generate,
    min_version,
    parse_request,
    running_group,
)
from learner.rollouts.group_books import GroupBooks
from learner.rollouts.group_spec import GroupSpec
from learner.rollouts.outcomes import (
    Accepted,
    Cancel,
    EventRefused,
    GroupAborted,
    GroupProgress,
    Ignored,
    Outcome,
    PromptFeature,
    Requeued,
    Sampling,
    WholeGroup,
)
from learner.trajectory import TRUNCATED
from p2p.errors import Refusal
from p2p.printable import printable
from p2p.protocol.rollout import MAX_LOGPROB, Generate, TokenEvent, unpack_ids
from p2p.version import Version

FAILURE_BUDGET = 8
"""Refusals of misbehaving nodes that one trajectory survives. Its own prompt may be what breaks them, so it must end;
eight failures on a healthy one are not chance, since the dispatcher avoids nodes that failed it before."""

STRANGERS_WORD = 1 / 16
"""What a failure counts at a node whose word does not count. Not nothing: a prompt that breaks every node must end."""


class Collector:
    """All outstanding groups. `vocab_size` bounds token ids; versions are known once `published` was told of them.

    Group ids below `first_group` belong to an earlier epoch: their late tokens are ignored, and `restore_group` may take
    them up again. `unwritten` holds what was accepted and is not in the journal yet; whoever keeps one empties it.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        failure_budget: int = FAILURE_BUDGET,
        first_group: int = 0,
        first_attempt: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.failure_budget = failure_budget
        self.first_attempt = first_attempt
        self.books = GroupBooks()
        self.unwritten = self.books.unwritten
        self.episodes = EpisodeAnswers(self.books, vocab_size)
        self.credible: Callable[[str], bool] = lambda node: True  # whose word counts; the controller sets it
        self.tokens_by_node: dict[str, int] = {}
        self.failures_by_node: dict[str, int] = {}
        """events and requests refused that were held against a node"""
        self._last_group = first_group - 1
        self._published: set[Version] = set()

    # ---- work to do

    def published(self, version: Version) -> None:
        """Tokens of this version may arrive from now on. Tokens of a version never published are refused: a node
        could otherwise claim to be fresher than it is."""
        self._published.add(version)

    def open_group(self, reserved: ReservedGroup, spec: GroupSpec, sampling: Sampling) -> tuple[str, ...]:
        """Start a reserved group with one member a seed. Its request ids, all waiting for a node. With `extra`, the group is
        whole once all but so many members have ended: with these, in order of member.

        Group ids must grow, so that any smaller unknown id is known to be over. ValueError otherwise.
        """
        group_id = reserved.group_id
        if group_id <= self._last_group:
            raise ValueError(f"group {group_id} comes after group {self._last_group}")
        if len(spec.seeds) <= reserved.extra or not spec.prompt_ids or sampling.max_new_tokens < 1:
            raise ValueError(f"group {group_id} has no members, no prompt or no token budget")
        if reserved.version not in self._published:
            raise ValueError(f"group {group_id}: version {reserved.version} was not published")
        self._last_group = group_id
        limit = sampling.turn_end(0)
        members = [RunningSample(seed, limit, attempt=self.first_attempt) for seed in spec.seeds]
        group = self.books.groups[group_id] = running_group(reserved, spec, sampling, members)
        return tuple(group.request_name(index) for index in range(len(members)))

    def restore_group(self, left: UnfinishedGroup, spec: GroupSpec, sampling: Sampling) -> WholeGroup | None:
        """Go on with a group of an earlier epoch, each member from the last token that the journal has of it. The group
        itself when every member (all but `extra`) had ended: then nothing is left to generate. An episode whose turn had ended
        asks its environment again, with all its turns.

        ValueError for a group id of this epoch, or pieces that do not follow each other from 0 on.
        """
        group_id = left.group_id
        if group_id > self._last_group or group_id in self.books.groups:
            raise ValueError(f"group {group_id} is not of an earlier epoch, or was taken up already")
        if len(spec.seeds) <= left.group.extra or not spec.prompt_ids or len(spec.seeds) != len(left.members):
            raise ValueError(f"group {group_id} has {len(spec.seeds)} seeds and {len(left.members)} members")
        group = running_group(left.group, spec, sampling, [])
        for seed, pieces in zip(spec.seeds, left.members, strict=True):
            # A second attempt, for the dispatcher.
            member = RunningSample(seed, sampling.turn_end(0), attempt=self.first_attempt + 1)
            for piece in pieces:
                if piece.version is None:
                    member.give(unpack_ids(piece.ids), sampling)
                else:
                    member.completion.add(piece.event())
                    member.made_by(piece.node, piece.start)
            group.members.append(member)
        self.books.groups[group_id] = group
        for index, member in enumerate(group.members):
            finish = finish_of(group, member)
            if finish and sampling.turns is not None:
                self.books.ask(group, index, over(group, member))
            else:
                member.finish = finish
        return self.books.whole(group)

    def pending(self) -> list[WaitingSequence]:
        """What waits for a node, for the dispatcher."""
        return [
            WaitingSequence(
                group.request_name(index),
                group.group_id,
                group.version,
                min_version(group, member),
                tokens=len(member.completion.ids),
                attempt=member.attempt - self.first_attempt,
                avoid=frozenset(member.failed_on),
                prompt_tokens=len(group.prompt_ids),
                prefer=member.prefer,
            )
            for group in self.books.groups.values()
            for index, member in enumerate(group.members)
            if member.waits
        ]

    def assign(self, request_id: str, node: str, now: float = 0.0) -> Generate:
        """`node` works on this request from `now` on; what to send it. KeyError when it does not wait for a node."""
        found = self.books.find(request_id)
        if found is None or not found.member.waits:
            raise KeyError(f"request {request_id} does not wait for a node")
        group, index, member = self.books.held.setdefault(node, {})[request_id] = found
        member.node, member.prefer, member.since, member.had = node, "", now, len(member.completion.ids)
        return generate(group, index, member)

    def states(self) -> Iterator[GroupState]:
        """Every unfinished group, for the forecast. A prompt's own length is its feature."""
        for group in self.books.groups.values():
            members = [
                MemberState(
                    len(m.completion.ids), bool(m.finish), m.node, group.request_name(index), min_version(group, m)
                )
                for index, m in enumerate(group.members)
            ]  # fmt: skip
            tokens = len(group.prompt_ids)
            yield GroupState(
                group.group_id, group.task_index, tokens, feature=float(tokens), step=group.version.step, members=members
            )

    def task_of(self, group_id: int) -> PromptFeature:
        """The prompt of an unfinished group. KeyError for any other group."""
        group = self.books.groups[group_id]
        return PromptFeature(group.task_index, float(len(group.prompt_ids)))

    def working(self, node: str) -> list[str]:
        """Request ids that `node` holds."""
        return list(self.books.held.get(node, ()))

    def holds(self, node: str, request_id: str) -> bool:
        """Whether it works on this."""
        return request_id in self.books.held.get(node, ())

    def load(self, node: str) -> int:
        """How many requests `node` holds."""
        return len(self.books.held.get(node, ()))

    def progress(self) -> dict[str, dict[str, int]]:
        """Node -> request id -> completion tokens so far, of everything that nodes hold."""
        return {n: {r: len(of.member.completion.ids) for r, of in held.items()} for n, held in self.books.held.items()}

    def progress_of(self, group_id: int) -> GroupProgress | None:
        """How far an unfinished group has come; None for any other."""
        group = self.books.groups.get(group_id)
        if group is None:
            return None
        ended = tuple(len(m.completion.ids) for m in group.members if m.finish)
        running = tuple(len(m.completion.ids) for m in group.members if not m.finish)
        return GroupProgress(ended, running, group.needed - len(ended))

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Group ids opened and neither finished nor aborted."""
        return tuple(self.books.groups)

    # ---- events

    def extend(self, node: str, run: TokenEvent) -> int:
        """The plain case, which nearly every run is: a sequence goes on where it stands, on the node that holds it, under a
        version that may make it, and does not end. How many tokens were taken; 0 when it is not so plain: then nothing has
        changed, and `tokens` decides about the event and says why.

        A thousand nodes send sixteen thousand runs a second, of three tokens: hence bytes to lists at once and built-in
        functions over them, where `tokens` takes each check by itself.
        """
        at_node = self.books.held.get(node)
        held = at_node.get(run.request_id) if at_node else None
        if held is None or run.finish:
            return 0
        group, index, member = held
        size, completion, sampling, version = len(run.packed_ids), member.completion, group.sampling, run.version
        start, count = len(completion.ids), size // 4
        if not count or size % 4 or size != len(run.packed_logprobs) or run.start != start:
            return 0
        if start + count >= member.limit:
            return 0
        known = completion.spans and completion.spans[-1].version == version
        if version not in self._published or not (known or version >= min_version(group, member)):
            return 0
        ids = struct.unpack(f"<{count}I", run.packed_ids)
        logprobs = struct.unpack(f"<{count}f", run.packed_logprobs)
        # A sum with a NaN or an infinity in it is one too, where min and max may step over a NaN.
        if not (min(logprobs) >= MIN_LOGPROB and max(logprobs) <= MAX_LOGPROB and math.isfinite(sum(logprobs))):
            return 0
        if max(ids) >= (self.vocab_size or 1 << 31) or any([stop in ids for stop in sampling.stop_ids]):
            return 0
        if sampling.stop is not None and sampling.stop.may_end(ids):
            return 0
        completion.extend(ids, logprobs, version)
        if member.last_node != node:  # here and not in `made_by` alone: a call is dear sixteen thousand times a second
            member.made_by(node, start)
        self.tokens_by_node[node] = self.tokens_by_node.get(node, 0) + count
        self.unwritten.add(
            group.group_id, index, node=node, start=start, version=version, ids=run.packed_ids, logprobs=run.packed_logprobs
        )
        return count

    def tokens(self, node: str, event: TokenEvent) -> Outcome:
        """Take one event from `node`. Never raises on anything a node can send."""
        where = parse_request(event.request_id)
        if where is not None and where.attempt < self.first_attempt:
            return Ignored(event.request_id)  # of an earlier epoch; after a power cut, even of a group that nobody knows
        if where is None or where.group_id > self._last_group:
            return EventRefused(self._refuse(node, event, f"no such request {event.request_id!r:.80}"))
        group_id, index, attempt = where
        group = self.books.groups.get(group_id)
        if group is None:
            return Ignored(event.request_id)
        if index >= len(group.members) or attempt > group.members[index].attempt:
            return EventRefused(self._refuse(node, event, f"request {event.request_id} was never made"))
        member = group.members[index]
        if attempt < member.attempt or member.finish:
            return Ignored(event.request_id)
        if member.node != node:
            return EventRefused(self._refuse(node, event, f"request {event.request_id} is not with this node"))

        added = add_event(
            member.completion, event, expected(group, member, self._published, self.vocab_size), group.sampling.stop,
            member.turn_start,
        )  # fmt: skip
        if added.event is None:
            refusal = self._refuse(node, event, f"request {event.request_id}: {added.wrong}")
            return self._failed(group, index, refusal, breach=True)
        said, event, finish = event, added.event, added.ending
        count = event.count
        if count:
            member.made_by(node, event.start)
            self.tokens_by_node[node] = self.tokens_by_node.get(node, 0) + count
            self.unwritten.add(
                group_id, index, node=node, start=event.start, version=event.version, ids=event.packed_ids,
                logprobs=event.packed_logprobs,
            )  # fmt: skip
        cancel = ((node, event.request_id),) if added.cut and not said.finish else ()
        if finish and group.sampling.turns is not None:
            self.books.release(group, index)
            self.books.ask(group, index, over(group, member))
            return Accepted(event.request_id, count, cancel=cancel, gave_up=tuple(member.gave_up), stay=member.stay)
        if finish:
            member.finish = finish
            self.books.stop(group, index)
            whole = self.books.whole(group)
            return Accepted(event.request_id, count, whole, cancel, gave_up=tuple(member.gave_up), stay=member.stay)
        if event.finish == "interrupt":
            old = self.books.release(group, index)
            return Requeued(group.request_name(index), old, None, count, since=member.since, made=member.made_here)
        if event.finish in ("error", "abort"):
            what = f"gave up with {event.finish}: {printable(event.message, 200)}"
            return self._failed(group, index, self._refuse(node, event, f"request {event.request_id}: {what}"), count)
        return Accepted(event.request_id, count)

    def declined(self, node: str, request_id: str, reason: str, *, retryable: bool, avoid: bool = True) -> Outcome:
        """`node` would not take the request. Retryable (it is full, draining, stalled, or behind `min_version`) costs the
        trajectory nothing, and with `avoid` others are asked first from now on; otherwise it counts against the trajectory,
        whose request may be at fault."""
        held = self.books.held.get(node, {}).get(request_id)
        if held is None:
            return Ignored(request_id)
        group, index, member = held
        if not retryable:
            what = f"request {request_id} declined: {reason}"
            return self._failed(group, index, Refusal(what, peer=node, version=min_version(group, member)))
        if avoid:
            member.failed_on.add(node)
        old = self.books.release(group, index)
        return Requeued(group.request_name(index), old, since=member.since, made=member.made_here)

    def node_lost(self, node: str) -> list[str]:
        """The node is gone. Every trajectory it held waits again, with all its tokens: their new request ids."""
        lost = list(self.books.held.get(node, {}).values())
        for group, index, _ in lost:
            self.books.release(group, index)
        self.books.held.pop(node, None)
        return [group.request_name(index) for group, index, _ in lost]

    def abort_group(self, group_id: int) -> Cancel:
        """Forget a group: the (node, request id) that still work on it. KeyError when it is not outstanding."""
        return self.books.abort(group_id)

    def cut(self, group_id: int) -> WholeGroup:
        """End a group where it stands: as many of its unfinished members as it needs, those that have made most, end as
        TRUNCATED. For episodes there is `EpisodeAnswers.cut`.

        KeyError when it is not outstanding; ValueError, and nothing changed, when too few members have a token
        (`GroupProgress.longest`). The journal need not know: after a crash what it has of the group goes on.
        """
        group = self.books.groups[group_id]
        if group.sampling.turns is not None:
            raise ValueError(f"group {group_id} is of episodes, whose score is their environment's")
        for index in self.books.longest(group):
            group.members[index].finish = TRUNCATED
        whole = self.books.whole(group)
        assert whole is not None
        return whole

    # ---- inside

    def _refuse(self, node: str, event: TokenEvent, reason: str) -> Refusal:
        return Refusal(reason, peer=node, version=event.version)

    def _failed(
        self, group: RunningGroup, index: int, refusal: Refusal, tokens: int = 0, *, breach: bool = False
    ) -> Requeued | GroupAborted:
        member = group.members[index]
        member.failures += 1 if self.credible(refusal.peer) else STRANGERS_WORD
        member.failed_on.add(refusal.peer)
        if not breach:
            member.gave_up.add(refusal.peer)
        self.failures_by_node[refusal.peer] = self.failures_by_node.get(refusal.peer, 0) + 1
        if member.failures >= self.failure_budget:
            reason = f"member {index} failed {member.failures:g} times, last on {refusal.peer}: {refusal.reason}"
            cancel = self.books.abort(group.group_id)
            return GroupAborted(group.group_id, reason, cancel, refusal, breach=breach, task_index=group.task_index)
        old = self.books.release(group, index)
        return Requeued(group.request_name(index), old, refusal, tokens, breach)
