"""SIGTERM where trio runs."""

from __future__ import annotations

import os
import signal

import pytest
import trio
import trio.lowlevel

from p2p.errors import Terminated, UsageError, first_of
from p2p.termination import run_terminable


def test_sigterm_ends_it_and_what_it_had_open_is_closed() -> None:
    closed = []

    async def main() -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                os.kill(os.getpid(), signal.SIGTERM)
                await trio.sleep(60)
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(BaseExceptionGroup) as raised:
        run_terminable(main)
    assert isinstance(first_of(raised.value), Terminated) and closed == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_it_returns_and_raises_is_as_with_trio_alone() -> None:
    async def main(number: int) -> int:
        await trio.lowlevel.checkpoint()
        if number < 0:
            raise UsageError("below 0")
        return number + 1

    assert run_terminable(main, 2) == 3
    with pytest.raises(UsageError, match="below 0"):
        run_terminable(main, -1)
