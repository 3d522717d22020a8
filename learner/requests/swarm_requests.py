"""Requests beside training, on the swarm's nodes: the shell around the books and the placing.

Readers take tokens out of the books at their own pace: what they have not read yet is at most what they asked for, so a slow one
costs memory that was granted and holds nobody up. Must not know HTTP, or what evaluates.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from learner.dispatch.node_table import NodeView
from learner.requests.book import COUNTED, RequestBook
from learner.requests.placing import RequestPlaces, count_places, place, served
from learner.requests.port import Ask, Made, RequestClass, Requests
from learner.requests.sequence import LETTERS, RequestSequence
from learner.requests.settings import RequestsSection
from learner.rollouts.beside import BesideTraining, Footprint, GivenOut, Taken
from learner.rollouts.outcomes import Cancel
from p2p.errors import Refusal
from p2p.protocol.generation import Abort, Assign, GenerateRequest, Interrupt, Rejected
from p2p.protocol.rollout import CAUSES, TokenEvent
from p2p.protocol.wire import FEW
from p2p.version import Version

LOOK_S = 0.1
"""Seconds between two looks for a place while something waits: no event says that a node has become free."""

LOOK_SHARE = 19.0
LOOK_LEAST_S = 0.02
LOOK_MOST_S = 0.5
"""After a look it pauses LOOK_SHARE times as long as that took (it may have 5 % of the time), at least LOOK_LEAST_S and at most
LOOK_MOST_S seconds."""

IDLE_S = 5.0
"""Seconds for which training must have nothing to do before requests may hold more than their share. Between two steps it pauses
for less; taking places back costs it up to half a second, and the requests a prefill each."""

MESSAGE_BYTES, MESSAGE_REQUESTS = 1 << 20, FEW
"""Bytes of token ids, and requests, in one message to a node, unless a single request has more: far below a frame."""


class SwarmRequests(Requests, BesideTraining):
    """`nodes()` are the dispatcher's views of them, `training_wants()` says whether training could use every place (`beside` is
    False where nothing is generated for training at all), `send` and `report` are the head's."""

    def __init__(
        self, settings: RequestsSection, vocab_size: int | None, *, epoch: int, send: Callable[[str, object], None],
        nodes: Callable[[], Sequence[NodeView]], training_wants: Callable[[], bool], report: Callable[[str, Refusal], None],
        beside: bool = True, now: Callable[[], float] = trio.current_time,
    ) -> None:  # fmt: skip
        self.settings, self._beside = settings, beside
        self.book = RequestBook(epoch, dict(settings.most_waiting()), vocab_size)
        self._shares = settings.shares()
        self._send, self._nodes, self._training_wants, self._report, self._now = send, nodes, training_wants, report, now
        self._due = trio.Event()
        self._idle_since: float | None = None
        """when training was first seen with nothing to do; None while it wants places"""

    # ---- whoever asks

    @asynccontextmanager
    async def sample(self, ask: Ask) -> AsyncIterator[AsyncIterator[Made]]:
        """See `Requests.sample`."""
        sequence = self.book.open(ask, self._now(), served(self._nodes()) if ask.exact_version is not None else ())
        reader = RequestReader(sequence)
        self._due.set()
        try:
            yield reader
        finally:
            self._cancel(self.book.cancel(sequence))

    def close(self, reason: str) -> None:
        """The run is over: every sequence ends with an error of that text, and none is taken any more."""
        self._cancel(self.book.close(reason))

    # ---- work out

    async def run(self) -> None:
        """For ever: find places for what waits, and end what waits in vain."""
        try:
            while True:
                with trio.move_on_after(LOOK_S if self._anything_waits else math.inf):
                    await self._due.wait()
                self._due = trio.Event()
                began = self._now()
                self.dispatch()
                await trio.sleep(min(max(LOOK_SHARE * (self._now() - began), LOOK_LEAST_S), LOOK_MOST_S))
        finally:
            self.close("the run is over")

    @property
    def _anything_waits(self) -> bool:
        return any(self.book.waits(c) for c in LETTERS.values())

    def dispatch(self) -> None:
        """Give what waits a node, as far as its class has places."""
        nodes = self._nodes()
        self.book.expire(self._now(), self.settings.wait_s, served(nodes))
        out: dict[tuple[str, float], list[GenerateRequest]] = {}
        for sequence, peer in place(nodes, self.book, self._places(nodes)):
            hold_s = self.settings.hold_s if sequence.ask.exact_version is not None else 0.0
            out.setdefault((peer, hold_s), []).append(GenerateRequest.of(self.book.assign(sequence, peer)))
        for (peer, hold_s), requests in out.items():
            for message in _messages(requests):
                self._send(peer, Assign(message, hold_s))

    def _places(self, nodes: Sequence[NodeView]) -> RequestPlaces:
        idle = self._idle_since is not None and self._now() - self._idle_since >= IDLE_S
        return count_places(nodes, self._shares, training_wants=self._beside and not idle)

    def tick(self) -> None:
        """Every now and then: see whether training wants its places back, and have nodes hand back what is beyond the shares."""
        if not any(self.book.waits(c) or self.book.holding(c) for c in LETTERS.values()):
            self._idle_since = None
            return
        if self._training_wants():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._now()
        places = self._places(self._nodes())
        for request_class in LETTERS.values() if places.places else ():
            for sequence in self.book.beyond(request_class, places.allowed(request_class, self.book), places.spared):
                sequence.asked_back = True
                self._send(sequence.node, Interrupt((sequence.request_id,)))

    def published(self, version: Version) -> None:
        """Tokens of `version` may come from now on."""
        self.book.published(version)
        self._due.set()

    # ---- work in

    def given(self, out: GivenOut) -> None:
        pass

    def owns(self, peer: str, request_id: str) -> bool:
        """By its first letter."""
        return request_id[1:2] == "." and request_id[0] in LETTERS

    def load(self, peer: str) -> int:
        return self.book.load(peer)

    def working(self, peer: str) -> list[str]:
        return self.book.working(peer)

    def footprint(self, peer: str) -> Footprint:
        return self.book.footprint(peer)

    def progress(self) -> dict[str, dict[str, int]]:
        return self.book.progress()

    def on_tokens(self, peer: str, run: TokenEvent) -> Taken:
        """Into the books, and what follows from it to the node."""
        taken = self.book.tokens(peer, run, self._now())
        if run.finish or taken.cancel:
            self._due.set()
        self._cancel(taken.cancel)
        return taken

    def on_rejected(self, peer: str, message: Rejected) -> None:
        avoid = message.cause not in CAUSES
        self.book.declined(peer, message.request_id, message.reason, retryable=message.retryable, avoid=avoid)
        self._due.set()

    def take(self, peer: str, request_id: str, reason: str) -> None:
        self.book.declined(peer, request_id, reason, retryable=True)
        self._due.set()

    def on_node_lost(self, peer: str) -> int:
        self._due.set()
        return self.book.node_lost(peer)

    def _cancel(self, pairs: Cancel) -> None:
        for peer, request_id in pairs:
            self._send(peer, Abort((request_id,)))

    # ---- what a person sees

    def status(self) -> dict[str, dict[RequestClass, int]]:
        """What is counted -> class -> how many."""
        classes, counts = LETTERS.values(), self.book.counts
        now = {"waiting": {c: self.book.waits(c) for c in classes}, "running": {c: self.book.holding(c) for c in classes}}
        return now | {name: {c: counts[c][name] for c in classes} for name in COUNTED}


