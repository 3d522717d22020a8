"""Generation requests and the tokens that answer them: the values that head, agent and engine share.

Must not know how they travel, nor what a reward is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from p2p.version import Version

FINISH_REASONS = ("", "stop", "length", "interrupt", "abort", "error")
"""Why a sequence ended: "" it goes on; "stop" a stop token; "length" budget used up; "interrupt" handed back whole on
request (partial result kept); "abort" thrown away; "error" the engine could not go on (see the message)."""


@dataclass(frozen=True, slots=True)
class Generate:
    """One sequence to generate.

    `request_id` is unique per trajectory attempt. `prefix_ids` are completion tokens that another node already made
    (a migration): the engine goes on after them, and token positions count from the first prefix token.
    `max_new_tokens` bounds the whole completion, prefix included. The token drawn at completion position i depends
    only on (weights, tokens so far, temperature, top_p, seed, i), never on what else runs in the batch.
    `temperature` 0 is greedy. A node serves it only at a version >= `min_version`.
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


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens newly made for one sequence, all under one version.

    `start` is the completion position of `ids[0]`. `logprobs[i]` is the log probability (nats, float32) of `ids[i]`
    under the distribution it was sampled from (after temperature and top_p; for greedy, under temperature 1).
    A stop token is part of the completion. `finish` as in FINISH_REASONS; an event may carry no tokens.
    """

    request_id: str
    start: int
    ids: tuple[int, ...]
    logprobs: np.ndarray
    version: Version
    finish: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of a completion were made under `version`."""

    version: Version
    start: int
    stop: int


@dataclass
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
        if event.ids and event.start != len(self.ids):
            raise ValueError(f"tokens start at {event.start}, expected {len(self.ids)}")
        if len(event.ids) != len(event.logprobs):
            raise ValueError(f"{len(event.ids)} tokens with {len(event.logprobs)} logprobs")
        if not np.isfinite(event.logprobs).all() or (len(event.logprobs) and float(event.logprobs.max()) > 1e-3):
            raise ValueError("logprobs are not finite values <= 0")
        if self.spans and event.ids and event.version < self.spans[-1].version:
            raise ValueError(f"version went back from {self.spans[-1].version} to {event.version}")
        if event.ids:
            stop = event.start + len(event.ids)
            if self.spans and self.spans[-1].version == event.version:
                self.spans[-1] = Span(event.version, self.spans[-1].start, stop)
            else:
                self.spans.append(Span(event.version, event.start, stop))
            self.ids.extend(event.ids)
            self.logprobs.extend(float(x) for x in event.logprobs)
        self.finish = event.finish
