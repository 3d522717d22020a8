"""How links between peers come about: dialling, handshakes, reconnects. A thin shell around the gate.

Must not know what the messages after the handshake mean: they go to the owner. A **link** is one control and one bulk channel;
it is up when both passed their handshake. What happens to it then is in `links`.

Who dials: a node dials the head. How two nodes come together, and which of them dials first, is in `dialling`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from p2p.channel.port import BULK, CONTROL, Channel, Network
from p2p.channel.visits import HELLO_EACH_S, HELLOS, LINK_EACH_S, SHORT_LINKS, ShortVisits
from p2p.complaints import complain
from p2p.errors import ChannelClosed, Refusal, Unreachable
from p2p.identity import Identity
from p2p.limits import GREETING_WINDOW, HANDSHAKE_S, PROTOCOL_VERSION
from p2p.membership.addresses import reach_of
from p2p.membership.dialling import CannotLink, Dialler
from p2p.membership.gate import VISITOR, Gate
from p2p.membership.inboxes import LOOK_S, REASON, overfull
from p2p.membership.links import Link, LinkOwner, LinkTasks
from p2p.membership.reachability import Kind, dialled_kind
from p2p.membership.texts import MAX_NAME, MAX_REASON, clean_hello
from p2p.printable import printable
from p2p.protocol.join import Hello, Rejection, Renewal, RosterEntry, Welcome
from p2p.protocol.messages import decode
from p2p.protocol.wire import encode
from p2p.release import release

log = logging.getLogger("shoal.membership")

SHED_S = 10.0
"""Seconds until a link that is no longer needed is closed: by then what is in flight on it has arrived, and the links that
take its place are up."""

RENEW_CHECK_S = 600.0
"""Seconds from one look of the head to the next for memberships past half their life. A membership lives for a week, but a
machine may sleep for days, so the head looks often."""

DOOR_S = 1.0
"""Seconds from one look of the head for peers that have to go to the next: so soon a ban or a revoked ticket ends links."""

OFTEN = "its links end as soon as they are up: it may come again in a while"
"""Why a peer is sent away that comes and goes without end."""

FRUITLESS = "its hellos come to no link: it may come again in a while"
"""Why a peer is sent away that says hello without end."""


class JoinRefused(Exception):
    """The other side answered a handshake with a refusal."""

    def __init__(self, peer: str, reason: str, retryable: bool) -> None:
        super().__init__(f"{peer} refused: {reason}")
        self.peer, self.reason, self.retryable = peer, reason, retryable


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Whom a peer belongs to, and what it says of itself when it opens a link. The gate of the other side checks lengths."""

    run: str
    head: str
    """the head's peer id; the head's own `PeerSettings` name itself"""
    name: str
    """for people; others see it in rosters and logs"""
    ticket: str = ""
    """the encoded ticket, shown to the head alone; the head has none"""
    dialable: bool = True
    """whether others can open connections to this peer"""
    site: str = ""
    """peers of one site share a fast LAN; empty for none"""


