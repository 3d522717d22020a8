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
from p2p.protocol.wire import Blob, Count, Few, Line, Message, Record, Row, Text

log = logging.getLogger("shoal.protocol")


class Hello(Message, frozen=True, tag="hello"):
    """First message on every channel, from the peer that opened it. A node shows the head its ticket the first time;
    after that, and to other nodes, its membership. `addresses` are where it can be dialled (empty behind NAT). The gate
    refuses another protocol or run, a bad proof, and names or addresses that are longer or more than it takes."""

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
    seen: Text
    """the joiner's end of the connection as the acceptor sees it, from which the joiner learns that it is behind NAT. May be
    empty"""


class Rejection(Message, frozen=True, tag="refused"):
    """The acceptor's other answer, then it closes. A retryable one may be tried again later, as it is."""

    reason: Line
    retryable: bool


class RosterEntry(Record, frozen=True):
    """One peer that the receiver may link with, and where it can be dialled."""

    peer: Text
    addresses: Few[Text]
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
    """A peer and the number of its group."""

    peer: Text
    group: Count


class Grouping(Message, frozen=True, tag="grouping"):
    """Head to node: the groups that the swarm is in (see `broadcast.peer_groups`), as far as the node is concerned. Without
    `sites`, all peers are one group."""

    group: Count
    """the receiver's own"""
    sites: Row[Count]
    """of each group, the number of its site"""
    witness: bool
    """the receiver tells the source of every chunk as soon as it has it"""
    peers: Row[Placed]
    """the receiver and its neighbours"""
    stand_ins: Row[Count] = ()
    """groups that nobody serves on the receiver's lane"""
    strangers: Row[Count] = ()
    """groups of those to whom nothing is entrusted"""
    apart: Row[Text] = ()
    """peers whom it was told to link with before and who are not its neighbours any more"""


class Renewal(Message, frozen=True, tag="renewal"):
    """Head to node, long before the membership that it holds expires: the next one."""

    membership: Blob


class Bye(Message, frozen=True, tag="bye"):
    """Orderly end of a membership or of the run. A node that leaves says it twice: first with `draining`, and at the end without.
    It closes as soon as the head has answered the second one."""

    reason: Text
    done: bool
    """the run is over"""
    draining: bool = False
    """the node takes nothing new; the tokens of what it holds follow"""
