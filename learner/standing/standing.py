"""One record a peer, and what follows from it. Pure: told what happened and the time (Unix seconds), asked what is allowed.

A stranger begins with FIRST sequences. Each sequence that it ends as asked lets it hold one more, a long one as many as it has
times EARNS tokens: so its allowance at least doubles with every round of work. Each doubt halves the allowance. Who is caught, or
doubted or refused too often, is expelled: it starts anew after a while that doubles each time. Identities are free, so what the
unproven hold together is bounded as well (`StandingRules.unproven_share`), and so is how many records are kept.

The gate, the dispatcher, the activation and the audits ask here and keep no back-off of their own. Must not know links, requests,
prices or how a fault was found. It outlives links and the head: `take_changed` says what to keep, `restore` takes it back.
Whom the operator banned is in the books (`learner.admission`), not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from learner.standing.wave import WAVE_COMPLETIONS, WAVE_S
from p2p.forgetting import forget_oldest, renewed

FIRST = 2
"""Sequences that a peer without a record may hold."""

EARNS = 512
"""Tokens of a sequence ended as asked that let its maker hold one more. Else a node that can hold 256 sequences of 32k tokens,
each of which takes minutes, would need seven rounds of them to be given so many."""

DOUBTS = 8
"""Doubts that expel a peer which ended nothing as asked in between: a fault of the line makes one or two."""

STRANGER_DOUBTS = 3
"""Doubts that expel a peer which has delivered nothing yet, one fewer for each time that it was expelled before. So a stranger
can hold up what it was given on trial, three times at the most."""

DOUBTED_S = (60.0, 3600.0)
"""Seconds for which a doubted peer is on trial again, and until it ended a sequence as asked: its word does not count, and it
shares with strangers what they may hold together. At first, doubled with each further doubt, and at the most. One doubt is
forgotten in each of the longer time."""

RECHECK = 4096
"""Tokens of a proven peer that are all checked again after a doubt, or when checks say something against it: as many as prove a
peer by default. A doubt is over with the next sequence that ends; this is not."""

EXPELLED_S = (30.0, 86_400.0)
"""Seconds for which an expelled peer may not come: at first, doubled each time, and at the most."""

REFUSALS, REFUSALS_S = 64, 60.0
"""So many refused messages expel a peer, forgotten one by one over so many seconds: an honest node causes one or two, when it
loses a race with a restart."""

MOST_RECORDS = 10_000
"""Records that are kept. Beyond, those are forgotten first that were not expelled and delivered least."""

EVERYBODY = "*"
"""Among those whom the operator answers for: all peers."""


@dataclass(frozen=True, slots=True)
class StandingRules:
    """What the operator decides."""

    proven_tokens: int = 4096
    """completion tokens of sequences ended as asked, and of these checked where anything is, that prove a peer"""
    checks: bool = False
    """whether tokens are checked at all; without it delivery alone proves"""
    unproven_share: float = 0.25
    """of the sequences that are with nodes, what the unproven may hold together while a proven peer is there"""
    audit_share: float = 0.02
    """of the sequences of a proven peer, how many are checked"""
    trusted: frozenset[str] = frozenset()
    """peers that the operator answers for: proven from the start, as many sequences as they can decode"""


@dataclass(slots=True)
class PeerRecord:
    """What is remembered of one peer."""

    peer: str
    delivered: int = 0
    """completion tokens of sequences that it ended as asked, since it was last expelled"""
    checked: int = 0
    """of these, tokens that were checked and found sound"""
    recheck: int = 0
    """tokens of its making that are still to be checked, all of them, before a share is enough again"""
    allowance: float = FIRST
    """sequences that it may hold"""
    doubts: int = 0
    """since it last ended a sequence as asked"""
    doubted: int = 0
    """in all"""
    strikes: float = 0.0
    """doubts that were not forgotten at the time `struck_at`, that of the last one"""
    struck_at: float = 0.0
    refusals: float = 0.0
    """at the time `refused_at`; they fade"""
    refused_at: float = 0.0
    expelled: int = 0
    """how often"""
    barred_until: float = 0.0
    why: str = ""
    """of the last doubt or expulsion"""


class _Question(NamedTuple):
    """A peer may have turned together with others."""

    until: float
    """when its word counts again at the latest"""
    left: int
    """completions of its own that are still to be found sound"""
    tokens: int
    """or tokens of whatever it had a part in"""


class TrialOrder(NamedTuple):
    """Who was never expelled comes first, then who is least doubted, then who delivered most."""

    expelled: int
    doubts: int
    owes: int
    """completion tokens that it delivered, less than nothing"""
    peer: str


@dataclass
class Standing:
    """The records of a run's peers."""

    rules: StandingRules = field(default_factory=StandingRules)
    _records: dict[str, PeerRecord] = field(default_factory=dict, init=False, repr=False)
    _changed: set[str] = field(default_factory=set, init=False, repr=False)
    _in_question: dict[str, _Question] = field(default_factory=dict, init=False, repr=False)

    def restore(self, records: Iterable[PeerRecord]) -> None:
        """Take back what `take_changed` gave away in an earlier life."""
        self._records |= {record.peer: record for record in records}

    def take_changed(self) -> list[PeerRecord]:
        """Copies of the records that changed since the last call, to be kept."""
        changed, self._changed = self._changed, set()
        return [replace(self._records[peer]) for peer in sorted(changed) if peer in self._records]

    # ---- what happened

    def ended(self, peer: str, tokens: int) -> None:
        """A sequence of so many completion tokens of its making ended as asked."""
        record = self._of(peer)
        record.delivered += tokens
        record.allowance += max(1.0, tokens / EARNS)
        record.doubts = 0

    def checked(self, peer: str, tokens: int, *, whole: bool = False) -> None:
        """So many of its tokens were checked and found sound; `whole`: they are a completion that nobody else had a part in."""
        record = self._of(peer)
        record.checked += tokens
        record.recheck = max(0, record.recheck - tokens)
        question = self._in_question.get(peer)
        if question is not None:
            left, more = question.left - whole, question.tokens - tokens
            if left > 0 and more > 0:
                self._in_question[peer] = question._replace(left=left, tokens=more)
            else:
                del self._in_question[peer]

    def question(self, peers: Iterable[str], until: float, completions: int = WAVE_COMPLETIONS) -> None:
        """They may have turned together with others: all of theirs is checked until so many completions were sound, or RECHECK
        tokens of whatever they had a part in, and they are on trial as long, at most until this time. inf: found wrong itself."""
        if self.rules.checks:
            for peer in peers:
                if not self.trusts(peer) and (until == math.inf or not self.found_wrong(peer)):
                    self._in_question[peer] = _Question(until, completions, RECHECK)
                    renewed(self._in_question, peer)
            forget_oldest(self._in_question, MOST_RECORDS)

    def no_questions(self) -> None:
        """Nothing is checked any more, so nobody could show anything."""
        self._in_question.clear()

    def found_wrong(self, peer: str) -> bool:
        """Whether some of what it made was grossly wrong, and not enough was sound since."""
        question = self._in_question.get(peer)
        return question is not None and question.until == math.inf

    def recheck(self, peer: str) -> None:
        """What was checked says something against it, and not enough: all of its next RECHECK tokens are to be checked."""
        self._of(peer).recheck = RECHECK

    def doubt(self, peer: str, why: str, now: float) -> bool:
        """It withheld, was slow without reason, gave up or ignored what it was told. Whether that expels it."""
        record = self._of(peer)
        if now < record.barred_until:
            return False  # it is away for what it did, and this was before
        record.allowance = max(1.0, record.allowance / 2)
        record.doubts += 1
        record.doubted += 1
        record.strikes, record.struck_at = _left(record, now) + 1.0, now
        record.recheck = RECHECK
        record.why = why
        most = DOUBTS if record.delivered else max(1, STRANGER_DOUBTS - record.expelled)
        if record.doubts < most:
            return False
        self.expel(peer, f"doubted {record.doubts} times in a row, the last time since {why}", now)
        return True

    def refused(self, peer: str, why: str, now: float) -> bool:
        """Something that it sent was refused. Whether that expels it."""
        record = self._of(peer)
        faded = max(0.0, now - record.refused_at) * REFUSALS / REFUSALS_S
        record.refusals, record.refused_at = max(0.0, record.refusals - faded) + 1.0, now
        if record.refusals < REFUSALS:
            return False
        self.expel(peer, f"{REFUSALS} refused messages in {REFUSALS_S:.0f} s, the last one: {why}", now)
        return True

    def expel(self, peer: str, why: str, now: float) -> None:
        """It was caught: it loses what it earned, and may come again after a while that doubles each time."""
        record = self._of(peer)
        first, most = EXPELLED_S
        record.barred_until = now + min(first * 2.0 ** min(record.expelled, 32), most)
        record.expelled += 1
        record.delivered = record.checked = record.recheck = record.doubts = 0
        self._in_question.pop(peer, None)
        record.allowance, record.refusals, record.why = 1.0, 0.0, why

    def forgive(self, peers: Iterable[str]) -> None:
        """The operator forgives these: they may come at once, as strangers."""
        for peer in peers:
            self._in_question.pop(peer, None)
            if peer in self._records:
                record = self._of(peer)
                record.barred_until, record.expelled, record.strikes, record.doubts = 0.0, 0, 0.0, 0

    # ---- what follows

    def trusts(self, peer: str) -> bool:
        """Whether the operator answers for it."""
        return peer in self.rules.trusted or EVERYBODY in self.rules.trusted

    def may_hold(self, peer: str, capacity: int) -> int:
        """Sequences that it may hold at once, of those that it says it can."""
        if self.trusts(peer):
            return capacity
        record = self._records.get(peer)
        if record is None:
            return min(capacity, FIRST)
        return min(capacity, int(min(record.allowance, FIRST) if record.doubts else record.allowance))

    def doubted(self, peer: str, now: float) -> bool:
        """Whether it was doubted lately, or has ended nothing as asked since: it is on trial again."""
        record = self._records.get(peer)
        if record is None or self.trusts(peer):
            return False
        question = self._in_question.get(peer)
        if question is not None and question.until < math.inf and not 0 < question.until - now <= WAVE_S:
            del self._in_question[peer]  # it is over, or the clock was set back
            question = None
        if question is not None:
            return True
        if not record.strikes:
            return False
        if record.doubts:
            return True
        return self.doubted_s(peer, now) > 0

    def doubted_s(self, peer: str, now: float) -> float:
        """Seconds for which its doubts put it on trial from now on."""
        record = self._records.get(peer)
        if record is None or not record.strikes:
            return 0.0
        first, most = DOUBTED_S
        return max(0.0, record.struck_at + min(first * 2.0 ** (min(record.strikes, 32.0) - 1.0), most) - now)

    def delivered(self, peer: str) -> bool:
        """Whether it ended anything as asked since it was last expelled."""
        return self.trusts(peer) or self.made_since_expelled(peer)

    def made_since_expelled(self, peer: str) -> bool:
        """The same, of a trusted peer too."""
        record = self._records.get(peer)
        return record is not None and record.delivered > 0

    def proven(self, peer: str) -> bool:
        """Whether it delivered enough, and had enough of it checked where anything is."""
        record, need = self._records.get(peer), self.rules.proven_tokens
        if self.trusts(peer):
            return True
        return record is not None and record.delivered >= need and (not self.rules.checks or record.checked >= need)

    def audit_share(self, peer: str) -> float:
        """Share of its sequences that are to be checked: all of a stranger's, and again for RECHECK tokens after a doubt, and of
        one in question."""
        if not self.rules.checks or self.trusts(peer):
            return 0.0
        record = self._records.get(peer)
        settled = record is not None and self.proven(peer) and not record.doubts and not record.recheck
        settled = settled and peer not in self._in_question
        return self.rules.audit_share if settled else 1.0

    def barred_s(self, peer: str, now: float) -> float:
        """Seconds for which it is still expelled; 0 when it may come."""
        record = self._records.get(peer)
        return max(0.0, record.barred_until - now) if record is not None else 0.0

    def doubts(self, peer: str) -> int:
        """Doubts since it last ended a sequence as asked."""
        record = self._records.get(peer)
        return record.doubts if record is not None else 0

    def order(self, peer: str) -> TrialOrder:
        """Where it comes among the others where there is little for those who are not proven."""
        record = self._records.get(peer)
        return TrialOrder(record.expelled, record.doubts, -record.delivered, peer) if record else TrialOrder(0, 0, 0, peer)

    def why(self, peer: str) -> str:
        """Of its last doubt or expulsion; "" when there was none."""
        record = self._records.get(peer)
        return record.why if record is not None else ""

    def of(self, peer: str) -> PeerRecord:
        """A copy of its record; a stranger's when it has none."""
        return replace(self._records.get(peer) or PeerRecord(peer))

    def __len__(self) -> int:
        return len(self._records)

    # ---- inside

    def _of(self, peer: str) -> PeerRecord:
        """Its record, which is about to change."""
        self._changed.add(peer)
        record = self._records.get(peer)
        if record is None:
            if len(self._records) >= MOST_RECORDS:
                self._forget()
            record = self._records[peer] = PeerRecord(peer)
        return record

    def _forget(self) -> None:
        """Make room: an eighth of all records, those of the least use. Identities are free, and so is to be expelled: who made
        something stays before who is barred, however long."""
        for record in sorted(self._records.values(), key=lambda r: (r.delivered, r.barred_until))[: max(1, MOST_RECORDS // 8)]:
            del self._records[record.peer]
            self._changed.discard(record.peer)


def _left(record: PeerRecord, now: float) -> float:
    """Doubts that are not forgotten yet."""
    return max(0.0, record.strikes - max(0.0, now - record.struck_at) / DOUBTED_S[1])
