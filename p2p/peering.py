"""Links between peers: handshake, one control and one bulk channel each, reconnects. A thin shell around the gate.

Must not know what the messages after the handshake mean: they go to the owner. A **link** is up when both channels passed
their handshake; it is down when either closes, and then both close.

Who dials: a node dials the head; of two nodes the one with the smaller peer id dials if the other can be dialled, else
the other one. So every pair has one link, and a node behind NAT takes part through the connections it opened.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import trio

from p2p.channel.base import BULK, CONTROL, Channel, Network
from p2p.errors import ChannelClosed, Refusal, first_of
from p2p.gate import Gate
from p2p.identity import Identity
from p2p.limits import GREETING_WINDOW, HANDSHAKE_S, PROTOCOL_VERSION
from p2p.links import OUTBOX, Link
from p2p.protocol.messages import Hello, Member, Refused, Renewal, Welcome
from p2p.protocol.wire import decode, encode

__all__ = ["REDIAL_S", "JoinRefused", "Link", "Peering"]

log = logging.getLogger("shoal.peering")

MAX_REASON = 500
"""Characters of a refusal's reason that a peer is told: it may quote what the peer itself sent."""

MAX_SITE = 64
"""Characters of a site's name that count."""

SHED_S = 10.0
"""A link that is needed no more is closed after so long: what is in flight on it has arrived, the links in its place are up."""

RENEW_CHECK_S = 600.0
"""How often the head looks whether a membership it gave is past half its life. Often, for a machine may sleep for days."""

