"""Who may come in, and with what proof: tickets, memberships, peers to keep away from; at the head, the run's books.

No I/O of its own; both clocks are passed in (`wall` for what is signed, `now` for how long a peer is banned). Must not know
channels or links.
"""

from __future__ import annotations

from collections.abc import Callable

from p2p.errors import Refusal
from p2p.identity import Identity, public_key_of
from p2p.limits import PROTOCOL_VERSION
from p2p.membership.admission import Membership, check_membership, check_ticket, sign_membership
from p2p.membership.banlist import Banlist
from p2p.membership.doorkeeper import Doorkeeper
from p2p.membership.texts import MAX_NAME
from p2p.protocol.join import Hello

MAX_ADDRESSES, MAX_ADDRESS = 16, 256
"""The most a peer may say of where it is: addresses, characters of each."""

MEMBERSHIP_S = 7 * 24 * 3600
"""Seconds that a membership lasts. A week, so that it outlives restarts of the head; its epoch tells which head gave it."""

VISITOR = "shoal-doctor"
"""`Hello.agent` of who only asks whether its ticket is good: it hears so, and gets a membership that is over, and no link. So it
uses nothing of the ticket up."""

VISIT_S = -24 * 3600
"""Seconds that a visitor's membership lasts: it ended a day ago, which no clock of a node is late by."""


class Gate:
    """One peer's side of admission. `membership` is what it shows to others (the head shows none); `epoch` is the newest
    it knows of."""

    def __init__(self, identity: Identity, *, run: str, head: str, wall: Callable[[], float]) -> None:
        self._identity, self._wall = identity, wall
        self.run_id, self.head, self.head_key = run, head, public_key_of(head)
        self.is_head = identity.peer_id == head
        self.membership, self.epoch = b"", 0
        self.banned = Banlist()
        self.doorkeeper = Doorkeeper()
        """the head's; a node's is never asked"""

    def admit(self, peer: str, hello: Hello, now: float) -> bytes:
        """Check the hello of `peer` at `now` (seconds of the clock that bans are counted by). Returns the membership to answer
        with: this peer's own, or, at the head, a fresh one for `peer`. Refusal when `peer` has no place here."""
        if hello.protocol != PROTOCOL_VERSION:
            raise Refusal(f"it speaks protocol {hello.protocol}, this is {PROTOCOL_VERSION}", peer=peer, fatal=True)
        if hello.run != self.run_id:
            raise Refusal(f"it wants run {hello.run}, this is run {self.run_id}", peer=peer, fatal=True)
        if self.banned.holds(peer, now):
            raise Refusal("it was dropped a short while ago for what it sent", peer=peer)
        if len(hello.addresses) > MAX_ADDRESSES or len(hello.name) > MAX_NAME or len(hello.agent) > MAX_NAME:
            raise Refusal("its hello says too much: names or addresses over the limit", peer=peer, fatal=True)
        if any(len(address) > MAX_ADDRESS for address in hello.addresses):
            raise Refusal(f"an address of more than {MAX_ADDRESS} characters", peer=peer, fatal=True)
        if not self.is_head:
            self.check(hello.membership, peer)
            return self.membership
        return self._admit_to_run(peer, hello)

    def _admit_to_run(self, peer: str, hello: Hello) -> bytes:
        """The head's: a fresh membership for who shows a good one, or a good ticket."""
        now, visit = self._wall(), hello.agent == VISITOR
        why = "the learner's books do not know it (any more): it needs a ticket"
        try:
            self.check(hello.membership, peer)
            known = True
        except Refusal as stale:
            known, why = False, stale.reason
        if self.doorkeeper.knows(peer, now) and known and not visit:
            return self.grant(peer)
        if not hello.ticket:
            raise Refusal(why, peer=peer, fatal=True)
        try:
            ticket = check_ticket(hello.ticket, head=self.head, run=self.run_id, now=now, peer=peer)
        except Refusal as refusal:
            raise Refusal(refusal.reason, peer=peer, fatal=True) from None
        self.doorkeeper.admit(peer, ticket, now, visit=visit)
        return self.grant(peer, lasting_s=VISIT_S if visit else MEMBERSHIP_S)

    def check(self, membership: bytes, peer: str) -> Membership:
        """`membership` read and proven to be the head's, for `peer`, of this run, in time. Refusal otherwise."""
        # One epoch back is fine: a neighbour may not have heard of the learner's restart yet.
        floor = 0 if self.is_head else max(0, self.epoch - 1)
        return check_membership(
            membership, head_key=self.head_key, run=self.run_id, peer=peer, now=self._wall(), min_epoch=floor
        )

    def grant(self, peer: str, lasting_s: int = MEMBERSHIP_S) -> bytes:
        """A fresh signed membership for `peer`, for so many seconds. Only the head can make one that others accept."""
        expires = int(self._wall()) + lasting_s
        return sign_membership(self._identity, Membership(self.run_id, self.epoch, peer, expires))

    def due(self, proven: float) -> bool:
        """Whether a membership granted at wall time `proven` is past half its life (or the clock was set back behind it,
        which would put its renewal off for ever)."""
        return not 0 <= self._wall() - proven < MEMBERSHIP_S / 2
