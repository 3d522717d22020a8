"""The head gives freed memory back when it has grown, and not again and again for what is in use."""

from __future__ import annotations

from types import SimpleNamespace

import trio

from learner.head import freed_memory
from learner.head.freed_memory import EVERY_S, GROWN, give_back_now_and_then


async def test_what_is_in_use_is_tried_once(monkeypatch, autojump_clock) -> None:
    memory = SimpleNamespace(rss=10 * GROWN, free=0, given=0)

    def give_back() -> None:
        memory.given += 1
        memory.rss, memory.free = memory.rss - memory.free, 0

    monkeypatch.setattr(freed_memory.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: memory))
    monkeypatch.setattr(freed_memory, "give_back_what_is_freed", give_back)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_back_now_and_then)
        await trio.sleep(EVERY_S / 2)  # between two of its looks from here on
        seen = []
        for grows, free in ((0, 0), (GROWN, 0), (1, 0), (0, 0), (GROWN + 1, GROWN), (0, 0), (GROWN - 1, 0), (2, 0)):
            memory.rss, memory.free = memory.rss + grows, free
            await trio.sleep(EVERY_S)
            seen.append(memory.given)
        assert seen == [0, 0, 1, 1, 2, 2, 2, 3]
        nursery.cancel_scope.cancel()
