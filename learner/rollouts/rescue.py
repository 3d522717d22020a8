"""Takes sequences from nodes that hold them up, and says so to whoever keeps the nodes' standing. A thin shell.

What makes no progress at all (`stalls`), what falls behind the others (`paces`), what hardly begins while nobody is known
(`first_tries`), what the trainer waits for (`hedging`), and what was asked back and did not come. Must not know how a link is
closed, or what a record makes of a doubt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial

from learner.dispatch.giving_way import GivingWay
from learner.dispatch.node_table import NEXT_TO_NOTHING, NodeView
from learner.rollouts.beside import BesideTraining
from learner.rollouts.buffers import TrainingBuffers
from learner.rollouts.collector import Collector
from learner.rollouts.deliveries import Deliveries
from learner.rollouts.first_tries import REST_S, FirstTries
from learner.rollouts.given_up import GivenUp
from learner.rollouts.group import RunningGroup, member_name, parse_request
from learner.rollouts.hedging import Fleet, Way, free_places, moves, to_hedge
from learner.rollouts.hold_ups import GivenBack, HoldUps, HoldUpVerdict
from learner.rollouts.outcomes import Accepted, Cancel, Requeued
from learner.rollouts.paces import STAYS, PaceWatch
from learner.rollouts.silences import HELD_UP_S, HURRY, MANY_S, SLOWER, SilenceWatch, Usual
from learner.rollouts.stalls import Stall, StallWatch
from learner.rollouts.strangers_time import StrangersTime
from learner.standing.port import NodeConduct
from p2p.errors import Refusal
from p2p.forgetting import forget_oldest
from p2p.protocol.generation import Interrupt

PATIENCE_S = (5.0, 30.0)
"""Seconds that a sequence may stay at a node whatever others achieve: one whose word does not count, and one whose word does. An
engine may pause for an update, or compile what it needs first."""

ANSWER_S = 10.0
"""Seconds in which a node must give back what it is asked for. An engine answers between two decoding steps; after that it is
taken by force."""

HEDGE_S = 0.25
"""Seconds that the trainer waits before what holds it up is taken from strangers, and from others what is behind."""

HEDGE_LEAST_S, HEDGE_SHARE = 0.1, 20.0
"""Seconds between two looks at that at the least, and so many times as long as the last one took: 5 % of the time, until a look
takes a twentieth of HEDGE_S, which is the most. With a thousand nodes it does."""

LATE_HEDGE_S, LATE_LOOK_S = 1.0, 4.0
"""Seconds since the last look after which nothing counts as silent: this process stood still, and has not read what came."""

AVOID_S = 10.0
"""Seconds for which what was taken from a node does not come back to it. Were it for good, a sequence taken from all nodes that
may hold anything would wait for one that may not."""

MOVES = 3
"""A request that was given to so many nodes is left where it is, unless that stalls."""

TAKEN_EARLY_S = 1.0
"""Who had a sequence for less than this, and STAYS times what one usually takes, is not at fault when it is taken."""


class Rescue:
    """`beside()` is what nodes hold beside training; `cancel` tells nodes to stop, `send(peer, message)` anything else.
    `moves_slow`: whether what only comes slowly may go on elsewhere, under another version perhaps."""

    def __init__(
        self, collector: Collector, buffers: TrainingBuffers, conduct: NodeConduct, *, stall_s: float,
        beside: Callable[[], BesideTraining], report: Callable[[str, Refusal], None], cancel: Callable[[Cancel], None],
        send: Callable[[str, object], None], giving_way: GivingWay | None = None, moves_slow: bool = True,
    ) -> None:  # fmt: skip
        self._collector, self._buffers, self._conduct, self._beside = collector, buffers, conduct, beside
        self._report, self._cancel, self._send = report, cancel, send
        self._giving_way = giving_way or GivingWay()
        self._stalls, self._paces, self._first_tries = StallWatch(stall_s), PaceWatch(), FirstTries()
        self._silences, self._silences_beside = SilenceWatch(sees_slow=moves_slow), SilenceWatch()
        self._deliveries = Deliveries()
        self._looked = self._hedged = float("inf")
        """when that was done last"""
        self._avoided: dict[tuple[str, str], float] = {}
        """(node, group.member) -> when it was taken from there"""
        self._spared: dict[tuple[str, str], float] = {}
        """the same, of what was taken without a doubt"""
        self._asked: dict[tuple[str, str], float] = {}
        """(node, request id) -> when it was asked back"""
        self._waits: float | None = None
        """since when the trainer waits for what is under way"""
        self.ended: Counter[str] = Counter()
        """sequences that ended as asked, by node"""
        self._all_ended: Counter[str] = Counter()
        """the same with those beside training"""
        self._given_up, self._hold_ups, self._strangers_time = GivenUp(), HoldUps(), StrangersTime()
        self._credited: dict[str, int] = {}
        """tokens of each node that its standing knows of"""
        self.taken = 0
        """sequences that were taken from nodes, in all"""
        self.waits_for: Callable[[Iterable[RunningGroup]], None] = lambda groups: None
        """hears of the groups for which the trainer waits, each time that it is looked at; the head sets it"""
        self.took_from: Callable[[str, float, float], None] = lambda peer, now, rest_s: None
        """hears of a node from which something was taken; the head sets it, and keeps work from the node for a while, for these
        seconds at least"""

    def impatience(self, now: float) -> Callable[[str, str], Usual]:
        """Of a node and a request id: what is usual, where what is later would be taken from it now, since the trainer waits for
        its group; and where the group is over. Else nothing is too late."""
        hedges = self._waits is not None and now - self._waits >= HEDGE_S and self._hold_ups.worth_it(now)
        awaited = set(self._buffers.ledger.blockers()) if hedges else set()

        def usual(node: str, request_id: str) -> Usual:
            name = parse_request(request_id)
            here = name is not None and name.group_id in self._collector.books.groups
            return self._silences.usual(node) if name is None or not here or name.group_id in awaited else Usual()

        return usual

    def look(self, now: float, nodes: Callable[[], Iterable[NodeView]]) -> None:
        """Take what stalls, falls behind or was asked back in vain."""
        trained, beside = self._collector.progress(), self._beside().progress()
        held = {node: dict(progress) for node, progress in trained.items()}
        for peer, progress in beside.items():
            held[peer] = held.get(peer, {}) | progress
        self._forget(held)
        stalls = self._stalls.look(held, now, self._all_ended)
        stalled = {stall.node for stall in stalls}
        late = self._paces.look(
            trained, self._collector.tokens_by_node, self.ended, now, credible=self._conduct.credible,
            patience=lambda node: PATIENCE_S[self._conduct.credible(node)],
        )  # fmt: skip
        self._silences.look(trained, now, least=self._paces.least)
        self._silences_beside.look(beside, now, least=0.0)
        stalls += [stall for stall in late if stall.node not in stalled]
        if now - self._looked < LATE_LOOK_S:
            self._move_silent(beside, now, nodes)
            if not self._conduct.anybody_proven():
                self._try_others(trained, now, nodes)
        self._looked = now
        self._avoid_no_longer(now)
        stalls += self._unanswered(now, {stall.node for stall in stalls})
        for stall in stalls:
            self._report(stall.node, Refusal(f"{stall.reason}: {len(stall.request_ids)} sequences go elsewhere"))
            self._take(stall, now)
            self._silences.taken(stall.node)
            self.took_from(stall.node, now, 0.0)
            self._conduct.doubt(stall.node, stall.reason)

    def moved(self, peer: str, tokens: int, now: float) -> None:
        """So many tokens came from it."""
        self._deliveries.came(peer, tokens, now)

    def delivers(self, now: float) -> Callable[[str], float]:
        """node -> tokens that came from it lately, while nodes hold the trainer up; else 0, and it is not gone by."""
        if self._hold_ups.lately(now):
            return lambda peer: NEXT_TO_NOTHING if self._silences.late(peer) else self._deliveries.lately(peer, now)
        return self._delivers_beside_silent(now)

    def _delivers_beside_silent(self, now: float) -> Callable[[str], float]:
        """The same, while many nodes are silent."""
        return partial(self._deliveries.lately, now=now) if self._silences.many(now) else lambda peer: 0.0

    def _move_silent(
        self, held: Mapping[str, Mapping[str, int]], now: float, nodes: Callable[[], Iterable[NodeView]]
    ) -> None:
        """Take what made no progress for longer than usual, of sequences that somebody waits for who is not the trainer, where
        another node whose word counts has a free place. Their prompts are anybody's, and may be long: it is a doubt for
        strangers alone, and after some moves a sequence stays where it is."""
        late = partial(self._silences_beside.behind, now=now, least=0.0)
        silent = {
            peer: those for peer, requests in held.items()
            if (those := tuple(r for r, tokens in requests.items() if late(peer, r, tokens) and _attempt(r) < MOVES))
        }  # fmt: skip
        credible, last_came = self._conduct.credible, self._deliveries.last
        free = free_places(nodes(), credible, last_came, since=now - HELD_UP_S / 2) if silent else {}
        for peer, those in silent.items():
            if sum(free.values()) > free.get(peer, 0):
                self._take(Stall(peer, those, f"no progress of {those[0]} for longer than usual"), now)
                if not self._conduct.credible(peer):
                    self._conduct.doubt(peer, f"no progress of {those[0]} for longer than usual")

    def _try_others(
        self, held: Mapping[str, Mapping[str, int]], now: float, nodes: Callable[[], Iterable[NodeView]]
    ) -> None:
        """Nobody is proven: take what hardly begins, or takes long, where others have nothing to do. Not only where nobody has
        ended anything: to end one sequence is cheap, and who came last has nothing to show."""
        for peer, those in self._first_tries.look(held, nodes(), now, self._giving_way.speeds).items():
            self._take(Stall(peer, those, "nobody is known yet, and others have nothing to do"), now)
            self._silences.taken(peer)
            self._hold_ups.noticed(now)
            self.took_from(peer, now, REST_S)

    def ask_back(self, peer: str, request_ids: Sequence[str], now: float) -> None:
        """Ask a node for these, with their tokens."""
        self._send(peer, Interrupt(tuple(request_ids)))
        for request_id in request_ids:
            self._asked.setdefault((peer, request_id), now)

    def hedge(self, now: float, nodes: Callable[[], Iterable[NodeView]]) -> None:
        """Take what holds up the step for which the trainer waits from nodes whose word does not count, and what is behind from
        others, where another one whose word counts has a free place. To be called every `hedge_pause_s`."""
        ledger, step, on_time = self._buffers.ledger, self._buffers.awaited, now - self._hedged < LATE_HEDGE_S
        self._hedged = now
        if step is None or step != ledger.step or ledger.ready(step):
            self._waits = None
            self._strangers_time.rests(now)
            return
        self._waits = now if self._waits is None else self._waits
        self._silences.alert = self._conduct.on_alert()
        if now - self._waits < HEDGE_S:
            self._strangers_time.rests(now)
            return
        behind = partial(self._silences.behind, now=now, least=self._paces.least) if on_time else _not_behind
        sure = self._hold_ups.sure(now)
        self.waits_for(group for g in ledger.blockers() if (group := self._collector.books.groups.get(g)) is not None)
        early = partial(self._early, now=now, sure=sure) if on_time and self._hold_ups.worth_it(now) else _not_early
        hedges = to_hedge(ledger, self._collector, self._conduct.credible, behind, early)
        there = list(nodes()) if hedges else []
        hedges = self._strangers_time.look(
            hedges, now, places=any(free_places(there, self._conduct.credible, self._deliveries.last).values()),
            asked=self._asked, doubted=self._conduct.doubted, holds=self._collector.holds,
        )  # fmt: skip
        if not hedges:
            return
        fleet = Fleet(
            there, credible=self._conduct.credible, doubted=self._conduct.doubted, ended=self.ended,
            last_came=self._deliveries.last, delivers=self._delivers_beside_silent(now), begun=self._silences.begun,
            asked=self._asked, spared=self._spared, fault_s=self._fault_s,
        )  # fmt: skip
        doubted: dict[str, str] = {}
        for hedge, way, doubt in moves(hedges, fleet, now):
            if way is Way.ASK:
                self.ask_back(hedge.node, (hedge.request_id,), now)
                continue
            self._take(Stall(hedge.node, (hedge.request_id,), "the trainer waits for it"), now, avoid=way is not Way.PAUSED)
            if hedge.early:
                says = self._silences.moved_early(hedge.node, hedge.request_id, now)
                blamed = hedge.node if way is Way.EARLY and says.blames else ""
                if way is Way.EARLY and says.late:
                    self._giving_way.late(hedge.node, says.lost_s, now)
                self._hold_ups.moved(blamed, member_name(hedge.request_id), now, sooner=not says.shows)
            if way in (Way.TAKE, Way.EARLY):
                self._silences.taken(hedge.node)
            if way in (Way.QUEUED, Way.EARLY):
                continue
            # A stranger does not rest. It has few chances, and the sooner it used them up, the better.
            if way is Way.PAUSED or self._conduct.delivered(hedge.node):
                self.took_from(hedge.node, now, 0.0)
            if way is Way.TAKE and hedge.behind_s:
                self._silences.held_up(hedge.node, now)
            if way is Way.TAKE:
                self._conduct.held_up(hedge.node, now)
            if doubt:
                self._hold_ups.held_up(hedge.node, now)
                again = not hedge.behind_s and self._conduct.doubted(hedge.node) and self._conduct.delivered(hedge.node)
                if not again or self._hold_ups.worse(hedge.node):
                    doubted[hedge.node] = doubt
        for node, why in doubted.items():
            self._conduct.doubt(node, why)

    def ended_at(self, peer: str, request_id: str, what: Accepted, now: float) -> None:
        """A sequence, or a turn of it, ended as asked at `peer`: to its credit, and not to that of nodes that had given it up."""
        late = self._silences.late(peer)
        self._silences.ended(peer, request_id, now)
        self._silences.made(peer, what.stay.tokens, now - what.stay.since)
        self._strangers_time.ended(peer, request_id, now - what.stay.since, counts=self._conduct.credible(peer))
        made = self._collector.tokens_by_node.get(peer, 0)
        self._conduct.ended(peer, made - self._credited.get(peer, 0))
        self._credited[peer] = made
        self._giving_way.ended(peer, made, now)
        self.ended[peer] += 1
        self._all_ended[peer] += 1
        at_once_s = self._silences.at_once_s + (SLOWER * what.stay.tokens / rate if (rate := self._silences.usual_rate) else 0.0)
        if other := self._hold_ups.ended(peer, member_name(request_id), now, at_once_s, late):
            self._conduct.doubt(other, f"held up {request_id}, which another node made at once, and others before")
        for other in self._given_up.made(request_id, peer, what.gave_up, self._conduct.delivered):
            self._conduct.doubt(other, f"gave up {request_id}, which another node made")

    def requeued(self, peer: str, request_id: str, outcome: Requeued, now: float) -> None:
        """`peer` gave this back, or says that it cannot do it: a doubt if another one can."""
        if outcome.refusal is not None:
            self._given_up.gave_up(peer, request_id, now)
            self._report(peer, outcome.refusal)
            return
        asked = self._asked.pop((peer, request_id), None) is not None
        held_s = now - outcome.since
        touched = outcome.made > 0 and outcome.made >= self._paces.least * held_s  # one token is none
        back = GivenBack(
            held_s, self._buffers.ledger.step, asked=asked, touched=touched, waits=self._waits is not None,
            credible=self._conduct.credible(peer), leaves=self._conduct.leaves(peer),
        )  # fmt: skip
        verdict = self._hold_ups.gave_back(peer, back, now, self._fault_s)
        if verdict is HoldUpVerdict.NOTHING:
            return
        self.took_from(peer, now, 0.0)
        self._avoid(peer, request_id, now)
        if verdict is HoldUpVerdict.DOUBTED:
            self._conduct.doubt(peer, f"gave back {request_id} after {back.held_s:.1f} s, not the first, while the trainer waits")

    def request_ended(self, peer: str, request_id: str, made: int, now: float) -> None:
        """One beside training ended as asked, of which `peer` made so many tokens."""
        self._silences_beside.ended(peer, request_id, now)
        self._all_ended[peer] += 1
        self._conduct.ended(peer, made)

    def take_all(self, peer: str, now: float) -> None:
        """The rest of a message was not read, so nothing that `peer` holds goes on where it stands: all of it goes to others. A
        stranger rests: else it would have the next ones at once, and the next."""
        self.took_from(peer, now, 0.0 if self._conduct.credible(peer) else REST_S)
        held = tuple((peer, r) for r in self._collector.working(peer) + self._beside().working(peer))
        self._collector.node_lost(peer)
        self._beside().on_node_lost(peer)
        self._cancel(held)

    @property
    def _fault_s(self) -> float:
        return max(TAKEN_EARLY_S, STAYS * self._paces.usual_s)

    def _early(self, node: str, request_id: str, now: float, sure: bool) -> bool:
        """Whether it is silent, or comes slowly, at a node whose word counts, and may be moved for that."""
        share = HURRY if sure else 1.0
        early = self._silences.early(node, request_id, now, share)
        slow = self._silences.slow(node, request_id, now, share)
        return (early or slow) and self._hold_ups.may_move(member_name(request_id), sure=sure, slow=slow)

    def _avoid(self, peer: str, request_id: str, now: float) -> None:
        """It does not come back to this node for AVOID_S while another may have it."""
        group_id, _, index = member_name(request_id).partition(".")
        group = self._collector.books.groups.get(int(group_id))
        if group is not None:
            group.members[int(index)].failed_on.add(peer)
            self._avoided[peer, member_name(request_id)] = now

    def _forget(self, held: Container[str]) -> None:
        """What is counted of nodes that hold nothing, where it is of too many: all of it, so that nothing is credited twice."""
        for node in forget_oldest(self._collector.tokens_by_node, stays=held.__contains__):
            self._credited.pop(node, None)
            self.ended.pop(node, None)
        forget_oldest(self._all_ended, stays=held.__contains__)
        self._deliveries.forget(held.__contains__)
        forget_oldest(self._collector.failures_by_node)

    def _avoid_no_longer(self, now: float) -> None:
        """What was taken AVOID_S ago may come back to the node, unless that gave it up as well."""
        self._spared = {pair: at for pair, at in self._spared.items() if now - at < MANY_S}
        for node, member in [pair for pair, at in self._avoided.items() if now - at > AVOID_S]:
            del self._avoided[node, member]
            group_id, _, index = member.partition(".")
            group = self._collector.books.groups.get(int(group_id))
            if group is not None and node not in group.members[int(index)].gave_up:
                group.members[int(index)].failed_on.discard(node)

    def _unanswered(self, now: float, but: set[str]) -> list[Stall]:
        """What was asked back ANSWER_S ago and is still there."""
        held = {(p, r) for p in {p for p, _ in self._asked} for r in self._collector.working(p) + self._beside().working(p)}
        self._asked = {pair: at for pair, at in self._asked.items() if pair in held}
        found: dict[str, list[str]] = {}
        for (peer, request_id), at in self._asked.items():
            if now - at > ANSWER_S and peer not in but:
                found.setdefault(peer, []).append(request_id)
        return [Stall(p, tuple(r), f"asked for {r[0]}, it gave nothing back for {ANSWER_S:.0f} s") for p, r in found.items()]

    def _take(self, stall: Stall, now: float, avoid: bool = True) -> None:
        """Whatever the node says: these go elsewhere, and with `avoid` do not come back to it for AVOID_S while another may have
        them."""
        for request_id in stall.request_ids:
            if self._beside().owns(stall.node, request_id):
                self._beside().take(stall.node, request_id, stall.reason)
            else:
                self._collector.declined(stall.node, request_id, stall.reason, retryable=True, avoid=avoid)
                (self._avoided if avoid else self._spared)[stall.node, member_name(request_id)] = now
        self.taken += len(stall.request_ids)
        self._cancel(tuple((stall.node, request_id) for request_id in stall.request_ids))


def hedge_pause_s(took_s: float) -> float:
    """Seconds until the next look at what the trainer waits for, where the last one took so long."""
    return min(max(HEDGE_LEAST_S, HEDGE_SHARE * took_s), HEDGE_S)


def _not_early(node: str, request_id: str) -> bool:
    return False


def _not_behind(node: str, request_id: str, tokens: int) -> float:
    return 0.0


def _attempt(request_id: str) -> int:
    """The last part of a request's name."""
    return int(request_id.rpartition(".")[2])
