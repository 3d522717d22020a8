"""Messages of coming, staying and going: the handshake, the roster, the groups of peers, the goodbye.

Must not know channels or who is admitted.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from msgspec.structs import replace

from p2p.limits import MAX_FRAME, MAX_PEERS
from p2p.protocol.wire import Blob, Count, Message, Record, Row, Text

log = logging.getLogger("shoal.messages")


class Hello(Message, frozen=True, tag="hello"):
    """First message on every channel, from the peer that opened it. A node shows the head its ticket the first time;
    after that, and to other nodes, its membership. `addresses` are where it can be dialled (empty behind NAT)."""

    protocol: Count
    run: Text
    ticket: Text
    membership: Blob
    addresses: Row[Text]
    name: Text
    agent: Text
    site: Text
    """those of one site share a fast LAN; empty for none"""


class Welcome(Message, frozen=True, tag="welcome"):
    """The acceptor's answer. `membership` is the head's to the joiner, or a node's own proof to the node that dialled."""

    protocol: Count
    membership: Blob
    name: Text


class Rejection(Message, frozen=True, tag="refused"):
    """The acceptor's other answer, then it closes. A retryable one may be tried again later, as it is."""

    reason: Text
    retryable: bool


class RosterEntry(Record, frozen=True):
    peer: Text
    addresses: Row[Text]
    name: Text


class Roster(Message, frozen=True, tag="roster"):
    """Head to node: whom to link with, of those admitted and alive, the receiver included: everybody, or in groups (see
    Grouping) its neighbours. Replaces the roster before."""

    epoch: Count
    members: Row[RosterEntry]


def make_roster(epoch: int, members: Sequence[RosterEntry]) -> Roster:
    """The roster of `members`, in a frame. When they are too many for all their addresses, each is listed with fewer;
    when they are too many even so, the last ones are left out (a mesh of so many is not to be had anyway)."""
    for addresses in (16, 8, 4, 2, 1):
        listed = tuple(replace(m, addresses=m.addresses[:addresses]) for m in members[:MAX_PEERS])
        texts = ((m.peer, m.name, *m.addresses) for m in listed)
        ends = list(accumulate(16 + sum(5 + len(text.encode()) for text in of_one) for of_one in texts))
        fits = bisect_right(ends, MAX_FRAME - 1024)
        if fits == len(members):
            break
    if fits < len(members):
        log.warning("%d peers are too many for a roster: the last %d are left out", len(members), len(members) - fits)
    return Roster(epoch, listed[:fits])


class Placed(Record, frozen=True):
    peer: Text
    group: Count


class Grouping(Message, frozen=True, tag="grouping"):
    """Head to node: the groups that the swarm is in (see `broadcast.groups`), as far as the node is concerned. `group` is its
    own, `sites` the number of each group's site, `witness` whether it tells the source of every chunk at once, `peers` the
    groups of its neighbours and its own, `stand_ins` the groups without its lane, `apart` those whom it was told to link with
    before and who are not its neighbours any more. Without `sites`: all are one group."""

    group: Count
    sites: Row[Count]
    witness: bool
    peers: Row[Placed]
    stand_ins: Row[Count] = ()
    apart: Row[Text] = ()


class Renewal(Message, frozen=True, tag="renewal"):
    """Head to node, long before the membership that it holds expires: the next one."""

    membership: Blob


class Bye(Message, frozen=True, tag="bye"):
    """Orderly end of a membership or of the run. `done` says that the run is over. `draining` is a node's first word of the two:
    it takes nothing new, and the tokens of what it holds follow; after its last one (neither flag) it closes as soon as the
    head has answered with the same."""

    reason: Text
    done: bool
    draining: bool = False
