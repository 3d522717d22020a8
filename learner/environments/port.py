"""The port between the rollouts and whoever runs episodes of several turns. Must not know nodes, versions, torch or the network.

An episode is one member of a group: the model takes a turn (sampled tokens), the environment answers (given tokens), until it is
over. The rollouts keep all tokens, and hand over the whole episode each time; so whoever runs it may lose its own state (a killed
process, a new life of the learner) and set it back by taking the turns again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio

from learner.tasks.port import Score


class EpisodeKey(NamedTuple):
    """One episode of this life of the learner. `life` goes up when it is begun anew."""

    group_id: int
    member: int
    life: int = 0


class Turn(NamedTuple):
    """A turn of the model, and what the environment answered."""

    sampled: tuple[int, ...]
    """token ids, the stop token included where there is one"""
    given: tuple[int, ...] = ()
    """token ids of the answer, the beginning of the next turn included (what a chat template calls the generation prompt); empty
    for the last turn of an episode, and for one that is not answered yet"""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode whose last turn waits for its answer."""

    key: EpisodeKey
    task_index: int
    """`Task.prompt(task_index)` began it"""
    turns: tuple[Turn, ...]
    """at least one"""
    over: str = ""
    """why no turn can follow: "length" (no tokens left), "turns" (the most there may be), "time"; "": one may. The environment is
    told, and scores what there is."""


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """What the environment made of an episode's last turn. One of three: it goes on with `given`, it is done with `score`, or it
    failed."""

    key: EpisodeKey
    number: int
    """how many turns the episode had when it was asked"""
    given: tuple[int, ...] = ()
    score: Score | None = None
    """the whole episode's: it is done"""
    anew: str = ""
    """why the episode cannot be set back, and must begin anew; "": it need not"""
    failed: str = ""
    """one line, which names the prompt: why its group must be given up"""


class EpisodeRunner(Protocol):
    """Whoever runs the episodes of a task. Nothing here waits: answers come through `answers`, in any order."""

    answers: trio.MemoryReceiveChannel[TurnAnswer]

    def respond(self, episode: Episode) -> None:
        """Have the environment answer the episode's last turn.

        The same turn may be asked about again, with `over`: then tokens are not wanted any more, also not those of an answer
        under way, and an answer must be a score (or `anew`, or `failed`). After a learner's restart an episode is asked about
        that this runner never saw: its turns say how it came there. An answer's `given` must not end with a stop token.
        """

    def forget(self, keys: Sequence[EpisodeKey]) -> None:
        """These are over, or given up: no answer is wanted any more."""
