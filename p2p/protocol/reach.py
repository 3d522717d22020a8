"""Messages about how two members can be linked: where one can be met, the head's arrangement of a meeting, how links came about.

Must not know channels, nor who decides what.
"""

from __future__ import annotations

from p2p.protocol.wire import Count, Few, Line, Many, Message, Name, Real, Record, Text


class Whereabouts(Message, frozen=True, tag="where"):
    """Node to head, whenever it changes: where the node can be reached. The addresses replace those of its hello. The head
    believes no address of another host than the one that it sees the node at, but those that a hello may have."""

    addresses: Few[Text]
    """that can be dialled: of its interfaces, and of a port that its router mapped"""
    met: Few[Text]
    """its listening port as others see it, from which its own connections leave"""
    nat: Name
    """one of `p2p.membership.reachability.NATS`"""


class Introduce(Message, frozen=True, tag="introduce"):
    """Node to head: I am to be linked with this member, and cannot reach it. The head answers both with a Meeting, or the sender
    with a NoMeeting."""

    peer: Text
    why: Line
    """what was tried"""


class Meeting(Message, frozen=True, tag="meeting"):
    """Head to two members: connect to each other, `wait_s` after this came, from the ports that you listen on."""

    peer: Text
    addresses: Few[Text]
    first: bool
    """the receiver begins the handshake, and opens the channels"""
    wait_s: Real


class NoMeeting(Message, frozen=True, tag="no meeting"):
    """Head to node: these two cannot be brought together, for that reason. What they have comes to each other through others."""

    peer: Text
    why: Line


class Linked(Record, frozen=True):
    """How the sender is linked with one member."""

    peer: Text
    kind: Name
    """one of `p2p.membership.reachability.KINDS`"""
    why: Line
    """of a member that it is not linked with: what was tried"""


class LinkKinds(Message, frozen=True, tag="link kinds"):
    """Node to head, when it changed: how the node is linked with the members that it was told to link with."""

    links: Many[Linked]


class PassOn(Record, frozen=True):
    """What `source` sends the receiver, the receiver sends on to `target`, who has no link with it: every chunk whose number
    leaves `share` when divided by `of`."""

    source: Text
    target: Text
    share: Count
    of: Count


class PassingOn(Message, frozen=True, tag="pass on"):
    """Head to node, when it changed: what the node passes on, in place of what it was told before."""

    rows: Many[PassOn]