class Peering:
    """Accepts, dials and keeps links, and tells their `owner`. `wall` reads the Unix time, which memberships are checked by."""

    def __init__(
        self, network: Network, identity: Identity, settings: PeerSettings, owner: LinkOwner, *, wall: Callable[[], float]
    ) -> None:
        self._network, self._settings, self._wall = network, settings, wall
        self.gate = Gate(identity, run=settings.run, head=settings.head, wall=wall)
        self.head, self.me = settings.head, identity.peer_id
        self._short_links = ShortVisits(SHORT_LINKS, LINK_EACH_S, LINK_EACH_S)
        """whose links end as soon as they are up"""
        self._sent_away = 0
        self._hellos = ShortVisits(HELLOS, HELLO_EACH_S)
        """whose hellos come to no link: each is counted when its channel comes, and taken back where a link begins"""
        self._tasks = LinkTasks(owner, self._renewed, settings.head, left=self._short_links.left)
        self.links: dict[str, Link] = self._tasks.links
        """live links by peer, from the end of the handshake on"""
        self._half: dict[str, tuple[Channel, Hello]] = {}
        """peers whose control channel passed its handshake, and whose bulk channel is awaited"""
        self.dialler = Dialler(
            network, self.links, self._reach, me=self.me, head=self.head, dialable=settings.dialable, is_banned=self.is_banned
        )
        """who makes the links with the members of the roster"""
        self.listed: set[str] = set()
        """the members of the last roster, whoever is to dial them"""
        self._greeting: set[str] = set()
        """peers that `connect` is at work on"""
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Accept, for ever; owns every task of the links."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self.me == self.head:
                nursery.start_soon(self._renew)
                nursery.start_soon(self._keep_door)
                nursery.start_soon(self._keep_inboxes)
            else:
                await nursery.start(self.dialler.run)
            task_status.started()
            async for channel in self._network.incoming:
                nursery.start_soon(self._accept, channel)

    # --- dialling ----------------------------------------------------------------------------------------------------

    async def connect(self, peer: str, addresses: Iterable[str], kind: Kind | None = None) -> None:
        """Open both channels to `peer` and shake hands; `addresses` are multiaddrs, tried in turn. Returns once `on_up` was told.
        `kind`: what the link is called; unless it is said, by how `peer` was dialled.
        ChannelClosed when it cannot be reached, JoinRefused when it answers no, Refusal when its answer is not accepted."""
        try:
            self._greeting.add(peer)
            await self._connect(peer, list(addresses), kind)
        except (ChannelClosed, JoinRefused, Refusal):
            raise
        except Exception as error:  # what it sent, or said of itself, found a defect of ours
            log.exception("cannot connect to %s", peer)
            raise Refusal(f"it cannot be connected to: {error!r}"[:MAX_REASON], peer=peer) from error
        finally:
            self._greeting.discard(peer)

    async def _connect(self, peer: str, addresses: list[str], kind: Kind | None) -> None:
        opened: list[Channel] = []
        try:
            for which in (CONTROL, BULK):
                opened.append(await self._network.open(peer, addresses, which))
                welcome = await self._greet(opened[-1])
                self.dialler.saw_us(peer, opened[-1].remote(), opened[-1].local(), welcome.seen)
                if peer == self.head:
                    self.gate.epoch = self.gate.check(welcome.membership, self.me).epoch
                    self.gate.membership = welcome.membership
                else:
                    self.gate.check(welcome.membership, peer)
            self._network.admitted(opened[-1])
        except BaseException:
            for channel in opened:
                await channel.aclose("handshake failed")
            raise
        control, bulk = opened
        kind = kind or dialled_kind(control.remote())
        await self._start(Link(peer, printable(welcome.name, MAX_NAME), control, bulk, kind=kind))

    async def _reach(self, peer: str, addresses: Sequence[str], kind: Kind | None) -> None:
        """`connect`, as the dialler takes it."""
        try:
            await self.connect(peer, addresses, kind)
        except Unreachable as error:
            raise CannotLink(error.why) from error
        except (ChannelClosed, JoinRefused, Refusal) as error:
            raise CannotLink(str(error)) from error

    def keep_connected(self, members: Iterable[RosterEntry]) -> None:
        """Make and keep links with these members, whoever is to dial; with no others from now on."""
        members = list(members)
        self.listed = {m.peer for m in members}
        self.dialler.want(members)

    def shed(self, peers: Collection[str]) -> None:
        """Close the links to `peers` after SHED_S, unless the roster lists them by then. Both ends are told to; one would do."""
        if peers and self._nursery is not None:
            self._nursery.start_soon(self._shed, frozenset(peers))

    async def _shed(self, peers: frozenset[str]) -> None:
        await trio.sleep(SHED_S)
        for peer in peers - self.listed:
            if peer != self.head:
                await self.close(peer, "neighbours no longer")

    async def _greet(self, channel: Channel) -> Welcome:
        s = self._settings
        hello = Hello(
            protocol=PROTOCOL_VERSION, run=s.run, ticket=s.ticket if channel.peer == self.head else "",
            membership=self.gate.membership, addresses=tuple(self._network.addresses) if s.dialable else (), name=s.name,
            agent=f"shoal/{release()}", site=s.site,
        )  # fmt: skip
        return await greet(channel, hello)

    # --- keeping away ------------------------------------------------------------------------------------------------

    def keep_away(self, peer: str, reason: str, *, ban: bool = True) -> None:
        """As `expel`, without waiting: the link ends soon. Without `ban` the gate's doorkeeper knows for how long."""
        if ban:
            self.gate.banned.add(peer, trio.current_time())
        link = self.links.get(peer)
        if link is not None:
            link.closing = link.closing or reason
            link.doomed.set()

    def is_banned(self, peer: str) -> bool:
        """Whether `peer` was expelled, and its time is not over."""
        return self.gate.banned.holds(peer, trio.current_time())

    @property
    def turned_away(self) -> int:
        """Connections that were not taken in, and channels that were closed before anything was read, since too many came."""
        return self._network.turned_away + self._sent_away

    # --- accepting ---------------------------------------------------------------------------------------------------

    async def _accept(self, channel: Channel) -> None:
        peer = channel.peer
        channel.restrict(GREETING_WINDOW)
        came = trio.current_time()
        if not self._hellos.may_come(peer, came):
            self._sent_away += 1
            complain(log, peer, f"{peer} is sent away: {FRUITLESS}")
            await channel.aclose(FRUITLESS)
            await self._network.drop(peer, FRUITLESS)  # its link too: else it would go on over the same connection
            return
        self._hellos.change(peer, -1, came)
        if channel.kind == CONTROL and not self._short_links.may_come(peer, came):
            self._sent_away += 1
            complain(log, peer, f"{peer} is sent away: {OFTEN}")
            await self._part_with(channel, OFTEN)
            return
        try:
            hello = await _first(channel)
            if not isinstance(hello, Hello):
                raise Refusal(f"expected a hello, got {type(hello).__name__}", peer=peer, fatal=True)
            proof = self.gate.admit(peer, hello, trio.current_time())
            hello = clean_hello(hello)
            channel.restrict()
            await channel.send(encode(Welcome(PROTOCOL_VERSION, proof, self._settings.name, channel.remote())))
        except Refusal as refusal:
            await self._turn_away(channel, refusal)
            return
        except ChannelClosed:
            if channel.kind == CONTROL:
                self._short_links.left(peer, came, trio.current_time())
            await self._part_with(channel, "gone during the handshake")
            return
        except Exception as error:  # its hello found a defect of ours
            log.exception("cannot admit %s", peer)
            await self._turn_away(channel, Refusal(f"its hello cannot be handled: {error!r}", fatal=True))
            return
        if hello.agent == VISITOR:
            await self._see_off(channel)
            return
        if channel.kind == CONTROL:
            old = self._half.pop(peer, None)
            self._half[peer] = (channel, hello)
            if old is not None:
                await old[0].aclose("replaced by a newer channel")
            await trio.sleep(HANDSHAKE_S)
            if self._half.get(peer, (None, None))[0] is channel:
                del self._half[peer]
                await self._part_with(channel, "no bulk channel came")
            return
        half = self._half.pop(peer, None)
        if half is None:
            await self._part_with(channel, "bulk channel without a control channel")
            return
        self._hellos.change(peer, 2, trio.current_time())
        self._network.admitted(channel)
        reach = reach_of(peer, hello.addresses, channel.remote(), self._network.addresses if self.me == self.head else ())
        kind = self.dialler.kind_of_arrival(peer)
        await self._start(Link(peer, hello.name, half[0], channel, site=hello.site, reach=reach, kind=kind, arrived=True))

    async def _turn_away(self, channel: Channel, refusal: Refusal) -> None:
        reason = refusal.reason[:MAX_REASON]
        complain(log, channel.peer, Refusal(reason, peer=channel.peer, fatal=refusal.fatal))
        try:
            with trio.move_on_after(HANDSHAKE_S):
                await channel.send(encode(Rejection(reason, not refusal.fatal)))
                # The dialler closes once it has read the answer: closing first could cut it off.
                await channel.receive()
        except ChannelClosed:
            pass
        if refusal.fatal:
            await self._part_with(channel, reason)
        else:  # it will come again soon, over the same connection
            await channel.aclose(reason)

    async def _see_off(self, channel: Channel) -> None:
        """A visitor has its answer, and closes once it has read it."""
        try:
            with trio.move_on_after(HANDSHAKE_S):
                await channel.receive()
        except ChannelClosed:
            pass
        await self._part_with(channel, "it was a visit")

    async def _part_with(self, channel: Channel, reason: str) -> None:
        """Close a channel that came to nothing, and the connection under it unless it carries something else."""
        await channel.aclose(reason)
        if channel.peer not in self.links and channel.peer not in self._half and channel.peer not in self._greeting:
            await self._network.drop(channel.peer, reason)

    async def _renew(self) -> None:
        """The head's: a link may outlive the membership that its peer shows to others."""
        while True:
            await trio.sleep(RENEW_CHECK_S)
            for link in self.links.values():
                if self.gate.due(link.proven):
                    link.proven = self._wall()
                    link.post(Renewal(self.gate.grant(link.peer)))

    async def _keep_door(self) -> None:
        """The head's: who was banned, or came by a ticket that was revoked, goes."""
        while True:
            await trio.sleep(DOOR_S)
            for peer, reason in self.gate.doorkeeper.unwelcome(list(self.links), self._wall()).items():
                complain(log, peer, f"{peer} has to go: {reason}")
                await self.close(peer, reason)
                await self._network.drop(peer, reason)

    async def _keep_inboxes(self) -> None:
        """The head's: who says more than can be heard, and has most of what all say, goes."""
        while True:
            await trio.sleep(LOOK_S)
            unheard = {peer: link.control.unheard() + link.bulk.unheard() for peer, link in self.links.items()}
            for peer in overfull(unheard):
                reason = REASON.format(unheard[peer])
                complain(log, peer, f"{peer} has to go: {reason}")
                self.keep_away(peer, reason, ban=False)

    # --- links -------------------------------------------------------------------------------------------------------

    async def _start(self, link: Link) -> None:
        assert self._nursery is not None
        link.proven = self._wall()
        await self._tasks.start(self._nursery, link)

    def _renewed(self, link: Link, message: Renewal) -> None:
        if link.peer != self.head:
            raise Refusal("Renewal from a peer that is not the head", fatal=True)
        self.gate.check(message.membership, self.me)
        self.gate.membership = message.membership

    async def close(self, peer: str, reason: str) -> None:
        """Close the link to `peer`, if there is one; `on_down` follows."""
        await self._tasks.close(peer, reason)


async def greet(channel: Channel, hello: Hello) -> Welcome:
    """Say `hello` on a channel that was just opened; the peer's welcome. JoinRefused when it answers no, Refusal when that is no
    answer, ChannelClosed when none comes."""
    await channel.send(encode(hello))
    answer = await _first(channel)
    if isinstance(answer, Rejection):
        raise JoinRefused(channel.peer, answer.reason, answer.retryable)
    if not isinstance(answer, Welcome):
        raise Refusal(f"expected a welcome, got {type(answer).__name__}", peer=channel.peer, fatal=True)
    return answer


async def _first(channel: Channel) -> object:
    """The first message, within HANDSHAKE_S. Cancelling a receive is safe: it only waits for the reader task."""
    with trio.move_on_after(HANDSHAKE_S):
        return decode(await channel.receive())
    raise ChannelClosed(f"{channel.peer} did not say hello within {HANDSHAKE_S:.0f} s")
