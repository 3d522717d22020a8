"""Live neighbours: two channels each, the queue of control messages that wait for it, and the tasks that read and write.

Must not know who posts what, or how a link came about: `p2p.membership.peering` starts one when its handshakes are over. A
link is down when either channel closes, and then both close.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

import trio

from p2p.channel.port import Channel
from p2p.complaints import complain
from p2p.errors import ChannelClosed, Refusal, first_of
from p2p.limits import KIB, MIB
from p2p.membership.addresses import Reach
from p2p.membership.reachability import Kind
from p2p.membership.texts import MAX_REASON, clean_message
from p2p.membership.workload import PeerLoad
from p2p.protocol.join import Renewal
from p2p.protocol.messages import decode
from p2p.protocol.versions import Chunk, GetCatalog, GetParts, Have, Parts
from p2p.protocol.wire import encode, prefix_of

log = logging.getLogger("shoal.membership")

OUTBOX = 8192
"""Control messages that may wait for one peer. A peer that lets more pile up does not read, and its link is closed."""

OUTBOX_BYTES = 64 * MIB
"""Bytes of control messages that may wait for one peer. An answer can be as large as a frame, so a count alone bounds nothing."""

ALL_BYTES, EACH_BYTES, STILL_S = 64 * MIB, 512 * KIB, 5.0
"""Bytes of control messages that may wait for all peers together; beyond that whoever lets most wait has to go, if it is more
than EACH_BYTES and nothing of it has left for so many seconds. Sixty identities that never read had half a gigabyte kept;
a node that joins a large run may have megabytes waiting for it, and takes them."""

ANSWER_BELOW = 256 * KIB
"""Bytes of control messages that wait for a peer beyond which its questions wait too. Sixty identities that asked faster than
they read, at a head short of a core, had 295 MiB of answers kept: each took some of it now and then, so none had to go."""

HEARD, HEARD_S = 32, 0.05
"""Messages of one channel that are handled as they come, in so many seconds: the rest wait for their turn, between which others
have theirs."""

SHORT = 2 * KIB
"""Bytes of a Have or of Parts that is handled as it comes: a few hundred numbers, or two signatures to check."""

_QUESTIONS = (GetCatalog, GetParts)
"""What answers come to that may be long."""

_CHUNK, _SHORT = prefix_of(Chunk), (prefix_of(Have), prefix_of(Parts))

REPLACED = "replaced by a newer link"
"""Why a link is closed when its peer has made another one."""

LOOK_S = 0.1
"""Seconds between two looks for such a peer: rosters for thousands, all at once, must not look at thousands for each."""


@dataclass(slots=True)
class Unread:
    """What waits in the outboxes of all links of one peer."""

    nbytes: int = 0
    links: set[Link] = field(default_factory=set)
    """those with something in theirs"""
    looked_at: float = -inf
    """when who lets most wait was last looked for"""

    def relieve(self, now: float) -> None:
        """Too much waits: drop who lets most wait, of those for whom nothing has left for a while."""
        if now - self.looked_at < LOOK_S:
            return
        self.looked_at = now
        stuck = [link for link in self.links if now - link.moved_at > STILL_S and link.queued > EACH_BYTES]
        if stuck:
            max(stuck, key=lambda link: link.queued).overflow()


@dataclass(eq=False)
class Link:
    """A live neighbour. `name` and `site` are what the peer says of itself, made fit to be shown; `peer` is proven by the
    transport."""

    peer: str
    name: str
    control: Channel
    bulk: Channel
    site: str = ""
    reach: Reach = field(default_factory=Reach)
    """where others may be told to dial it"""
    kind: Kind = "inbound"
    """how it came about"""
    proven: float = 0.0
    """wall time (Unix seconds) at which the head gave this peer its membership; only the head reads it"""
    closing: str = ""
    """why this side closes the link; empty while it does not"""
    queued: int = 0
    """bytes in the outbox"""
    unread: Unread = field(default_factory=Unread, repr=False)
    """what waits for all links together, from when this one is started"""
    moved_at: float = inf
    """when something last left its outbox (seconds of trio's clock), or the link was started"""
    arrived: bool = False
    """the peer made it, not this side"""
    came: float = -inf
    """when it was started (seconds of trio's clock)"""
    flowing: bool = False
    """its writer runs: what is posted while nothing waits goes straight to the channel"""
    doomed: trio.Event = field(default_factory=trio.Event, repr=False)
    """set when the link must close although its writer may be stuck"""

    over: trio.Event = field(default_factory=trio.Event, repr=False)
    """set when it is no link any more"""
    _left: trio.Event = field(default_factory=trio.Event, repr=False)
    """set when there is room for an answer"""

    def __post_init__(self) -> None:
        self.outbox, self.outgoing = trio.open_memory_channel[bytes](OUTBOX)

    def post(self, message: object) -> None:
        """Queue a control message without waiting; never raises. A link that is closing drops it; one whose peer does
        not drain closes."""
        if self.doomed.is_set():
            return
        try:
            data = encode(message)
        except ValueError as error:  # too long for a frame: a limit of ours is wrong, and no reason to end the caller
            log.error("cannot send to %s: %s", self.peer, error)
            return
        try:
            if self.flowing and not self.queued and self.control.try_send(data):
                self.moved_at = trio.current_time()
                return
            if self.queued + len(data) > OUTBOX_BYTES:
                raise trio.WouldBlock
            self.outbox.send_nowait(data)
            self.count(len(data))
            if self.unread.nbytes > ALL_BYTES:
                self.unread.relieve(trio.current_time())
        except trio.WouldBlock:
            self.overflow()
        except (trio.ClosedResourceError, trio.BrokenResourceError, ChannelClosed):
            pass

    def overflow(self) -> None:
        """The peer does not read: the link has to go. What waits for it goes with it, and is nobody else's concern."""
        self.closing = self.closing or f"{self.queued} bytes of control messages pile up unread"
        queued = self.queued
        self.count(-queued)
        self.unread = Unread()
        self.count(queued)
        self.doomed.set()

    async def room_for_an_answer(self) -> None:
        """Until no more than ANSWER_BELOW waits for the peer. For its own task alone: who does not read is not heard. The channel
        ends when nothing of what waits leaves, and this wait with it."""
        while self.queued > ANSWER_BELOW:
            self._left = trio.Event()
            await self._left.wait()

    def count(self, nbytes: int) -> None:
        """So many bytes are in the outbox, or are not any more."""
        self.queued += nbytes
        if self.queued <= ANSWER_BELOW:
            self._left.set()
        self.unread.nbytes += nbytes
        if self.queued:
            self.unread.links.add(self)
        else:
            self.unread.links.discard(self)


class LinkOwner:
    """What an owner does about its links. All of it runs in the link's own tasks, and may await."""

    async def on_up(self, link: Link) -> None:
        """`link` is up; nothing is read from it before this returns. It may take the place of an older link to that peer,
        whose `on_down` comes before or after."""

    async def on_down(self, link: Link, reason: str) -> None:
        """`link` is closed. Comes once for every link, also for one that another replaced before its `on_up`."""

    async def on_message(self, link: Link, message: object) -> None:
        """A decoded message of either channel. A Refusal that this raises closes the link."""

    def hear(self, link: Link, message: object) -> bool:
        """As `on_message`, for a Chunk, a short Have or short Parts, without waiting. False, or a Refusal: it was not handled,
        and comes to `on_message`."""
        return False

    async def on_refusal(self, peer: str, refusal: Refusal) -> None:
        """Something that `peer` sent is not accepted, and its link is about to close for it."""


@dataclass(slots=True)
class _Reading:
    """How one channel of a link is read."""

    busy: bool = True
    """a message that came before is being handled"""
    rests_until: float = -inf
    """nothing is handled before, since its peer takes more than its share of the time"""
    since: float = -inf
    """seconds of trio's clock"""
    heard: int = 0
    """messages that were handled at once since then"""


class LinkTasks:
    """The links of one peer and their tasks. `renewed(link, message)` takes a new membership, or raises a Refusal. `head` is
    always read at once; another peer waits when its messages take more than their share of the time. `left(peer, came, now)` is
    told when a link is over."""

    def __init__(
        self, owner: LinkOwner, renewed: Callable[[Link, Renewal], None], head: str = "", *,
        left: Callable[[str, float, float], None] = lambda peer, came, now: None,
    ) -> None:  # fmt: skip
        self._owner, self._renewed, self._head, self._left = owner, renewed, head, left
        self._workload, self._unread = PeerLoad(), Unread()
        self.links: dict[str, Link] = {}
        """by peer"""

    async def start(self, nursery: trio.Nursery, link: Link) -> None:
        """Serve `link`; returns once `on_up` has heard of it. It takes the place of another link to that peer, which is
        closed."""
        # In place before the old one is closed, which takes a while: a third link must see this one.
        old, self.links[link.peer] = self.links.get(link.peer), link
        link.unread, link.came = self._unread, trio.current_time()
        link.moved_at = link.came
        if old is not None:
            if old.arrived and link.arrived:  # else one peer had a new link as often as it liked
                self._left(old.peer, old.came, trio.current_time())
            await self._close_link(old, REPLACED)
        up = trio.Event()
        nursery.start_soon(self._serve, link, up)
        await up.wait()

    async def _serve(self, link: Link, up: trio.Event) -> None:
        reason = "closed"
        try:
            if self.links.get(link.peer) is not link:
                raise ChannelClosed(link.closing or REPLACED)
            await self._guarded(link, "its arrival", self._owner.on_up(link))
            up.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, link)
                nursery.start_soon(self._read, link, link.bulk)
                nursery.start_soon(self._until_doomed, link)
                await self._read(link, link.control)
        except* ChannelClosed as group:
            reason = link.closing or str(first_of(group))
        except* Refusal as group:
            reason = link.closing or str(first_of(group))
        finally:
            up.set()
            if self.links.get(link.peer) is link:
                del self.links[link.peer]
            link.over.set()
            if not link.closing:  # whatever we close it for is no habit of the peer's
                self._left(link.peer, link.came, trio.current_time())
            link.outbox.close()
            link.count(-link.queued)
            with trio.CancelScope(shield=True):
                await link.control.aclose(reason)
                await link.bulk.aclose(reason)
                await self._owner.on_down(link, reason)

    @staticmethod
    async def _write(link: Link) -> None:
        async with link.outgoing:
            link.flowing = True
            async for data in link.outgoing:
                await link.control.send(data)
                link.count(-len(data))
                link.moved_at = trio.current_time()
        raise ChannelClosed(link.closing or "closed here")

    @staticmethod
    async def _until_doomed(link: Link) -> None:
        await link.doomed.wait()
        raise ChannelClosed(link.closing)

    async def _read(self, link: Link, channel: Channel) -> None:
        reading = _Reading()
        channel.offer(lambda data: self._hear(link, reading, data))
        try:
            await self._read_on(link, channel, reading)
        finally:
            channel.offer(None)

    def _hear(self, link: Link, reading: _Reading, data: bytes) -> bool:
        """Handle a message as it comes, if it is one of those that come most and that take little: to wake a task for it would
        cost as much again."""
        now = trio.current_time()
        if now - reading.since > HEARD_S:
            reading.since, reading.heard = now, 0
        is_chunk = data.startswith(_CHUNK)
        allowed = not reading.busy and now >= reading.rests_until and reading.heard < HEARD
        if not allowed or not (is_chunk or (len(data) <= SHORT and data.startswith(_SHORT))):
            return False
        reading.heard += 1
        began = perf_counter()
        try:
            handled = self._owner.hear(link, decode(data))
        except Exception:  # whatever it is, `_read_on` comes upon it too
            return False
        if handled and not is_chunk and link.peer != self._head:
            reading.rests_until = now + self._workload.spent(link.peer, perf_counter() - began, now)
        return handled

    async def _read_on(self, link: Link, channel: Channel, reading: _Reading) -> None:
        while True:
            try:
                reading.busy = False
                data = await channel.receive()
                reading.busy = True
                if (pause := reading.rests_until - trio.current_time()) > 0:
                    await trio.sleep(pause)
                began = perf_counter()
                message = clean_message(decode(data))
                if isinstance(message, Renewal):
                    self._renewed(link, message)
                    continue
            except ChannelClosed as closed:
                refusal = _refused_below(closed, link.peer)
                if refusal is not None and not link.closing:
                    complain(log, link.peer, refusal)
                    await self._owner.on_refusal(link.peer, refusal)
                raise
            except Refusal as refusal:
                raise await self._refused(link, refusal) from None
            if isinstance(message, _QUESTIONS):
                await link.room_for_an_answer()
                began = perf_counter()
            await self._guarded(link, f"its {type(message).__name__}", self._owner.on_message(link, message))
            # A chunk that is not wanted costs nothing, and one that is wanted is what links are for.
            if link.peer != self._head and not isinstance(message, Chunk):
                pause = self._workload.spent(link.peer, perf_counter() - began, trio.current_time())
                if pause:
                    await trio.sleep(pause)

    async def _guarded(self, link: Link, what: str, handling: Awaitable[None]) -> None:
        """What a peer does may find a defect of ours: it then costs that peer's link, and no other."""
        try:
            await handling
        except (ChannelClosed, Refusal):
            raise
        except Exception as error:
            log.exception("cannot handle %s of %s", what, link.peer)
            refusal = Refusal(f"{what} cannot be handled: {error!r}"[:MAX_REASON], fatal=True)
            raise await self._refused(link, refusal) from error

    async def _refused(self, link: Link, refusal: Refusal) -> Refusal:
        """Tell the owner; the link ends with what is returned."""
        refusal = refusal.at(peer=link.peer)
        complain(log, link.peer, refusal)
        await self._owner.on_refusal(link.peer, refusal)
        return refusal

    async def close(self, peer: str, reason: str) -> None:
        """Close the link to `peer`, if there is one; `on_down` follows."""
        link = self.links.pop(peer, None)
        if link is not None:
            await self._close_link(link, reason)

    @staticmethod
    async def _close_link(link: Link, reason: str) -> None:
        link.closing = link.closing or reason
        await link.control.aclose(reason)
        await link.bulk.aclose(reason)


def _refused_below(closed: ChannelClosed, peer: str) -> Refusal | None:
    """What the channel itself refused (a frame over the limit, credits overrun), if that is why it closed. A peer's own
    words cannot look like it: they follow "closed by the peer"."""
    head, found, reason = str(closed).partition(" chunk=-: ")
    return Refusal(reason, peer=peer, fatal=True) if found and head.startswith("refused: ") else None
