"""How links between peers come about: dialling, handshakes, reconnects. A thin shell around the gate.

Must not know what the messages after the handshake mean: they go to the owner. A **link** is one control and one bulk channel;
it is up when both passed their handshake. What happens to it then is in `links`.

Who dials: a node dials the head; of two nodes the one with the smaller peer id dials if the other can be dialled, else
the other one. So every pair has one link, and a node behind NAT takes part through the connections it opened.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import trio

from p2p.channel.port import BULK, CONTROL, Channel, Network
from p2p.errors import ChannelClosed, Refusal
from p2p.identity import Identity
from p2p.limits import GREETING_WINDOW, HANDSHAKE_S, PROTOCOL_VERSION
from p2p.membership.gate import Gate
from p2p.membership.links import MAX_REASON, Link, LinkTasks
from p2p.protocol.join import Hello, Rejection, Renewal, RosterEntry, Welcome
from p2p.protocol.messages import decode
from p2p.protocol.wire import encode

__all__ = ["REDIAL_S", "JoinRefused", "Link", "Peering"]

log = logging.getLogger("shoal.peering")

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
        self._tasks = LinkTasks(on_up=on_up, on_down=on_down, on_message=on_message, on_refusal=on_refusal, renewed=self._renewed)
        self.links: dict[str, Link] = self._tasks.links
        self._half: dict[str, tuple[Channel, Hello]] = {}
        self._dialling: dict[str, trio.CancelScope] = {}
        self._members: dict[str, RosterEntry] = {}
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
                await bulk.aclose("handshake failed")
                raise
        except BaseException:
            await control.aclose("handshake failed")
            raise
        return await self._start(peer, welcome.name, tuple(addresses), control, bulk)

    def keep_connected(self, members: Iterable[RosterEntry]) -> None:
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

    def _mine_to_dial(self, member: RosterEntry) -> bool:
        if not member.addresses:
            return False
        return self.me < member.peer or not self._dialable

    async def _keep(self, peer: str, scope: trio.CancelScope) -> None:
        with scope:
            attempt = 0
            # A cancelled scope ends only what waits: a dial that was just through comes round once more.
            while (member := self._members.get(peer)) is not None:
                if peer in self.links or self.shuns(peer):
                    attempt = 0
                    await trio.sleep(1.0)
                    continue
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
        if isinstance(answer, Rejection):
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
        await self._start(peer, hello.name, hello.addresses, half[0], channel, hello.site[:MAX_SITE])

    async def _turn_away(self, channel: Channel, refusal: Refusal) -> None:
        reason = refusal.reason[:MAX_REASON]
        log.warning("%s", Refusal(reason, peer=channel.peer, fatal=refusal.fatal))
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
                if self.gate.due(link.proven) and link.peer not in self.gate.revoked:
                    link.proven = self._wall()
                    link.post(Renewal(self.gate.grant(link.peer)))

    # --- links -------------------------------------------------------------------------------------------------------

    async def _start(
        self, peer: str, name: str, addresses: tuple[str, ...], control: Channel, bulk: Channel, site: str = ""
    ) -> Link:
        assert self._nursery is not None
        return await self._tasks.start(self._nursery, peer, name, addresses, control, bulk, site=site, proven=self._wall())

    def _renewed(self, link: Link, message: Renewal) -> None:
        if link.peer != self.head:
            raise Refusal("Renewal from a peer that is not the head", fatal=True)
        self.gate.check(message.membership, self.me)
        self.gate.membership = message.membership

    async def close(self, peer: str, reason: str) -> None:
        """Close the link to `peer`, if there is one; `on_down` follows."""
        await self._tasks.close(peer, reason)


async def _first(channel: Channel) -> object:
    """The first message, within HANDSHAKE_S. Cancelling a receive is safe: it only waits for the reader task."""
    with trio.move_on_after(HANDSHAKE_S):
        return decode(await channel.receive())
    raise ChannelClosed(f"{channel.peer} did not say hello within {HANDSHAKE_S:.0f} s")
