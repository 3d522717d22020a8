"""A player that can be turned against the others: a real peer over real links that from then on cheats with what it sends.

It sits between the player and its bulk channels, so all but the cheating is production's. Must not know rounds or sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from p2p.channel.port import Channel, ChannelStats, PathState
from p2p.limits import CHANNEL_WINDOW
from p2p.protocol.messages import decode
from p2p.protocol.versions import Chunk
from p2p.protocol.wire import encode

HONEST, CORRUPT, WITHHOLD = "honest", "corrupt", "withhold"


@dataclass(slots=True)
class Conduct:
    """How one player behaves on all of its channels."""

    now: str = HONEST

    def turn(self, to: str) -> None:
        """ValueError for a conduct that there is not."""
        if to not in (HONEST, CORRUPT, WITHHOLD):
            raise ValueError(f"conduct {to!r} is not one of {HONEST}, {CORRUPT}, {WITHHOLD}")
        self.now = to

    def out(self, message: bytes) -> bytes | None:
        """What really leaves instead of `message`, an encoded one; None for nothing. Only chunks are tampered with: what
        proves them is signed, and a false proof would be refused before any chunk."""
        if self.now == HONEST:
            return message
        value = decode(message)
        if not isinstance(value, Chunk):
            return message
        if self.now == WITHHOLD:
            return None
        return encode(replace(value, data=bytes([value.data[0] ^ 1]) + value.data[1:]))


class RogueChannel(Channel):
    """`inner`, but for what `conduct` makes of what is sent."""

    def __init__(self, inner: Channel, conduct: Conduct) -> None:
        self.inner, self._conduct = inner, conduct
        self.peer, self.kind = inner.peer, inner.kind

    async def send(self, message: bytes) -> None:
        really = self._conduct.out(message)
        if really is not None:
            await self.inner.send(really)

    def try_send(self, message: bytes) -> bool:
        really = self._conduct.out(message)
        return really is None or self.inner.try_send(really)

    async def receive(self) -> bytes:
        return await self.inner.receive()

    async def aclose(self, reason: str = "") -> None:
        await self.inner.aclose(reason)

    def restrict(self, window: int = CHANNEL_WINDOW) -> None:
        self.inner.restrict(window)

    def statistics(self) -> ChannelStats:
        return self.inner.statistics()

    def path(self) -> PathState | None:
        return self.inner.path()

    def smooth(self, rate: float) -> None:
        self.inner.smooth(rate)
