"""Programs that take part in a contest: Shoal's broadcast and the systems it is measured against, each a process of its own.

Importing this imports none of them. The peers' packages come with the extra `peers`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from netem.contest.players.events import Role, need
from p2p.errors import UsageError
from p2p.processes import python_command

SWARM = "netem.contest.players.swarm"
PEERS = {
    "shoal": SWARM, "star": SWARM, "chain": SWARM, "tree": SWARM,
    "shardcast": "netem.contest.players.shard", "libtorrent": "netem.contest.players.torrent",
}  # fmt: skip
"""Name of each contestant -> the module that runs it. The first four are policies of Shoal; the others are named as their
package."""


def is_ours(peer: str) -> bool:
    """Whether `peer` is a policy of Shoal."""
    return PEERS.get(peer) == SWARM


def peer_argv(peer: str) -> Callable[[Role], list[str]]:
    """A function from a role to the command that starts its player. UsageError for an unknown `peer` or without its package."""
    if peer not in PEERS:
        raise UsageError(f"no peer {peer!r}: {', '.join(PEERS)}")
    if is_ours(peer):
        return lambda role: python_command(SWARM, replace(role, options={"policy": peer, **role.options}).text())
    need(peer)
    return lambda role: python_command(PEERS[peer], role.text())
