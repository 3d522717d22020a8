"""SIGTERM where trio runs: it ends there as Ctrl-C does, between two steps of a task and not in the midst of trio's own work."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from p2p.errors import Terminated

Result = TypeVar("Result")


async def until_terminated() -> None:
    """For ever, unless SIGTERM comes: Terminated."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            raise Terminated


def run_terminable(main: Callable[..., Awaitable[Result]], *args: object) -> Result:
    """`trio.run(main, *args)` which SIGTERM ends: Terminated then, in an exception group. What `main` raises is raised as it
    is."""
    raised: list[Exception] = []

    async def run() -> list[Result]:
        results = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_terminated)
            try:
                results.append(await main(*args))
            except Exception as error:  # a nursery would put it into a group
                raised.append(error)
            nursery.cancel_scope.cancel()
        return results

    results = trio.run(run)
    if raised:
        raise raised[0]
    return results[0]
