"""Asking for more nodes: by a command, by a webhook, and what comes of it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from learner.economy.allocation import Advice
from learner.economy.candidates import Rules
from learner.economy.pool import Pool
from learner.head.provider import LASTING_S, Provider
from tests.unit.test_pool import World

THREE = Advice(3, 10.0, "3 more: a step would take 10 s instead of 25 s")


@contextmanager
def server(heard: list[dict], status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/more"
        http.shutdown()


async def test_a_command_and_a_webhook_are_told_how_many_and_why(tmp_path: Path) -> None:
    out, heard = tmp_path / "out", []
    script = f"import os; open({str(out)!r}, 'w').write(os.environ['SHOAL_MORE'] + ' ' + os.environ['SHOAL_TICKET'])"
    with server(heard, 202) as url:
        provider = Provider(lambda: THREE, "run", "shoal1x", [sys.executable, "-c", script], url)
        await provider.ask(THREE)
    assert out.read_text() == "3 shoal1x" and provider.asked == 1
    assert heard == [{"more": 3, "why": THREE.why, "run": "run", "ticket": "shoal1x"}]
    assert provider.said.startswith("asked for 3 more nodes: ") and "ended with 0" in provider.said and "202" in provider.said


@pytest.mark.parametrize(
    ("command", "url", "said"),
    [
        (["/no/such/program"], "", "No such file"),
        ([sys.executable, "-c", "import sys; sys.exit('no quota')"], "", "ended with 1 (no quota)"),
        ([], "http://127.0.0.1:9/more", "127.0.0.1:9"),
        ([], "nonsense", "nonsense"),
    ],
)
async def test_whatever_goes_wrong_is_said_and_costs_nothing_else(command: list[str], url: str, said: str) -> None:
    provider = Provider(lambda: THREE, "run", "t", command, url)
    await provider.ask(THREE)
    assert said in provider.said


async def test_nobody_is_asked_for_what_does_not_last_nor_too_often(autojump_clock: trio.abc.Clock, tmp_path: Path) -> None:
    wanted: list[Advice | None] = [None]
    asked: list[float] = []
    provider = Provider(lambda: wanted[0], "run", "t", ["x"], every_s=600)

    async def ask(advice: Advice) -> None:
        asked.append(trio.current_time())

    provider.ask = ask  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(provider.run)
        await trio.sleep(100)
        wanted[0] = THREE
        await trio.sleep(LASTING_S / 2)
        wanted[0] = None
        await trio.sleep(100)
        assert not asked
        wanted[0] = THREE
        await trio.sleep(2000)
        nursery.cancel_scope.cancel()
    assert 2 <= len(asked) <= 4 and min(b - a for a, b in pairwise(asked)) >= 600


def test_the_pool_says_how_many_more_would_be_used_in_full() -> None:
    pool = Pool(Rules(dwell_s=10.0), 2)
    world = World(pool, {"a": 100.0}, {"a": 0.0}, 10.0, 4000)  # 400 tokens/s are needed
    assert pool.advice() is None
    world.run(400)
    advice = pool.advice()
    assert advice is not None and advice.more in (2, 3) and f"{advice.more} more" in pool.status(world.now)["advice"]
    capped = Pool(Rules(dwell_s=10.0, max_usd_per_hour=1.5), 2)
    world = World(capped, {"a": 100.0}, {"a": 1.0}, 10.0, 4000)
    world.run(400)
    advice = capped.advice()
    assert advice is not None and advice.more == 0
