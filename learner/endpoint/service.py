"""The endpoint of a run, put together: key, door and server. Thin shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trio

from learner.endpoint.door import EndpointDoor
from learner.endpoint.http import HttpServer, ServerLimits
from learner.endpoint.keys import ADDRESS_FILE, KEY_FILE, endpoint_key
from learner.endpoint.reader import Offer
from learner.endpoint.settings import EndpointSection, read_listen
from p2p.files import write_whole


class Endpoint:
    """The endpoint of one run. It has its key at once, and an address when `run` has started."""

    def __init__(self, settings: EndpointSection, run_dir: Path, offer: Offer) -> None:
        """UsageError when there is no key."""
        self.url = ""
        self._settings, self._run_dir = settings, run_dir
        self._door = EndpointDoor(settings, offer, endpoint_key(run_dir, settings.key_env))
        self._server = HttpServer(self._door, ServerLimits(
            connections=settings.connections, body_bytes=settings.body_bytes, receive_s=settings.receive_s,
            send_s=settings.send_s,
        ))  # fmt: skip

    async def run(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. UsageError when it cannot listen where it should."""
        host, port = read_listen(self._settings.listen)
        async with trio.open_nursery() as nursery:
            bound = await nursery.start(self._server.run, host, port)
            self.url = f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
            write_whole(self._run_dir / ADDRESS_FILE, json.dumps({"url": self.url}))
            task_status.started()

    def key_where(self) -> str:
        """Where a person finds the key."""
        return f"${self._settings.key_env}" if self._settings.key_env else str(self._run_dir / KEY_FILE)

    def status(self) -> dict[str, Any]:
        """What it did, as plain values."""
        answered = self._door.answered
        return {
            "url": self.url, "key": self.key_where(), "now": self._door.now, "answered": answered[200],
            "refused": sum(answered.values()) - answered[200], "left": self._server.tally.left,
            "connections": self._server.tally.connections,
        }  # fmt: skip
