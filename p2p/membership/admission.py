"""Who may take part: join tickets and memberships. Pure: the time is passed in. Must not know channels or rosters.

A **ticket** is what the learner's owner hands out: where the head is, which run, and the head's own signature that
admits whoever shows it until it expires, as far as the head's books allow (`p2p.membership.doorkeeper`). A **membership**
is the head's statement about one peer (run, epoch, peer, expiry) and is what two nodes show each other.
"""

from __future__ import annotations

import base64
import re

from p2p.errors import Refusal, UsageError
from p2p.identity import Identity, peer_id_of, public_key_of, verify
from p2p.protocol.wire import Blob, Row, Signed, Text, encode_struct, unpack

TICKET_DOMAIN = b"shoal/ticket/2"
MEMBERSHIP_DOMAIN = b"shoal/membership/1"
"""What a ticket and a membership are signed under, so that the signature of one never passes for that of the other."""

PREFIX = "shoal2"
"""How the text of a ticket starts: a person, and `read_ticket`, see at once what it is. The digit is the format's version."""

FAMILY = "shoal"
"""How the texts of tickets of all formats start."""


class Ticket(Signed, frozen=True):
    """An invitation to a run. `addresses` are dialable multiaddrs of the head, `expires` is Unix seconds (0: never)."""

    run: Text
    head: Text
    addresses: Row[Text]
    expires: int
    id: Text
    """under which the head's books have it"""
    signature: Blob

    def encode(self) -> str:
        """The text that a person passes on; `read_ticket` takes it."""
        return PREFIX + base64.urlsafe_b64encode(encode_struct(self)).decode().rstrip("=")


def make_ticket(head: Identity, run: str, addresses: tuple[str, ...], expires: int = 0, *, id: str = "") -> Ticket:
    """A ticket for `run`, signed by the head's key. `addresses` are dialable multiaddrs of the head; `expires` is Unix seconds
    (0: never); `id` is what the head's books call it (none for a head without books)."""
    body = encode_struct([run, head.peer_id, addresses, expires, id])
    signature = head.sign(TICKET_DOMAIN, body)
    return Ticket(run=run, head=head.peer_id, addresses=addresses, expires=expires, id=id, signature=signature)


def read_ticket(text: str) -> Ticket:
    """The ticket in what a person pasted; white space is ignored. UsageError when it is not a whole, unaltered ticket."""
    text = "".join(text.split())
    if re.match(FAMILY + r"\d", text) and not text.startswith(PREFIX):
        raise UsageError(f"not a ticket of this release: it starts with {text[:6]!r}, not with {PREFIX!r}; all peers of a run "
                         "are of one release")  # fmt: skip
    if not text.startswith(PREFIX):
        raise UsageError(f"not a ticket: it should start with {PREFIX!r}, this starts with {text[:12]!r}")
    try:
        raw = base64.urlsafe_b64decode(text[len(PREFIX) :] + "=" * (-len(text[len(PREFIX) :]) % 4))
        ticket = unpack(raw, Ticket)
        body = encode_struct([ticket.run, ticket.head, ticket.addresses, ticket.expires, ticket.id])
        whole = verify(public_key_of(ticket.head), TICKET_DOMAIN, body, ticket.signature)
    except (ValueError, Refusal):
        raise UsageError("not a ticket: it is cut off or altered (copy it whole from the learner's output)") from None
    if not whole:
        raise UsageError("not a ticket: its signature does not fit (copy it whole from the learner's output)")
    return ticket


def check_ticket(text: str, *, head: str, run: str, now: float, peer: str = "") -> Ticket:
    """The head's check of the ticket that `peer` showed, at `now` (Unix seconds): the ticket, whose id is still to be looked up.
    Refusal with the reason when it admits nobody to this run."""
    try:
        ticket = read_ticket(text)
    except UsageError as error:
        raise Refusal(str(error), peer=peer) from None
    if ticket.run != run:
        raise Refusal(f"the ticket is for run {ticket.run}, this learner runs {run}", peer=peer)
    if ticket.head != head:
        raise Refusal(f"the ticket was signed by {ticket.head}, this head is {head}", peer=peer)
    if ticket.expires and now > ticket.expires:
        raise Refusal(f"the ticket expired {now - ticket.expires:.0f} s ago", peer=peer)
    return ticket


class Membership(Signed, frozen=True):
    """The head's word that `peer` belongs to `run` until `expires` (Unix seconds)."""

    run: Text
    epoch: int
    peer: Text
    expires: int


class _Shown(Signed, frozen=True):
    """A membership as peers show it."""

    body: Blob
    signature: Blob


def sign_membership(head: Identity, membership: Membership) -> bytes:
    """`membership` in the form that peers show each other, signed by the head's key."""
    body = encode_struct(membership)
    return encode_struct(_Shown(body, head.sign(MEMBERSHIP_DOMAIN, body)))


def check_membership(data: bytes, *, head_key: bytes, run: str, peer: str, now: float, min_epoch: int = 0) -> Membership:
    """The membership that `peer` (as the transport proved it) showed, verified at `now` (Unix seconds). Fatal Refusal with the
    reason when it is not the head's, not for this peer and run, of an epoch before `min_epoch`, or out of date."""
    try:
        shown = unpack(data, _Shown)
        genuine = verify(head_key, MEMBERSHIP_DOMAIN, shown.body, shown.signature)
        membership = unpack(shown.body, Membership) if genuine else None
    except Refusal:
        raise Refusal("malformed membership", peer=peer, fatal=True) from None
    if membership is None:
        raise Refusal(f"membership is not signed by the head {peer_id_of(head_key)}", peer=peer, fatal=True)
    if membership.peer != peer:
        raise Refusal(f"membership belongs to {membership.peer}", peer=peer, fatal=True)
    if membership.run != run:
        raise Refusal(f"membership is for run {membership.run}, this is run {run}", peer=peer, fatal=True)
    if membership.epoch < min_epoch:
        raise Refusal(f"membership is of epoch {membership.epoch}, the run is at {min_epoch}", peer=peer, fatal=True)
    if now > membership.expires:
        raise Refusal(f"membership expired {now - membership.expires:.0f} s ago", peer=peer, fatal=True)
    return membership
