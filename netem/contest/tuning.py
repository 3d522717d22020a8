"""How each contestant is configured for a network.

The other systems get the best settings we found, from rates that a user would not know. Shoal itself is told no rate, only the
profile's congestion control. Pure, except that it reads which congestion controls the kernel has.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netem.contest.players import is_ours
from netem.contest.players.events import need
from netem.networks.profile import LEARNER, Profile
from p2p.broadcast.peer_groups import MESH
from p2p.errors import UsageError
from p2p.limits import MIB

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
FAST = 50e6
"""bit/s at the source above which shardcast is faster with fewer, larger requests (see `netem.contest.players.shard`)."""


def player_options(peer: str, profile: Profile, payload_bytes: int, mesh: int = MESH) -> dict[str, Any]:
    """Options for the players of `peer`. `mesh`: with more nodes than this, Shoal's nodes are linked in groups; its plain
    policies need all nodes linked to all others, and ignore it."""
    if is_ours(peer):
        congestion = {"congestion": profile.congestion} if profile.congestion in available_congestion() else {}
        return congestion | ({"mesh": mesh} if peer == "shoal" and mesh != MESH else {})
    if profile.ipv6 == "only":
        raise UsageError(f"{peer} is played over IPv4 only: its network must not have ipv6 = 'only'")
    return shardcast_options(profile, payload_bytes) if peer == "shardcast" else {}


def congestion_in_force(peer: str, profile: Profile, on_hosts: str) -> str:
    """TCP congestion control of the connections of `peer`: `on_hosts`, that of the hosts, unless it is Shoal's player, which can
    choose."""
    return str(player_options(peer, profile, 1).get("congestion", on_hosts)) if is_ours(peer) else on_hosts


def missing(peer: str) -> str | None:
    """Why `peer` cannot be played on this machine, with the remedy; None when it can."""
    try:
        if not is_ours(peer):
            need(peer)
    except UsageError as error:
        return str(error)
    if peer == "shardcast" and shutil.which("wget") is None:
        return "shardcast needs the program wget: apt-get install wget"
    return None


def available_congestion() -> Sequence[str]:
    """TCP congestion controls that the kernel has; none where it does not say."""
    try:
        return AVAILABLE.read_text().split()
    except OSError:
        return ()


def shardcast_options(profile: Profile, payload_bytes: int) -> dict[str, Any]:
    """Options for shardcast: the best tree for the profile's rates, and shards so small that a small payload still is a
    pipeline."""
    large = profile.learner.access.up > FAST
    shard = min(4 * MIB if large else MIB, max(MIB // 8, payload_bytes // 16))
    return {"upstream": best_tree(profile), "shard_bytes": shard, "concurrent": 1 if large else 2}


def best_tree(profile: Profile) -> dict[str, list[str]]:
    """host -> [the host it downloads from]: a tree with the highest rate at which all edges can run at once, a parent's uplink
    being shared equally. Among such trees it takes one with strong uplinks near the source. ValueError when uplinks of 0 allow
    none.

    A rate r is possible if sum floor(u / r) >= N, for then hosts can be attached in order of their uplinks. Candidates are the
    shares u / k of an uplink and the slowest downlink.
    """
    nodes = sorted(profile.hosts[1:], key=lambda h: -h.access.up)  # stable
    limit = min(h.access.down for h in nodes)
    shares = {host.access.up / k for host in profile.hosts for k in range(1, len(nodes) + 1)}
    for rate in sorted({min(share, limit) for share in shares}, reverse=True):
        tree: dict[str, list[str]] = {}
        room = [(LEARNER, int(profile.learner.access.up / rate + 1e-9))]
        for node in nodes:
            room = [(name, left) for name, left in room if left > 0]
            if not room:
                break
            name, left = room[0]
            tree[node.name] = [name]
            room = [(name, left - 1), *room[1:], (node.name, int(node.access.up / rate + 1e-9))]
        if len(tree) == len(nodes):
            return tree
    raise ValueError("uplinks of 0: no tree")
