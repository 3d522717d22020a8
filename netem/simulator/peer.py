"""One simulated peer: production's exchange over a simulated network and clock; `sim_pump` carries out what leaves it.

Must not know faults, results or when a round is over.

What it leaves out: data and disks (a chunk costs a constant time), the trainer's encoding, credits of channels, and everything
about links but their delay: a neighbour is there or is not. Everybody follows the source from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import floor, inf

from netem.networks.profile import Host
from netem.simulator.flows import Arrival
from netem.simulator.sim_pump import Bulk, Loop, SimPump
from netem.simulator.wire import HEAD, RUN, SimVersion
from p2p.broadcast.exchange_core import TICK_S
from p2p.broadcast.inbox import Inbox
from p2p.channel.port import Channel
from p2p.protocol.versions import Parts
from p2p.weights.manifest import Manifest

SMALL = 100
"""Bytes of a control message. Nothing follows from it: control messages take no part in the sharing of links."""


NO_CHANNEL = Channel()
"""What every neighbour has in place of a channel: chunks leave by `sim_pump`. One for all, for there are millions of links."""


class NoChunks:
    """A store that keeps nothing: nobody reads what simulated chunks hold."""

    def put(self, digest: bytes, data: bytes) -> None: ...

    def pin(self, digests: Iterable[bytes]) -> None: ...

    def unpin(self, digests: Iterable[bytes]) -> None: ...


class SimPeer(Inbox):
    """`source`: the source's name. `delay_s`: one way, the middle of its links. `phase`: seconds to its first tick."""

    _pump: SimPump

    def __init__(self, loop: Loop, host: Host, source: str, *, policy: str, delay_s: float, phase: float) -> None:
        self.loop, self.host, self.name, self._delay_s, self._ticks_from = loop, host, host.name, delay_s, phase
        super().__init__(
            me=host.name, run=RUN, head=source, head_key=HEAD.public_key, store=NoChunks(),
            now=lambda: loop.now, wall=lambda: loop.now, policy=policy,
        )  # fmt: skip
        self.on_header = self._on_header
        self.alive = True
        self._parked = False
        """has nothing to do until a version or a want comes: it does not tick"""
        self._catching = False
        self._queueing = (-inf, 0.0)
        """(when it was looked at, seconds that a control message waits here)"""
        loop.at(phase, self._tick)

    def _make_pump(self) -> SimPump:
        return SimPump(self.transfers, self.loop, self.host, delay_s=self._delay_s, busy=self._left)

    @property
    def pump(self) -> SimPump:
        """What leaves this peer."""
        return self._pump

    # --- neighbours --------------------------------------------------------------------------------------------------

    def link(self, other: str) -> None:
        """`other` is a neighbour from now on."""
        if other not in self.peers:
            self.add_peer(other, partial(self._post, other), NO_CHANNEL)
            self.peers[other].following = True

    def _post(self, other: str, message: object) -> None:
        now = self.loop.now
        if self._queueing[0] != now:
            self._queueing = now, self._pump.queueing()
        wait = self._queueing[1]
        if wait:
            self.loop.at(now + wait, self._leave, other, message)
        else:
            self._leave(other, message)

    def _leave(self, other: str, message: object) -> None:
        self.loop.network.send_small(self.loop.now, self.name, other, SMALL, message)

    # --- versions ----------------------------------------------------------------------------------------------------

    def publish(self, version: SimVersion) -> None:
        """The source makes a version, all of it at once."""
        self._forget_old()
        self.offer(version.parts[0], announce=True)
        for part in version.parts[1:]:
            self.extend(version.mid, part, announce=True)

    def catch_up(self, version: SimVersion) -> None:
        """Take part in a version whose announcement was missed, and whose parts were asked for."""
        self._catching = True
        self.prove(version.mid, version.parts)
        self._catching = False

    def _on_header(self, manifest: Manifest) -> bool:
        self._forget_old(manifest.mid)
        if self._catching:
            self.take(manifest.mid, catching=True)
        return not self._catching

    def _forget_old(self, new: bytes = b"") -> None:
        self.wake_up()
        for mid in [mid for mid in self.transfers if mid != new]:
            self.floor = self.transfers[mid].manifest.version
            self.forget(mid)
        for peer in self.peers.values():
            peer.job = None  # what was not handed to a channel yet belongs to the past

    # --- messages ----------------------------------------------------------------------------------------------------

    def receive(self, arrival: Arrival) -> None:
        """What the network brought. Chunks are verified one after another, and acted on then."""
        if isinstance(arrival.tag, Bulk):
            self.loop.at(self.loop.worked(self.name), self._on_bulk, arrival.source, arrival.tag)
        else:
            self.hear(arrival.source, arrival.tag)
            if isinstance(arrival.tag, Parts):
                self._see_whether_complete(arrival.tag.mid)

    def _see_whether_complete(self, mid: bytes) -> None:
        transfer = self.transfers.get(mid)
        if transfer is not None and transfer.session.complete:
            self.loop.completed(self.name)

    def _on_bulk(self, source: str, bulk: Bulk) -> None:
        if not self.alive:
            return
        chunk = bulk.chunk
        for message in bulk.ahead:
            self.hear(source, message)
        transfer = self.transfers.get(chunk.mid)
        held = 0 if transfer is None else len(transfer.session.held)
        self.hear(source, chunk)
        if transfer is not None and len(transfer.session.held) > held:
            self.loop.moved_at = self.loop.now
            self._see_whether_complete(chunk.mid)

    # --- timers ------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """A host that was gone is back."""
        self.alive, self._pump.blocked = True, False
        self._tick()

    def leave(self) -> None:
        """The host is gone."""
        self.alive, self._pump.blocked = False, True

    def _tick(self) -> None:
        if not self.alive:
            return
        self.tick()
        done = not self.is_source and all(s.session.complete and not s.news.pending for s in self.transfers.values())
        if done and self._pump.at_rest:
            self._parked = True
        else:
            self.loop.at(self.loop.now + TICK_S, self._tick)

    def _left(self) -> None:
        """A chunk leaves: it will be waited for, and control messages wait behind it."""
        self._queueing = -inf, 0.0
        self.wake_up()

    def wake_up(self) -> None:
        """There is work: no more skipping of ticks."""
        if self._parked:
            self._parked = False
            ticks = floor((self.loop.now - self._ticks_from) / TICK_S) + 1
            self.loop.at(self._ticks_from + ticks * TICK_S, self._tick)
