"""Makes links with the members that the head lists, by whatever works, and tells the head how it went. A thin shell.

What to try next is decided in `reachability`. Must not know what links are for, nor the handshake: that is `peering`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import psutil
import trio

from p2p.channel.opening import endpoint_of
from p2p.channel.port import Network
from p2p.errors import ChannelClosed, Refusal, Unreachable
from p2p.limits import HANDSHAKE_S
from p2p.membership.links import Link
from p2p.membership.reachability import MEET_S, Kind, Pursuit, nat_of
from p2p.membership.texts import MAX_REASON
from p2p.printable import printable
from p2p.protocol.join import RosterEntry
from p2p.protocol.reach import Introduce, Linked, LinkKinds, Meeting, NoMeeting, Whereabouts

log = logging.getLogger("shoal.membership")

LOOK_S = 1.0
"""Seconds between two looks at a peer that is banned or being met, and at what is to be told to the head."""

MEETINGS = 8
"""Meetings that are tried at once: each is a few sockets that send a packet a second."""

STARTS = 256
"""Links that are begun with at once, and more of them each LOOK_S: a roster of 9,000 members held the loop for 0.16 s."""

MAX_WAIT_S = 5.0
"""Seconds that the head may let us wait for a meeting: a second or two of round trip, not longer."""

SIGHTINGS = 16
"""Peers whose view of our own address is kept: two tell a symmetric NAT from a steady one."""


Connect = Callable[[str, Sequence[str], Kind | None], Awaitable[None]]
"""Opens both channels to a peer at these addresses, or over a connection that is there; CannotLink when that fails."""


class CannotLink(Exception):
    """The owner's connect failed in a way that is no error of ours; the text says why."""


