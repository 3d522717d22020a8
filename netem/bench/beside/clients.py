"""Many clients of an endpoint at once, of whom some leave early. They stream chat completions over sockets of their own.

Must not know the run behind the endpoint.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import trio

from p2p.errors import ShoalError

AT_ONCE = 64 << 10
"""Bytes that are read from a socket at once: what the kernel holds for one."""

LATER_S = 2.0
"""Seconds after which a client that was told to come later does, where the answer does not say how many."""

EARLY_S = 5.0
"""Seconds within which clients leave that do not wait for their first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Clients that come all at once, each with one request."""

    url: str
    key: str
    clients: int
    leave: float
    """the share of them that does not wait for its answer: a third before the first token, the others after it"""
    tokens: int
    """most tokens of an answer"""
    seed: int = 0


@dataclass(slots=True)
class CrowdTally:
    """What they got."""

    first_s: list[float] = field(default_factory=list)
    """of those who stayed: seconds from asking to the first token"""
    whole_s: list[float] = field(default_factory=list)
    """seconds from asking to the end"""
    left: int = 0
    busy: int = 0
    """answers 429, after which a client comes again"""
    broken: list[str] = field(default_factory=list)
    """what those who stayed got instead of a whole answer"""


async def ask_all(crowd: Crowd) -> CrowdTally:
    """Until the last of them has its answer, or has left."""
    rng, tally = random.Random(crowd.seed), CrowdTally()
    leavers = set(rng.sample(range(crowd.clients), int(crowd.leave * crowd.clients)))
    async with trio.open_nursery() as nursery:
        for number in range(crowd.clients):
            leaves = number in leavers
            patience = rng.random() * EARLY_S if leaves and number % 3 == 0 else None
            client = _Client(crowd, tally, number, leaves_early=leaves and patience is None, began=trio.current_time())
            nursery.start_soon(client.ask, patience)
    return tally


@dataclass(frozen=True, slots=True)
class _Client:
    crowd: Crowd
    tally: CrowdTally
    number: int
    leaves_early: bool
    """with its first token"""
    began: float

    async def ask(self, patience: float | None) -> None:
        """Until it has its answer, or leaves: after `patience` seconds, where it has not endless."""
        with trio.move_on_after(math.inf if patience is None else patience) as waits:
            while later := await self._try():
                self.tally.busy += 1
                await trio.sleep(later)
        self.tally.left += waits.cancelled_caught

    async def _try(self) -> float:
        """One request; how many seconds later to come again, 0 for not at all."""
        crowd, tally, number = self.crowd, self.tally, self.number
        asked = {
            "messages": [{"role": "user", "content": f"{100_000 + number}>"}], "max_tokens": crowd.tokens, "seed": number,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        body = json.dumps(asked).encode()
        where = urlsplit(crowd.url)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {crowd.key}\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        made, finish = 0, ""
        try:
            async with await trio.open_tcp_stream(where.hostname or "", where.port or 80) as stream:
                await stream.send_all(head.encode() + body)
                lines = _lines(stream)
                status = (await anext(lines)).split()[1]
                async for line in lines:
                    if line.lower().startswith("retry-after:") and status == "429":
                        return float(line.partition(":")[2])
                    if not line.startswith("data: {"):
                        continue
                    (choice,) = json.loads(line[6:])["choices"]
                    ids = choice.get("token_ids") or ()
                    if ids and not made:
                        if self.leaves_early:
                            tally.left += 1
                            return 0.0
                        tally.first_s.append(trio.current_time() - self.began)
                    made += len(ids)
                    finish = choice["finish_reason"] or finish
        except (OSError, trio.BrokenResourceError, StopAsyncIteration, ValueError, KeyError, IndexError) as error:
            tally.broken.append(f"client {number}: {type(error).__name__}: {error}"[:200])
            return 0.0
        if status == "429":
            return LATER_S
        if finish:
            tally.whole_s.append(trio.current_time() - self.began)
        else:
            tally.broken.append(f"client {number}: status {status}, {made} tokens and no end")
        return 0.0


async def _lines(stream: trio.SocketStream) -> AsyncIterator[str]:
    """Lines of the answer; those of its framing among them."""
    rest = b""
    while part := await stream.receive_some(AT_ONCE):
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode().rstrip("\r")


def percentile(values: list[float], share: float) -> float:
    """Of at least one value. ShoalError for none."""
    if not values:
        raise ShoalError("no client had an answer")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
