"""libtorrent 2.1 as a player: BitTorrent among all hosts, every peer told of every other.

Generous to it: the torrent is made in `prepare`, before the clock runs (a user could not: hashing comes after the training
step); nodes have its metadata and are connected to each other before `publish`; nothing looks for peers. After `publish` the
source adds the torrent as a seed, dials all nodes, and the rest is libtorrent's. Must not know rates or delays.
It has no options.
"""

from __future__ import annotations

import base64
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from blake3 import blake3

from netem.contest.players.events import Expect, Player, Prepare, Role, RoundTraffic, serve
from p2p.errors import ShoalError

if TYPE_CHECKING:
    import libtorrent as lt

PORT = 6881
"""TCP port of every peer: each host has an address of its own."""

PIECE_BYTES = 32 * 1024
"""Bytes of a piece: small, since a peer can pass a piece on only once it has all of it."""

CONNECT_S = 8.0
"""Seconds that a node has, before it answers `expecting`, to be connected to all other nodes."""

REDIAL_S = 0.25
"""Seconds between two attempts to connect to the nodes that are still missing: about the round trip of an intercontinental
path."""

SETTINGS: dict[str, Any] = {
    # Peers are given, all are ours, and nothing else is out there.
    "enable_dht": False, "enable_lsd": False, "enable_upnp": False, "enable_natpmp": False, "enable_ip_notifier": False,
    "allow_multiple_connections_per_ip": True, "smooth_connects": False, "connection_speed": 500, "max_failcount": 100,
    "min_reconnect_time": 1, "peer_turnover": 0, "close_redundant_connections": False, "listen_queue_size": 100,
    # TCP, in the clear, as fast as it goes.
    "enable_outgoing_utp": False, "enable_incoming_utp": False, "mixed_mode_algorithm": 0,
    "out_enc_policy": 2, "in_enc_policy": 2, "upload_rate_limit": 0, "download_rate_limit": 0, "rate_limit_ip_overhead": False,
    # Nobody is choked: tit-for-tat among friends only costs.
    "unchoke_slots_limit": -1, "seed_choking_algorithm": 1, "allowed_fast_set_size": 0,
    # Few requests outstanding: what is asked of one peer is not asked of others, however slow it turns out, and in the end it is
    # asked of all. The defaults (3 s, 500 requests) took 20 % longer and made three times as many duplicates; 0 s starves.
    "request_queue_time": 1, "max_out_request_queue": 64, "max_allowed_in_request_queue": 3000,
    "send_buffer_watermark": 512 * 1024, "send_buffer_low_watermark": 64 * 1024, "send_buffer_watermark_factor": 50,
    "aio_threads": 2, "hashing_threads": 1, "alert_queue_size": 10_000,
}  # fmt: skip