class Dialler:
    """`connect(peer, addresses, kind)` opens the channels and shakes hands; `links` are those that are up."""

    def __init__(
        self, network: Network, links: Mapping[str, Link], connect: Connect, *, me: str, head: str, dialable: bool,
        is_banned: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._network, self._links, self._connect, self._is_banned = network, links, connect, is_banned
        self._me, self._head, self._dialable = me, head, dialable
        self.members: dict[str, RosterEntry] = {}
        """the members of the last roster that there is to be a link with"""
        self.at_work: dict[str, trio.CancelScope] = {}
        """the tasks that keep links, by peer"""
        self.pursuits: dict[str, Pursuit] = {}
        """what was tried, of those that there is no link with"""
        self._meeting: set[str] = set()
        self._met: dict[str, float] = {}
        """peers that just came by a meeting which they were to open the channels of"""
        self._seen_by: dict[str, str] = {}
        """host of another member -> our end as it sees it, of connections that left from the port that we listen on"""
        self._seen = ""
        """the same, by the head"""
        self._told: tuple[Link | None, Whereabouts | None, LinkKinds | None] = None, None, None
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Tell the head what changes, for ever; owns the tasks of all links that are to be made."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                self._begin()
                self._tell()
                await trio.sleep(LOOK_S)

    # --- links that are wanted ---------------------------------------------------------------------------------------

    def want(self, members: Iterable[RosterEntry]) -> None:
        """Keep links with these from now on, and with no others."""
        self.members = {m.peer: m for m in members if m.peer not in (self._me, self._head)}
        for peer in [p for p in self.at_work if p not in self.members]:
            self.at_work.pop(peer).cancel()
            self.pursuits.pop(peer, None)
        self._begin()

    def _begin(self) -> None:
        """Start the tasks of members that have none yet, the first few of them."""
        if self._nursery is not None:
            for peer in list(islice((peer for peer in self.members if peer not in self.at_work), STARTS)):
                scope = self.at_work[peer] = trio.CancelScope()
                self._nursery.start_soon(self._keep, peer, scope)

    def kind_of_arrival(self, peer: str) -> Kind:
        """What a link is called that `peer` opened."""
        at = self._met.pop(peer, None)
        if at is not None and trio.current_time() - at < HANDSHAKE_S:
            return "met"
        return "mapped port" if self._network.mapped else "inbound"

    async def _keep(self, peer: str, scope: trio.CancelScope) -> None:
        with scope:
            # A cancelled scope ends only what waits: a dial that was just through comes round once more.
            while (member := self.members.get(peer)) is not None:
                if peer in self._links or self._is_banned(peer) or peer in self._meeting:
                    if peer not in self._meeting:
                        self.pursuits.pop(peer, None)
                    await self._while_linked(peer)
                    continue
                pursuit = self.pursuits.get(peer)
                if pursuit is None:
                    pursuit = self.pursuits[peer] = Pursuit(self._me < peer, trio.current_time())
                await self._take_step(member, pursuit)

    async def _while_linked(self, peer: str) -> None:
        """Until the link to `peer` is over, or a while has passed where there is none."""
        link = self._links.get(peer)
        if link is None:
            await trio.sleep(LOOK_S)
        else:
            await link.over.wait()

    async def _take_step(self, member: RosterEntry, pursuit: Pursuit) -> None:
        now, may_ask = trio.current_time(), bool(self._network.listening) and self._head in self._links
        match pursuit.next(now, dialable=bool(member.addresses), may_ask=may_ask):
            case "dial":
                try:
                    await self._connect(member.peer, member.addresses, None)
                except CannotLink as error:
                    level = logging.INFO if pursuit.dials < 3 else logging.DEBUG
                    log.log(level, "cannot reach %s (%s): %s", member.name, member.peer, error)
                    pursuit.dial_failed(trio.current_time(), str(error))
            case "ask":
                pursuit.asked(now)
                self._links[self._head].post(Introduce(member.peer, pursuit.tried[:MAX_REASON]))
            case "wait":
                wait = pursuit.next_at(dialable=bool(member.addresses), may_ask=may_ask) - now
                await trio.sleep(min(max(wait, 0.01), LOOK_S))

    # --- meetings ----------------------------------------------------------------------------------------------------

    def invite(self, message: Meeting) -> None:
        """The head's word that a member is to be met. Refusal of one that is not listed."""
        if message.peer not in self.members:
            raise Refusal(f"a meeting with {message.peer}, who is not in the roster")
        if message.peer in self._links or message.peer in self._meeting or len(self._meeting) >= MEETINGS:
            return
        assert self._nursery is not None
        self._meeting.add(message.peer)
        self._nursery.start_soon(self._meet, message)

    def decline(self, message: NoMeeting) -> None:
        """The head's word that there is no meeting with a member."""
        if message.peer in self.pursuits:
            self.pursuits[message.peer].not_met(printable(message.why, MAX_REASON))

    async def _meet(self, message: Meeting) -> None:
        peer, name = message.peer, self.members[message.peer].name
        try:
            await trio.sleep(min(max(message.wait_s, 0.0), MAX_WAIT_S))
            if peer in self._links:
                return
            await self._network.meet(peer, message.addresses[:4], first=message.first, seconds=MEET_S)
            log.info("met %s (%s): both connected at once", name, peer)
            if message.first:
                await self._connect(peer, (), "met")
            else:
                self._met[peer] = trio.current_time()
                with trio.move_on_after(HANDSHAKE_S):
                    while peer not in self._links:  # noqa: ASYNC110 - links have no event of their own
                        await trio.sleep(0.1)
        except (CannotLink, ChannelClosed) as error:
            why = error.why if isinstance(error, Unreachable) else str(error)
            log.info("cannot meet %s (%s): %s", name, peer, why)
            if peer in self.pursuits:
                self.pursuits[peer].not_met(why)
        finally:
            self._meeting.discard(peer)

    # --- what the head is told ---------------------------------------------------------------------------------------

    def saw_us(self, peer: str, remote: str, local: str, seen: str) -> None:
        """`peer`, at `remote`, says that it sees our end of a connection, `local`, as `seen`."""
        ports = {end.port for end in map(endpoint_of, self._network.listening) if end is not None}
        here, there, end = endpoint_of(local), endpoint_of(remote), endpoint_of(seen)
        if here is None or there is None or end is None or here.port not in ports:
            return
        if peer == self._head:
            if seen != self._seen:
                self._seen_by.clear()  # another lease, or another network: what others saw before says nothing
            self._seen = seen
            return
        self._seen_by[there.host] = seen
        while len(self._seen_by) > SIGHTINGS:
            del self._seen_by[next(iter(self._seen_by))]

    def whereabouts(self) -> Whereabouts:
        """Where this host can be reached, as far as it knows."""
        own = _own_hosts()
        # A neighbour on the same LAN sees an address that nobody else sees.
        others = {host: seen for host, seen in self._seen_by.items() if (end := endpoint_of(seen)) and end.host not in own}
        sightings = {"": self._seen, **others} if self._seen else others
        met = tuple(dict.fromkeys(sightings.values()))[:4]
        addresses = tuple(self._network.addresses)[:16] if self._dialable else ()
        return Whereabouts(addresses, met, nat_of(sightings, own))

    def kinds(self) -> tuple[Linked, ...]:
        """How this host is linked with each member that it is to be linked with; those that it has just heard of are left out."""
        found = []
        for peer in sorted(self.members):
            link, pursuit = self._links.get(peer), self.pursuits.get(peer)
            if link is not None:
                found.append(Linked(peer, link.kind, ""))
            elif pursuit is not None and (pursuit.tried or pursuit.met):
                found.append(Linked(peer, "relayed", pursuit.why[:MAX_REASON]))
        return tuple(found)

    def _tell(self) -> None:
        head = self._links.get(self._head)
        if head is None:
            return
        before = self._told if self._told[0] is head else (head, None, None)
        now = head, self.whereabouts(), LinkKinds(self.kinds())
        for old, new in zip(before[1:], now[1:], strict=True):
            if old != new:
                head.post(new)
        self._told = now


def _own_hosts() -> set[str]:
    with suppress(OSError):
        return {address.address.split("%")[0] for addresses in psutil.net_if_addrs().values() for address in addresses}
    return set()
