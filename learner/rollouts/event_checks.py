"""What tokens from a node must be, and where they end a sequence, for whichever class of requests. Pure. Must not know groups,
attempts or who holds what.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, NamedTuple

from learner.rollouts.stop_strings import StopStrings
from p2p.protocol.rollout import FINISH_REASONS, Completion, TokenEvent
from p2p.version import Version

MIN_LOGPROB = -60.0
"""No sampler draws a token that is less likely (e^-60); the trainer's importance weights would overflow on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Which tokens may come next of one sequence."""

    held: int
    """completion tokens so far"""
    limit: int
    """completion tokens at the most"""
    stop_ids: tuple[int, ...]
    least: Version
    """of the next token"""
    exact: Version | None = None
    """the only version that may make tokens of it; None: any from `least` on"""
    published: Container[Version]
    vocab_size: int | None = None


def event_fault(event: TokenEvent, expected: Expected) -> str | None:
    """What is wrong with an event of the node that holds the sequence, beyond what Completion.add checks."""
    if not event.whole:
        return f"{len(event.packed_ids)} bytes of token ids with {len(event.packed_logprobs)} of logprobs"
    held, limit, stop_ids, ids = expected.held, expected.limit, expected.stop_ids, event.ids
    if ids:
        if event.version not in expected.published:
            return f"version {event.version} was never published"
        if event.version < expected.least:
            return f"version {event.version} is older than {expected.least}"
        if expected.exact is not None and event.version != expected.exact:
            return f"version {event.version} instead of {expected.exact} exactly"
        if float(event.logprobs.min()) < MIN_LOGPROB:
            return f"logprob {float(event.logprobs.min())} of a sampled token"
        if held + len(ids) > limit:
            return f"{held + len(ids)} tokens of {limit} asked for"
        if any(token in stop_ids for token in ids[:-1]):
            return "tokens after a stop token"
        if any(not 0 <= t < (expected.vocab_size or 1 << 31) for t in ids):
            return "a token id outside the vocabulary"
    last = ids[-1] if ids else None
    if event.finish == "stop" and last not in stop_ids:
        return "finished with stop and made no stop token"
    if event.finish == "length" and held + len(ids) < limit:
        return f"finished with length at {held + len(ids)} of {limit} tokens"
    if event.finish not in FINISH_REASONS:
        return f"unknown finish {event.finish!r:.40}"
    return None


Ending = Literal["", "stop", "length"]
"""How tokens show that their sequence has ended; "" when they do not."""


class Added(NamedTuple):
    """What came of an event's tokens."""

    wrong: str | None = None
    """what is wrong with them: none of them was added"""
    event: TokenEvent | None = None
    """what was added: without what came after a stop string; None where something is wrong"""
    ending: Ending = ""
    cut: bool = False
    """a stop string ended it, which the node does not know"""


def add_event(made: Completion, event: TokenEvent, expected: Expected, stop: StopStrings | None, start: int = 0) -> Added:
    """Add an event of the node that holds the sequence to what is `made` of it; `stop` looks at the text from token `start` on.
    The end is ours to tell: a node's flag is checked and not stored. Never raises on anything a node can send."""
    wrong = event_fault(event, expected)
    if wrong is not None:
        return Added(wrong)
    try:
        added = stop.cut(event, made.ids, start) if stop is not None else event
        made.add(added)
    except ValueError as error:
        return Added(str(error))
    made.finish = ""
    if added is not event:
        return Added(None, added, "stop", cut=True)
    if len(made.ids) <= start:  # what stands before the text was not made
        return Added(None, added)
    if made.ids[-1] in expected.stop_ids:
        return Added(None, added, "stop")
    return Added(None, added, "length" if len(made.ids) >= expected.limit else "")
