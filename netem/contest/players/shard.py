"""shardcast 0.3 as a player: the source is its origin server, every node one of its middle nodes.

A middle node polls its upstream servers, downloads all shards of a new version with wget and serves them on; it never joins
them nor checks its copy, so the player does both when it has finished. Leaves are middle nodes too, because the package's
client writes its list of versions to one file of the installation, which all processes of a machine share.

Generous to it: each server is asked for its dummy file and the tree stands before the clock runs; the poll and the retries
are shortened as its library and its environment variables allow. `broadcast` (hash, shards, announcement) runs after
`publish`: it is one call. Must not know rates or delays.

A node with several upstream servers draws one for each shard and takes the answer "not there yet" for a fault: trees where
that can happen (the source beside a parent) measured worse than chains.

Options: upstream, which is the tree (host -> list of hosts it may download from).
shard_bytes: small shards pass through a chain sooner, but each is a connection that starts slowly, and a server handles one at a
time: above some 50 Mbit/s at the source, larger ones (4 MiB) and fewer downloads of a node are faster.
concurrent: downloads that a node has under way. A server handles one request and holds five; further ones wait until TCP sends
their SYN again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from netem.contest.players.events import Expect, Player, Prepare, Role, RoundTraffic, serve
from p2p.errors import ShoalError

if TYPE_CHECKING:
    from shardcast import MiddleNode, OriginServer

PORT = 8000
"""TCP port of every server: each host has an address of its own."""

POLL_S = 0.1
"""Seconds between two looks of a node for a new version: short, since this wait is part of every measured time."""

RETRY_S = 0
"""Seconds between two tries of a download, as whole seconds, so 0 is the shortest."""

KEEP = 2
"""Versions that stay on disk: this round's and the last one's."""

TRIES = 1_000_000
"""Tries of a download, so that none is the last: shardcast takes a shard that does not exist yet for an error, and gives a
version up after the last try."""

START_S = 25.0
"""Seconds that a node has to find its upstream servers, while players of one machine start one after the other."""

_GET = re.compile(r'"GET /(v\d+/shard_\d+\.bin) HTTP/[\d.]+" 200')


class ShardPlayer(Player):
    """See `Player`. Without wget it must not be started, for shardcast would install that by itself."""

    def __init__(self, role: Role) -> None:
        self._role, self._directory = role, Path(role.directory)
        self._served = self._directory / "served"
        self._served.mkdir()
        (self._served / "data1.bin").write_bytes(bytes(64 * 1024))  # what shardcast measures its upstream with
        self._counter = _set_up(role.options, self._served)
        self._origin: OriginServer | None = None
        self._node: MiddleNode | None = None
        self._payload: Path | None = None
        self._expecting = False
        self._done: set[str] = set()
        self._received = 0
        if role.role == "source":
            from shardcast import OriginServer

            self._origin = OriginServer(str(self._served), PORT, KEEP)
        else:
            self._node = self._middle()

    def prepare(self, command: Prepare, payload: bytes, digest: str) -> dict[str, Any]:
        """Source: write the payload to disk, from where shardcast cuts it into shards."""
        self._counter.sent = 0
        self._payload = self._directory / "payload"
        self._payload.write_bytes(payload)
        return {}

    def publish(self, round: int) -> None:
        assert self._origin is not None and self._payload is not None
        self._origin.broadcast(str(self._payload), self._role.options["shard_bytes"])

    def expect(self, command: Expect) -> None:
        self._counter.sent = self._received = 0
        self._expecting = True

    def poll(self) -> str | None:
        """Node: the digest of a version whose shards have all come."""
        if self._node is None or not self._expecting:
            return None
        versions = set(self._node.processed_versions) - self._done
        if not versions:
            return None
        self._done |= versions
        hasher, self._received = blake3(), 0
        for shard in sorted((self._served / max(versions)).glob("shard_*.bin")):
            data = shard.read_bytes()
            self._received += len(data)
            hasher.update(data)
        self._expecting = False
        return hasher.hexdigest()

    def traffic(self) -> RoundTraffic:
        """Bytes of the round. shardcast counts nothing, so bytes sent are those of the requests that its server has answered."""
        return RoundTraffic(self._counter.sent, self._received, 0)

    def close(self) -> None:
        for part in (self._node, self._origin):
            if part is not None:
                part.shutdown()

    def _middle(self) -> MiddleNode:
        """A middle node, made when its upstream servers answer. ShoalError when they do not within START_S."""
        from shardcast import MiddleNode

        servers = [f"http://{self._role.hosts[name]}:{PORT}" for name in self._role.options["upstream"][self._role.name]]
        deadline, why = time.monotonic() + START_S, "no time"
        while time.monotonic() < deadline:
            try:
                with _alone(deadline):
                    return MiddleNode(servers, str(self._served), PORT, POLL_S)
            except Exception as error:  # it raises plain ones
                why = str(error)
                time.sleep(0.2)
        raise ShoalError(f"shardcast found no upstream: {why}")


def _set_up(options: dict[str, Any], served: Path) -> _Counter:
    """Set the environment that shardcast reads when it is imported; returns the counter of the bytes that its server sends."""
    settings = {
        "RETRY_ATTEMPTS": TRIES, "FAST_RETRY_ATTEMPTS": TRIES, "FAST_RETRY_INTERVAL": RETRY_S,
        "MAX_CONCURRENT_DOWNLOADS": options["concurrent"], "MAX_DISTRIBUTION_FOLDERS": KEEP,
    }  # fmt: skip
    os.environ.update({f"SHARDCAST_{name}": str(value) for name, value in settings.items()})
    for name in [n for n in os.environ if n.lower() in ("http_proxy", "all_proxy")]:
        del os.environ[name]  # wget would heed it
    from shardcast.utils import logger

    counter = _Counter(served)
    logger.setLevel(logging.DEBUG)  # its server logs requests there; its own handler stays at INFO
    logger.addHandler(counter)
    return counter


class _Counter(logging.Handler):
    """Adds up the shards that the server says it has answered with."""

    def __init__(self, served: Path) -> None:
        super().__init__(logging.DEBUG)
        self._served, self.sent = served, 0

    def emit(self, record: logging.LogRecord) -> None:
        found = _GET.search(record.getMessage())
        if found:
            self.sent += (self._served / found[1]).stat().st_size


@contextmanager
def _alone(deadline: float) -> Iterator[None]:
    """One player of this machine at a time: shardcast downloads its dummy file to one place in /tmp, which players on hosts of
    their own would not share. TimeoutError at the deadline."""
    with open(Path(tempfile.gettempdir()) / "shoal-shardcast.lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("other players are starting") from None
                time.sleep(0.02)
        yield


if __name__ == "__main__":
    sys.exit(serve(sys.argv, ShardPlayer))
