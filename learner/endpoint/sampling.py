"""All sequences of one request, sampled at once. Must not know HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import blake3
import trio

from learner.requests.port import Ask, Made, Requests
from p2p.errors import ShoalError

Hear = Callable[[int, Made], bool]
"""Hears a sequence's index and its next tokens, and says whether more are wanted."""

SEED_BITS = 63
"""Bits of a seed that nodes take."""


def seed_of(seed: int, index: int) -> int:
    """The seed of a request's sequence `index`: the client's own for the first, and others that follow from it."""
    if index:
        seed = int.from_bytes(blake3.blake3(f"{seed} {index}".encode()).digest(8))
    return seed % (1 << SEED_BITS)


async def sample_all(requests: Requests, asks: Sequence[Ask], hear: Hear, taken: Callable[[], None]) -> None:
    """Until each sequence has ended, or `hear` wants no more of it. `taken` is called once all of them are. The first error ends
    all of them and is raised: Busy, NoSuchVersion, any other ShoalError."""
    failures: list[Exception] = []
    waiting = len(asks)

    async def sample(index: int, ask: Ask) -> None:
        nonlocal waiting
        try:
            async with requests.sample(ask) as pieces:
                waiting -= 1
                if not waiting:
                    taken()
                async for made in pieces:
                    if not hear(index, made) or made.finish:
                        return
            raise ShoalError("a sequence ended before its last token")
        except Exception as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, ask in enumerate(asks):
            nursery.start_soon(sample, index, ask)
    if failures:
        raise failures[0]
