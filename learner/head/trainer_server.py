"""The head's side of the trainer's socket: accepts one trainer at a time and answers it. Must not know torch.

Thin shell: what the answers are is its caller's business (`trainer_requests`).
"""

from __future__ import annotations

import logging
import os
import socket as stdsocket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from learner.client.messages import HEARTBEAT_S, SOCKET, Error, SegmentDone, Wait, decode, socket_path
from p2p.errors import Refusal, ShoalError
from p2p.limits import MAX_FRAME
from p2p.protocol.wire import encode

log = logging.getLogger("shoal.trainer_server")


Answer = Callable[[object], Awaitable[object]]
"""The answer to one message of the trainer's. It may take as long as it takes: the server keeps the trainer patient. A ShoalError
raised here reaches the trainer as its text."""


def ignore(reason: str) -> None:
    """A connection ended of which nothing hangs."""


async def serve_trainer(
    run_dir: Path, answer: Answer, on_gone: Callable[[str], None] = ignore, socket: str = SOCKET, *,
    task_status: Any = trio.TASK_STATUS_IGNORED,
) -> None:  # fmt: skip
    """Listen on a socket of the run directory and serve one connection after another, never two at once. `on_gone(reason)` hears
    when one ends."""
    (run_dir / socket).unlink(missing_ok=True)
    listener = trio.socket.socket(stdsocket.AF_UNIX, stdsocket.SOCK_STREAM)
    with socket_path(run_dir, socket) as name:
        await listener.bind(name)
    os.chmod(run_dir / socket, 0o600)
    listener.listen(1)
    task_status.started()
    with listener:
        while True:
            connection, _ = await listener.accept()
            stream = trio.SocketStream(connection)
            reason = "it closed the connection"
            try:
                async with stream:
                    await _serve(stream, answer)
            except* (trio.BrokenResourceError, trio.ClosedResourceError, Refusal) as group:
                reason = f"{type(group.exceptions[0]).__name__}: {group.exceptions[0]}"
            on_gone(reason)


async def _serve(stream: trio.SocketStream, answer: Answer) -> None:
    """Answer every request but `SegmentDone`: when one of these is refused, so is the next request, with the same words."""
    buffer = bytearray()
    refused: Error | None = None
    while True:
        while len(buffer) < 4 or len(buffer) < 4 + struct.unpack_from(">I", buffer)[0]:
            piece = await stream.receive_some()
            if not piece:
                return
            buffer += piece
            if len(buffer) >= 4 and struct.unpack_from(">I", buffer)[0] > MAX_FRAME:
                raise Refusal("the trainer sent an oversized frame")
        (size,) = struct.unpack_from(">I", buffer)
        request = decode(bytes(buffer[4 : 4 + size]))
        del buffer[: 4 + size]
        answered = refused or await _answered(stream, answer, request)
        if isinstance(request, SegmentDone):
            refused = answered if isinstance(answered, Error) else None
        else:
            refused = None
            await _send(stream, answered)


async def _answered(stream: trio.SocketStream, answer: Answer, request: object) -> object:
    answered: object = Error("no answer")

    async def heartbeat() -> None:
        while True:
            await trio.sleep(HEARTBEAT_S)
            with trio.CancelScope(shield=True):  # half a frame would garble the answer that follows
                await _send(stream, Wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(heartbeat)
        try:
            answered = await answer(request)
        except ShoalError as error:
            log.error("trainer's %s: %s", type(request).__name__, error)
            answered = Error(str(error)[:2000])
        nursery.cancel_scope.cancel()
    return answered


async def _send(stream: trio.SocketStream, message: object) -> None:
    data = encode(message)
    await stream.send_all(struct.pack(">I", len(data)) + data)
