"""The head's side of the trainer's socket: accepts one trainer at a time and answers it. Must not know torch.

Thin shell: what the answers are is the handler's business (`TrainerHandler`, implemented by the head).
"""

from __future__ import annotations

import logging
import os
import socket as stdsocket
import struct
from pathlib import Path
from typing import Any

import trio

from learner.client.messages import (
    HEARTBEAT_S,
    SOCKET,
    Batch,
    Begin,
    Begun,
    CommitStep,
    Discard,
    Due,
    Error,
    Finish,
    IsDue,
    Log,
    NextBatch,
    Ok,
    Resume,
    SealVersion,
    SegmentDone,
    Start,
    Wait,
    decode,
    socket_path,
)  # fmt: skip
from p2p.errors import Refusal, ShoalError
from p2p.limits import MAX_FRAME
from p2p.protocol.wire import encode

log = logging.getLogger("shoal.trainer_port")


class TrainerHandler:
    """What the head does for its trainer. A ShoalError raised here reaches the trainer as its text."""

    async def on_resume(self, message: Resume) -> Start:
        raise NotImplementedError

    async def on_due(self, message: Due) -> IsDue:
        raise NotImplementedError

    async def on_begin(self, message: Begin) -> Begun:
        raise NotImplementedError

    async def on_segment(self, message: SegmentDone) -> None:
        raise NotImplementedError

    async def on_seal(self, message: SealVersion) -> None:
        raise NotImplementedError

    async def on_next(self, message: NextBatch) -> Batch:
        """May wait for as long as it takes; the port keeps the trainer patient."""
        raise NotImplementedError

    async def on_commit(self, message: CommitStep) -> None:
        raise NotImplementedError

    async def on_discard(self, message: Discard) -> None:
        raise NotImplementedError

    async def on_log(self, message: Log) -> None:
        raise NotImplementedError

    async def on_finish(self, message: Finish) -> None:
        raise NotImplementedError

    async def on_trainer_gone(self, reason: str) -> None:
        raise NotImplementedError


async def serve_trainer(run_dir: Path, handler: TrainerHandler, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    """Listen on the run directory's socket and serve one trainer after another, never two at once."""
    (run_dir / SOCKET).unlink(missing_ok=True)
    listener = trio.socket.socket(stdsocket.AF_UNIX, stdsocket.SOCK_STREAM)
    with socket_path(run_dir) as name:
        await listener.bind(name)
    os.chmod(run_dir / SOCKET, 0o600)
    listener.listen(1)
    task_status.started()
    with listener:
        while True:
            connection, _ = await listener.accept()
            stream = trio.SocketStream(connection)
            reason = "it closed the connection"
            try:
                async with stream:
                    await _serve(stream, handler)
            except* (trio.BrokenResourceError, trio.ClosedResourceError, Refusal) as group:
                reason = f"{type(group.exceptions[0]).__name__}: {group.exceptions[0]}"
            await handler.on_trainer_gone(reason)


async def _serve(stream: trio.SocketStream, handler: TrainerHandler) -> None:
    buffer = bytearray()
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
        answer = await _answer(stream, handler, request)
        await _send(stream, answer)


async def _answer(stream: trio.SocketStream, handler: TrainerHandler, request: object) -> object:
    answer: object = Error("no answer")

    async def heartbeat() -> None:
        while True:
            await trio.sleep(HEARTBEAT_S)
            with trio.CancelScope(shield=True):  # half a frame would garble the answer that follows
                await _send(stream, Wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(heartbeat)
        try:
            answer = await _dispatch(handler, request)
        except ShoalError as error:
            log.error("trainer's %s: %s", type(request).__name__, error)
            answer = Error(str(error)[:2000])
        nursery.cancel_scope.cancel()
    return answer


async def _dispatch(handler: TrainerHandler, request: object) -> object:
    match request:
        case Resume():
            return await handler.on_resume(request)
        case Due():
            return await handler.on_due(request)
        case Begin():
            return await handler.on_begin(request)
        case NextBatch():
            return await handler.on_next(request)
        case SegmentDone():
            await handler.on_segment(request)
        case SealVersion():
            await handler.on_seal(request)
        case CommitStep():
            await handler.on_commit(request)
        case Discard():
            await handler.on_discard(request)
        case Log():
            await handler.on_log(request)
        case Finish():
            await handler.on_finish(request)
        case _:
            return Error(f"unexpected {type(request).__name__}")
    return Ok()


async def _send(stream: trio.SocketStream, message: object) -> None:
    data = encode(message)
    await stream.send_all(struct.pack(">I", len(data)) + data)
