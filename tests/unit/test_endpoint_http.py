"""The endpoint's server before bytes of strangers: malformed, too large, too slow, too many, and gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from learner.endpoint.http import HttpServer, RequestHead, Responder, ServerLimits
from p2p.errors import UsageError


class Echo:
    """A door that answers with what it was sent, or waits for ever."""

    def __init__(self) -> None:
        self.cancelled = self.waiting = 0

    def knows(self, head: RequestHead) -> bool:
        return "authorization" in head.headers

    async def refuse(self, head: RequestHead, reply: Responder) -> bool:
        if head.path == "/refused":
            await reply.whole(401, b"no", {})
            return True
        return False

    async def answer(self, head: RequestHead, body: bytes, reply: Responder) -> None:
        if head.path == "/wait":
            self.waiting += 1
            try:
                await trio.sleep_forever()
            finally:
                self.waiting -= 1
                self.cancelled += 1
        if head.path == "/flood":
            await reply.begin(200, {})
            while True:
                await reply.more(b"x" * 65536)
        if head.path == "/broken":
            raise RuntimeError("as a test wants")
        if head.path == "/parts":
            await reply.begin(200, {"Content-Type": "text/plain"})
            for part in (b"one ", b"two", b""):
                await reply.more(part)
            return
        await reply.whole(200, head.method.encode() + b" " + body, {})

    async def fault(self, status: int, message: str, reply: Responder) -> None:
        await reply.whole(status, message.encode(), {})


@asynccontextmanager
async def server(**limits: float) -> AsyncIterator[Served]:
    """A server on a free port."""
    values: Mapping[str, float] = {"connections": 50, "body_bytes": 1000, "receive_s": 30.0, "send_s": 30.0, **limits}
    door = Echo()
    found = HttpServer(door, ServerLimits(**values))  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        port = await nursery.start(found.run, "127.0.0.1", 0)
        yield Served(door, found, port)
        nursery.cancel_scope.cancel()


class Served:
    def __init__(self, door: Echo, server: HttpServer, port: int) -> None:
        self.door, self.server, self.port = door, server, port

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def ask(self, data: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        async with await self.connect() as stream:
            await stream.send_all(data)
            return await everything(stream)


async def everything(stream: trio.SocketStream) -> bytes:
    found = b""
    with trio.fail_after(30):
        async for part in stream:
            found += part
    return found


async def until(condition: object) -> None:
    assert callable(condition)
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.01)


GET = b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


async def test_it_answers_and_keeps_a_connection_for_more() -> None:
    async with server() as served:
        twice = b"POST /x HTTP/1.1\r\nHost: a\r\nAuthorization: k\r\nContent-Length: 2\r\n\r\nhi" + GET
        answer = await served.ask(twice)
        assert answer.count(b"HTTP/1.1 200") == 2 and b"POST hi" in answer and b"GET " in answer
        assert b"3\r\ntwo\r\n0\r\n\r\n" in await served.ask(GET.replace(b"/x", b"/parts"))
        await until(lambda: served.server.tally.connections == 0)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200_000 + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nAuthorization: k\r\nContent-Length: 1001\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999999999999999\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nAuthorization: k\r\nContent-Length: 99999999999999999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nAuthorization: k\r\nTransfer-Encoding: chunked\r\n\r\n1f4\r\n" + b"x" * 500 + b"\r\n"
         + b"1f5\r\n" + b"x" * 501 + b"\r\n0\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nAuthorization: k\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"200"),  # a route that no program has
        (b"GET /broken HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"500"),
    ],
)  # fmt: skip
async def test_what_is_not_a_request_gets_one_line_and_ends_nothing_else(data: bytes, status: bytes) -> None:
    async with server() as served:
        answer = await served.ask(data)
        first = answer.partition(b"\r\n")[0]
        assert first.startswith(b"HTTP/1.1 " + status), answer[:200]
        assert (await served.ask(GET)).startswith(b"HTTP/1.1 200")
        await until(lambda: served.server.tally.connections == 0)


async def test_a_refusal_is_read_also_when_the_body_never_ends() -> None:
    async with server() as served, await served.connect() as stream:
        await stream.send_all(b"POST /refused HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\n" + b"x" * 100)
        answer = await everything(stream)
        assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" in answer.lower()


async def test_who_asks_whether_to_go_on_is_told_so() -> None:
    async with server() as served, await served.connect() as stream:
        words = b"POST /x HTTP/1.1\r\nHost: a\r\nAuthorization: k\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        await stream.send_all(words)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 100")
        await stream.send_all(b"hi")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [
    b"", b"GET /x HT", b"GET /x HTTP/1.1\r\nHost: a\r\nX-",
    b"POST /x HTTP/1.1\r\nHost: a\r\nAuthorization: k\r\nContent-Length: 9\r\n\r\nhi",
])  # fmt: skip
async def test_a_request_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    async with server(receive_s=0.1) as served:
        answer = await served.ask(sent)
        assert answer.startswith(b"HTTP/1.1 408") if b"Length" in sent else answer == b""


async def test_a_client_that_leaves_cancels_its_request() -> None:
    async with server() as served:
        for _ in range(3):
            stream = await served.connect()
            await stream.send_all(GET.replace(b"/x", b"/wait"))
            await until(lambda: served.door.waiting == 1)
            await stream.aclose()
            await until(lambda: served.door.waiting == 0)
        assert served.door.cancelled == 3
        await until(lambda: served.server.tally.left == 3 and served.server.tally.connections == 0)


async def test_a_client_that_sends_on_and_on_while_it_is_answered_is_cut() -> None:
    async with server() as served, await served.connect() as stream:
        await stream.send_all(GET.replace(b"/x", b"/wait").replace(b"Connection: close\r\n", b""))
        with pytest.raises(trio.BrokenResourceError), trio.fail_after(30):
            while True:
                await stream.send_all(b"x" * 65536)
        await until(lambda: served.door.cancelled == 1)


async def test_a_client_that_does_not_read_is_cut() -> None:
    async with server(send_s=0.2) as served, await served.connect() as stream:
        await stream.send_all(GET.replace(b"/x", b"/flood"))
        await until(lambda: served.server.tally.left == 1 and served.server.tally.connections == 0)


async def known(served: Served) -> trio.SocketStream:
    """A connection on which somebody with a key has had an answer, and which stays."""
    stream = await served.connect()
    await stream.send_all(b"GET /x HTTP/1.1\r\nHost: x\r\nAuthorization: k\r\n\r\n")
    assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
    return stream


async def test_connections_beyond_the_limit_are_told_to_come_later() -> None:
    async with server(connections=2) as served:
        async with await known(served), await known(served):
            await until(lambda: served.server.tally.connections == 2)
            assert (await served.ask(GET)).startswith(b"HTTP/1.1 503")
        await until(lambda: served.server.tally.connections == 0)
        assert (await served.ask(GET)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("words", [b"", b"GET /x HTTP/1.1\r\n", GET, GET.replace(b"/x", b"/wait")])
async def test_strangers_keep_nobody_out_who_has_a_key(words: bytes) -> None:
    """256 connections that said nothing held all places for a minute."""
    async with server(connections=32) as served, await known(served) as mine, trio.open_nursery() as nursery:

        async def stranger() -> None:
            while True:
                with suppress(OSError, trio.BrokenResourceError):
                    async with await served.connect() as stream:
                        await stream.send_all(words.replace(b"Connection: close\r\n", b""))
                        while await stream.receive_some():
                            pass

        for _ in range(64):
            nursery.start_soon(stranger)
        await trio.sleep(0.2)
        for _ in range(20):
            async with await known(served):
                assert served.server.tally.connections <= 2 * 32
        await mine.send_all(b"GET /x HTTP/1.1\r\nHost: x\r\nAuthorization: k\r\n\r\n")
        assert (await mine.receive_some()).startswith(b"HTTP/1.1 200"), "the connection of who has a key stayed"
        nursery.cancel_scope.cancel()


async def test_a_body_comes_with_a_key() -> None:
    """Each connection without one could have had a whole body kept, of paths that need none."""
    async with server() as served:
        words = b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%sContent-Length: 9\r\n\r\n123456789"
        assert (await served.ask(words % b"")).startswith(b"HTTP/1.1 413")
        assert (await served.ask(words % b"Authorization: k\r\n")).endswith(b"123456789")


async def test_who_has_to_make_room_is_told() -> None:
    async with server(connections=1) as served, await served.connect() as stranger:
        await until(lambda: served.server.tally.connections == 1)
        async with await known(served):
            assert (await stranger.receive_some()).startswith(b"HTTP/1.1 503")


async def test_who_was_turned_away_takes_no_place() -> None:
    async with server(connections=2) as served:
        async with await known(served), await known(served):
            waiting = [await served.connect() for _ in range(2)]
            assert [(await stream.receive_some())[:12] for stream in waiting] == [b"HTTP/1.1 503"] * 2
        await until(lambda: served.server.tally.connections == 2)
        async with await known(served), await known(served):  # while those two linger
            assert served.server.tally.connections == 4


async def test_beyond_twice_the_limit_nobody_is_answered() -> None:
    async with server(connections=1) as served, await known(served), await served.connect() as late:
        assert (await late.receive_some()).startswith(b"HTTP/1.1 503")  # and it lingers
        assert await served.ask(GET) == b""


async def test_a_port_that_is_taken_is_one_line() -> None:
    async with server() as served:
        other = HttpServer(Echo(), ServerLimits(connections=1, body_bytes=1, receive_s=1, send_s=1))
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {served.port}"):
            await other.run("127.0.0.1", served.port)