class RequestReader(AsyncIterator[Made]):
    """The tokens of one sequence, as they come."""

    def __init__(self, sequence: RequestSequence) -> None:
        self._sequence, self._read = sequence, 0
        self._changed = trio.Event()
        sequence.wake = self._wake

    def _wake(self) -> None:
        self._changed.set()

    async def __anext__(self) -> Made:
        await trio.lowlevel.checkpoint()
        while True:
            sequence = self._sequence
            made = sequence.made(self._read)
            if made is not None:
                self._read += len(made.ids)
                return made
            if sequence.finish:
                raise StopAsyncIteration
            if sequence.error is not None:
                raise sequence.error
            self._changed = trio.Event()
            await self._changed.wait()


def _messages(requests: Sequence[GenerateRequest]) -> list[tuple[GenerateRequest, ...]]:
    """In order, each of no more than MESSAGE_BYTES unless one request alone is larger."""
    found: list[list[GenerateRequest]] = [[]]
    size = 0
    for request in requests:
        more = len(request.prompt_ids) + len(request.prefix_ids)
        if found[-1] and (size + more > MESSAGE_BYTES or len(found[-1]) >= MESSAGE_REQUESTS):
            found.append([])
            size = 0
        found[-1].append(request)
        size += more
    return [tuple(one) for one in found if one]

