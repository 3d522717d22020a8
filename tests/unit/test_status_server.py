"""The status port: its default, who is told when that is taken, and what is served there."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time

import httpx
import pytest

from learner.config import StatusSection
from learner.status.server import DEFAULT_PORT, is_local_name, serve_status
from p2p.errors import UsageError


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> int:
    """A default port that no run on this machine has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    monkeypatch.setattr("learner.status.server.DEFAULT_PORT", port)
    return port


def test_the_setting_names_the_default() -> None:
    assert str(DEFAULT_PORT) in (StatusSection.model_fields["port"].description or "") and StatusSection().port == 0


def test_two_runs_on_one_machine(usual: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), serve_status(0, lambda: {"run": "first"}) as first:
        assert first == usual and not caplog.messages
        with serve_status(0, lambda: {"run": "second"}) as second:
            assert second not in (0, usual)
            [said] = caplog.messages
            assert str(usual) in said and str(second) in said and "status.port" in said
            assert httpx.get(f"http://127.0.0.1:{second}/status", trust_env=False).json() == {"run": "second"}
        with pytest.raises(UsageError, match=str(usual)), serve_status(usual, dict):
            pass
    with serve_status(0, dict) as again:
        assert again == usual


def test_metrics_come_in_the_format_that_is_asked_for(usual: int) -> None:
    with serve_status(0, lambda: {"run": "r", "metrics": {"reward/mean": 0.5}}) as port:
        for accept, kind, end in (
            ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0; charset=utf-8", "# EOF\n"),
            ("text/plain", "text/plain; version=0.0.4; charset=utf-8", "\n"),
        ):
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics?x=1", headers={"Accept": accept}, trust_env=False)
            assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
            assert answer.text.endswith(end) and "\nshoal_reward_mean 0.5\n" in answer.text
            assert ("# EOF" in answer.text) == ("openmetrics" in kind)
        index = httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
        assert index.headers["content-type"].startswith("text/html") and "/status" in index.text and "/metrics" in index.text
        assert httpx.get(f"http://127.0.0.1:{port}/no", trust_env=False).status_code == 404


def test_a_web_site_whose_name_points_here_is_refused(usual: int) -> None:
    for host in ("", "127.0.0.1", "127.0.0.1:7462", "[::1]:7462", "10.0.0.7:80", "localhost:9", "gpu-box:7462", "x.localhost"):
        assert is_local_name(host), host
    for host in ("evil.example", "evil.example:7462", "127.0.0.1.evil.example", "localhost.evil.example", "[bad.example"):
        assert not is_local_name(host), host
    with serve_status(0, lambda: {"run": "r"}) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}/status", headers={"Host": f"evil.example:{port}"}, trust_env=False)
        assert answer.status_code == 421 and "localhost" in answer.text


def test_a_state_that_cannot_be_written_is_a_503_and_no_traceback(usual: int, capfd: pytest.CaptureFixture[str]) -> None:
    with serve_status(0, lambda: {"run": object(), "metrics": 3, "nodes": 3}) as port:
        for path in ("status", "metrics"):
            answer = httpx.get(f"http://127.0.0.1:{port}/{path}", trust_env=False)
            assert answer.status_code == 503 and "cannot be written" in answer.text, path
    assert "Traceback" not in capfd.readouterr().err


def test_whoever_does_not_wait_for_the_answer_is_no_error(
    usual: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    asked, gone = threading.Event(), threading.Event()

    def snapshot() -> dict[str, object]:
        asked.set()
        gone.wait(30)
        return {"long": "x" * 10**7}

    with caplog.at_level(logging.DEBUG), serve_status(0, snapshot) as port:
        asker = socket.create_connection(("127.0.0.1", port))
        asker.sendall(b"GET /status HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert asked.wait(30)
        asker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asker.close()  # with a reset
        gone.set()
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:
                thread.join(30)
    assert capfd.readouterr().err == "" and not caplog.messages


def test_what_fails_in_a_request_is_a_log_line(
    usual: int, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(host: str) -> bool:
        raise RuntimeError("odd")

    monkeypatch.setattr("learner.status.server.is_local_name", fail)
    with caplog.at_level(logging.WARNING), serve_status(0, dict) as port:
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/status", trust_env=False)
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:
                thread.join(30)
    assert "Traceback" not in capfd.readouterr().err
    assert any("failed" in said for said in caplog.messages)


def closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it, now or within some seconds."""
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_open_requests_hold_no_thread(usual: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.status.server.MOST_CONNECTIONS", 8)
    monkeypatch.setattr("learner.status.server.HEAD_S", 1.0)
    before = threading.active_count()
    with serve_status(0, lambda: {"run": "r"}) as port:
        half = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        for connection in half[::2]:
            connection.sendall(b"GET /status HTTP/1.0\r\nHost: localhost\r\nX: ")
        began = time.monotonic()
        while threading.active_count() < before + 9 and time.monotonic() - began < 30:
            time.sleep(0.01)
        more = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        assert threading.active_count() <= before + 9  # the server's own, and those of eight connections
        assert all(closed(connection) for connection in more)
        for connection in half:  # a byte now and then keeps none of them open
            try:
                connection.sendall(b"x")
            except OSError:
                pass
        for connection in half:
            while not closed(connection):  # some get an answer to what they had sent by then
                pass
        assert httpx.get(f"http://127.0.0.1:{port}/status", trust_env=False, timeout=30).json() == {"run": "r"}
        for connection in (*half, *more):
            connection.close()


def test_who_does_not_take_its_answer_loses_it(usual: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.status.server.TAKE_S", 1.0)
    with serve_status(0, lambda: {"long": "x" * 10**8}) as port, socket.create_connection(("127.0.0.1", port)) as stuck:
        stuck.sendall(b"GET /status HTTP/1.0\r\nHost: localhost\r\n\r\n")
        serving = lambda: [t for t in threading.enumerate() if "process_request_thread" in t.name]
        stuck.recv(1)
        assert serving()
        for thread in serving():
            thread.join(30)
        assert not serving()
