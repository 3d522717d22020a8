"""What travels in a simulated broadcast: how a version is cut, what chunks take on a link, and the messages of peers.

Values only. Must not know peers, links or time. A message carries its round, as real ones carry their manifest's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from p2p.broadcast.chunkset import bits_of
from p2p.channel.stream import PIECE
from p2p.limits import DEFAULT_SEGMENT

PACKET_HEAD = 52
"""Bytes of IP and TCP in a packet: 20 + 20, and 12 of timestamps."""

RECORD_HEAD = 30
"""Bytes of yamux (12) and Noise (18) in a record that holds PIECE bytes."""

CHUNK_HEAD = 55
"""Bytes of a chunk's message beside its data."""

def wire_bytes(payload: int, mtu: int) -> int:
    """What `payload` bytes of a chunk take on a link of that MTU."""
    size = payload + CHUNK_HEAD
    size += RECORD_HEAD * ceil(size / PIECE)
    return size + PACKET_HEAD * ceil(size / (mtu - PACKET_HEAD))


@dataclass(frozen=True, slots=True)
class SimVersion:
    """A version of one round, as the manifest cuts it: `payload` bytes in segments of DEFAULT_SEGMENT, those in chunks."""

    number: int
    payload: int
    chunk_bytes: int

    @property
    def per_segment(self) -> int:
        return -(-DEFAULT_SEGMENT // self.chunk_bytes)

    @property
    def total(self) -> int:
        whole, rest = divmod(self.payload, DEFAULT_SEGMENT)
        return whole * self.per_segment - (-rest // self.chunk_bytes)

    def size(self, chunk: int) -> int:
        segment, index = divmod(chunk, self.per_segment)
        return min(self.chunk_bytes, min(DEFAULT_SEGMENT, self.payload - segment * DEFAULT_SEGMENT) - index * self.chunk_bytes)

    def segment(self, chunk: int) -> range:
        """All chunks of the segment that this one is in."""
        start = chunk - chunk % self.per_segment
        return range(start, min(start + self.per_segment, self.total))


class SimChunk(NamedTuple):
    round: int
    chunk: int
    duty: int


class SimSubscribe(NamedTuple):
    round: int
    have: Sequence[int]


class SimHave(NamedTuple):
    """`bits`: the chunks once more, as bits of a number: one message goes to many."""

    round: int
    chunks: Sequence[int]
    bits: int


def have(number: int, chunks: Sequence[int]) -> SimHave:
    """The message of round `number` that says that these are held."""
    return SimHave(number, chunks, bits_of(chunks))


class SimWant(NamedTuple):
    round: int
    chunks: Sequence[int]


class SimRelieve(NamedTuple):
    round: int
    chunks: Sequence[int]


class SimGetParts(NamedTuple):
    round: int


class SimParts(NamedTuple):
    """All records of the manifest."""

    round: int


Message = SimSubscribe | SimHave | SimWant | SimRelieve | SimGetParts | SimParts
