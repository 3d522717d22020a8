"""An HTTP/1.1 server for one program, under trio: connections, limits, deadlines, and clients that leave. Must not know routes.

The protocol is h11's; what is here is its sockets. Why no ready server: uvicorn needs asyncio, and of those that run under trio
hypercorn is the one that is kept up. It sends under a shield and without a deadline, so that one client that does not read holds
the run's end; it has no limit on connections; an error of one connection that it did not expect ends its nursery, which would be
the run's; and it speaks HTTP/2 and web sockets to whoever asks, which nobody here needs. h11 comes with httpx, which Shoal has.

A client that closes its side of a connection, or half of it, has left: what it asked for is cancelled.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import h11
import trio

from p2p.errors import UsageError, first_of

log = logging.getLogger("shoal.endpoint")

HEAD_BYTES = 16 << 10
"""Bytes of a first line and headers that may be waited for to be whole: a key, a host and some more take one KiB of them, a
browser's cookies eight."""

AT_ONCE = 64 << 10
"""Bytes that are read from, or given to, a socket at once: what the kernel holds for one."""

EARLY_BYTES = 64 << 10
"""Bytes that a client may send before it has the answer to what it asked first. Clients that wait for answers send none."""

LINGER_S = 2.0
"""Seconds for which a connection is still read after a request was refused unread: closed at once, the kernel would drop the
answer that the client has not read."""

BACKLOG = 1024
"""Connections that may wait to be accepted: a client that starts a thousand requests at once opens as many."""

QUIET_S = 60
"""Seconds of silence after which the kernel asks whether a client's machine is still there."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request without its body."""

    method: str
    path: str
    """without the query"""
    headers: Mapping[str, str]
    """by lower-case name; of several of one name the last"""


