"""Engines that give something else than what the model would say: each wraps an honest core and answers as that would.

Must not know peers or the learner. What each does is in CHEATS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from node.engine.port import CommitResult, EngineCore, EngineStats, StateFile
from p2p.protocol.rollout import Generate, TokenEvent
from p2p.version import Version

CONSTANT_LOGPROB = -60.0
"""Nats that the constant tokens claim. The importance weight of such a token is as high as the objective allows."""

VOCABULARY = 40
"""Random tokens are drawn below this id: the demo's model has a few more."""

COPIES = 4
"""One answer in so many is made, the others are copies of one that was."""


class Whole(NamedTuple):
    """All tokens of an answer, after its request's prefix, and what is claimed of them."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str = "length"


class RogueCore(EngineCore):
    """`honest` does all that a rogue does not do itself. A rogue must look honest but for what it makes: it installs every
    version, names the right one, and ends its sequences."""

    def __init__(self, honest: EngineCore, seed: int) -> None:
        self.honest, self.chance = honest, np.random.default_rng(seed)
        self._made: list[TokenEvent] = []

    @property
    def version(self) -> Version:
        """The version that its tokens claim."""
        return self.honest.stats().version

    def load(self, model_dir: Path, state: StateFile) -> None:
        self.honest.load(model_dir, state)

    def add(self, request: Generate) -> None:
        self.answer(request, self.whole(request))

    def whole(self, request: Generate) -> Whole:
        """An answer that costs nothing to make."""
        raise NotImplementedError

    def answer(self, request: Generate, answer: Whole) -> None:
        """At once, and to the end."""
        made = TokenEvent.of(
            request.request_id, len(request.prefix_ids), answer.ids, answer.logprobs, version=self.version, finish=answer.finish
        )
        self._made.append(made)

    def step(self) -> list[TokenEvent]:
        made, self._made = self._made, []
        return made + [self.told(e) for e in self.honest.step()] if self.honest.has_work() else made

    def told(self, event: TokenEvent) -> TokenEvent:
        """What becomes of an honest event."""
        return event

    def has_work(self) -> bool:
        return bool(self._made) or self.honest.has_work()

    def interrupt(self, request_ids: Sequence[str] | None = None) -> list[TokenEvent]:
        return [self.told(e) for e in self.honest.interrupt(request_ids)]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.honest.abort(request_ids)

    def stage(self, state: StateFile) -> None:
        self.honest.stage(state)

    def commit(self) -> CommitResult:
        return self.honest.commit()

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        return self.honest.score(prompt_ids, completion_ids, temperature)

    def stats(self) -> EngineStats:
        return self.honest.stats()

    def close(self) -> None:
        self.honest.close()


def _left(request: Generate) -> int:
    return request.max_new_tokens - len(request.prefix_ids)


class Constant(RogueCore):
    """One token over and over, said to be all but impossible."""

    def whole(self, request: Generate) -> Whole:
        return Whole([7] * _left(request), [CONSTANT_LOGPROB] * _left(request))


class RandomTokens(RogueCore):
    """Tokens drawn at random, with the log probabilities of such."""

    def whole(self, request: Generate) -> Whole:
        """Without a stop token: it is as long as may be."""
        stops = set(request.stop_ids)
        ids = [int(i) for i in self.chance.integers(3, VOCABULARY, _left(request)) if int(i) not in stops]
        ids += [next(i for i in range(3, VOCABULARY) if i not in stops)] * (_left(request) - len(ids))
        return Whole(ids, [-math.log(VOCABULARY)] * len(ids))


class Copied(RogueCore):
    """Answers to other prompts, with the log probabilities that they had there."""

    def __init__(self, honest: EngineCore, seed: int) -> None:
        super().__init__(honest, seed)
        self._asked, self._growing = 0, dict[str, list[TokenEvent]]()
        self._answer: Whole | None = None

    def add(self, request: Generate) -> None:
        """Every COPIES-th is made, the others are answered at once."""
        self._asked += 1
        if self._answer is None or request.prefix_ids or self._asked % COPIES == 0:
            self.honest.add(request)
            if not request.prefix_ids:
                self._growing[request.request_id] = []
            return
        (ids, logprobs, finish), left = self._answer, _left(request)
        self.answer(request, Whole(ids[:left], logprobs[:left], finish if len(ids) <= left else "length"))

    def told(self, event: TokenEvent) -> TokenEvent:
        """What is made is kept as the next answer to copy."""
        grown = self._growing.get(event.request_id)
        if grown is not None:
            grown.append(event)
            if event.finish:
                del self._growing[event.request_id]
            if event.finish in ("stop", "length"):
                ids = [i for e in grown for i in e.ids]
                self._answer = Whole(ids, [float(x) for e in grown for x in e.logprobs], event.finish)
        return event


class MadeUp(RogueCore):
    """Honest tokens, and log probabilities drawn at random."""

    def add(self, request: Generate) -> None:
        self.honest.add(request)

    def told(self, event: TokenEvent) -> TokenEvent:
        claimed = self.chance.uniform(-3.0, 0.0, event.count).astype("<f4")
        return msgspec.structs.replace(event, packed_logprobs=claimed.tobytes())


class OldWeights(RogueCore):
    """It serves the version that it began with for ever, and says that it serves the newest."""

    def __init__(self, honest: EngineCore, seed: int) -> None:
        super().__init__(honest, seed)
        self._claimed: Version | None = None
        self._staged: Version | None = None

    @property
    def version(self) -> Version:
        return self._claimed or super().version

    def load(self, model_dir: Path, state: StateFile) -> None:
        super().load(model_dir, state)
        self._claimed = state.version

    def add(self, request: Generate) -> None:
        self.honest.add(replace(request, min_version=self.honest.stats().version, exact_version=None))

    def told(self, event: TokenEvent) -> TokenEvent:
        return msgspec.structs.replace(event, version=self.version)

    def stage(self, state: StateFile) -> None:
        self._staged = state.version

    def commit(self) -> CommitResult:
        assert self._staged is not None
        self._claimed, self._staged = self._staged, None
        return CommitResult(self._claimed, 0.0, 0.0)

    def stats(self) -> EngineStats:
        return replace(self.honest.stats(), version=self.version)


CHEATS: dict[str, Callable[[Any, int], RogueCore]] = {
    "constant": Constant, "random": RandomTokens, "copied": Copied, "made-up": MadeUp, "old-weights": OldWeights,
}  # fmt: skip
"""One token over and over, said to be all but impossible; tokens drawn at random, with the log probabilities of such; answers to
other prompts; honest tokens with log probabilities drawn at random; the weights of the start, said to be the newest."""
