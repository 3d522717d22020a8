"""What a process of environments says of itself before a run, asked of one that ends then. A thin shell; must not know tasks."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress

import trio

from learner.environments.home import EnvironmentHome
from learner.environments.host import CHILD, START_S
from learner.environments.settings import EnvironmentSection
from learner.environments.wire import ChildReady, pack, unpack
from learner.tasks.port import EnvironmentSource
from p2p.errors import UsageError
from p2p.processes import python_command, signal_group

READ_BYTES = 1 << 16
"""Bytes of its answer that are read at once."""


def try_environment(source: EnvironmentSource, settings: EnvironmentSection) -> ChildReady:
    """Make it once, where the run would: its code does not run in this process. UsageError when it cannot be made."""
    return trio.run(_try, source, settings)


async def _try(source: EnvironmentSource, settings: EnvironmentSection) -> ChildReady:
    home = EnvironmentHome(settings)
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            child = home.start(python_command(CHILD), theirs.fileno())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(home.relay, source.name)  # it must not wait for somebody who reads what it prints
                ready = await _ready(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), home, source)
                nursery.cancel_scope.cancel()
        finally:
            with suppress(PermissionError):  # macOS, where only a dead one is left
                signal_group(child, signal.SIGKILL)  # what the environment started too
            child.kill()
            child.wait()
    finally:
        ours.close()
        home.close()
    if ready.error:
        raise UsageError(ready.error)
    return ready


async def _ready(stream: trio.SocketStream, home: EnvironmentHome, source: EnvironmentSource) -> ChildReady:
    """Its first message; one with an `error` where there is none."""
    why, buffer = f"it was not ready within {START_S:g} s", bytearray()
    with trio.move_on_after(START_S):
        try:
            await stream.send_all(pack(home.setup(source)))
            while data := await stream.receive_some(READ_BYTES):
                buffer += data
                for message in unpack(buffer, ChildReady):
                    return message
            why = "it ended before it was ready (its output says why)"
        except trio.BrokenResourceError:
            why = "it ended before it was ready (its output says why)"
        except ValueError as error:
            why = str(error)
    return ChildReady(error=f"the process of environment {source.name} does not start: {why}")
