"""The deterministic simulator: a broadcast over a profile's network, with production's own sessions, policies and uplinks.

A discrete-event loop over `flows.Network`: no clock, no threads, randomness from a seed (when each peer ticks, and who
knows whom where not everybody does). What a peer does is in `simpeer`; here are rounds, faults and results. Must not know
how a policy decides.

What an emulated round has and this does not: packets (so jitter, loss, queues that overflow, TCP's search for a rate and
what it sends twice), acknowledgements and control messages that take a share of uplinks, processes that wait for a core, the
trainer's encoding and the receivers' decoding. It is the time of the protocol, without the cost of the machine it runs on.
`t_star` and all times are of payload; chunks take their wire size on the links.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from statistics import median

from netem.bound import profile_bound
from netem.flows import Network
from netem.profile import Profile
from netem.simpeer import SimPeer
from netem.simpump import Loop
from netem.simwire import Plan
from p2p.broadcast.exchange import TICK_S
from p2p.broadcast.groups import Grid
from p2p.broadcast.policy import DEFAULT, POLICIES
from p2p.errors import ShoalError, UsageError
from p2p.publish import chunk_bytes_for

PROCESS_S = 0.001
"""A receiver verifies and stores one chunk in so long, one after another."""

PAUSE_S = 1.0
"""From the end of one round to the next: what is still on its way arrives, and counts for the old one."""

FULL_MESH = 32
"""Hosts that may all know each other; a larger profile needs `degree` or `neighbours`."""

STALL_S = 120.0
"""Simulated seconds in which no host gets a new chunk before the round is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The host is gone for good, `at` seconds after the publication of round `round` (from 1). Its neighbours notice one delay
    later, as when its process ends, and `unnoticed_s` after that: SILENCE_S for a host that loses its power."""

    at: float
    host: str
    unnoticed_s: float = 0.0
    round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRates:
    """The host's access link has these rates (bit/s) from then on."""

    at: float
    host: str
    up: float
    down: float
    round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Withhold:
    """From then on the host acknowledges what it gets, announces it, and hands on nothing."""

    host: str
    at: float = 0.0
    round: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The host is not there before. The round lasts until it has everything."""

    at: float
    host: str
    round: int = 1


Fault = Kill | SetRates | Withhold | Join


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


def simulate(
    profile: Profile,
    payload_bytes: int,
    *,
    chunk_bytes: int | None = None,
    policy: str = DEFAULT,
    rounds: int = 1,
    seed: int = 0,
    degree: int | None = None,
    neighbours: Mapping[str, Sequence[str]] | None = None,
    faults: Sequence[Fault] = (),
    process_s: float = PROCESS_S,
    mesh: int = FULL_MESH - 1,
) -> list[SimResult]:
    """Broadcast `rounds` versions of `payload_bytes` from the profile's first host to all others, one after another, as peers
    that keep what they learned of their uplinks and of each other. The same arguments give the same results, bit for bit.

    `chunk_bytes`: as the publisher would choose unless given. `neighbours`: host -> hosts, both ways; with `degree` a random
    graph in which each host has about so many; else everybody knows everybody, and under the default policy more than `mesh`
    nodes, or those that share a site, are in groups as the head would put them. UsageError for arguments that make no
    broadcast, ShoalError when a round stands still for STALL_S.
    """
    if payload_bytes < 1 or rounds < 1 or (chunk_bytes is not None and chunk_bytes < 1):
        raise UsageError(f"{rounds} rounds of {payload_bytes} bytes in chunks of {chunk_bytes}")
    if policy not in POLICIES:
        raise UsageError(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
    names = [host.name for host in profile.hosts]
    for fault in faults:
        if fault.host not in names or (fault.host == names[0] and not isinstance(fault, SetRates)):
            raise UsageError(f"{fault}: the host must be one of the profile's, and not the source")
        if fault.at < 0 or not 1 <= fault.round <= rounds:
            raise UsageError(f"{fault}: there are {rounds} rounds, and times count from 0")
    grid = None
    if neighbours is None and degree is None and policy == DEFAULT:
        absent = {fault.host for fault in faults if isinstance(fault, Join)}
        grid = Grid({h.name: h.site for h in profile.hosts[1:] if h.name not in absent}, mesh=mesh)
    if neighbours is None:
        if grid is None:
            neighbours = random_neighbours(names, degree, seed) if degree is not None else full_mesh(names)
    size = chunk_bytes or chunk_bytes_for(payload_bytes)
    simulation = Simulation(
        profile, policy=policy, seed=seed, neighbours=neighbours or {}, grid=grid, faults=faults, process_s=process_s
    )
    return [simulation.round(Plan(number, payload_bytes, size)) for number in range(1, rounds + 1)]


def full_mesh(names: Sequence[str]) -> dict[str, list[str]]:
    """Everybody knows everybody. UsageError beyond FULL_MESH hosts."""
    if len(names) > FULL_MESH:
        raise UsageError(f"{len(names)} hosts cannot all know each other, {FULL_MESH} can: give a degree or neighbours")
    return {name: [other for other in names if other != name] for name in names}


def random_neighbours(names: Sequence[str], degree: int, seed: int) -> dict[str, list[str]]:
    """Unions of random rings: connected, and each host has about `degree` neighbours, at most. UsageError below 2."""
    if degree < 2:
        raise UsageError(f"degree {degree}: a swarm needs 2 neighbours a host or more")
    draw = random.Random(f"{seed}/neighbours")
    graph: dict[str, dict[str, None]] = {name: {} for name in names}
    for _ in range(degree // 2):
        ring = list(names)
        draw.shuffle(ring)
        for one, other in zip(ring, ring[1:] + ring[:1], strict=True):
            if one != other:
                graph[one][other] = graph[other][one] = None
    return {name: list(others) for name, others in graph.items()}


class Simulation(Loop):
    """Peers, the network between them, and the time. `round` may be called again and again."""

    def __init__(
        self,
        profile: Profile,
        *,
        policy: str,
        seed: int,
        neighbours: Mapping[str, Sequence[str]],
        grid: Grid | None,
        faults: Sequence[Fault],
        process_s: float,
    ) -> None:
        self.profile, self.process_s, self.events = profile, process_s, 0
        self.network, self.now = Network(profile), 0.0
        self.moved_at = self._began = 0.0
        self._hosts = {host.name: host for host in profile.hosts}
        self._faults = faults
        self._grid = grid
        if grid is not None:
            everybody = [host.name for host in profile.hosts[1:]]
            neighbours = {name: [profile.learner.name, *(grid.links(name) if name in grid else ())] for name in everybody}
            neighbours[profile.learner.name] = everybody
        self._neighbours = neighbours
        self._queue: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._count = 0
        self._waiting: dict[str, None] = {}
        """hosts that are to complete the round"""
        self._done: dict[str, float] = {}
        draw = random.Random(seed)
        self.source = profile.learner.name
        self.peers: dict[str, SimPeer] = {}
        for host in profile.hosts:
            others = neighbours.get(host.name, ())
            delay_s = median(self._delay(host.name, other) for other in others) if others else 0.0
            self.peers[host.name] = SimPeer(
                self, host, self.source, policy=policy, delay_s=delay_s, phase=draw.uniform(0.0, TICK_S)
            )
            for step in host.trace:
                self.at(step.at, self._set_uplink, host.name, step.up)
        absent = {fault.host for fault in faults if isinstance(fault, Join)}
        for name in self.peers:
            if name in absent:
                self.peers[name].alive = False
                self.network.remove_host(0.0, name)
        for name, others in neighbours.items():
            for other in others:
                if not {name, other} & absent:
                    self.peers[name].link(other)
        self._arrange()

    def _arrange(self) -> None:
        """Tell everybody its place, as the head does. Links of before stay."""
        if self._grid is None:
            return
        for name, peer in self.peers.items():
            if name == self.source:
                peer.places = self._grid.source_places()
            elif name in self._grid:
                peer.places = self._grid.places(name)
                for other in self._grid.links(name):
                    if other not in peer.links and self.peers[other].alive:
                        self._connect(name, other)
            peer.rearranged()

    def _connect(self, one: str, other: str) -> None:
        """A new link, in the midst of a round or not."""
        for a, b in ((one, other), (other, one)):
            self.peers[a].link(b)
            self.peers[a].greet(b)

    def _delay(self, one: str, other: str) -> float:
        a, b = self._hosts[one], self._hosts[other]
        if a.site and a.site == b.site:
            return 2 * self.profile.sites[a.site].delay
        return a.access.delay + b.access.delay

    # --- what peers need ---------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[..., object], *arguments: object) -> None:
        self._count += 1
        heappush(self._queue, (time, self._count, action, arguments))

    def queueing(self, host: str) -> float:
        return self.peers[host].queueing(self.now)

    def completed(self, host: str) -> None:
        if self._waiting.pop(host, 0) is None:
            self._done[host] = self.now - self._began

    # --- rounds ------------------------------------------------------------------------------------------------------

    def round(self, plan: Plan) -> SimResult:
        """One version, from its publication until everybody has it and nothing is on its way any more."""
        events, self._began, self.moved_at = self.events, self.now, self.now
        faults = [fault for fault in self._faults if fault.round == plan.number]
        joining = {fault.host for fault in faults if isinstance(fault, Join)}
        self._done = {}
        self._waiting = {n: None for n, p in self.peers.items() if n != self.source and (p.alive or n in joining)}
        if not self._waiting:
            raise UsageError("there is nobody to send to")
        for fault in faults:
            self.at(self.now + fault.at, self._happen, fault, plan)
        self.peers[self.source].offer(plan)
        for name, peer in self.peers.items():
            if peer.alive and name != self.source:
                self.at(self.now + self._delay(self.source, name), self._announce, peer, plan)
        self._run(inf)
        self._run(self.now + PAUSE_S)
        times, t_star = list(self._done.values()), profile_bound(self.profile, plan.payload)
        return SimResult(
            t_star, max(times, default=0.0), median(times) if times else 0.0, max(times, default=0.0) / t_star,
            self.peers[self.source].sent_bytes, sum(p.duplicate_bytes for p in self.peers.values() if p.plan is plan),
            self._done, self.events - events,
        )  # fmt: skip

    def _announce(self, peer: SimPeer, plan: Plan) -> None:
        if peer.alive:
            peer.take(plan, catching=False)

    def _run(self, until: float) -> None:
        """To `until`; to the end of the round if that is endless."""
        network, queue, peers = self.network, self._queue, self.peers
        while self._waiting or until < inf:
            at = min(queue[0][0] if queue else inf, inf if (due := network.next_at) is None else due)
            if at > until:
                self.now = until
                return
            if at - self.moved_at > STALL_S and self._waiting:
                raise ShoalError(f"no chunk has moved for {STALL_S:.0f} s; lacking at {', '.join(list(self._waiting)[:10])}")
            self.now = at
            arrivals, sent = network.advance(at), network.drain_sent()
            self.events += len(arrivals)
            for arrival in arrivals:
                peers[arrival.target].receive(arrival)
            for source, target in sent:
                peers[source].sent(target)
            while queue and queue[0][0] <= at:
                _, _, action, arguments = heappop(queue)
                self.events += 1
                action(*arguments)

    # --- faults ------------------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault, plan: Plan) -> None:
        peer = self.peers[fault.host]
        match fault:
            case SetRates():
                self.network.set_rates(self.now, fault.host, fault.up, fault.down)
                peer.up = fault.up
            case Withhold():
                peer.withholds = True
            case Kill():
                self._kill(peer, fault.unnoticed_s)
            case Join():
                self._join(peer, plan)

    def _set_uplink(self, host: str, up: float) -> None:
        self.peers[host].up = up

    def _kill(self, peer: SimPeer, unnoticed_s: float) -> None:
        if not peer.alive:
            return
        peer.alive = False
        self._waiting.pop(peer.name, None)
        for name in peer.links:
            self.peers[name].handed -= self.network.backlog(self.now, name, peer.name)
            self.at(self.now + self._delay(peer.name, name) + unnoticed_s, self.peers[name].unlink, peer.name)
        if self._grid is not None:
            self.at(self.now + 2 * self._delay(peer.name, self.source) + unnoticed_s, self._left, peer.name)
        self.network.remove_host(self.now, peer.name)

    def _left(self, host: str) -> None:
        """The head noticed, and others take its place."""
        if self._grid is not None and not self.peers[host].alive:
            self._grid.remove(host)
            self._arrange()

    def _join(self, peer: SimPeer, plan: Plan) -> None:
        peer.alive = True
        self.network.restore_host(self.now, peer.name)
        others: Sequence[str] = self._neighbours[peer.name]
        if self._grid is not None:
            self._grid.add(peer.name, self._hosts[peer.name].site)
            self._arrange()
            others = [self.source, *self._grid.links(peer.name)]
        for name in others:
            if self.peers[name].alive:
                self.peers[name].link(peer.name)
                peer.link(name)
        peer.take(plan, catching=True)
        peer.tick()
