"""One peer's part in the swarm: its links, the versions that travel over them and, at the source, who is told of whom.

Peering, exchange and rosters are wired here, once for all who take part: the learner's head, a node, a contest's player, a test.
What is neither of the versions family nor about whom to link with goes to the owner. Must not know rollouts, engines or prices,
nor what a version is for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from p2p.broadcast.exchange import Exchange
from p2p.broadcast.peer_groups import MESH, PeerPlaces
from p2p.broadcast.policies.registry import DEFAULT
from p2p.broadcast.rosters import Rosters, places_of
from p2p.broadcast.transfer import Transfer
from p2p.channel.listening import short_address
from p2p.channel.port import Network
from p2p.complaints import complain
from p2p.errors import ChannelClosed, Refusal, Unreachable, UsageError
from p2p.identity import Identity
from p2p.membership.admission import Ticket
from p2p.membership.conduct import PeerConduct, RefusalCounts
from p2p.membership.deputies import by_sender
from p2p.membership.doorkeeper import Doorkeeper
from p2p.membership.links import Link, LinkOwner
from p2p.membership.matchmaking import Matchmaker
from p2p.membership.peering import JoinRefused, Peering, PeerSettings
from p2p.membership.reachability import redial_s
from p2p.membership.redials import Redials
from p2p.membership.texts import MAX_REASON
from p2p.printable import printable
from p2p.protocol.join import Grouping, Roster
from p2p.protocol.reach import Meeting, NoMeeting, PassingOn
from p2p.protocol.versions import Catalog, GetCatalog, GetParts, Report
from p2p.version import Version
from p2p.weights.store import ChunkStore

log = logging.getLogger("shoal.swarm")

ROSTERS_S = 0.5
"""Seconds between two rounds of rosters in a large swarm: a thousand nodes that come one by one must not cost a message to
each of the others each time, and a new node waits half a second at most to hear of its neighbours."""

STEADY_S = 10.0
"""Seconds that a link to the head must have lived for the next one to be dialled at once. One that breaks sooner is made again
only after a pause: it may break each time."""

ENTRY_BYTES = 160
"""Of an entry of the catalog: three digests of up to 32 bytes, two versions, a kind and a size."""

@dataclass(frozen=True, slots=True)
class SourceRole:
    """The head of `run`: it admits peers, signs versions and has no ticket of its own."""

    run: str
    epoch: int
    mesh: int = MESH
    """nodes up to which everybody is told of everybody, as in `Grid`"""
    doorkeeper: Doorkeeper | None = None
    """who may come, beyond a good signature; None: anybody"""


@dataclass(frozen=True, slots=True)
class FollowerRole:
    """A node: it joins with `ticket` and stays connected to the head that signed it."""

    ticket: Ticket
    dialable: bool = True
    """whether others can open connections to it"""
    site: str = ""
    """nodes of one site share a fast LAN; empty for none"""


class SwarmOwner:
    """What only the owner of a swarm knows. All of it is called in the task of the link concerned."""

    async def on_up(self, link: Link) -> None:
        """`link` is up; its peer takes part in the broadcast once this returns. When `link` replaces an older one to that
        peer, the older one's `on_down` may not come."""

    async def on_down(self, link: Link, reason: str) -> None:
        """`link` is closed and no other has taken its place; its peer is out of the broadcast."""

    async def on_message(self, link: Link, message: object) -> None:
        """A message that is the owner's; a follower hears the head alone. A Refusal that this raises is handled as any other:
        `on_refusal` hears it, and a fatal one costs the link."""

    def on_refusal(self, peer: str, refusal: Refusal) -> None:
        """Something that `peer` sent is not accepted. A follower tells the head, too; a fatal refusal costs the link."""

    def catalog(self) -> Catalog | None:
        """The source's: what a joiner may fetch, None before there is anything. Each peer gets it that comes or asks."""
        return None


