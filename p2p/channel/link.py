"""Framing and credits of one channel, sans-IO: bytes in, events out. Must not know tasks, clocks or transports.

A frame is a 4-byte big-endian body length, a type byte, the body. Lengths and credits are checked when the header is
complete, before any of the body is kept, so a peer makes us hold at most one header and MAX_FRAME bytes here.

Credits: a message costs its length plus PER_MESSAGE bytes. A sender has at most the window outstanding; the receiver
gives credit back as its application consumes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from p2p.errors import Refusal
from p2p.limits import CHANNEL_WINDOW, MAX_FRAME
from p2p.printable import printable

HEADER = struct.Struct("!IB")
DATA, CREDIT, KEEPALIVE, CLOSE = range(4)
_CREDIT_BODY = struct.Struct("!I")

PER_MESSAGE = 64
"""Bytes of credit charged for a message on top of its own, about what holding it costs, so that empty messages are not free."""

MAX_REASON = 1024
"""Bytes of the text of a CLOSE frame: a sentence for a log, and a bound on what a peer can make us keep."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A whole message; its credit stays taken until `LinkCore.consumed`."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Granted:
    """The peer gave back so many bytes of our sending credit."""

    amount: int


@dataclass(frozen=True, slots=True)
class Alive:
    """A keepalive."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer closes, and says why."""

    reason: str


Event = ReceivedMessage | Granted | Alive | Closed


def cost_of(size: int) -> int:
    """Credit that a message of `size` bytes takes."""
    return size + PER_MESSAGE


class LinkCore:
    """Both directions of one channel. After a Refusal the receiving side is dead and repeats it."""

    def __init__(self, peer: str = "", window: int = CHANNEL_WINDOW) -> None:
        self._peer, self._window = peer, window
        self._accepts = window
        self._outstanding = 0  # credit taken by what we sent and the peer has not given back
        self._held = 0  # received credit not yet granted back, consumed or not
        self._ungranted = 0
        self._head, self._body = bytearray(), bytearray()
        self._type, self._length = -1, -1  # of the frame whose body is coming in; -1 between frames
        self._fault: Refusal | None = None

    @property
    def ungranted(self) -> int:
        """Credit of consumed messages that no grant has given back yet, bytes."""
        return self._ungranted

    @property
    def buffered(self) -> int:
        """Bytes of an incomplete frame held here; never above HEADER.size + MAX_FRAME."""
        return len(self._head) + len(self._body)

    @property
    def unheard(self) -> int:
        """Credit of messages that came whole and that nobody consumed yet, bytes."""
        return self._held - self._ungranted

    def restrict(self, window: int) -> None:
        """Refuse from now on what would make more than `window` bytes held here, whatever the peer's window."""
        self._accepts = window

    def has_credit(self, size: int) -> bool:
        return self._outstanding + cost_of(size) <= self._window

    def data_header(self, size: int) -> bytes:
        """Take the credit of a message of `size` bytes; its frame is this header and then the message.

        ValueError over MAX_FRAME or without credit.
        """
        if size > MAX_FRAME:
            raise ValueError(f"a message of {size} bytes is over the limit of {MAX_FRAME}")
        if not self.has_credit(size):
            raise ValueError(f"no credit for {size} bytes: {self._outstanding} of {self._window} outstanding")
        self._outstanding += cost_of(size)
        return HEADER.pack(size, DATA)

    def grant_frame(self) -> bytes:
        """A frame that gives all consumed credit back; b"" when there is none."""
        amount, self._ungranted = self._ungranted, 0
        self._held -= amount
        return HEADER.pack(_CREDIT_BODY.size, CREDIT) + _CREDIT_BODY.pack(amount) if amount else b""

    @staticmethod
    def keepalive_frame() -> bytes:
        return HEADER.pack(0, KEEPALIVE)

    @staticmethod
    def close_frame(reason: str) -> bytes:
        text = reason.encode("utf-8", "replace")[:MAX_REASON]
        return HEADER.pack(len(text), CLOSE) + text

    def consumed(self, size: int) -> None:
        """The application took a received message of `size` bytes."""
        self._ungranted += cost_of(size)

    def feed(self, data: bytes | memoryview) -> Iterator[Event]:
        """The events that `data` completes, in order; Refusal after those before the fault. Exhaust the iterator."""
        if self._fault is not None:
            raise self._fault
        view = memoryview(data)
        while view:
            if self._length < 0:
                take = HEADER.size - len(self._head)
                self._head += view[:take]
                view = view[take:]
                if len(self._head) < HEADER.size:
                    return
                length, kind = HEADER.unpack(self._head)
                self._head.clear()
                self._check(kind, length)
                self._type, self._length = kind, length
                if length == 0:
                    yield self._finish(b"")
                continue
            missing = self._length - len(self._body)
            if not self._body and len(view) >= missing:
                body = bytes(view[:missing])
            else:
                self._body += view[:missing]
                if len(self._body) < self._length:
                    return
                body = bytes(self._body)
                self._body = bytearray()
            view = view[missing:]
            yield self._finish(body)

    def _check(self, kind: int, length: int) -> None:
        """Refuse a frame by its header alone; take the credit of a message."""
        if length > MAX_FRAME:
            self._refuse(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
        if kind == DATA:
            if self._held + cost_of(length) > self._accepts:
                self._refuse(
                    f"credits overrun: a message of {length} bytes with {self._held} of {self._accepts} outstanding"
                )
            self._held += cost_of(length)
        elif kind == CREDIT:
            if length != _CREDIT_BODY.size:
                self._refuse(f"a credit frame of {length} bytes, not {_CREDIT_BODY.size}")
        elif kind == KEEPALIVE:
            if length:
                self._refuse(f"a keepalive frame of {length} bytes, not 0")
        elif kind == CLOSE:
            if length > MAX_REASON:
                self._refuse(f"a close frame of {length} bytes is over the limit of {MAX_REASON}")
        else:
            self._refuse(f"unknown frame type {kind}")

    def _finish(self, body: bytes) -> Event:
        kind, self._type, self._length = self._type, -1, -1
        if kind == DATA:
            return ReceivedMessage(body)
        if kind == CREDIT:
            (amount,) = _CREDIT_BODY.unpack(body)
            if amount == 0 or amount > self._outstanding:
                self._refuse(f"a grant of {amount} bytes with {self._outstanding} outstanding")
            self._outstanding -= amount
            return Granted(amount)
        return Alive() if kind == KEEPALIVE else Closed(printable(body.decode("utf-8", "replace"), MAX_REASON))

    def _refuse(self, reason: str) -> NoReturn:
        self._fault = Refusal(reason, peer=self._peer, fatal=True)
        raise self._fault
