"""The one Channel implementation, over any byte transport. Must not know which transport it is.

Three tasks per channel: a reader that always drains the transport into a store bounded by credits, a writer that
alone writes, and a watch that breaks the transport when nothing moves. Reads and writes are shielded from
cancellation: on libp2p a cancelled write (and a read sends window updates, so also a read) desynchronises the Noise
nonces of the whole connection. What ends them is always `ByteTransport.abort`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from p2p.allowance.meter import HostMeter
from p2p.channel.link import HEADER, Closed, Granted, LinkCore, ReceivedMessage, cost_of
from p2p.channel.port import CONTROL, Channel, PathState
from p2p.channel.transport import ByteTransport
from p2p.errors import ChannelClosed, Refusal
from p2p.limits import CHANNEL_WINDOW, CREDIT_PROGRESS_S, KEEPALIVE_S, KIB, MAX_FRAME, SILENCE_S, WRITE_PROGRESS_S

PIECE = 65507
"""Bytes of one write. With yamux's 12-byte header it fills exactly one Noise record; one more byte makes two."""

FRAMING = 30
"""Bytes that yamux (12) and Noise (18) add to one write."""

READ_SIZE = 256 * KIB
"""Bytes asked of the transport at once: several chunks, so that a busy channel takes few turns of the scheduler."""

QUEUE_LIMIT = 128 * KIB
"""Bytes waiting for the writer before `send` waits too (one message of any size always fits an empty queue, or one of SMALL):
two chunks keep the wire busy, and more would only make the scheduler's choices stale."""

GRANT_BATCH = CHANNEL_WINDOW // 4
"""Bytes of consumed credit that are given back at once: a quarter of the window missing never stops a sender. Less credit goes
with the next write or in place of a keepalive, since on a quiet link a frame for each message would be half of the work."""

LINGER_S = WRITE_PROGRESS_S
"""Seconds from the end of a channel until both directions of its transport must have ended; then the connection is broken."""

SMALL, BATCH_S = 4 * KIB, 1e-3
"""Messages below so many bytes, sent so many seconds after the last write, wait for the writer's turn and leave together: a
record and a system call for each would cost more than the turn."""

CLOSE_WAIT_S = 1.0
"""Seconds that `aclose` waits for its CLOSE frame to leave; it may still leave later."""


