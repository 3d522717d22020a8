"""A player that can be told to cheat: a real peer over real links that corrupts or withholds the chunks it sends.

It wraps the player's bulk channels, so everything else is production code. Must not know rounds or sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from p2p.channel.port import Channel, PathState
from p2p.limits import CHANNEL_WINDOW
from p2p.protocol.messages import decode
from p2p.protocol.versions import Chunk
from p2p.protocol.wire import encode

ConductName = Literal["honest", "corrupt", "withhold"]
"""corrupt: each chunk is sent with a wrong byte. withhold: no chunk is sent."""


@dataclass(slots=True)
class Conduct:
    """How one player behaves, on all of its channels, from now on."""

    now: ConductName = "honest"

    def out(self, message: bytes) -> bytes | None:
        """The bytes to send in place of `message` (encoded); None for nothing. Only chunks are tampered with: their proofs are
        signed, and a false proof would be refused before any chunk."""
        if self.now == "honest":
            return message
        value = decode(message)
        if not isinstance(value, Chunk):
            return message
        if self.now == "withhold":
            return None
        return encode(replace(value, data=bytes([value.data[0] ^ 1]) + value.data[1:]))


class RogueChannel(Channel):
    """`inner`, except that `conduct` decides what is really sent."""

    def __init__(self, inner: Channel, conduct: Conduct) -> None:
        self.inner, self._conduct = inner, conduct
        self.peer, self.kind = inner.peer, inner.kind

    async def send(self, message: bytes) -> None:
        really = self._conduct.out(message)
        if really is not None:
            await self.inner.send(really)

    def try_send(self, message: bytes, *, more: bool = False) -> bool:
        really = self._conduct.out(message)
        return really is None or self.inner.try_send(really, more=more)

    def offer(self, take: Callable[[bytes], bool] | None) -> None:
        self.inner.offer(take)

    async def receive(self) -> bytes:
        return await self.inner.receive()

    async def aclose(self, reason: str = "") -> None:
        await self.inner.aclose(reason)

    def restrict(self, window: int = CHANNEL_WINDOW) -> None:
        self.inner.restrict(window)

    def path(self) -> PathState | None:
        return self.inner.path()

    def smooth(self, rate: float) -> None:
        self.inner.smooth(rate)