class Responder(Protocol):
    """The way back to the client. Each call ends when the kernel has the bytes; ClientGone when the client takes none."""

    @property
    def begun(self) -> bool:
        """Whether a status was sent."""

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """The answer all at once."""

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers of an answer that comes in parts."""

    async def more(self, body: bytes) -> None:
        """A part; b"" ends the answer."""


class Door(Protocol):
    """The program behind the server."""

    def knows(self, head: RequestHead) -> bool:
        """Whether the request comes from who has a key, and not from a stranger."""

    async def refuse(self, head: RequestHead, reply: Responder) -> bool:
        """Whether the request is refused by its head alone; then it was answered, and its body is never read."""

    async def answer(self, head: RequestHead, body: bytes, reply: Responder) -> None:
        """Answer it. Cancelled when the client leaves."""

    async def fault(self, status: int, message: str, reply: Responder) -> None:
        """Say what the server itself refuses: a malformed request, a body that is too large or too slow, our own error."""


class ClientGone(Exception):
    """The client left, or takes no more bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What clients may take."""

    connections: int
    body_bytes: int
    receive_s: float
    send_s: float


@dataclass(slots=True)
class ServerTally:
    """What the server has done so far."""

    connections: int = 0
    """open now"""
    left: int = 0
    """requests whose client left before it had its answer"""


class HttpServer:
    """One listening socket and its connections."""

    def __init__(self, door: Door, limits: ServerLimits) -> None:
        self.tally = ServerTally()
        self._door, self._limits = door, limits
        self._strangers: dict[trio.SocketStream, trio.CancelScope] = {}
        """connections on which nobody has asked yet whom the door knows, the oldest first"""
        self._served = self._turned_away = 0
        """connections whose requests are answered; that are told to come later"""

    async def run(self, host: str, port: int, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `task_status` is told the port. UsageError when it cannot listen there."""
        try:
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        except OSError as error:
            first = first_of(error)
            why = first.strerror if isinstance(first, OSError) else str(first)
            raise UsageError(f"endpoint.listen: cannot listen on {host} port {port}: {why}") from None
        bound = int(listeners[0].socket.getsockname()[1])
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._serve, listeners)
            task_status.started(bound)

    async def _serve(self, stream: trio.SocketStream) -> None:
        """One connection. Nothing that happens on it ends the others, but that a new one takes the place of the oldest of
        strangers where all places are taken: who says nothing must not keep out who has a key."""
        self.tally.connections += 1
        try:
            _ask_the_quiet(stream)
            connection = _Connection(stream, self._door, self._limits, self.tally)
            if not self._makes_room() or not await self._serve_one(stream, connection):
                await self._turn_away(connection)
        except (ClientGone, trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        except Exception:
            log.exception("a connection of the endpoint failed")
        finally:
            self.tally.connections -= 1
            with trio.CancelScope(shield=True):  # a close is one system call
                await trio.aclose_forcefully(stream)

    def _makes_room(self) -> bool:
        """Whether there is a place for one more."""
        if self._served < self._limits.connections:
            return True
        if self._strangers:
            self._strangers.pop(next(iter(self._strangers))).cancel()
            return True
        return False

    async def _serve_one(self, stream: trio.SocketStream, connection: _Connection) -> bool:
        """Until the client leaves, or (False) it has to make room."""
        self._served += 1
        try:
            with trio.CancelScope() as scope:
                self._strangers[stream] = scope
                await connection.run(known=lambda: self._strangers.pop(stream, None))
            return not scope.cancelled_caught
        finally:
            self._strangers.pop(stream, None)
            self._served -= 1

    async def _turn_away(self, connection: _Connection) -> None:
        """Of so many as are served are told why; others are closed at once."""
        if self._turned_away < self._limits.connections:
            self._turned_away += 1
            try:
                await connection.turn_away()
            finally:
                self._turned_away -= 1


def _ask_the_quiet(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, QUIET_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, QUIET_S // 4)


class _Connection:
    """A client's connection: requests one after another."""

    def __init__(self, stream: trio.SocketStream, door: Door, limits: ServerLimits, tally: ServerTally) -> None:
        self._stream, self._door, self._limits, self._tally = stream, door, limits, tally
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._early = bytearray()
        """what the client sent while we answered"""
        self._is_head = False
        """the request under way is one for the head of an answer alone"""

    async def turn_away(self) -> None:
        """Say that there are too many, unless an answer was begun."""
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._fault(503, "so many connections are open already that one more is not taken: come later")

    async def run(self, known: Callable[[], object]) -> None:
        """Until the client leaves or breaks the rules. `known` is called when the door knows who asks."""
        while True:
            try:
                with trio.fail_after(self._limits.receive_s):
                    request = await self._next_event()
                    if not isinstance(request, h11.Request):
                        return
                    head = _head(request)
                    self._is_head = head.method == "HEAD"
                    reply = _Responder(self._h11, self._stream, self._limits.send_s, is_head=self._is_head)
                    allowed = 0
                    if self._door.knows(head):
                        known()
                        await trio.lowlevel.checkpoint_if_cancelled()  # it has to make room, and must hear so
                        allowed = self._limits.body_bytes
                    body = None if await self._door.refuse(head, reply) else await self._body(request, allowed)
            except trio.TooSlowError:
                if self._h11.our_state is h11.SEND_RESPONSE:
                    await self._fault(408, f"the request did not arrive within {self._limits.receive_s:g} s")
                return
            except h11.RemoteProtocolError as error:
                if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await self._fault(error.error_status_hint, f"malformed HTTP: {error}")
                return
            except _TooLarge:
                most = self._limits.body_bytes
                await self._fault(413, f"a request may have {most} bytes at most (endpoint.body_bytes), and none without the key")
                return
            if body is not None:
                await self._answer(head, body, reply)
            if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                await self._linger()
                return
            self._h11.start_next_cycle()
            self._is_head = False

    async def _next_event(self) -> object:
        """h11's next event of the client."""
        while True:
            if self._h11.they_are_waiting_for_100_continue:
                await self._stream.send_all(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            event = self._h11.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._early:
                data, self._early = bytes(self._early), bytearray()
            else:
                data = bytes(await self._stream.receive_some(AT_ONCE))
            self._h11.receive_data(data)

    async def _body(self, request: h11.Request, most: int) -> bytes:
        said = next((value for name, value in request.headers if name == b"content-length"), b"0")
        if len(said) > 15 or int(said) > most:
            raise _TooLarge
        body = bytearray()
        while isinstance(event := await self._next_event(), h11.Data):
            if len(body) + len(event.data) > most:
                raise _TooLarge
            body += event.data
        if not isinstance(event, h11.EndOfMessage):
            raise ClientGone
        return bytes(body)

    async def _answer(self, head: RequestHead, body: bytes, reply: _Responder) -> None:
        """Answer while watching for the client to leave."""
        gone = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope.cancel)
            with suppress(ClientGone):
                await self._answer_or_say_why_not(head, body, reply)
                gone = False
            nursery.cancel_scope.cancel()
        if gone:
            self._tally.left += 1
            raise ClientGone

    async def _answer_or_say_why_not(self, head: RequestHead, body: bytes, reply: _Responder) -> None:
        try:
            await self._door.answer(head, body, reply)
        except ClientGone:
            raise
        except Exception:
            log.exception("%s %s could not be answered", head.method, head.path)
            if self._h11.our_state is h11.SEND_RESPONSE:
                await self._door.fault(500, "the learner could not answer: its log says why", reply)

    async def _watch(self, leave: Callable[[], None]) -> None:
        while len(self._early) <= EARLY_BYTES:
            try:
                data = await self._stream.receive_some(AT_ONCE)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                break
            if not data:
                break
            self._early += data
        leave()

    async def _fault(self, status: int, message: str) -> None:
        reply = _Responder(self._h11, self._stream, self._limits.send_s, is_head=self._is_head)
        await self._door.fault(status, message, reply)
        await self._linger()

    async def _linger(self) -> None:
        """Let the client read the answer to what it was still sending."""
        with trio.move_on_after(LINGER_S):
            await self._stream.send_eof()
            while await self._stream.receive_some(AT_ONCE):
                pass


class _TooLarge(Exception):
    """The body has more bytes than a client may send."""


def _head(request: h11.Request) -> RequestHead:
    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in request.headers}
    return RequestHead(request.method.decode("ascii"), request.target.decode("ascii").partition("?")[0], headers)


class _Responder:
    """`Responder` over h11."""

    def __init__(self, connection: h11.Connection, stream: trio.SocketStream, send_s: float, *, is_head: bool = False) -> None:
        self._h11, self._stream, self._send_s, self._is_head = connection, stream, send_s, is_head

    @property
    def begun(self) -> bool:
        return self._h11.our_state is not h11.SEND_RESPONSE

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        head = self._response(status, {**headers, "Content-Length": str(len(body))})
        rest = [] if self._is_head else [h11.Data(data=body)]
        await self._send(b"".join(self._h11.send(event) or b"" for event in (head, *rest, h11.EndOfMessage())))

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        await self._send(self._h11.send(self._response(status, headers)) or b"")

    async def more(self, body: bytes) -> None:
        """Further bytes; b"" ends the answer."""
        await self._send(self._h11.send(h11.Data(data=body) if body else h11.EndOfMessage()) or b"")

    def _response(self, status: int, headers: Mapping[str, str]) -> h11.Response:
        end = {} if self._h11.their_state is h11.DONE else {"Connection": "close"}  # what is left of the request is not read
        phrase = HTTPStatus(status).phrase.encode()
        found = [(name.encode(), value.encode()) for name, value in {**headers, **end}.items()]
        return h11.Response(status_code=status, headers=found, reason=phrase)

    async def _send(self, data: bytes) -> None:
        for start in range(0, len(data), AT_ONCE):
            try:
                with trio.fail_after(self._send_s):
                    await self._stream.send_all(data[start : start + AT_ONCE])
            except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
                raise ClientGone from None
