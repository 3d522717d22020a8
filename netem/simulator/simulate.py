"""The deterministic simulator: a broadcast over a profile's network, with production's own sessions, policies and uplinks.

No clock, no threads, randomness from a seed (when each peer ticks). Here is what can be asked of it; the
loop over rounds and faults is in `loop`, what a peer does in `peer`. Must not know how a policy decides.

What an emulated round has and this does not: packets (so jitter, loss, queues that overflow, TCP's search for a rate and
what it sends twice), acknowledgements and control messages that take a share of uplinks, processes that wait for a core, the
trainer's encoding and the receivers' decoding. It is the time of the protocol, without the cost of the machine it runs on.
`t_star` and all times are of payload; chunks take their wire size on the links.
"""

from __future__ import annotations

from collections.abc import Sequence

from netem.networks.faults import SetRates, joiners
from netem.networks.profile import Profile
from netem.simulator.cores import Machine
from netem.simulator.loop import BroadcastSimulation, SimFault, SimResult
from netem.simulator.wire import make_version
from p2p.broadcast.peer_groups import Grid
from p2p.broadcast.policies.registry import DEFAULT, POLICIES
from p2p.errors import UsageError
from p2p.limits import KIB, MAX_CHUNK
from p2p.weights.encode import chunk_bytes_for

OWN_CORES = Machine()
"""Each peer has a core to itself."""

FULL_MESH = 32
"""Hosts that may all know each other. The work of a message to each grows with them; a larger profile needs groups."""


def simulate(
    profile: Profile,
    payload_bytes: int,
    *,
    chunk_bytes: int | None = None,
    policy: str = DEFAULT,
    rounds: int = 1,
    seed: int = 0,
    faults: Sequence[SimFault] = (),
    fault_round: int = 1,
    unnoticed_s: float = 0.0,
    machine: Machine = OWN_CORES,
    mesh: int = FULL_MESH - 1,
    packets: bool = False,
    known: bool = False,
) -> list[SimResult]:
    """Broadcast `rounds` versions of `payload_bytes` from the profile's first host to all others, one after another, as peers
    that keep what they learned of their uplinks and of each other. The same arguments give the same results, bit for bit.

    `chunk_bytes`: as the publisher would choose unless given. Everybody knows everybody, but under the default policy more than
    `mesh` nodes, or those that share a site, are in groups as the head would put them. `faults` meet round `fault_round` (from
    1); a late host is absent in those before. The neighbours of a killed host notice one delay later, as when its process ends,
    and `unnoticed_s` after that: SILENCE_S for a host that loses its power. `machine`: what the peers' work takes, and whether
    they share cores, as they do in an emulation. `packets`: the profile's jitter and loss count, as far as `FlowNetwork` knows
    them. `known`: the source is told its uplink, and nodes remember theirs from an earlier run. UsageError for arguments that
    make no broadcast, ShoalError when a round stands still for STALL_S.
    """
    if payload_bytes < 1 or rounds < 1 or (chunk_bytes is not None and not KIB <= chunk_bytes <= MAX_CHUNK):
        raise UsageError(f"{rounds} rounds of {payload_bytes} bytes in chunks of {chunk_bytes}")
    if policy not in POLICIES:
        raise UsageError(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
    names = [host.name for host in profile.hosts]
    if not 1 <= fault_round <= rounds:
        raise UsageError(f"faults in round {fault_round}: there are {rounds} rounds")
    for fault in faults:
        if not isinstance(fault, SimFault):
            raise UsageError(f"{fault}: the simulator knows no {type(fault).__name__}")
        if fault.host not in names or (fault.host == names[0] and not isinstance(fault, SetRates)):
            raise UsageError(f"{fault}: the host must be one of the profile's, and not the source")
    grid = None
    if policy == DEFAULT:
        late = joiners(faults)
        grid = Grid({h.name: h.site for h in profile.hosts[1:] if h.name not in late}, mesh=mesh)
    elif len(names) > FULL_MESH:
        raise UsageError(f"{len(names)} hosts cannot all know each other, {FULL_MESH} can: policy {policy!r} knows no groups")
    size = chunk_bytes or chunk_bytes_for(payload_bytes, nodes=len(names) - 1)
    simulation = BroadcastSimulation(
        profile, policy=policy, seed=seed, grid=grid, faults=faults, fault_round=fault_round, unnoticed_s=unnoticed_s,
        machine=machine, packets=packets,
    )  # fmt: skip
    if known:
        simulation.know_uplinks()
    return [simulation.round(make_version(number, payload_bytes, size)) for number in range(1, rounds + 1)]