class TorrentPlayer(Player):
    """One session for all rounds, one torrent a round."""

    def __init__(self, role: Role) -> None:
        import libtorrent

        self._lt, self._role, self._directory = libtorrent, role, Path(role.directory)
        alerts = libtorrent.alert.category_t
        settings = {
            **SETTINGS, "listen_interfaces": f"{role.address}:{PORT}",
            "alert_mask": alerts.status_notification | alerts.error_notification | alerts.storage_notification,
        }  # fmt: skip
        self._session: lt.session | None = libtorrent.session(cast(Any, settings))  # its stubs know no plain dict
        self._handle: lt.torrent_handle | None = None
        self._metadata: lt.torrent_info | None = None
        self._expected: Expect | None = None

    # --- the source ---

    def prepare(self, command: Prepare, payload: bytes, digest: str) -> dict[str, Any]:
        """Source: make the torrent. Returns its metadata for the nodes, in base64."""
        lt = self._lt
        self._forget()
        folder = self._folder(command.round)
        (folder / "payload").write_bytes(payload)
        files = [lt.create_file_entry("payload", len(payload))]
        torrent = lt.create_torrent(files, PIECE_BYTES, lt.create_torrent.v1_only)
        lt.set_piece_hashes(torrent, str(folder))
        encoded = lt.bencode(torrent.generate())
        self._metadata = self._parse(encoded)
        return {"torrent": base64.b64encode(encoded).decode()}

    def publish(self, round: int) -> None:
        """Source: seed the torrent and connect to all nodes."""
        assert self._metadata is not None
        self._handle = self._add(self._metadata, round, self._lt.torrent_flags.seed_mode)
        self._dial(self._role.nodes)

    # --- a node ---

    def expect(self, command: Expect) -> None:
        """Node: add the torrent and connect to the other nodes, for at most CONNECT_S."""
        self._forget()
        metadata = self._parse(base64.b64decode(command.extra["torrent"]))
        self._handle = self._add(metadata, command.round, 0)
        self._expected = command
        # Each pair is dialled by one of the two; whoever has no torrent yet hangs up, so again until all are there.
        others = [name for name in self._role.nodes if name != self._role.name]
        mine = others[: self._role.nodes.index(self._role.name)]
        deadline = time.monotonic() + CONNECT_S
        while len(self._connected()) < len(others) and time.monotonic() < deadline:
            self._dial(mine)
            time.sleep(REDIAL_S)

    def poll(self) -> str | None:
        """Node: the digest of the payload once it is on disk. ShoalError for an alert of libtorrent that ends the round."""
        assert self._session is not None
        for alert in self._session.pop_alerts():
            if isinstance(alert, self._lt.torrent_error_alert | self._lt.file_error_alert | self._lt.listen_failed_alert):
                raise ShoalError(f"libtorrent: {alert.message()}")
            if self._expected is None:
                continue
            if isinstance(alert, self._lt.torrent_finished_alert):
                assert self._handle is not None
                self._handle.flush_cache()  # finished means hashed, not yet written
            elif isinstance(alert, self._lt.cache_flushed_alert) and self._whole():
                payload = self._folder(self._expected.round) / "payload"
                self._expected = None
                return blake3(payload.read_bytes()).hexdigest()
        return None

    def _whole(self) -> bool:
        return self._handle is not None and self._handle.status().is_finished

    # --- both ---

    def traffic(self) -> RoundTraffic:
        """Bytes of payload of the round, as libtorrent counts them; failed pieces count as duplicates."""
        if self._handle is None:
            return RoundTraffic(0, 0, 0)
        s = self._handle.status()
        return RoundTraffic(s.total_payload_upload, s.total_payload_download, s.total_redundant_bytes + s.total_failed_bytes)

    def close(self) -> None:
        self._forget()
        self._session = None  # blocks until libtorrent has let go of its sockets

    def _add(self, metadata: lt.torrent_info, round: int, more: int) -> lt.torrent_handle:
        assert self._session is not None
        lt = self._lt
        flags = lt.torrent_flags
        wanted = lt.add_torrent_params()
        wanted.ti, wanted.save_path = metadata, str(self._folder(round))
        wanted.flags = (wanted.flags & ~(flags.auto_managed | flags.paused)) | flags.disable_pex | more
        return self._session.add_torrent(wanted)

    def _parse(self, encoded: bytes) -> lt.torrent_info:
        return self._lt.torrent_info(cast(Any, self._lt.bdecode(encoded)))

    def _dial(self, names: list[str]) -> None:
        assert self._handle is not None
        there = self._connected()
        for name in names:
            if self._role.hosts[name] not in there:
                self._handle.connect_peer((self._role.hosts[name], PORT))

    def _connected(self) -> set[str]:
        assert self._handle is not None
        busy = self._lt.peer_info.connecting | self._lt.peer_info.handshake
        return {peer.ip[0] for peer in self._handle.get_peer_info() if not peer.flags & busy}

    def _folder(self, round: int) -> Path:
        folder = self._directory / f"round-{round}"
        folder.mkdir(exist_ok=True)
        return folder

    def _forget(self) -> None:
        """Remove the torrent of the round before, and its files."""
        if self._handle is not None and self._session is not None:
            self._session.remove_torrent(self._handle, self._lt.session.delete_files)
        self._handle = self._expected = self._metadata = None


if __name__ == "__main__":
    sys.exit(serve(sys.argv, TorrentPlayer))
