"""One connection to the head: a frame out, and where it is answered, a frame in. Must not know what the messages are for."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from learner.client import messages
from p2p.errors import ShoalError
from p2p.limits import MAX_FRAME
from p2p.protocol.wire import encode

Answer = TypeVar("Answer")


class HeadGone(ShoalError):
    """The head closed the socket, stopped answering, or refused a request (the message says which). Nothing more can be asked
    over this connection."""


@contextmanager
def _told_of(what: str) -> Iterator[None]:
    """Around what the head must have done within SILENCE_S: a HeadGone says what it has not, or how the socket ended."""
    try:
        yield
    except TimeoutError:
        raise HeadGone(f"the head has not {what} for {messages.SILENCE_S:.0f} s") from None
    except OSError as error:
        raise HeadGone(f"the head is gone: {error}") from None


class HeadConnection:
    """A socket to the head. Threads may share it: a question and its answer are not parted, others wait meanwhile."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._whole = sock, threading.Lock()

    def close(self) -> None:
        self._sock.close()

    def tell(self, message: object) -> None:
        """Send what the head does not answer (`SegmentDone`)."""
        with self._whole:
            self._send(message)

    def _send(self, message: object) -> None:
        data = encode(message)
        with _told_of(f"taken {type(message).__name__}"):
            self._sock.sendall(struct.pack(">I", len(data)) + data)

    def ask(self, request: object, expect: type[Answer]) -> Answer:
        """What the head answers, however long it takes, as long as it says that it is at work. HeadGone where it refuses."""
        with self._whole:
            answer = self._asked(request)
        if isinstance(answer, messages.Error):
            raise HeadGone(f"the head refused {type(request).__name__}: {answer.reason}")
        if not isinstance(answer, expect):
            raise HeadGone(f"the head answered {type(request).__name__} with {type(answer).__name__}")
        return answer

    def _asked(self, request: object) -> object:
        self._send(request)
        answer: object = messages.Wait()
        with _told_of(f"answered {type(request).__name__}"):
            while isinstance(answer, messages.Wait):
                (size,) = struct.unpack(">I", self._read(4))
                if size > MAX_FRAME:
                    raise HeadGone(f"the head sent a frame of {size} bytes")
                answer = messages.decode(self._read(size))
        return answer

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise HeadGone("the head closed the connection")
            data += piece
        return data


def connect_to(run_dir: Path, name: str = messages.SOCKET) -> HeadConnection:
    """A connection to the head that runs on `run_dir`, by one of its sockets. OSError when none listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(messages.SILENCE_S)
    try:
        with messages.socket_path(run_dir, name) as path:
            sock.connect(path)
    except OSError:
        sock.close()
        raise
    return HeadConnection(sock)
