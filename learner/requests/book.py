"""The books of outstanding evaluation and serving sequences: who waits, who holds what, what came of it. Pure, told the time.

As `learner.rollouts.collector` is for training: a sequence is at one node at a time, each hand-over is a new attempt, and what a
node sent before it was lost stays, as the next attempt's prefix. Whether a sequence has ended follows from its tokens. Nothing
here is reserved, journaled or trained on. Must not know shares, the network or whoever reads the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import replace

from learner.requests.port import Ask, Busy, NoSuchVersion, RequestClass
from learner.requests.sequence import LETTERS, RequestSequence, check_ask, parse_request_id
from learner.rollouts.beside import Footprint, Taken
from learner.rollouts.collector import STRANGERS_WORD
from learner.rollouts.event_checks import add_event
from learner.rollouts.outcomes import Cancel
from p2p.errors import Refusal, ShoalError, UsageError
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version

FAILURE_BUDGET = 8
"""Failures at nodes that misbehave or give up which one sequence survives, as one of training does: eight are not chance."""

DECLINE_BUDGET = 3
"""Nodes that must decline a sequence for good before it fails: three that say the same leave little doubt (a prompt longer
than the model takes), and one alone could be wrong or lie."""


MOST_AVOIDED = 64
"""Nodes that failed one request, or were gone with it, and are asked last, from which on some other is forgotten for one that is
gone: identities are free."""

MAX_UNREAD = 65_536
"""Sequences of a class that may be over while their readers have not left. Each holds no more than it asked for: this bounds what
readers who never read can cost."""

COUNTED = ("asked", "ended", "failed", "cancelled", "busy", "moved", "tokens")
"""What is counted of each class: sequences taken, how they left, those refused because too many waited, hand-overs after the
first, and tokens accepted."""


class RequestBook:
    """All outstanding sequences of an epoch. `most_waiting` is by class. Of what is over, only that it was is known."""

    def __init__(
        self, epoch: int, most_waiting: dict[RequestClass, int], vocab_size: int | None = None,
        failure_budget: int = FAILURE_BUDGET, decline_budget: int = DECLINE_BUDGET,
    ) -> None:  # fmt: skip
        self.epoch, self.most_waiting, self.vocab_size = epoch, most_waiting, vocab_size
        self.failure_budget, self.decline_budget = failure_budget, decline_budget
        self.counts: dict[RequestClass, Counter[str]] = {c: Counter() for c in LETTERS.values()}
        """class -> what happened (one of COUNTED) -> how often"""
        self.closed = ""
        """why nothing is taken any more"""
        self.credible: Callable[[str], bool] = lambda node: True
        """whose word counts; the head sets it"""
        self.max_context = 0
        """tokens that the model takes, prompt and completion together; 0: not known"""
        self._last = -1
        self._open: dict[int, RequestSequence] = {}
        self._waiting: dict[RequestClass, dict[int, RequestSequence]] = {c: {} for c in LETTERS.values()}
        self._held: dict[str, dict[str, RequestSequence]] = {}
        """node -> request id -> what it works on under that"""
        self._unread: Counter[RequestClass] = Counter()
        """what is over and whose reader has not left"""
        self._holding: Counter[RequestClass] = Counter()
        self._published: set[Version] = set()

    # ---- work to do

    def published(self, version: Version) -> None:
        """Tokens of this version may arrive from now on."""
        self._published.add(version)

    def open(self, ask: Ask, now: float, served: Container[Version]) -> RequestSequence:
        """A new sequence, which waits for a node. `served`: versions that nodes serve now. Busy, NoSuchVersion, UsageError."""
        if self.closed:
            raise ShoalError(self.closed)
        check_ask(ask, self.vocab_size)
        ask = self._within_context(ask)
        self._check_versions(ask, served)
        waiting, counts = self._waiting[ask.request_class], self.counts[ask.request_class]
        if len(waiting) >= self.most_waiting[ask.request_class] or self._unread[ask.request_class] >= MAX_UNREAD:
            counts["busy"] += 1
            unread = self._unread[ask.request_class]
            what = f"{len(waiting)} {ask.request_class} requests wait for a node already, and {unread} have not been read"
            raise Busy(f"{what}: try again later")
        counts["asked"] += 1
        self._last += 1
        sequence = RequestSequence(ask, self.epoch, self._last, now)
        self._open[self._last] = waiting[self._last] = sequence
        return sequence

    def _within_context(self, ask: Ask) -> Ask:
        """With no more tokens than the model takes: engines end there, with what looks like too short a completion."""
        room = self.max_context - len(ask.prompt_ids)
        if not self.max_context or ask.max_new_tokens <= room:
            return ask
        if room < 1:
            raise UsageError(f"a prompt of {len(ask.prompt_ids)} tokens; the model takes {self.max_context} with the completion")
        return replace(ask, max_new_tokens=room)

    def _check_versions(self, ask: Ask, served: Container[Version]) -> None:
        newest = max(self._published, default=None)
        wanted = ask.exact_version or ask.min_version
        if wanted is None:
            return
        if newest is None or wanted > newest:
            raise NoSuchVersion(
                f"version {wanted} is not published yet; the newest is {newest}", later=wanted.epoch == self.epoch
            )
        exact = ask.exact_version
        if exact is not None and (exact not in self._published or (exact != newest and exact not in served)):
            raise NoSuchVersion(f"no node serves version {exact}; the newest is {newest}", later=False)

    def waiting(self, request_class: RequestClass) -> list[RequestSequence]:
        """What waits for a node, in the order in which it is to get one: those that had one before come first."""
        return sorted(self._waiting[request_class].values(), key=lambda s: (s.attempt == 0, s.number))

    def waits(self, request_class: RequestClass) -> int:
        """How many wait for a node."""
        return len(self._waiting[request_class])

    def holding(self, request_class: RequestClass, but: Collection[str] = ()) -> int:
        """How many are with nodes, those in `but` left out."""
        there = (self._held.get(node, {}).values() for node in but)
        return self._holding[request_class] - sum(s.ask.request_class == request_class for held in there for s in held)

    def held(self) -> Iterator[RequestSequence]:
        """All that are with nodes."""
        for at_node in self._held.values():
            yield from at_node.values()

    def assign(self, sequence: RequestSequence, node: str) -> Generate:
        """`node` works on it from now on; what to send. KeyError when it does not wait for a node."""
        del self._waiting[sequence.ask.request_class][sequence.number]
        sequence.node = sequence.last_node = node
        sequence.before = sequence.tokens
        self._held.setdefault(node, {})[sequence.request_id] = sequence
        self._holding[sequence.ask.request_class] += 1
        return sequence.generate()

    def working(self, node: str) -> list[str]:
        """Request ids that `node` holds."""
        return list(self._held.get(node, ()))

    def load(self, node: str) -> int:
        """How many requests `node` holds."""
        return len(self._held.get(node, ()))

    def footprint(self, node: str) -> Footprint:
        """What they take of its memory."""
        held = self._held.get(node)
        if not held:
            return Footprint()
        return Footprint(float(sum(s.context for s in held.values())), sum(s.growth for s in held.values()))

    def progress(self) -> dict[str, dict[str, int]]:
        """Node -> request id -> completion tokens so far, of everything that nodes hold."""
        return {node: {name: s.tokens for name, s in held.items()} for node, held in self._held.items()}

    # ---- events

    def tokens(self, node: str, event: TokenEvent, now: float) -> Taken:
        """Take one event from `node`. Never raises on anything a node can send."""
        name = parse_request_id(event.request_id)
        if name is not None and name.epoch < self.epoch:
            return Taken(late=True)
        if name is None or name.epoch > self.epoch or name.number > self._last:
            return self._refused(node, event, f"no such request {event.request_id!r:.80}")
        sequence = self._open.get(name.number)
        if sequence is None:
            return Taken(late=True)  # it is over: late, and nobody's fault
        if name.letter != sequence.ask.request_class[0] or name.attempt > sequence.attempt:
            return self._refused(node, event, f"request {event.request_id} was never made")
        if name.attempt < sequence.attempt or sequence.over:
            return Taken(late=True)
        if sequence.node != node:
            return self._refused(node, event, f"request {event.request_id} is not with this node")
        added = add_event(sequence.completion, event, sequence.expected(self._published, self.vocab_size), sequence.ask.stop)
        if added.event is None:
            refusal = Refusal(f"request {event.request_id}: {added.wrong}", peer=node, version=event.version)
            return self._failed(sequence, refusal)
        said, event = event, added.event
        count = event.count
        if count:
            sequence.since = now
            self.counts[sequence.ask.request_class]["tokens"] += count
            sequence.wake()
        sequence.finish = added.ending
        if sequence.finish:
            cancel = ((node, sequence.request_id),) if added.cut and not said.finish else ()
            self._leave(sequence, "ended")
            return Taken(count, cancel=cancel, made=sequence.tokens - sequence.before)
        if event.finish == "interrupt":
            self._release(sequence)
        elif event.finish in ("error", "abort"):
            what = f"request {event.request_id}: gave up with {event.finish}: {event.message:.200}"
            return self._failed(sequence, Refusal(what, peer=node, version=event.version), count)
        return Taken(count)

    def declined(self, node: str, request_id: str, reason: str, *, retryable: bool, avoid: bool = True) -> None:
        """`node` would not take the request, or gave it back. Retryable (it is full, stalled, behind) costs the sequence nothing,
        and with `avoid` others are asked first from now on. Else it may be the request's fault: never held against the node."""
        sequence = self._held.get(node, {}).get(request_id)
        if sequence is None:
            return
        if avoid or not retryable:
            sequence.failed_on.add(node)
        sequence.declines += 0 if retryable else self._word(node)
        self._release(sequence)
        if sequence.declines >= self.decline_budget:
            self._fail(sequence, ShoalError(f"nodes do not take the request: {reason!r:.300}"))

    def node_lost(self, node: str) -> int:
        """The node is gone: what it held waits again, with all its tokens. Should it come back, others are asked first for
        what it lost twice, or once if its word does not count: else one that renews its link has it again and again. How many."""
        lost = list(self._held.get(node, {}).values())
        for sequence in lost:
            if not self.credible(node) or sequence.lost_by == node:
                if len(sequence.failed_on) >= MOST_AVOIDED:
                    sequence.failed_on.pop()
                sequence.failed_on.add(node)
            sequence.lost_by = node
            self._release(sequence)
        self._held.pop(node, None)
        return len(lost)

    def cancel(self, sequence: RequestSequence) -> Cancel:
        """Whoever asked has left: what must stop. Nothing where it is over already."""
        if sequence.over:
            self._unread[sequence.ask.request_class] -= not sequence.left
            sequence.left = True
            return ()
        sequence.left = True
        old = ((sequence.node, sequence.request_id),) if sequence.node else ()
        sequence.error = ShoalError("whoever asked has left")
        self._leave(sequence, "cancelled")
        return old

    def expire(self, now: float, wait_s: float, served: Container[Version]) -> None:
        """End what waits for a version that no node serves any more, or has waited for more than `wait_s` for a node."""
        newest = max(self._published, default=None)
        for waiting in self._waiting.values():
            for sequence in list(waiting.values()):
                exact = sequence.ask.exact_version
                if exact is not None and newest is not None and exact < newest and exact not in served:
                    self._fail(sequence, NoSuchVersion(f"no node serves version {exact} any more", later=False))
                elif now - sequence.since > wait_s:
                    self._fail(sequence, ShoalError(f"no node had a place for the request for {wait_s:.0f} s"))

    def beyond(self, request_class: RequestClass, allowed: int, but: Collection[str] = ()) -> list[RequestSequence]:
        """What nodes, those in `but` left out, are to hand back so that the class holds no more than `allowed` with them: of
        those not asked back yet, those with the fewest tokens, which cost least to take up elsewhere."""
        those = [s for s in self.held() if s.ask.request_class == request_class and s.node not in but]
        surplus = len(those) - sum(s.asked_back for s in those) - allowed
        if surplus <= 0:
            return []
        return sorted((s for s in those if not s.asked_back), key=lambda s: (s.tokens, -s.number))[:surplus]

    def close(self, reason: str) -> Cancel:
        """End everything: what nodes must stop. Nothing is taken any more."""
        self.closed = reason
        old = tuple((s.node, s.request_id) for s in self.held())
        for sequence in list(self._open.values()):
            self._fail(sequence, ShoalError(reason))
        return old

    # ---- inside

    def _word(self, node: str) -> float:
        """What it counts that `node` fails or declines."""
        return 1.0 if self.credible(node) else STRANGERS_WORD

    def _refused(self, node: str, event: TokenEvent, reason: str) -> Taken:
        return Taken(refusal=Refusal(reason, peer=node, version=event.version))

    def _failed(self, sequence: RequestSequence, refusal: Refusal, tokens: int = 0) -> Taken:
        """Its node misbehaved or gave up: it goes elsewhere, unless that has happened too often."""
        cancel = ((sequence.node, sequence.request_id),)
        sequence.failures += self._word(refusal.peer)
        sequence.failed_on.add(refusal.peer)
        self._release(sequence)
        if sequence.failures >= self.failure_budget:
            what = f"the request failed on nodes {sequence.failures:.3g} times, last: {refusal.reason!r:.300}"
            self._fail(sequence, ShoalError(what))
        return Taken(tokens, refusal, cancel)

    def _release(self, sequence: RequestSequence) -> None:
        """Take it from its node; it waits, with a new attempt."""
        self._drop(sequence)
        sequence.attempt += 1
        self._waiting[sequence.ask.request_class][sequence.number] = sequence
        self.counts[sequence.ask.request_class]["moved"] += 1

    def _fail(self, sequence: RequestSequence, error: ShoalError) -> None:
        sequence.error = error
        self._leave(sequence, "failed")

    def _leave(self, sequence: RequestSequence, how: str) -> None:
        """It is over."""
        if sequence.node:
            self._drop(sequence)
        self._waiting[sequence.ask.request_class].pop(sequence.number, None)
        del self._open[sequence.number]
        self.counts[sequence.ask.request_class][how] += 1
        self._unread[sequence.ask.request_class] += not sequence.left
        sequence.wake()

    def _drop(self, sequence: RequestSequence) -> None:
        """Its node holds it no more."""
        at_node = self._held[sequence.node]
        del at_node[sequence.request_id]
        if not at_node:
            del self._held[sequence.node]
        self._holding[sequence.ask.request_class] -= 1
        sequence.node, sequence.asked_back = "", False