class Swarm(LinkOwner):
    """One peer. Others see it under `name`; `policy` names the broadcast's policy.

    `now` counts seconds for timers, `wall` reads the Unix time for what is signed. The store's chunks are the caller's to drop.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        store: ChunkStore,
        role: SourceRole | FollowerRole,
        owner: SwarmOwner,
        *,
        name: str,
        policy: str = DEFAULT,
        now: Callable[[], float] = trio.current_time,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if isinstance(role, SourceRole):
            settings = PeerSettings(run=role.run, head=identity.peer_id, name=name)
        else:
            settings = PeerSettings(
                run=role.ticket.run, head=role.ticket.head, name=name, ticket=role.ticket.encode(), dialable=role.dialable,
                site=role.site,
            )  # fmt: skip
        self._role, self._owner = role, owner
        self.me, self.head, self.store = identity.peer_id, settings.head, store
        self.peering = Peering(network, identity, settings, self, wall=wall)
        self.links: Mapping[str, Link] = self.peering.links
        """live links by peer, from the end of the handshake on"""
        self.conduct: PeerConduct = RefusalCounts(self.peering.gate.banned)
        """the owner may put its own here, before `run`, with a gate that asks the same"""
        self._new_exchange = partial(
            Exchange, me=self.me, run=settings.run, head=self.head, head_key=self.peering.gate.head_key, store=store,
            now=now, wall=wall, on_refusal=self.on_refusal, policy=policy,
        )  # fmt: skip
        self.exchange = self._new_exchange()
        """with everybody but those who are kept apart"""
        self.transfers: Mapping[bytes, Transfer] = self.exchange.transfers
        """the transfers here, by manifest id; their traffic does not count who is kept apart"""
        self._apart: dict[str, Exchange] = {}
        """the exchanges of those who are kept apart, by peer"""
        self.rosters: Rosters | None = None
        self.matchmaker: Matchmaker | None = None
        """the source's, both"""
        if isinstance(role, SourceRole):
            self.peering.gate.epoch, self.peering.gate.doorkeeper = role.epoch, role.doorkeeper or Doorkeeper()
            self.rosters = Rosters(
                self.exchange, self.links, epoch=role.epoch, mesh=role.mesh, passes_on=lambda peer: self.conduct.passes_on(peer)
            )
            self.exchange.entrusts = self.rosters.entrusts
            self.matchmaker = Matchmaker(network, self.links, self.rosters.lists, self.rosters.changed)
        self.places: PeerPlaces | None = None
        self._unlisted: frozenset[str] = frozenset()  # who has a link and is not in the roster
        """where the head placed this follower; None while all peers are one group"""
        self._up: dict[str, Link] = {}
        """the links that the owner was told of, by peer"""

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Take part, for ever; owns every task of the swarm. A follower dials the head, again and again: UsageError when the
        head refuses it for good."""
        async with trio.open_nursery() as nursery:
            for exchange in self._exchanges:
                await nursery.start(exchange.run)
            await nursery.start(self.peering.run)
            nursery.start_soon(self._keep_rosters if self.rosters is not None else self._keep_head)
            task_status.started()

    # --- links -------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The newest epoch of the run that this peer knows of."""
        return self.peering.gate.epoch

    def send(self, peer: str, message: object) -> None:
        """Queue `message` for `peer` without waiting; nothing happens when it is not here."""
        if peer in self.links:
            self.links[peer].post(message)

    def pairs(self) -> list[dict[str, str]]:
        """The source's: how nodes are linked with each other, as plain values (see `pairs.PairLink`)."""
        return [pair._asdict() for pair in self.matchmaker.pairs()] if self.matchmaker is not None else []

    @property
    def turned_away(self) -> int:
        """As `Peering.turned_away`."""
        return self.peering.turned_away

    async def leave(self, reason: str) -> None:
        """Close every link."""
        for peer in list(self.links):
            await self.peering.close(peer, reason)

    async def _keep_head(self) -> None:
        """Stay connected to the head, through restarts of either side."""
        assert isinstance(self._role, FollowerRole)
        ticket, attempt, redials = self._role.ticket, 0, Redials()
        log.info("dialling the learner at %s", ", ".join(map(short_address, ticket.addresses)) or "no address")
        while True:
            try:
                await self.peering.connect(self.head, ticket.addresses)
                patience = redials.reached(trio.current_time())
                log.info("joined run %s at epoch %d as %s%s", ticket.run, self.epoch, self.me, patience)
                up_since = trio.current_time()
                while (link := self.links.get(self.head)) is not None:
                    await link.over.wait()
                if trio.current_time() - up_since > STEADY_S:
                    attempt = 0
                    continue
            except JoinRefused as refused:
                if not refused.retryable:
                    raise UsageError(f"the learner refused this node: {printable(refused.reason)}") from None
                self._tell_failure(redials, f"the learner refuses this node for now: {refused.reason}")
            except (ChannelClosed, Refusal) as error:
                why = error.why if isinstance(error, Unreachable) else str(error)
                self._tell_failure(redials, f"cannot reach the learner: {why}")
            await trio.sleep(redial_s(attempt))
            attempt += 1

    @staticmethod
    def _tell_failure(redials: Redials, why: str) -> None:
        if line := redials.failed(trio.current_time(), why):
            log.warning("%s", line)

    async def _keep_rosters(self) -> None:
        assert self.rosters is not None and self.matchmaker is not None
        while True:
            await trio.sleep(ROSTERS_S)
            self.rosters.review()
            self.rosters.flush()
            self.matchmaker.flush(self.rosters.meshed)
            self.exchange.set_apart(self.matchmaker.apart)

    # --- versions ----------------------------------------------------------------------------------------------------

    def keep_apart(self, peer: str) -> None:
        """The source's, before `run`: `peer` gets every version in an exchange of its own, and nobody hears of it.

        For a node on the source's own machine. Among the others it would be handed chunks to distribute over the very uplink
        that it shares with the source, and its loopback would be taken for that uplink's rate.
        """
        assert self.rosters is not None
        self._apart[peer] = self._new_exchange()
        self.rosters.apart.add(peer)

    def offer(self, header_part: bytes, *, announce: bool) -> None:
        """As `Exchange.offer`, to everybody."""
        for exchange in self._exchanges:
            exchange.offer(header_part, announce=announce)

    def extend(self, mid: bytes, part: bytes, *, announce: bool) -> None:
        """As `Exchange.extend`, to everybody."""
        for exchange in self._exchanges:
            exchange.extend(mid, part, announce=announce)

    def forget(self, mid: bytes) -> list[bytes]:
        """Drop a manifest; returns the digests of its chunks, for the store to drop."""
        for exchange in self._apart.values():
            exchange.forget(mid)
        return self.exchange.forget(mid)

    def send_catalog(self, link: Link) -> None:
        """The source's: tell the peer of `link` what it may fetch."""
        catalog = self._owner.catalog()
        if catalog is not None:
            link.post(catalog)

    @property
    def _exchanges(self) -> list[Exchange]:
        return [self.exchange, *self._apart.values()]

    def _arrange(self, places: PeerPlaces | None) -> None:
        self.places = places
        self.exchange.arrange(places, self._unlisted)

    def _see_who_is_listed(self) -> None:
        """Whoever comes without being in the roster is no part of the swarm to the head, whatever it is."""
        unlisted = frozenset(p for p in self._up if p != self.head and p not in self.peering.listed)
        if self.rosters is None and unlisted != self._unlisted:
            self._unlisted = unlisted
            self._arrange(self.places)

    # --- what the host's owner allows --------------------------------------------------------------------------------

    def allow(self, relays: float | None, chunks: float | None, down: float) -> None:
        """As `ExchangeCore.allow`, with everybody but those who are kept apart."""
        self.exchange.allow(relays, chunks, down)

    def expect_uplink(self, rate: float, *, told: bool) -> None:
        """As `ExchangeCore.expect_uplink`, with everybody but those who are kept apart."""
        self.exchange.expect_uplink(rate, told=told)

    @property
    def chunk_bytes_sent(self) -> int:
        """Payload of all chunks that left here, to whomever."""
        return sum(exchange.sent_bytes for exchange in self._exchanges)

    @property
    def uplink_rate(self) -> float:
        """Bytes/s that the uplink is known to carry; 0 while that is not known."""
        return self.exchange.uplink_rate

    @property
    def found_uplink(self) -> float:
        """As `ExchangeCore.found_uplink`."""
        return self.exchange.found_uplink

    # --- what links say (LinkOwner) ----------------------------------------------------------------------------------

    async def on_up(self, link: Link) -> None:
        """Tell the owner, then let the peer take part in the broadcast."""
        self._up[link.peer] = link
        if link.peer == self.head:
            self._arrange(None)  # it may be another head, and says anew which groups there are
            self.exchange.pass_on({})
        await self._owner.on_up(link)
        if self._up.get(link.peer) is not link:
            return  # a newer link has taken its place meanwhile
        self._see_who_is_listed()
        self._exchange_of(link.peer).add_peer(link.peer, link.post, link.bulk)
        if self.rosters is not None:
            self.send_catalog(link)
            self.rosters.changed()

    async def on_down(self, link: Link, reason: str) -> None:
        """Take the peer out of the broadcast, then tell the owner."""
        if self._up.get(link.peer) is not link:
            return  # a newer link has taken its place
        del self._up[link.peer]
        self._exchange_of(link.peer).remove_peer(link.peer)
        await self._owner.on_down(link, reason)
        if self.rosters is not None and self.matchmaker is not None:
            self.matchmaker.forget(link.peer)
            self.rosters.changed()

    async def on_message(self, link: Link, message: object) -> None:
        """Pass a message to whom it is for: the catalog, the exchange, the membership or the owner."""
        if self._up.get(link.peer) is not link:
            return  # a newer link has taken its place
        if self.rosters is not None and self._asks_catalog(message):
            catalog = self._owner.catalog()
            if catalog and self.exchange.answers.take(link.peer, ENTRY_BYTES * len(catalog.entries), trio.current_time()):
                link.post(catalog)
        elif not await self._exchange_of(link.peer).handle(link.peer, message):
            try:
                if self.matchmaker is None:
                    await self._follow(link, message)
                elif not self.matchmaker.handle(link, message):
                    await self._owner.on_message(link, message)
            except Refusal as refusal:
                complain(log, link.peer, refusal.at(peer=link.peer))
                await self.on_refusal(link.peer, refusal)

    def hear(self, link: Link, message: object) -> bool:
        """See `LinkOwner.hear`."""
        if self._up.get(link.peer) is not link:
            return True  # a newer link has taken its place
        return self._exchange_of(link.peer).hear_at_once(link.peer, message)

    async def on_refusal(self, peer: str, refusal: Refusal) -> None:
        """Tell the owner, and as a follower the head. Too many refusals, or a fatal one, cost the link, and keep the peer away
        for a while."""
        self._owner.on_refusal(peer, refusal)
        if self.rosters is None:
            self.send(self.head, Report(peer, refusal.version or Version(0, 0), refusal.chunk or 0, refusal.reason[:MAX_REASON]))
        # The head is never dropped for one bad manifest: what it sent is not accepted, and there is no other head.
        if peer != self.head and self.conduct.refused(peer, refusal.reason, trio.current_time(), fatal=refusal.fatal):
            why = str(refusal) if refusal.fatal else f"{refusal}; too many of its messages were refused"
            await self.peering.close(peer, why)

    def _exchange_of(self, peer: str) -> Exchange:
        return self._apart.get(peer, self.exchange)

    def _asks_catalog(self, message: object) -> bool:
        """Who asks for a manifest that is not here any more needs to know what is."""
        return isinstance(message, GetCatalog) or (isinstance(message, GetParts) and message.mid not in self.transfers)

    async def _follow(self, link: Link, message: object) -> None:
        if link.peer != self.head:
            raise Refusal(f"{type(message).__name__} from a peer that is not the head", fatal=True)
        match message:
            case Roster():
                self.peering.keep_connected(message.members)
                self._see_who_is_listed()
            case Meeting():
                self.peering.dialler.invite(message)
            case NoMeeting():
                self.peering.dialler.decline(message)
            case PassingOn():
                self.exchange.pass_on(by_sender(message.rows, self.peering.dialler.members))
            case Grouping():
                self._arrange(places_of(message))
                self.peering.shed(message.apart)
            case _:
                await self._owner.on_message(link, message)
