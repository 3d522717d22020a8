"""Programs that take part in a contest: the peers that our broadcast is measured against, each a process of its own.

Importing this imports none of them. The peers' packages come with the extra `peers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from netem.players.wire import Role, need
from p2p.errors import UsageError

PEERS = {"libtorrent": "netem.players.torrent", "shardcast": "netem.players.shard"}
"""Name (and package) of each peer, and the module that runs it."""


def peer_argv(peer: str) -> Callable[[Role], list[str]]:
    """What starts a player of that peer. UsageError, one line, for an unknown one or without its package."""
    if peer not in PEERS:
        raise UsageError(f"no peer {peer!r}: {', '.join(PEERS)}")
    need(peer)
    return lambda role: [sys.executable, "-m", PEERS[peer], role.text()]
