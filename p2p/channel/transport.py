"""What a channel runs over: a pipe of bytes. Must not know what a channel makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from p2p.channel.port import PathState


class ByteTransport(Protocol):
    """A reliable byte pipe. Failures are trio.BrokenResourceError or trio.ClosedResourceError, with the reason."""

    async def write(self, data: bytes) -> None: ...

    def try_write(self, data: bytes) -> bool:
        """Write all of `data` without waiting, or nothing: False. What the system does not take at once leaves as soon as it
        does, before anything else."""
        return False

    async def read(self, max_bytes: int) -> bytes:
        """At least one byte; b"" when the peer ended its direction."""
        ...

    def on_data(self, take: Callable[[bytes | memoryview], None] | None) -> None:
        """From now on, where the transport can do it, hand what arrives to `take` at once, and not to `read`, which still hears
        of the end. `take` must not raise. None: nothing more is wanted, and `read` returns b""."""

    async def aclose(self) -> None:
        """End our direction after what was written. The peer's direction can still be read. Never raises."""
        ...

    def path(self) -> PathState | None:
        """See `Channel.path`."""
        return None

    def remote(self) -> str:
        """See `Channel.remote`."""
        return ""

    def local(self) -> str:
        """See `Channel.local`."""
        return ""

    def smooth(self, rate: float) -> None:
        """See `Channel.smooth`."""

    async def abort(self) -> None:
        """Break the pipe and whatever connection it shares, at once: pending reads and writes fail. Never raises."""
        ...
