"""The status port without a path: a page that says what is there."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from learner.status.server import serve_status
from tests.support.watchdog import PATIENCE_S


def test_the_port_says_what_it_has() -> None:
    with serve_status(0, lambda: {}) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE_S) as answer:
            page = answer.read().decode()
        assert '<a href="/status">' in page and '<a href="/metrics">' in page
        with pytest.raises(urllib.error.HTTPError, match="only /, /status and /metrics"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/nothing", timeout=PATIENCE_S)
