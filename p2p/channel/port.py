"""The Channel and Network ports. Must not know what the messages mean.

A `Network` is one peer's way to others: it listens, dials, and hands over `Channel`s on which the remote peer's
identity is already proven by the transport (Noise, Ed25519). A channel carries whole messages of at most MAX_FRAME
bytes, in order, each way, under application credits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from p2p.errors import Unreachable
from p2p.limits import CHANNEL_WINDOW

CONTROL, BULK = "control", "bulk"
"""Channel kinds. Control messages never queue behind chunks: the two are separate streams with separate credits."""


@dataclass(frozen=True, slots=True)
class PathState:
    """What the transport knows of the path to the peer, for all channels that share its connection."""

    delivered: int
    """bytes that the peer's system has acknowledged"""
    unacked: int
    """TCP segments under way and not acknowledged yet"""
    rtt_s: float
    """seconds: the round trip now"""
    min_rtt_s: float
    """seconds: the shortest round trip seen lately; what `rtt_s` has beyond it was spent in queues"""
    resent: int = 0
    """bytes that were sent again because they seemed lost"""


class Channel:
    """Ordered messages to one peer."""

    peer: str
    """the remote peer id, proven by the transport"""
    kind: str
    """CONTROL or BULK"""

    async def send(self, message: bytes) -> None:
        """Queue one message; returns once credit is taken and the message is in the writer's bounded queue.

        Cancel-safe: a cancelled send either queued the whole message or none of it, and never disturbs the stream.
        ValueError over MAX_FRAME; ChannelClosed when the channel is or becomes closed, as it does when the peer
        receives nothing for CREDIT_PROGRESS_S while we wait for credit. Several tasks may send.
        """
        raise NotImplementedError

    def try_send(self, message: bytes, *, more: bool = False) -> bool:
        """Queue without waiting; False when there is no credit or no room right now. `more`: another follows at once, and this
        one may wait for it."""
        raise NotImplementedError

    async def receive(self) -> bytes:
        """The next message, which also returns its credit to the sender. ChannelClosed at the end or on a fault
        (an oversized or malformed frame, credits overrun, silence): everything received before is delivered first.
        One task receives."""
        raise NotImplementedError

    def offer(self, take: Callable[[bytes], bool] | None) -> None:
        """From now on, where the channel can do it, offer each message to `take` as it comes, while none waits for `receive`;
        True says that it is handled, and its credit is returned. `take` must neither wait nor raise. None: no more."""

    async def aclose(self, reason: str = "") -> None:
        """Close both directions; queued messages may be lost. Idempotent, never raises, safe from any task: a task
        blocked in send or receive gets ChannelClosed."""
        raise NotImplementedError

    def restrict(self, window: int = CHANNEL_WINDOW) -> None:
        """From now on hold at most `window` bytes of the peer that nobody has received; more closes the channel, as a credits
        overrun. The peer does not learn of it: this is for strangers, who are to send one short message and wait."""
        raise NotImplementedError

    def unheard(self) -> int:
        """Bytes of messages that came and that nobody received yet, with some for each; 0 where the channel cannot say."""
        return 0

    def path(self) -> PathState | None:
        """The state of the path to the peer; None where the transport cannot say."""
        return None

    def remote(self) -> str:
        """The peer's end of the connection as this host sees it, "/ip4/ADDRESS/tcp/PORT"; "" where the transport cannot say."""
        return ""

    def local(self) -> str:
        """This host's end of the connection, in the same form; "" where the transport cannot say."""
        return ""

    def smooth(self, rate: float) -> None:
        """Send no more than `rate` bytes/s, however much is handed over at once: a burst at the speed of this machine
        overruns the short queue of a slow link. Does nothing where the transport cannot do it."""


class Network(Protocol):
    """One peer's host. Made by an adapter's async context manager, which owns all its tasks."""

    peer_id: str

    @property
    def addresses(self) -> Sequence[str]:
        """Where others can dial this peer, full multiaddrs with /p2p/PEER for libp2p."""

    async def open(self, peer: str, addresses: Sequence[str], kind: str) -> Channel:
        """A new channel to `peer`, over a live connection if there is one, else by dialling `addresses` in turn.
        ChannelClosed with the reason when none of them works within HANDSHAKE_S."""

    @property
    def listening(self) -> Sequence[str]:
        """What is listened on, as "/ip4/ADDRESS/tcp/PORT"; nothing where connections do not leave from ports."""
        return ()

    @property
    def mapped(self) -> str:
        """The address of a port that a router mapped to this host, in the same form; "" for none."""
        return ""

    @property
    def turned_away(self) -> int:
        """Connections that were closed before their handshake, since too many came."""
        return 0

    async def meet(self, peer: str, addresses: Sequence[str], *, first: bool, seconds: float) -> None:
        """Connect to `peer`, who does the same towards this host at this moment: from the port listened on, to all of `addresses`
        at once. `first`: this side begins the handshake, and is to `open` the channels; exactly one of the two must.

        Returns once there is a connection. Unreachable, with the reason, when there is none after `seconds`."""
        raise Unreachable(peer, "this transport cannot open a connection from both sides at once")

    @property
    def incoming(self) -> trio.MemoryReceiveChannel[Channel]:
        """Channels that others opened to this peer."""

    def admitted(self, channel: Channel) -> None:
        """Whoever is at the other end has a link with us: the connection counts no more among those of strangers."""

    async def drop(self, peer: str, reason: str) -> None:
        """Close every channel and the connection to `peer`."""