class StreamChannel(Channel):
    """See `Channel` for the contract. Runs its tasks in `nursery`; `on_end` is called once when all have ended. `meter`: asked
    before anything is written."""

    def __init__(
        self,
        transport: ByteTransport,
        peer: str,
        kind: str,
        nursery: trio.Nursery,
        on_end: Callable[[StreamChannel], None] = lambda channel: None,
        *,
        meter: HostMeter | None = None,
    ) -> None:
        self._meter = meter or HostMeter()
        self.peer, self.kind = peer, kind
        self._transport, self._on_end = transport, on_end
        self._core = LinkCore(peer)
        self._queue: deque[tuple[bytes, bytes]] = deque()  # header, body
        self._queued_bytes = 0
        self._rest = memoryview(b"")  # of the frame being written
        self._rest_is_message = False
        self._unwritten = b""
        """a piece that was taken from the queue and that the transport did not take"""
        self._idling = False
        """the writer waits for something to write"""
        self._inbox: deque[bytes] = deque()
        self._offered: Callable[[bytes], bool] | None = None
        self._reason: str | None = None  # why it ended; None while open
        self._goodbye: str | None = None  # what a CLOSE frame still has to say
        self._ended, self._writer_done, self._reader_done = trio.Event(), trio.Event(), trio.Event()
        self._done = trio.Event()
        self._room, self._arrived, self._wake = trio.Event(), trio.Event(), trio.Event()
        self._send_lock = trio.Lock()  # first come, first served among senders
        self._last_sent = self._last_heard = trio.current_time()
        self._writing_since: float | None = None
        self._starved_since: float | None = None  # a sender waits for credit, and nothing has moved, since then
        self._keepalive_due = False
        nursery.start_soon(self._run)

    # --- the port

    async def send(self, message: bytes) -> None:
        """See `Channel.send`."""
        self._check_size(message)
        async with self._send_lock:  # a checkpoint; below nothing is taken before the last one
            try:
                while not self._take(message):
                    if self._core.has_credit(len(message)):
                        self._starved_since = None
                    elif self._starved_since is None:
                        self._starved_since = trio.current_time()
                    self._room = trio.Event()
                    await self._room.wait()
            finally:
                self._starved_since = None

    def try_send(self, message: bytes, *, more: bool = False) -> bool:
        """See `Channel.try_send`."""
        self._check_size(message)
        return not self._send_lock.locked() and self._take(message, more=more)

    async def receive(self) -> bytes:
        """See `Channel.receive`."""
        if self._inbox:
            await trio.lowlevel.checkpoint()
        while not self._inbox:  # the wait is a checkpoint: a second one would cost every message a turn of the scheduler
            if self._reason is not None:
                raise ChannelClosed(self._reason)
            self._arrived = trio.Event()
            await self._arrived.wait()
        message = self._inbox.popleft()
        self._give_back(message)
        return message

    def _give_back(self, message: bytes) -> None:
        self._core.consumed(len(message))
        if self._core.ungranted >= GRANT_BATCH:
            self._wake.set()

    def offer(self, take: Callable[[bytes], bool] | None) -> None:
        """See `Channel.offer`."""
        self._offered = take

    async def aclose(self, reason: str = "") -> None:
        """See `Channel.aclose`. Waits at most CLOSE_WAIT_S."""
        said = reason or "no reason given"
        self._end(f"closed here: {said}", goodbye=said)
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_WAIT_S):
            await self._writer_done.wait()

    def restrict(self, window: int = CHANNEL_WINDOW) -> None:
        self._core.restrict(window)

    def unheard(self) -> int:
        return self._core.unheard

    def path(self) -> PathState | None:
        return self._transport.path() if self._reason is None else None

    def remote(self) -> str:
        return self._transport.remote()

    def local(self) -> str:
        return self._transport.local()

    def smooth(self, rate: float) -> None:
        if self._reason is None:
            self._transport.smooth(rate)

    # --- for adapters

    @property
    def closed(self) -> bool:
        return self._reason is not None

    async def wait_done(self) -> None:
        """Until every task of the channel has ended."""
        await self._done.wait()

    async def abort(self, reason: str) -> None:
        """Close without a goodbye and break the transport's connection."""
        self._end(reason, lost=True)
        await self._break()

    # --- sending

    @staticmethod
    def _check_size(message: bytes) -> None:
        if len(message) > MAX_FRAME:
            raise ValueError(f"a message of {len(message)} bytes is over the limit of {MAX_FRAME}")

    def _take(self, message: bytes, *, more: bool = False) -> bool:
        """Queue the message if there is credit and room. ChannelClosed when closed."""
        if self._reason is not None:
            raise ChannelClosed(self._reason)
        full = self._queued_bytes > SMALL and self._queued_bytes + len(message) > QUEUE_LIMIT
        if full or not self._core.has_credit(len(message)):
            self._wake.set()  # something may wait there for `more`
            return False
        self._queue.append((self._core.data_header(len(message)), message))
        self._queued_bytes += cost_of(len(message))
        if more and self._idling:
            return True
        now = trio.current_time()
        free = self._idling and not self._unwritten and not self._meter.up.rate
        if free and (len(message) >= SMALL or now - self._last_sent >= BATCH_S):
            self._write_at_once(now)
        else:
            self._wake.set()
        return True

    def _write_at_once(self, now: float) -> None:
        """Write what is queued from here, while the writer waits: to wake it costs a turn of the scheduler a message. What the
        transport does not take is left to the writer."""
        try:
            while piece := self._gather():
                if not self._transport.try_write(piece):
                    self._unwritten = piece
                    self._wake.set()
                    return
                self._last_sent = now
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._end(f"connection lost: {error}", lost=True)

    def _moved(self) -> None:
        """Something moved: a sender that waits for credit has CREDIT_PROGRESS_S from now on again."""
        if self._starved_since is not None:
            self._starved_since = trio.current_time()

    def _gather(self) -> bytes:
        """The next at most PIECE bytes to write: small frames together, a large one in slices. b"" when idle."""
        parts: list[bytes | memoryview] = []
        room = most = self._meter.piece(PIECE)
        while room >= HEADER.size:
            if not self._rest and not self._load_frame(parts):
                break
            room = most - sum(map(len, parts))
            parts.append(self._rest[:room])
            self._rest = self._rest[room:]
            room -= len(parts[-1])
        return b"".join(parts)

    def _load_frame(self, parts: list[bytes | memoryview]) -> bool:
        """Start the next frame: its header goes to `parts`, its body to `_rest`. False when there is none."""
        self._rest_is_message = False
        grant = self._core.ungranted
        if grant and (self._keepalive_due or self._queue or parts or grant >= GRANT_BATCH):
            self._keepalive_due = False
            parts.append(self._core.grant_frame())
        elif self._queue:
            header, body = self._queue.popleft()
            self._queued_bytes -= cost_of(len(body))
            parts.append(header)
            self._rest, self._rest_is_message = memoryview(body), True
        elif self._goodbye is not None:
            frame, self._goodbye = self._core.close_frame(self._goodbye), None
            parts.append(frame[: HEADER.size])
            self._rest = memoryview(frame)[HEADER.size :]
        elif self._keepalive_due:
            self._keepalive_due = False
            parts.append(self._core.keepalive_frame())
        else:
            return False
        return True

    async def _write_loop(self) -> None:
        try:
            while True:
                piece = self._unwritten or self._gather()
                self._unwritten = b""
                if not piece:
                    if self._reason is not None:
                        return
                    await self._idle()
                if piece:
                    await self._meter.may_send(len(piece) + FRAMING, urgent=self.kind == CONTROL)
                    self._writing_since = trio.current_time()
                    with trio.CancelScope(shield=True):
                        await self._transport.write(piece)
                    self._writing_since, self._last_sent = None, trio.current_time()
                    if self._rest_is_message:  # a slow line, not a peer that stopped reading
                        self._moved()
                    self._room.set()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._end(f"connection lost: {error}", lost=True)
        finally:
            self._writing_since = None
            with trio.CancelScope(shield=True):  # the watch is still there to break it
                await self._transport.aclose()
            self._writer_done.set()

    async def _idle(self) -> None:
        """Wait for something to write."""
        self._wake, self._idling = trio.Event(), True
        try:
            await self._wake.wait()
        finally:
            self._idling = False

    # --- receiving

    async def _read_loop(self) -> None:
        try:
            self._transport.on_data(self._take_in)
            with trio.CancelScope(shield=True):  # nothing in the loop waits but the read
                while await self._read_on():
                    pass
        except Refusal as refusal:
            self._end(str(refusal), goodbye=f"refused: {refusal.reason}")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._end(f"connection lost: {error}", lost=True)
        finally:
            self._reader_done.set()

    async def _read_on(self) -> bool:
        """Read once and handle what arrived; False at the end of the stream."""
        data = await self._transport.read(READ_SIZE)
        if not data:
            self._end("closed by the peer: its stream ended", lost=True)
            return False
        self._hear(data)
        return True

    def _take_in(self, data: bytes | memoryview) -> None:
        """What arrived, from the transport itself."""
        try:
            self._hear(data)
        except Refusal as refusal:
            self._end(str(refusal), goodbye=f"refused: {refusal.reason}")
            self._transport.on_data(None)

    def _hear(self, data: bytes | memoryview) -> None:
        self._last_heard = trio.current_time()
        for event in self._core.feed(data):
            if isinstance(event, ReceivedMessage):
                if self._reason is not None:
                    continue
                if self._offered is not None and not self._inbox and self._offered(event.body):
                    self._give_back(event.body)
                else:
                    self._inbox.append(event.body)
                    self._arrived.set()
            elif isinstance(event, Granted):
                self._moved()
                self._room.set()
            elif isinstance(event, Closed):
                self._end(f"closed by the peer: {event.reason or 'no reason given'}", lost=True)

    # --- ending

    def _end(self, reason: str, *, goodbye: str | None = None, lost: bool = False) -> None:
        """Close with the first reason given. `lost` means that nobody is there to read what is queued."""
        if self._reason is None:
            self._reason, self._goodbye = reason, goodbye
        if lost:
            self._queue.clear()
            self._queued_bytes, self._rest, self._goodbye, self._unwritten = 0, memoryview(b""), None, b""
        for event in (self._ended, self._room, self._arrived, self._wake):
            event.set()

    async def _watch(self) -> None:
        """Break the connection when a write makes no progress, the peer is silent, or closing takes too long; see to it that the
        peer hears something every KEEPALIVE_S."""
        try:
            while not self._ended.is_set():
                now = trio.current_time()
                if self._writing_since is not None and now - self._writing_since >= WRITE_PROGRESS_S:
                    await self.abort(f"connection lost: no byte could be written for {WRITE_PROGRESS_S:.0f} s")
                elif now - self._last_heard >= SILENCE_S:
                    await self.abort(f"connection lost: nothing heard for {SILENCE_S:.0f} s")
                elif self._starved_since is not None and now - self._starved_since >= CREDIT_PROGRESS_S:
                    why = f"nothing was read there for {CREDIT_PROGRESS_S:.0f} s"
                    self._end(f"closed here: {why}", goodbye=why)
                else:
                    quiet = self._last_sent + KEEPALIVE_S - now if self._idling else KEEPALIVE_S
                    if quiet <= 0:
                        self._keepalive_due = True
                        self._wake.set()
                    with trio.move_on_after(quiet if quiet > 0 else KEEPALIVE_S):
                        await self._ended.wait()
            with trio.move_on_after(LINGER_S):
                await self._writer_done.wait()
                await self._reader_done.wait()
        finally:
            if not (self._writer_done.is_set() and self._reader_done.is_set()):
                self._end("closed here: shutting down", lost=True)
                await self._break()

    async def _break(self) -> None:
        with trio.CancelScope(shield=True):
            await self._transport.abort()

    async def _run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_loop)
                nursery.start_soon(self._read_loop)
                nursery.start_soon(self._watch)
        finally:
            self._end("closed here: shutting down", lost=True)
            self._done.set()
            self._on_end(self)
