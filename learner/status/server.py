"""The status page: /status (JSON) and /metrics (Prometheus) on loopback. Must not know what the numbers mean."""

from __future__ import annotations

import errno
import json
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from learner.local_names import is_local_name
from p2p.errors import UsageError

log = logging.getLogger("shoal.status")

DEFAULT_PORT = 7462
"""The port when none is set, so that a scraper and a bookmark stay good: SHOA on a telephone's keys, below the ports that systems
give away by themselves, and in no /etc/services."""

MOST_CONNECTIONS = 32
"""Connections that are served at once: some scrapers, browsers and `shoal status`. Each has a thread; one more is closed."""

HEAD_S, TAKE_S = 5.0, 30.0
"""Seconds that a client has to send its request, and to take the answer. Clients are on this machine."""

INDEX = b"""<!doctype html><meta charset="utf-8"><title>Shoal</title>
<p>A learner of Shoal: <a href="/status">/status</a> is its state as JSON,
<a href="/metrics">/metrics</a> its numbers for Prometheus. <code>shoal status RUN_DIR</code> shows them as tables.</p>
"""


@contextmanager
def serve_status(port: int, snapshot: Callable[[], dict[str, Any]]) -> Iterator[int]:
    """Serve `snapshot()` from a thread until the block ends; yields the port. UsageError when the port is taken. Port 0 is
    DEFAULT_PORT, or where that is taken, by another run on this machine for instance, any free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.give(self.connection, math.inf)  # the state is ours to make
            if not is_local_name(self.headers.get("Host", "")):
                self.send_error(421, "ask by an address, localhost or a name without a dot")
                return
            path = self.path.partition("?")[0]
            if path == "/":
                self._answer(INDEX, "text/html; charset=utf-8")
                return
            if path not in ("/status", "/metrics"):
                self.send_error(404, "only /status and /metrics")
                return
            try:
                values = snapshot()
            except Exception as error:  # the head is stopping: the page must not hang on it
                self.send_error(503, f"the learner is stopping ({type(error).__name__})")
                return
            try:
                body, kind = self._body(path, values)
            except Exception as error:  # a value that no format has
                self.send_error(503, f"the state cannot be written ({type(error).__name__})")
                return
            self._answer(body, kind)

        def _body(self, path: str, values: dict[str, Any]) -> tuple[bytes, str]:
            if path == "/status":
                return json.dumps(values).encode(), "application/json"
            from learner.status.exposition import metrics_text

            answer = metrics_text(values, ",".join(self.headers.get_all("Accept") or ()))
            return answer.body, answer.content_type

        def _answer(self, body: bytes, kind: str) -> None:
            server.give(self.connection, TAKE_S)
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = _bind(port, Handler)
    thread = threading.Thread(target=server.serve_forever, name="status", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


class _StatusServer(ThreadingHTTPServer):
    """What goes wrong with one request is a log line: stderr may be a live page's. Who is slow in sending or in taking, or is
    one too many, loses its connection: a thread is never held for long."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS
    """of connections that are not taken yet: beyond it a client tries again a second later"""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[Any, float] = {}
        """socket -> when it is closed"""
        self._changing = threading.Lock()
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more."""
        with self._changing:
            if len(self._open) >= MOST_CONNECTIONS:
                return False
            self._open[request] = time.monotonic() + HEAD_S
            return True

    def give(self, request: Any, seconds: float) -> None:
        """So much time from now on for a connection that is served."""
        with self._changing:
            if request in self._open:
                self._open[request] = time.monotonic() + seconds

    def shutdown_request(self, request: Any) -> None:
        """It is served, or was turned away."""
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Twice a second: end those whose time is over. Their threads then read the end of the stream."""
        now = time.monotonic()
        with self._changing:
            late = [request for request, until in self._open.items() if now > until]
            for request in late:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exception(), (BrokenPipeError, ConnectionResetError)):
            return  # whoever asked did not wait for the answer
        log.warning("a request from %s failed", client_address, exc_info=True)


def _bind(port: int, handler: type[BaseHTTPRequestHandler]) -> _StatusServer:
    try:
        return _StatusServer(("127.0.0.1", port or DEFAULT_PORT), handler)
    except OSError as error:
        if port or error.errno != errno.EADDRINUSE:
            raise UsageError(f"status port {port or DEFAULT_PORT} cannot be used: {error.strerror}") from None
    server = _StatusServer(("127.0.0.1", 0), handler)
    log.warning(
        "port %d is taken, by another run perhaps: /status and /metrics are on port %d (status.port sets one)",
        DEFAULT_PORT, server.server_address[1],
    )  # fmt: skip
    return server
