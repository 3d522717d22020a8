"""The loop of the simulator: peers, the network between them, the time; rounds, faults and results. Deterministic.

Events over a `FlowNetwork`, one after another in the order of their times. Must not know what a peer does (`peer`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from netem.networks.bound import profile_bound
from netem.networks.faults import Join, Kill, SetRates, Withhold, joiners
from netem.networks.profile import Profile
from netem.simulator.cores import Cores, Machine
from netem.simulator.flows import FlowNetwork
from netem.simulator.peer import SimPeer
from netem.simulator.wire import SimVersion
from netem.timeline import Timeline
from p2p.broadcast.exchange_core import TICK_S
from p2p.broadcast.peer_groups import Grid
from p2p.errors import ShoalError, UsageError
from p2p.uplink_file import TCP_PART

PAUSE_S = 1.0
"""From the end of one round to the next: what is still on its way arrives, and counts for the old one."""

STALL_S = 120.0
"""Simulated seconds in which no host gets a new chunk before the round is given up."""

SimFault = Kill | SetRates | Withhold | Join
"""What can be simulated. A round waits for a host that withholds, and for a late one, until it has everything."""


@dataclass(frozen=True, slots=True)
class SimResult:
    """One round. Times in seconds from its publication (a joiner's too), bytes of payload."""

    t_star: float
    """the fluid bound of the profile, faults aside"""
    t_max: float
    t_median: float
    ratio: float
    """t_max / t_star"""
    source_bytes: int
    """that the source sent, its wasted copies as well"""
    duplicate_bytes: int
    """that reached hosts which had them"""
    done: dict[str, float]
    """every live host but the source -> when it had everything"""
    events: int
    """that the simulation dealt with"""
    began: float = 0.0
    """when it was published, in seconds from the beginning of the simulation"""


class BroadcastSimulation(Timeline):
    """Peers, the network between them, and the time. `round` may be called again and again."""

    def __init__(
        self,
        profile: Profile,
        *,
        policy: str,
        seed: int,
        grid: Grid | None,
        faults: Sequence[SimFault],
        fault_round: int,
        unnoticed_s: float,
        machine: Machine,
        packets: bool = False,
        network: Callable[[Profile, random.Random | None], FlowNetwork] = FlowNetwork,
    ) -> None:
        """`network`: makes the links, of the profile and of a draw where its packets count."""
        super().__init__()
        self.profile, self.events, self._cores = profile, 0, Cores(machine)
        self.network = network(profile, random.Random(seed) if packets else None)
        self.moved_at = self._began = 0.0
        self._hosts = {host.name: host for host in profile.hosts}
        self._faults, self._fault_round, self._unnoticed_s = faults, fault_round, unnoticed_s
        self._grid = grid
        self._waiting: dict[str, None] = {}
        """hosts that are to complete the round"""
        self._done: dict[str, float] = {}
        draw = random.Random(seed)
        self.source = profile.learner.name
        self.peers: dict[str, SimPeer] = {}
        for host in profile.hosts:
            others = self._neighbours(host.name)
            delay_s = median(self._delay(host.name, other) for other in others) if others else 0.0
            self.peers[host.name] = SimPeer(
                self, host, self.source, policy=policy, delay_s=delay_s, phase=draw.uniform(0.0, TICK_S)
            )
            for step in host.trace:
                self.at(step.at, self._set_uplink, host.name, step.up)
        absent = joiners(faults).keys()
        for name in self.peers:
            if name in absent:
                self.peers[name].leave()
                self.network.remove_host(0.0, name)
        for name in self.peers:
            for other in self._neighbours(name):
                if not {name, other} & absent:
                    self.peers[name].link(other)
        self._arrange()

    def know_uplinks(self) -> None:
        """Before anything is sent: the source is told its uplink, as its owner does, and nodes remember what they found of theirs
        when they last ran. Rates are those of the beginning."""
        for name, peer in self.peers.items():
            peer.expect_uplink(TCP_PART * self._hosts[name].access.up / 8, told=name == self.source)

    def _neighbours(self, host: str) -> list[str]:
        """Whom a host knows: everybody, or those of its groups and the source, which knows everybody."""
        grid = self._grid
        if grid is None or host == self.source:
            return [other for other in self._hosts if other != host]
        return [self.source, *(grid.links(host) if host in grid else ())]

    def _arrange(self) -> None:
        """Tell everybody its place, as the head does. Links of before stay."""
        if self._grid is None:
            return
        for name, peer in self.peers.items():
            if name == self.source:
                peer.arrange(self._grid.source_places())
            elif name in self._grid:
                peer.arrange(self._grid.places(name))
                for other in self._grid.links(name):
                    if other not in peer.peers and self.peers[other].alive:
                        self.peers[other].link(name)
                        peer.link(other)

    def _delay(self, one: str, other: str) -> float:
        return self.profile.delay(self._hosts[one], self._hosts[other])

    # --- what peers need ---------------------------------------------------------------------------------------------

    def worked(self, host: str) -> float:
        return self._cores.done(self.now, host)

    def queueing(self, host: str) -> float:
        return self.peers[host].pump.queueing()

    def completed(self, host: str) -> None:
        if self._waiting.pop(host, 0) is None:
            self._done[host] = self.now - self._began

    # --- rounds ------------------------------------------------------------------------------------------------------

    def round(self, version: SimVersion) -> SimResult:
        """One version, from its publication until everybody has it and nothing is on its way any more."""
        events, self._began, self.moved_at = self.events, self.now, self.now
        faults = self._faults if version.number == self._fault_round else ()
        joining = joiners(faults)
        self._done = {}
        self._waiting = {n: None for n, p in self.peers.items() if n != self.source and (p.alive or n in joining)}
        if not self._waiting:
            raise UsageError("there is nobody to send to")
        for fault in faults:
            self.at(self.now + fault.at, self._happen, fault, version)
        source = self.peers[self.source]
        sent = source.pump.sent
        source.publish(version)
        self._run(inf)
        self._run(self.now + PAUSE_S)
        times, t_star = list(self._done.values()), profile_bound(self.profile, version.payload)
        twice = sum(t.traffic.duplicates for p in self.peers.values() if (t := p.transfers.get(version.mid)) is not None)
        t_max = max(times, default=0.0)
        return SimResult(
            t_star=t_star, t_max=t_max, t_median=median(times) if times else 0.0, ratio=t_max / t_star,
            source_bytes=source.pump.sent - sent, duplicate_bytes=twice, done=self._done, events=self.events - events,
            began=self._began,
        )  # fmt: skip

    def _run(self, until: float) -> None:
        """To `until`; to the end of the round if that is endless."""
        network, peers = self.network, self.peers
        while self._waiting or until < inf:
            due = network.next_at
            at = self.next_at if due is None else min(self.next_at, due)
            if at > until:
                self.now = until
                return
            if at - self.moved_at > STALL_S and self._waiting:
                raise ShoalError(f"no chunk has moved for {STALL_S:.0f} s; lacking at {', '.join(list(self._waiting)[:10])}")
            self.now = at
            if at == due:
                arrivals, sent = network.advance(at), network.drain_sent()
                self.events += len(arrivals)
                for arrival in arrivals:
                    peers[arrival.target].receive(arrival)
                for source, target in sent:
                    peers[source].pump.drained(target)
            while self.next_at <= at:
                self.events += 1
                self.next()

    # --- faults ------------------------------------------------------------------------------------------------------

    def _happen(self, fault: SimFault, version: SimVersion) -> None:
        peer = self.peers[fault.host]
        match fault:
            case SetRates():
                self.network.set_rates(self.now, fault.host, fault.up, fault.down)
                peer.pump.up = fault.up
            case Withhold():
                peer.pump.blocked = True
            case Kill():
                self._kill(peer)
            case Join():
                self._join(peer, version)

    def _set_uplink(self, host: str, up: float) -> None:
        self.peers[host].pump.up = up

    def _kill(self, peer: SimPeer) -> None:
        if not peer.alive:
            return
        peer.leave()
        self._waiting.pop(peer.name, None)
        for name in peer.peers:
            self.peers[name].pump.handed -= self.network.backlog(self.now, name, peer.name)
            self.at(self.now + self._delay(peer.name, name) + self._unnoticed_s, self.peers[name].remove_peer, peer.name)
        if self._grid is not None:
            self.at(self.now + 2 * self._delay(peer.name, self.source) + self._unnoticed_s, self._left, peer.name)
        self.network.remove_host(self.now, peer.name)

    def _left(self, host: str) -> None:
        """The head noticed, and others take its place."""
        if self._grid is not None and not self.peers[host].alive:
            self._grid.remove(host)
            self._arrange()

    def _join(self, peer: SimPeer, version: SimVersion) -> None:
        peer.alive = True
        self.network.restore_host(self.now, peer.name)
        if self._grid is not None:
            self._grid.add(peer.name, self._hosts[peer.name].site)
            self._arrange()
        for name in self._neighbours(peer.name):
            if self.peers[name].alive:
                self.peers[name].link(peer.name)
                peer.link(name)
        peer.catch_up(version)
        peer.join()
