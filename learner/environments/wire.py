"""What the head and a process of environments say to each other: length-prefixed msgpack. Must not know sockets or processes."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

MAX_FRAME = 16 << 20
"""Bytes of one message either way: an episode's texts and a row of data, generously."""


class ChildSetup(msgspec.Struct, frozen=True):
    """The first message to a process: what it runs."""

    name: str
    options: dict[str, Any]
    turn_s: float
    episode_s: float
    memory_bytes: int = 0
    """most memory of the process; 0: as much as there is"""
    sandbox: bool = False
    scratch: str = ""
    """an empty folder, only for it: in the sandbox"""
    readable: list[str] = []
    """what it may read besides, in the sandbox"""
    allow_unconfined: bool = False


class ChildReady(msgspec.Struct, frozen=True, tag="ready"):
    """The process can begin; or `error` says why not."""

    error: str = ""
    tools: list[dict[str, Any]] = []
    """their JSON schemas"""
    replayable: bool = True
    missing: list[str] = []
    """layers of the sandbox that could not be had"""
    warnings: list[str] = []
    """what is odd about the environment, for a person"""


class AskTurn(msgspec.Struct, frozen=True, tag="ask"):
    """Answer the last of these turns; the ones before it, from `first` on, are taken again. Without turns the episode is `over`
    after those taken, and only its score is wanted."""

    episode: int
    first: int
    """0: begin; otherwise the process has taken as many turns"""
    turns: list[str]
    over: str
    row: Any = None
    seed: int = 0


class ForgetEpisode(msgspec.Struct, frozen=True, tag="forget"):
    """An episode is over, or given up."""

    episode: int


class PingChild(msgspec.Struct, frozen=True, tag="ping"):
    """Say that you live."""


class ChildPong(msgspec.Struct, frozen=True, tag="pong"):
    """It does."""


class TurnSaid(msgspec.Struct, frozen=True, tag="said"):
    """The answers to an `AskTurn`: messages for each turn, and the end where it is done."""

    episode: int
    first: int
    answers: list[list[dict[str, Any]]]
    done: bool = False
    reward: float = 0.0
    exact: bool = False
    parts: dict[str, float] = {}
    over: str = ""
    """of one that is done: the limit that ended it; "" where its environment did"""
    calls: int = 0
    """of one that is done: tool calls in it"""
    errors: int = 0
    """of these, the ones that were answered with an error"""


class TurnWrong(msgspec.Struct, frozen=True, tag="wrong"):
    """The episode failed."""

    episode: int
    why: str
    stuck: bool = False
    """a call hangs in it, or it is out of memory: this process must be replaced"""


class ToolStopped(msgspec.Struct, frozen=True, tag="stopped"):
    """A tool met a limit of its process. The model was told; this is for the log."""

    episode: int
    turn: int
    """from 0"""
    why: str


ToChild = AskTurn | ForgetEpisode | PingChild
ToHead = ChildReady | ChildPong | TurnSaid | TurnWrong | ToolStopped


def pack(message: object) -> bytes:
    """One message with its length. ValueError for one over MAX_FRAME, for integers beyond 64 bits and for values nested too
    deep; TypeError for values that are not plain."""
    try:
        data = msgspec.msgpack.encode(message)
    except (OverflowError, RecursionError) as error:
        raise ValueError(f"no message: {error}") from None
    if len(data) > MAX_FRAME:
        raise ValueError(f"a message of {len(data)} bytes; {MAX_FRAME} at most")
    return struct.pack(">I", len(data)) + data


def unpack(buffer: bytearray, kind: Any) -> list[Any]:
    """The whole messages at the beginning of `buffer`, which are removed from it. ValueError when it holds no message of this
    kind."""
    found = []
    while len(buffer) >= 4:
        (size,) = struct.unpack_from(">I", buffer)
        if size > MAX_FRAME:
            raise ValueError(f"a frame of {size} bytes")
        if len(buffer) < 4 + size:
            break
        try:
            found.append(msgspec.msgpack.decode(bytes(buffer[4 : 4 + size]), type=kind))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"no message: {error}") from None
        del buffer[: 4 + size]
    return found
