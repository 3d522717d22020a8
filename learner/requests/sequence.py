"""One sequence of evaluation or serving: what it is called, how far it is, what a node is asked for. Pure.

A request id is "LETTER.epoch.number.attempt", with e for evaluation and s for serving. Training's are three numbers
(`learner.rollouts.group`), so neither is ever taken for the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from learner.requests.port import Ask, Made, RequestClass
from learner.rollouts.event_checks import Expected
from p2p.errors import ShoalError, UsageError
from p2p.protocol.rollout import Completion, Generate
from p2p.version import Version

LETTERS: dict[str, RequestClass] = {"e": "evaluation", "s": "serving"}
"""First part of a request id -> its class."""

MAX_IDS = 1 << 20
"""Tokens of a prompt and of a completion that may be asked for: with both, a request is 8 MiB, far below a frame."""

MAX_STOP_IDS = 64
"""Stop ids of a request: each is looked for in every run of its tokens."""

ANY_VERSION = Version(0, 0)
"""Older than any that is published."""


class RequestId(NamedTuple):
    """What a request id says."""

    letter: str
    epoch: int
    number: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.letter}.{self.epoch}.{self.number}.{self.attempt}"


def parse_request_id(text: str) -> RequestId | None:
    """The parts of a request id in their one spelling, None for any other text."""
    letter, *numbers = text.split(".", 4)
    if len(text) > 64 or letter not in LETTERS or len(numbers) != 3 or not all(n.isascii() and n.isdigit() for n in numbers):
        return None
    found = RequestId(letter, *map(int, numbers))
    return found if str(found) == text else None


@dataclass(slots=True, eq=False)
class RequestSequence:
    """A sequence until its reader has left."""

    ask: Ask
    epoch: int
    number: int
    since: float
    """when it was asked for, or made its last token"""
    completion: Completion = field(default_factory=Completion)
    attempt: int = 0
    node: str = ""
    """who works on it; "" when it waits or is over"""
    last_node: str = ""
    """who was asked last"""
    before: int = 0
    """tokens that it had when that node was given it"""
    asked_back: bool = False
    """its node is to hand it back"""
    failures: float = 0.0
    """misdeeds of nodes that held it"""
    declines: float = 0.0
    """nodes that will not make it"""
    failed_on: set[str] = field(default_factory=set)
    lost_by: str = ""
    """the node that held it last when its link ended"""
    finish: str = ""
    """"stop" or "length" once it has ended"""
    error: ShoalError | None = None
    """why it cannot be made"""
    left: bool = False
    """its reader is gone"""
    wake: Callable[[], None] = lambda: None
    """something has changed that its reader waits for"""

    @property
    def request_id(self) -> str:
        """Of its present attempt."""
        return str(RequestId(self.ask.request_class[0], self.epoch, self.number, self.attempt))

    @property
    def over(self) -> bool:
        return bool(self.finish) or self.error is not None

    @property
    def tokens(self) -> int:
        """Completion tokens so far."""
        return len(self.completion.ids)

    @property
    def context(self) -> int:
        """Tokens that it holds on the node that takes it."""
        return len(self.ask.prompt_ids) + self.tokens

    @property
    def growth(self) -> float:
        """Tokens that it may still make, half of them: nothing is known of how long such completions are."""
        return (self.ask.max_new_tokens - self.tokens) / 2

    @property
    def least(self) -> Version:
        """What a node must be at to go on with it."""
        spans = self.completion.spans
        return spans[-1].version if spans else self.ask.exact_version or self.ask.min_version or ANY_VERSION

    def expected(self, published: set[Version], vocab_size: int | None) -> Expected:
        """What the next tokens must be."""
        ask = self.ask
        return Expected(
            held=self.tokens, limit=ask.max_new_tokens, stop_ids=ask.stop_ids, least=self.least, exact=ask.exact_version,
            published=published, vocab_size=vocab_size,
        )  # fmt: skip

    def generate(self) -> Generate:
        """What a node is asked for: seed and sampling as in every attempt, the tokens so far as a prefix."""
        ask = self.ask
        return Generate(
            self.request_id, ask.prompt_ids, max_new_tokens=ask.max_new_tokens, stop_ids=ask.stop_ids, seed=ask.seed,
            min_version=self.least, temperature=ask.temperature, top_p=ask.top_p, prefix_ids=tuple(self.completion.ids),
            exact_version=ask.exact_version,
        )  # fmt: skip

    def made(self, start: int) -> Made | None:
        """Its tokens from `start` on, as far as they are of one version; None when there are none."""
        span = next((s for s in self.completion.spans if s.start <= start < s.stop), None)
        if span is None:
            return None
        ids, logprobs = self.completion.ids[start : span.stop], self.completion.logprobs[start : span.stop]
        return Made(tuple(ids), tuple(logprobs), span.version, self.finish if span.stop == self.tokens else "")


def check_ask(ask: Ask, vocab_size: int | None) -> None:
    """UsageError for what no node could be asked for."""
    exact, least = ask.exact_version, ask.min_version
    for wrong, what in (
        (not ask.prompt_ids, "the prompt has no tokens"),
        (len(ask.prompt_ids) > MAX_IDS, f"a prompt of {len(ask.prompt_ids)} tokens; at most {MAX_IDS}"),
        (not 1 <= ask.max_new_tokens <= MAX_IDS, f"max_new_tokens = {ask.max_new_tokens}: from 1 to {MAX_IDS}"),
        (len(ask.stop_ids) > MAX_STOP_IDS, f"{len(ask.stop_ids)} stop ids; at most {MAX_STOP_IDS}"),
        (not 0 <= ask.seed < 1 << 63, f"seed = {ask.seed}: from 0 to 2^63 - 1"),
        (not (math.isfinite(ask.temperature) and ask.temperature >= 0), f"temperature = {ask.temperature}: 0 or more"),
        (not 0 < ask.top_p <= 1, f"top_p = {ask.top_p}: above 0, at most 1"),
        (exact is not None and least is not None and exact < least, f"version {exact} exactly, and at least {least}"),
    ):
        if wrong:
            raise UsageError(what)
    for ids, of in ((ask.prompt_ids, "the prompt"), (ask.stop_ids, "the stop ids")):
        bad = _outside(ids, vocab_size or 1 << 31)
        if bad is not None:
            raise UsageError(f"token id {bad} of {of} is outside the vocabulary")


def _outside(ids: Sequence[int], size: int) -> int | None:
    return next((i for i in ids if not 0 <= i < size), None)
