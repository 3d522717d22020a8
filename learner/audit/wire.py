"""Messages between the head and its auditor, over an inherited socket: length-prefixed msgpack, one answer for each request.

Both ends are this program on one machine. Must not know sockets, models or plans.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import numpy as np

from learner.audit.claims import Claim, OwnGroup, places_of
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.plan import Check
from p2p.version import Version

MAX_FRAME = 256 << 20
"""Bytes of one message: a manifest of 65,536 tensors and as many chunks, with much room."""

BFLOAT16_COLUMNS = len(Deviations._fields) + len(OwnDeviations._fields) - 1
"""What is said of tokens that the auditor made itself: `OwnDeviations`, flat."""

_LENGTH = struct.Struct("<I")


def pack(message: dict[str, Any]) -> bytes:
    """One frame. ValueError when it is over MAX_FRAME."""
    data = msgpack.packb(message)
    if len(data) > MAX_FRAME:
        raise ValueError(f"a message of {len(data)} bytes is over {MAX_FRAME}")
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The messages completed by `data`. ValueError for what is none."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            message = msgpack.unpackb(body, strict_map_key=False)
            if not isinstance(message, dict):
                raise ValueError("a frame that is no message")
            yield message


def follow_request(parts: Sequence[bytes], whole: str = "") -> bytes:
    """Take this version, whose manifest has these signed parts; `whole`: from the file that has its state, where it need not be
    told against the newest one."""
    return pack({"do": "follow", "parts": list(parts), "whole": whole})


def score_request(checks: Sequence[Check], bfloat16: int = 0, own: Sequence[OwnGroup] = ()) -> bytes:
    """Score these again. `bfloat16`: of up to so many tokens of completions of its `own`, say also what a node would come to that
    computes so."""
    rows = [
        [
            c.prompt_ids, c.completion_ids, c.logprobs, c.seed, c.given,
            [[p.version.epoch, p.version.step, p.first, p.stop] for p in c.parts],
        ]
        for c in checks
    ]  # fmt: skip
    return pack({"do": "score", "checks": rows, "bfloat16": bfloat16, "own": own})


def read_own(message: dict[str, Any]) -> list[OwnGroup]:
    """Inverse of what `score_request` says of them."""
    return [OwnGroup(tuple(prompt), tuple(seeds)) for prompt, seeds in message["own"]]


def read_claims(message: dict[str, Any]) -> list[list[tuple[Version, Claim]]]:
    """Of each completion, a claim for each of its parts, under its version."""
    out = []
    for prompt, completion, logprobs, seed, given, parts in message["checks"]:
        gaps = tuple((start, stop) for start, stop in given)
        out.append([
            (Version(epoch, step), Claim(
                tuple(prompt), tuple(completion[:stop]), tuple(logprobs[:stop]), seed, first=first, stop=stop, given=gaps,
            ))
            for epoch, step, first, stop in parts
        ])  # fmt: skip
    return out


def score_answer(found: Sequence[Sequence[Deviations | None]], own: OwnDeviations | None = None, **more: Any) -> bytes:
    """What `read_deviations` and `read_bfloat16` read, with `more` plain values."""
    columns = [[None if d is None else _columns(d) for d in of] for of in found]
    own = OwnDeviations.none() if own is None else own
    return pack({"found": columns, "bfloat16": _columns((*own.found, own.repeated, own.prompts)), **more})


def _columns(arrays: Sequence[np.ndarray]) -> list[bytes]:
    return [a.astype("<f8").tobytes() for a in arrays]


def read_deviations(message: dict[str, Any], checks: Sequence[Check]) -> list[list[Deviations | None]]:
    """What was found of each part of each of these. ValueError for anything else."""
    found = message.get("found")
    if not isinstance(found, list) or [len(of) for of in found] != [len(c.parts) for c in checks]:
        raise ValueError("it does not answer what was asked")
    read = [[None if d is None else Deviations(*(np.frombuffer(a, "<f8") for a in d)) for d in of] for of in found]
    for check, of in zip(checks, read, strict=True):
        for part, d in zip(check.parts, of, strict=True):
            if d is not None and {len(column) for column in d} != {len(places_of(part.first, part.stop, check.given))}:
                raise ValueError("it has other tokens than were asked for")
    return read


def read_bfloat16(message: dict[str, Any], most: int) -> OwnDeviations:
    """What a node would come to that computes in bfloat16, of at most so many tokens. ValueError for anything else."""
    columns = [np.frombuffer(column, "<f8") for column in message.get("bfloat16") or (b"",) * BFLOAT16_COLUMNS]
    if not _even(columns, most):
        raise ValueError("it has other tokens in bfloat16 than were asked for")
    *found, repeated, prompts = columns
    return OwnDeviations(Deviations(*found), repeated != 0, prompts)


def _even(columns: Sequence[np.ndarray], most: int) -> bool:
    """Whether all columns are of the same tokens, of so many at the most."""
    return len({len(column) for column in columns}) == 1 and len(columns[0]) <= most
