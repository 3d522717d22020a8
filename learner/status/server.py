"""The status page: /status (JSON) and /metrics (Prometheus) on loopback. Must not know what the numbers mean."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from p2p.errors import UsageError


@contextmanager
def serve_status(port: int, snapshot: Callable[[], dict[str, Any]]) -> Iterator[int]:
    """Serve `snapshot()` from a thread until the block ends; yields the port. UsageError when the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in ("/status", "/metrics"):
                self.send_error(404, "only /status and /metrics")
                return
            try:
                values = snapshot()
            except Exception as error:  # the head is stopping: the page must not hang on it
                self.send_error(503, f"the learner is stopping ({type(error).__name__})")
                return
            if self.path == "/status":
                body, kind = json.dumps(values).encode(), "application/json"
            else:
                body, kind = prometheus_text(values), "text/plain; version=0.0.4"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UsageError(f"status port {port} cannot be used: {error.strerror}") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="status", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


def prometheus_text(status: dict[str, Any]) -> bytes:
    """The newest metrics line and the run's counters in Prometheus' text format. No per-peer labels: peers are many."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    class Snapshot:
        def collect(self) -> Iterator[Metric]:
            for name, value in status["metrics"].items():
                if isinstance(value, (int, float)):
                    plain = "shoal_" + "".join(c if c.isalnum() else "_" for c in name)
                    yield GaugeMetricFamily(plain, name, value=value)
            yield GaugeMetricFamily(
                "shoal_nodes_live", "nodes with a live link", value=sum(n["alive"] for n in status["nodes"])
            )
            yield CounterMetricFamily(
                "shoal_learner_egress_bytes", "chunk bytes sent by the learner", value=status["learner_egress_bytes"]
            )
            yield CounterMetricFamily(
                "shoal_peer_bytes", "chunk bytes nodes got from each other", value=status["peer_bytes"]
            )
            family = CounterMetricFamily("shoal_trajectories", "trajectories by what became of them", labels=["state"])
            for state in ("reserved", "consumed", "lost"):
                family.add_metric([state], status["trajectories"][state])
            for reason, count in status["trajectories"]["aborted"].items():
                family.add_metric([f"aborted_{reason}"], count)
            yield family

    registry = CollectorRegistry()
    registry.register(Snapshot())  # type: ignore[arg-type]
    return bytes(generate_latest(registry))
