"""Generation requests and the tokens that answer them: the values that head, agent and engine share.

Must not know when or to whom they travel, nor what a reward is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from p2p.protocol.wire import MAX_LINE, Blob, Count, Line, Name, Record
from p2p.version import Version

FINISH_REASONS = ("", "stop", "length", "interrupt", "abort", "error")
"""Why a sequence ended: "" it goes on; "stop" a stop token; "length" budget used up; "interrupt" handed back whole on
request (partial result kept); "abort" thrown away; "error" the engine could not go on (see the message)."""


BEHIND, PAST, UPDATING, DRAINING, RESTING = CAUSES = ("behind", "past", "updating", "draining", "resting")
"""Why a node does not take a request that is nobody's fault: "behind" its version is older than the one asked for, so later it
may; "past" it serves a newer one than the exact one asked for, so it never will; "updating" it finishes what it runs before
it commits a newer version, so soon it may; "draining" it leaves, so it never will;
"resting" its owner's limits let it take no work for now."""


@dataclass(frozen=True, slots=True)
class Generate:
    """One sequence to generate.

    `request_id` is unique per trajectory attempt. `prefix_ids` are completion tokens that another node already made
    (a migration): the engine goes on after them, and token positions count from the first prefix token.
    `max_new_tokens` bounds the whole completion, prefix included. The token drawn at completion position i depends
    only on (weights, tokens so far, temperature, top_p, seed, i), never on what else runs in the batch.
    `temperature` 0 is greedy. A node serves it only at a version >= `min_version`, and with `exact_version` only at that very
    one: every token that it makes for the request is of that version, and when the engine commits another one the sequence
    ends there with "interrupt", its tokens kept.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    min_version: Version
    temperature: float = 1.0
    top_p: float = 1.0
    prefix_ids: tuple[int, ...] = ()
    exact_version: Version | None = None


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. struct.error for one that is not in [0, 2**32)."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Inverse of `pack_ids`. ValueError on half an id."""
    if len(data) % 4:
        raise ValueError("token ids are not whole uint32 values")
    return struct.unpack(f"<{len(data) // 4}I", data)


class TokenEvent(Record, frozen=True):
    """Tokens newly made for one sequence, all under one version: the same value in the engine, on the wire and at the head.

    `start` is the completion position of the first one. A stop token is part of the completion. An event may carry no tokens;
    its version then says nothing of any. `Completion.spans` tells the versions of a whole completion.
    """

    request_id: Name
    start: Count
    packed_ids: Blob
    """little-endian uint32, one a token"""
    packed_logprobs: Blob
    """little-endian float32, one a token: its log probability (nats) under the distribution it was sampled from (after
    temperature and top_p; for greedy, under temperature 1)"""
    version: Version
    finish: Name
    """as in FINISH_REASONS"""
    message: Line

    @classmethod
    def of(
        cls, request_id: str, start: int, ids: Sequence[int], logprobs: Sequence[float] | np.ndarray, version: Version,
        finish: str = "", message: str = "",
    ) -> TokenEvent:  # fmt: skip
        """From values that are not packed yet. struct.error for an id that is not in [0, 2**32)."""
        packed = np.asarray(logprobs, "<f4").tobytes()
        return cls(request_id, start, pack_ids(ids), packed, version, finish=finish, message=message[:MAX_LINE])

    @property
    def whole(self) -> bool:
        """Whether there is one log probability for each id, and no half of either. The other properties rely on it."""
        return not len(self.packed_ids) % 4 and len(self.packed_ids) == len(self.packed_logprobs)

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.packed_ids) // 4

    def goes_on_with(self, later: TokenEvent) -> bool:
        """Whether `later`, of the same sequence, continues exactly where this ends, under the same version."""
        return self.version == later.version and not self.finish and self.start + self.count == later.start

    def joined(self, later: TokenEvent) -> TokenEvent:
        """This and what it goes on with, as one."""
        ids, logprobs = self.packed_ids + later.packed_ids, self.packed_logprobs + later.packed_logprobs
        return replace(later, start=self.start, packed_ids=ids, packed_logprobs=logprobs)

    @property
    def ids(self) -> tuple[int, ...]:
        return unpack_ids(self.packed_ids)

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [n]"""
        return np.frombuffer(self.packed_logprobs, "<f4")


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a completion were made under `version`."""

    version: Version
    start: int
    stop: int


MAX_LOGPROB = 1e-3
"""Log probabilities are at most 0; so much is left to rounding."""


@dataclass(slots=True)
class Completion:
    """Tokens gathered so far for one sequence. `add` refuses gaps, overlaps and versions that go backwards."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str = ""

    def add(self, event: TokenEvent) -> None:
        """Append an event's tokens. ValueError when they do not continue exactly where this stands."""
        if self.finish:
            raise ValueError(f"tokens after the end ({self.finish})")
        if not event.whole:
            raise ValueError(f"{len(event.packed_ids)} bytes of token ids with {len(event.packed_logprobs)} of logprobs")
        if event.count:
            logprobs = event.logprobs
            if event.start != len(self.ids):
                raise ValueError(f"tokens start at {event.start}, expected {len(self.ids)}")
            if not np.isfinite(logprobs).all() or float(logprobs.max()) > MAX_LOGPROB:
                raise ValueError("logprobs are not finite values <= 0")
            if self.spans and event.version < self.spans[-1].version:
                raise ValueError(f"version went back from {self.spans[-1].version} to {event.version}")
            self.extend(event.ids, logprobs.tolist(), event.version)
        self.finish = event.finish

    def give(self, ids: Sequence[int]) -> None:
        """Append tokens that nobody sampled: log probability 0, in no span."""
        self.ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))

    def cut(self, position: int) -> None:
        """Forget the tokens from `position` on."""
        del self.ids[position:], self.logprobs[position:]
        kept = [span for span in self.spans if span.start < position]
        self.spans = [Span(span.version, span.start, min(span.stop, position)) for span in kept]

    def extend(self, ids: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        """Append tokens that were checked."""
        start, spans = len(self.ids), self.spans
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        if spans and spans[-1].stop == start and (spans[-1].version is version or spans[-1].version == version):
            start = spans.pop().start
        spans.append(Span(version, start, len(self.ids)))
