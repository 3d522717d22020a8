"""What a node generates: the requests that it was given, and the engine that serves them.

Thin shell around the engine port (tokens) and `batcher` (when they go out). Must not know how this node came into the swarm,
or how versions travel: it is told what serves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass

import trio

from node.engine.port import Engine, EngineDied, EngineStats
from node.install.engine_slot import EngineSlot
from node.serving.batcher import TokenBatcher
from p2p.errors import Refusal, UsageError, first_of
from p2p.protocol.generation import GenerateRequest, Rejected
from p2p.protocol.rollout import DRAINING, RESTING, UPDATING, TokenEvent
from p2p.stages import reached
from p2p.version import Version

log = logging.getLogger("shoal.node")

ENGINE_RESTART_S = 1.0
"""Seconds between the death of an engine and the start of the next one, so that one that cannot start does not spin."""

MAX_ENGINE_FAILURES = 5
"""Engine deaths in a row, without one token between them, before the node gives up with the last reason."""

LINGER_S = 1.0
"""Seconds after the last request for the very version that is served in which another may follow: whoever asks for many of them
(an evaluation) has only some at a node at a time, and the next ones come over the network. A newer version waits so long at most
where nothing follows."""

EngineFactory = Callable[[], AbstractAsyncContextManager[Engine]]


@dataclass(slots=True)
class HeldRequest:
    """A request that this node was given and has not answered to the end."""

    finish_s: float
    """a newer version may be held back for so long that it ends under the weights it began with; 0: not at all"""
    pinned: bool = False
    """it is for the very version that was served when it came"""
    began: bool = False
    """tokens were made for it here"""


class Serving:
    """The requests of this node and the engine that serves them.

    `slot` brings the engine to each version. `say(message)` sends to the head. `report()` tells the head how this node is.
    """

    def __init__(
        self, slot: EngineSlot, engine_factory: EngineFactory, say: Callable[[object], None],
        report: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._slot, self._engine_factory, self._say, self._report = slot, engine_factory, say, report
        slot.before_commit = self.before_commit
        self.engine: Engine | None = None
        """the one that runs the held version; None while none does"""
        self.assigned: dict[str, HeldRequest] = {}
        self.released = trio.Event()
        """set, and replaced, when something leaves `assigned`"""
        self._taken = trio.Event()
        """set, and replaced, when something comes to `assigned`"""
        self._pinned_s, self._pinned_at = 0.0, -math.inf
        """`finish_s` of the last request for an exact version, and when it was answered"""
        self.updating = False
        """whether a version waits for what runs here to end; nothing new is taken meanwhile"""
        self.draining = False
        """whether this node leaves; nothing new is taken any more"""
        self.rests = ""
        """why nothing new is taken although this node stays; "" while it is"""
        self.tokens = 0
        """tokens that went out to the head"""
        self._made_under: Version | None = None
        """the version of the last token"""
        self._batch = TokenBatcher()
        self._failures = 0

    async def assign(self, requests: tuple[GenerateRequest, ...], finish_s: float) -> None:
        """Give these to the engine. The head hears of each that it does not take. `finish_s`: see `HeldRequest`."""
        # All at once: the engine answers between two decoding steps, and groups prefill their prompt together.
        async with trio.open_nursery() as nursery:
            for wire in requests:
                nursery.start_soon(self._assign_one, wire, finish_s)

    async def _assign_one(self, wire: GenerateRequest, finish_s: float) -> None:
        version = self._slot.shadow.version or Version(0, 0)
        engine = self.engine
        if self.draining:
            self._say(Rejected(wire.request_id, version, "this node leaves", retryable=True, cause=DRAINING))
            return
        if self.rests:
            self._say(Rejected(wire.request_id, version, self.rests, retryable=True, cause=RESTING))
            return
        if engine is None:
            self._say(Rejected(wire.request_id, version, "no engine serves yet", retryable=True))
            return
        if self.updating and wire.exact_version != self._slot.serving:
            reason = "this node finishes what it runs before it commits a newer version"
            self._say(Rejected(wire.request_id, version, reason, retryable=True, cause=UPDATING))
            return
        try:
            self.assigned[wire.request_id] = HeldRequest(finish_s, pinned=wire.exact_version is not None)
            self._taken.set()
            self._taken = trio.Event()
            await engine.add(wire.generate())
        except (Refusal, ValueError) as error:
            self._release(wire.request_id)
            reason, cause = (error.reason, error.cause) if isinstance(error, Refusal) else (str(error), "")
            self._say(Rejected(wire.request_id, version, reason[:500], retryable=bool(cause), cause=cause))
        except EngineDied as died:
            # keep_engine tells the head about everything that was assigned, this one included.
            log.info("engine died while taking %s: %s", wire.request_id, died)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """Forget these requests (none named: all), with what was made for them and not sent."""
        gone = request_ids or tuple(self.assigned)
        self._batch.drop(gone)
        for request_id in gone:
            self._release(request_id)
        if self.engine is not None:
            with suppress(EngineDied):  # nothing left to abort; keep_engine reports the death
                await self.engine.abort(list(request_ids) or None)

    def _release(self, request_id: str) -> None:
        """Nothing more is to come of this request."""
        held = self.assigned.pop(request_id, None)
        if held is not None:
            if held.pinned:
                self._pinned_s, self._pinned_at = held.finish_s, trio.current_time()
            self.released.set()
            self.released = trio.Event()

    @asynccontextmanager
    async def before_commit(self, version: Version) -> AsyncIterator[None]:
        """Around the engine's commit: sequences that are to end under the weights they began with may do so first, and nothing
        new begins meanwhile. What has not begun goes back to the head at once, what has not ended in time does then."""
        lingers = self._pinned_s if self._lingers() > 0 else 0.0
        patience = max((held.finish_s for held in self.assigned.values()), default=lingers)
        if not patience:
            yield
            return
        log.info("version %s waits for %d sequences, at most %.0f s", version, len(self.assigned), patience)
        self.updating = True
        try:
            await self._report()  # before anything comes back, or it would come here again
            await self.hand_back([r for r, held in self.assigned.items() if held.finish_s and not held.began])
            with trio.move_on_after(patience):
                while self._holds() or self._lingers() > 0:
                    with trio.move_on_after(math.inf if self._holds() else self._lingers()):
                        await (self.released if self._holds() else self._taken).wait()
            await self.hand_back([r for r, held in self.assigned.items() if held.finish_s])
            yield
        finally:
            self.updating = False

    def _holds(self) -> bool:
        """Whether something here may keep a newer version waiting."""
        return any(held.finish_s for held in self.assigned.values())

    def _lingers(self) -> float:
        """Seconds for which another request for the version that is served may still follow the last one."""
        return self._pinned_at + LINGER_S - trio.current_time() if self._pinned_s else 0.0

    async def hand_back(self, request_ids: list[str]) -> None:
        """Have the engine end these; the pump brings their last events to the head."""
        if request_ids and self.engine is not None:
            with suppress(EngineDied):  # keep_engine tells the head
                await self.engine.interrupt(request_ids)

    async def stats(self) -> EngineStats | None:
        """How the engine is; None while none serves."""
        if self.engine is not None:
            with suppress(EngineDied):  # keep_engine tells the head
                return await self.engine.stats()
        return None

    async def forget(self) -> None:
        """Drop all requests, with what was made for them."""
        if self.assigned:
            await self.abort(())

    async def keep_engine(self) -> None:
        """Start the engine once there is something to serve; restart it, at the current version, when it dies."""
        await self._slot.servable.wait()
        while True:
            reason = ""
            log.info("starting the engine, and loading version %s into it ...", self._slot.shadow.version)
            try:
                async with self._engine_factory() as engine:
                    await self._slot.attach(engine)
                    self.engine = engine
                    log.info("ready: waiting for work from the learner")
                    await self._report()
                    await self._pump(engine)
                    reason = "it closed its stream"
            except* EngineDied as group:  # a group, since the engine's own nursery is inside the block
                reason = str(first_of(group))
            except* Refusal as group:
                raise UsageError(f"the engine cannot run this model: {first_of(group)}") from None
            finally:
                self.engine = None
                self._slot.detach()
            log.error("the engine died: %s", reason)
            version = self._slot.shadow.version or Version(0, 0)
            # Not retryable for free: one of these may be what killed it, and would go on to kill every other engine.
            for request_id in list(self.assigned):
                self._say(Rejected(request_id, version, f"engine died: {reason}"[:500], retryable=False))
                self._release(request_id)
            self._failures += 1
            if self._failures >= MAX_ENGINE_FAILURES:
                raise UsageError(f"the engine died {self._failures} times in a row, last: {reason}")
            await self._report()
            await trio.sleep(ENGINE_RESTART_S)

    async def _pump(self, engine: Engine) -> None:
        """Tokens from the engine to the head, in batches (see `batcher`)."""
        try:
            with suppress(trio.EndOfChannel):  # the engine is gone; the reason comes another way
                while True:
                    with trio.move_on_at(self._batch.due):
                        self._gather(await engine.events.receive())
                    if trio.current_time() >= self._batch.due:
                        self.flush()
        finally:
            self.flush()

    def _gather(self, events: list[TokenEvent]) -> None:
        now = trio.current_time()
        for event in events:
            held = self.assigned.get(event.request_id)
            if held is None:
                continue  # aborted meanwhile
            held.began = True
            if event.finish:
                self._release(event.request_id)
            if event.finish == "error":
                self.flush()  # what it made until then comes first
                self._say(Rejected(event.request_id, event.version, event.message[:500], retryable=False))
                continue
            if event.count and event.version != self._made_under:
                self._made_under = event.version
                log.info("first token under version %s", event.version)
                reached(event.version, "first token")
            self.tokens += event.count
            self._failures = 0
            self._batch.add(event, now)

    def flush(self) -> None:
        for message in self._batch.take():
            self._say(message)
