"""A served endpoint over a twin of what samples, for tests of its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import trio

from learner.endpoint.keys import KEY_FILE
from learner.endpoint.reader import Offer
from learner.endpoint.service import Endpoint
from learner.endpoint.settings import EndpointSection
from learner.tasks.port import ChatFormat
from p2p.version import Version
from tests.support.request_twin import RequestTwin, byte_tokenizer

EOS = 256
"""byte_tokenizer's only special token."""

MODEL = "org/model"


@dataclass(slots=True)
class House:
    endpoint: Endpoint
    twin: RequestTwin
    tokenizer: Any
    key: str
    published: list[Version]
    """the newest last; none: no version is published"""

    def client(self, **headers: str) -> httpx.AsyncClient:
        values = {"Authorization": f"Bearer {self.key}", **headers}
        return httpx.AsyncClient(base_url=self.endpoint.url, headers=values, timeout=60)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def settled(self) -> None:
        """Until nothing is sampled and nobody is connected any more."""
        with trio.fail_after(60):
            while self.twin.active or self.endpoint.status()["connections"] or self.endpoint.status()["now"]:
                await trio.sleep(0.01)


@asynccontextmanager
async def open_house(
    run_dir: Path, answer: str = "hello", *, stop: bool = True, chat_format: ChatFormat | None = None, **settings: Any
) -> AsyncIterator[House]:
    """An endpoint whose twin answers everything with this text, ended by EOS or by the length alone."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(answer, add_special_tokens=False) + [EOS] * stop
    twin = RequestTwin(lambda ask: ids)
    published = [Version(1, 4)]
    offer = Offer(
        requests=twin, version=lambda: published[-1] if published else None, tokenizer=tokenizer, vocab_size=257,
        stop_ids=(EOS,), model=MODEL, context=500, chat_format=chat_format or ChatFormat(),
    )  # fmt: skip
    endpoint = Endpoint(EndpointSection(**{"listen": "127.0.0.1:0", **settings}), run_dir, offer)
    key = (run_dir / KEY_FILE).read_text().strip() if not settings.get("key_env") else ""
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run)
        yield House(endpoint, twin, tokenizer, key, published)
        nursery.cancel_scope.cancel()
