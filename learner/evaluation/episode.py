"""A sample of an evaluation that has several turns: what a node and the environment are asked next. Pure.

The tokens of all turns follow each other and are never made of text again. Limits are those of training's episodes. Must not know
nodes, or what the environment does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from learner.environments.answers import episode_finish, unusable
from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.evaluation.result import SampledAnswer
from learner.requests.port import Ask

LIVES = 4
"""Lives of one episode: an environment that cannot be set back three times in a row will not be."""


class EpisodeLost(Exception):
    """The environment gave no answer that can be used; says why."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What bounds an episode, beside the `max_new_tokens` of its evaluation, which bounds all of it, given tokens included."""

    max_turns: int
    """turns of the model"""
    turn_tokens: int = 0
    """sampled tokens of one turn; 0: no bound of its own"""
    context: int = 0
    """tokens that the model takes, the prompt's included; 0: not known"""


class EvalEpisode:
    """One life of an episode. `ask` is what its first turn is asked with, `problem` the number by which the environment knows its
    prompt."""

    def __init__(self, ask: Ask, limits: EpisodeLimits, key: EpisodeKey, problem: int) -> None:
        room = limits.context - len(ask.prompt_ids)
        self._ask, self._limits, self._problem, self.key = ask, limits, problem, key
        self._most = min(ask.max_new_tokens, room) if limits.context else ask.max_new_tokens
        self._turns: list[Turn] = []
        self._over = ""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens after the prompt."""
        return tuple(token for turn in self._turns for ids in turn for token in ids)

    def next_ask(self) -> Ask:
        """The model's next turn. Each has a seed of its own, which does not depend on what was said."""
        held, number = self.ids, len(self._turns)
        left = max(1, self._most - len(held))  # of a prompt without room: whoever is asked says so
        return replace(
            self._ask, prompt_ids=self._ask.prompt_ids + held, max_new_tokens=min(left, self._limits.turn_tokens or left),
            seed=_seed(self._ask.seed, number) if number else self._ask.seed,
        )  # fmt: skip

    def sampled(self, turn: SampledAnswer) -> Episode:
        """The model took its turn: what the environment is asked."""
        self._turns.append(Turn(turn.ids))
        # One token for the environment and one for the model are the least of another turn.
        if len(self.ids) + 2 > self._most:
            return self._episode("length")
        return self._episode("turns" if len(self._turns) >= self._limits.max_turns else "")

    def answered(self, answer: TurnAnswer) -> SampledAnswer | Episode | None:
        """The environment's answer, to the last turn, which is not `anew`: the whole episode with its score; or what it must be
        asked besides, where the answer leaves no room for a turn; or None, and the model takes its next turn. EpisodeLost where
        it cannot be used."""
        wrong = unusable(answer, self._ask.stop_ids, None)
        if wrong:
            raise EpisodeLost(wrong)
        if answer.score is not None:
            ids = tuple(t for turn in self._turns for t in turn.sampled)
            return SampledAnswer(ids, episode_finish(answer.score, self._over), answer.score)
        if len(self.ids) + len(answer.given) >= self._most:
            return self._episode("length")
        self._turns[-1] = self._turns[-1]._replace(given=answer.given)
        return None

    def _episode(self, over: str) -> Episode:
        self._over = over
        return Episode(self.key, self._problem, tuple(self._turns), over)


def _seed(first: int, turn: int) -> int:
    """63 bits: of a later turn, whose first one has the seed `first`."""
    return int.from_bytes(hashlib.blake2b(f"turn {first} {turn}".encode(), digest_size=8).digest(), "little") >> 1