REDIAL_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits between attempts to reach a peer; the last one repeats."""


class JoinRefused(Exception):
    """The other side answered a handshake with a refusal."""

    def __init__(self, peer: str, reason: str, retryable: bool) -> None:
        super().__init__(f"{peer} refused: {reason}")
        self.peer, self.reason, self.retryable = peer, reason, retryable


class Peering:
    """Accepts, dials and keeps links. The owner's callbacks run in the link's own tasks and may await.

    `on_up(link)`, `on_down(link, reason)`, `on_message(link, message)`, `on_refusal(peer, refusal)`.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        *,
        run: str,
        head: str,
        name: str,
        agent: str,
        wall: Callable[[], float],
        on_up: Callable[[Link], Awaitable[None]],
        on_down: Callable[[Link, str], Awaitable[None]],
        on_message: Callable[[Link, object], Awaitable[None]],
        on_refusal: Callable[[str, Refusal], Awaitable[None]],
        ticket: str = "",
        membership: bytes = b"",
        dialable: bool = True,
        site: str = "",
    ) -> None:
        self._network = network
        self.gate = Gate(identity, run=run, head=head, wall=wall, membership=membership)
        self.run_id, self.head, self.me, self.name, self._agent, self._wall = run, head, identity.peer_id, name, agent, wall
        self.ticket, self._dialable, self._site = ticket, dialable, site
        self.links: dict[str, Link] = {}
        self._on_up, self._on_down, self._on_message, self._on_refusal = on_up, on_down, on_message, on_refusal
        self._half: dict[str, tuple[Channel, Hello]] = {}
        self._dialling: dict[str, trio.CancelScope] = {}
        self._members: dict[str, Member] = {}
        self._listed: set[str] = set()
        """the members of the last roster, whoever is to dial them"""
        self._greeting: set[str] = set()
        """peers that `connect` is at work on"""
        self._nursery: trio.Nursery | None = None

    @property
    def epoch(self) -> int:
        """The newest epoch this peer knows of."""
        return self.gate.epoch

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            if self.me == self.head:
                nursery.start_soon(self._renew)
            async for channel in self._network.incoming:
                nursery.start_soon(self._accept, channel)

    # --- dialling ----------------------------------------------------------------------------------------------------

    async def connect(self, peer: str, addresses: Iterable[str]) -> Link:
        """Open both channels to `peer` and shake hands. ChannelClosed when it cannot be reached, JoinRefused when it
        answers no."""
        try:
            self._greeting.add(peer)
            return await self._connect(peer, list(addresses))
        except (ChannelClosed, JoinRefused, Refusal):
            raise
        except Exception as error:  # what it sent, or said of itself, found a defect of ours
            log.exception("cannot connect to %s", peer)
            raise Refusal(f"it cannot be connected to: {error!r}"[:MAX_REASON], peer=peer) from error
        finally:
            self._greeting.discard(peer)

    async def _connect(self, peer: str, addresses: list[str]) -> Link:
        control = await self._network.open(peer, addresses, CONTROL)
        try:
            welcome = await self._greet(control)
            if peer == self.head:
                self.gate.membership = welcome.membership
                self.gate.epoch = self.gate.check(welcome.membership, self.me).epoch
            else:
                self.gate.check(welcome.membership, peer)
            bulk = await self._network.open(peer, addresses, BULK)
            try:
                await self._greet(bulk)
            except BaseException:
                await _close(bulk, "handshake failed")
                raise
        except BaseException:
            await _close(control, "handshake failed")
            raise
        return await self._start(peer, welcome.name, tuple(addresses), control, bulk)

    def keep_connected(self, members: Iterable[Member]) -> None:
        """Dial, and keep dialling, the members that are ours to dial; stop for those that left the roster."""
        members = list(members)
        self._listed = {m.peer for m in members}
        wanted = {m.peer: m for m in members if m.peer not in (self.me, self.head) and self._mine_to_dial(m)}
        self._members = wanted  # a peer that came back may listen elsewhere now
        for peer in [p for p in self._dialling if p not in wanted]:
            self._dialling.pop(peer).cancel()
        for peer in wanted:
            if peer not in self._dialling and self._nursery is not None:
                scope = self._dialling[peer] = trio.CancelScope()
                self._nursery.start_soon(self._keep, peer, scope)

    def shed(self, peers: Collection[str]) -> None:
        """Close the links to these in a while, unless they are members of the roster then. Both ends are told to, one will do."""
        if peers and self._nursery is not None:
            self._nursery.start_soon(self._shed, frozenset(peers))

    async def _shed(self, peers: frozenset[str]) -> None:
        await trio.sleep(SHED_S)
        for peer in peers - self._listed:
            if peer != self.head:
                await self.close(peer, "neighbours no longer")

    def _mine_to_dial(self, member: Member) -> bool:
        if not member.addresses:
            return False
        return self.me < member.peer or not self._dialable

    async def _keep(self, peer: str, scope: trio.CancelScope) -> None:
        with scope:
            attempt = 0
            while True:
                if peer in self.links or self.shuns(peer):
                    attempt = 0
                    await trio.sleep(1.0)
                    continue
                member = self._members[peer]
                try:
                    await self.connect(member.peer, member.addresses)
                except (ChannelClosed, JoinRefused, Refusal) as error:
                    level = logging.INFO if attempt < 3 else logging.DEBUG
                    log.log(level, "cannot reach %s (%s): %s", member.name, member.peer, error)
                    await trio.sleep(REDIAL_S[min(attempt, len(REDIAL_S) - 1)])
                    attempt += 1

    async def _greet(self, channel: Channel) -> Welcome:
        addresses = tuple(self._network.addresses) if self._dialable else ()
        ticket = self.ticket if channel.peer == self.head else ""
        hello = Hello(
            PROTOCOL_VERSION, self.run_id, ticket, self.gate.membership, addresses, self.name, self._agent, self._site
        )
        await channel.send(encode(hello))
        answer = await _first(channel)
        if isinstance(answer, Refused):
            raise JoinRefused(channel.peer, answer.reason, answer.retryable)
        if not isinstance(answer, Welcome):
            raise Refusal(f"expected a welcome, got {type(answer).__name__}", peer=channel.peer, fatal=True)
        return answer

    # --- keeping away ------------------------------------------------------------------------------------------------

    async def expel(self, peer: str, reason: str) -> None:
        """Close the link to `peer` for what it sent, and keep away from it for a while."""
        self.gate.shunned.add(peer, trio.current_time())
        await self.close(peer, reason)

    def shuns(self, peer: str) -> bool:
        return self.gate.shunned.holds(peer, trio.current_time())

    # --- accepting ---------------------------------------------------------------------------------------------------

    async def _accept(self, channel: Channel) -> None:
        peer = channel.peer
        channel.restrict(GREETING_WINDOW)
        try:
            hello = await _first(channel)
            if not isinstance(hello, Hello):
                raise Refusal(f"expected a hello, got {type(hello).__name__}", peer=peer, fatal=True)
            proof = self.gate.admit(peer, hello, trio.current_time())
            channel.restrict()
            await channel.send(encode(Welcome(PROTOCOL_VERSION, proof, self.name)))
        except Refusal as refusal:
            await self._turn_away(channel, refusal)
            return
        except ChannelClosed:
            await self._part_with(channel, "gone during the handshake")
            return
        except Exception as error:  # its hello found a defect of ours
            log.exception("cannot admit %s", peer)
            await self._turn_away(channel, Refusal(f"its hello cannot be handled: {error!r}", fatal=True))
            return
        if channel.kind == CONTROL:
            old = self._half.pop(peer, None)
            self._half[peer] = (channel, hello)
            if old is not None:
                await _close(old[0], "replaced by a newer channel")
            await trio.sleep(HANDSHAKE_S)
            if self._half.get(peer, (None, None))[0] is channel:
                del self._half[peer]
                await self._part_with(channel, "no bulk channel came")
            return
        half = self._half.pop(peer, None)
        if half is None:
            await self._part_with(channel, "bulk channel without a control channel")
            return
        await self._start(peer, hello.name, hello.addresses, half[0], channel, hello.site[:MAX_SITE])

    async def _turn_away(self, channel: Channel, refusal: Refusal) -> None:
        reason = refusal.reason[:MAX_REASON]
        log.warning("%s", Refusal(reason, peer=channel.peer, fatal=refusal.fatal))
        try:
            with trio.move_on_after(HANDSHAKE_S):
                await channel.send(encode(Refused(reason, not refusal.fatal)))
                # The dialler closes once it has read the answer: closing first could cut it off.
                await channel.receive()
        except ChannelClosed:
            pass
        if refusal.fatal:
            await self._part_with(channel, reason)
        else:  # it will come again soon, over the same connection
            await _close(channel, reason)

    async def _part_with(self, channel: Channel, reason: str) -> None:
        """Close a channel that came to nothing, and the connection under it unless it carries something else."""
        await _close(channel, reason)
        if channel.peer not in self.links and channel.peer not in self._half and channel.peer not in self._greeting:
            await self._network.drop(channel.peer, reason)

    async def _renew(self) -> None:
        """The head's: a link may outlive the membership that its peer shows to others."""
        while True:
            await trio.sleep(RENEW_CHECK_S)
            for link in self.links.values():
                if self.gate.due(link.proven) and link.peer not in self.gate.revoked:
                    link.proven = self._wall()
                    link.post(Renewal(self.gate.grant(link.peer)))

    # --- links -------------------------------------------------------------------------------------------------------

    async def _start(
        self, peer: str, name: str, addresses: tuple[str, ...], control: Channel, bulk: Channel, site: str = ""
    ) -> Link:
        outbox, outgoing = trio.open_memory_channel[bytes](OUTBOX)
        link = Link(peer, name, addresses, control, bulk, outbox, site, proven=self._wall())
        # In place before the old one is closed, which takes a while: a third link must see this one.
        old, self.links[peer] = self.links.get(peer), link
        if old is not None:
            await self._close_link(old, "replaced by a newer link")
        assert self._nursery is not None
        up = trio.Event()
        self._nursery.start_soon(self._serve, link, outgoing, up)
        await up.wait()
        return link

    async def _serve(self, link: Link, outgoing: trio.MemoryReceiveChannel[bytes], up: trio.Event) -> None:
        reason = "closed"
        try:
            if self.links.get(link.peer) is not link:
                raise ChannelClosed(link.closing or "replaced by a newer link")
            await self._guarded(link, "its arrival", self._on_up(link))
            up.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, link, outgoing)
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
            link.outbox.close()
            with trio.CancelScope(shield=True):
                await _close(link.control, reason)
                await _close(link.bulk, reason)
                await self._on_down(link, reason)

    async def _write(self, link: Link, outgoing: trio.MemoryReceiveChannel[bytes]) -> None:
        async with outgoing:
            async for data in outgoing:
                await link.control.send(data)
                link.queued -= len(data)
        raise ChannelClosed(link.closing or "closed here")

    @staticmethod
    async def _until_doomed(link: Link) -> None:
        await link.doomed.wait()
        raise ChannelClosed(link.closing)

    async def _read(self, link: Link, channel: Channel) -> None:
        while True:
            try:
                message = decode(await channel.receive())
            except ChannelClosed as closed:
                refusal = _refused_below(closed, link.peer)
                if refusal is not None and not link.closing:
                    log.warning("%s", refusal)
                    await self._on_refusal(link.peer, refusal)
                raise
            except Refusal as refusal:
                raise await self._refused(link, refusal) from None
            if isinstance(message, Renewal):
                await self._on_renewal(link, message)
            else:
                await self._guarded(link, f"its {type(message).__name__}", self._on_message(link, message))

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
        log.warning("%s", refusal)
        await self._on_refusal(link.peer, refusal)
        return refusal

    async def _on_renewal(self, link: Link, message: Renewal) -> None:
        try:
            if link.peer != self.head:
                raise Refusal("Renewal from a peer that is not the head", fatal=True)
            self.gate.check(message.membership, self.me)
        except Refusal as refusal:
            raise await self._refused(link, refusal) from None
        self.gate.membership = message.membership

    async def close(self, peer: str, reason: str) -> None:
        """Close the link to `peer`, if there is one; `on_down` follows."""
        link = self.links.pop(peer, None)
        if link is not None:
            await self._close_link(link, reason)

    @staticmethod
    async def _close_link(link: Link, reason: str) -> None:
        link.closing = link.closing or reason
        await _close(link.control, reason)
        await _close(link.bulk, reason)


def _refused_below(closed: ChannelClosed, peer: str) -> Refusal | None:
    """What the channel itself refused (a frame over the limit, credits overrun), if that is why it closed. A peer's own
    words cannot look like it: they follow "closed by the peer"."""
    head, found, reason = str(closed).partition(" chunk=-: ")
    return Refusal(reason, peer=peer, fatal=True) if found and head.startswith("refused: ") else None


async def _first(channel: Channel) -> object:
    """The first message, within HANDSHAKE_S. Cancelling a receive is safe: it only waits for the reader task."""
    with trio.move_on_after(HANDSHAKE_S):
        return decode(await channel.receive())
    raise ChannelClosed(f"{channel.peer} did not say hello within {HANDSHAKE_S:.0f} s")


async def _close(channel: Channel, reason: str) -> None:
    await channel.aclose(reason)
