"""A swarm as whoever samples from it sees it (`learner.requests.port`), without nodes: it serves one version at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from learner.requests.port import Ask, Busy, Made, NoSuchVersion
from p2p.errors import ShoalError
from p2p.version import Version

STOP = 0
"""The token that ends an answer."""


def one_token(ask: Ask) -> tuple[int, ...]:
    """The least answer."""
    return (1, STOP)


class RequestsTwin:
    """Serves `version`, at most `places` sequences at once, a token every `token_s`. `answer(ask)`: the tokens of an answer; it
    may raise ShoalError."""

    def __init__(
        self, version: Version | None = None, *, places: int = 8, waiting: int = 1000, token_s: float = 0.1,
        answer: Callable[[Ask], tuple[int, ...]] = one_token,
    ) -> None:  # fmt: skip
        self.version, self.token_s, self.answer = version, token_s, answer
        self.asked: list[Ask] = []
        self.refused = self.open = self.most_open = self.left = 0
        """`left`: sequences that were given up by who asked"""
        self.stuck = False
        """no token comes any more"""
        self.coming: set[Version] = set()
        """versions that will be served later"""
        self._waiting, self._places = waiting, trio.Semaphore(places)
        self._moved = trio.Event()

    def serve(self, version: Version | None) -> None:
        """From now on another version, or none: what was asked of the one before exactly is over."""
        self.version = version
        self._moved.set()
        self._moved = trio.Event()

    def served(self) -> Version | None:
        return self.version

    @asynccontextmanager
    async def sample(self, ask: Ask) -> AsyncIterator[AsyncIterator[Made]]:
        """See `Requests.sample`."""
        await trio.lowlevel.checkpoint()
        self._check(ask)
        if self.open >= self._waiting:
            self.refused += 1
            raise Busy(f"{self.open} requests wait")
        self.asked.append(ask)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        ended = False
        try:
            tokens = self._tokens(ask)
            yield tokens
            ended = True
        finally:
            self.open -= 1
            self.left += not ended

    def _check(self, ask: Ask) -> None:
        if ask.exact_version not in (None, self.version):
            raise NoSuchVersion(f"no node serves version {ask.exact_version}", later=ask.exact_version in self.coming)

    async def _tokens(self, ask: Ask) -> AsyncIterator[Made]:
        async with self._places:
            ids = self.answer(ask)
            for i, token in enumerate(ids):
                with trio.move_on_after(float("inf") if self.stuck else self.token_s):
                    await self._moved.wait()
                self._check(ask)
                if self.version is None:
                    raise ShoalError("no node")
                finish = "" if i + 1 < len(ids) else "stop" if token == STOP else "length"
                yield Made((token,), (-0.5,), self.version, finish)
