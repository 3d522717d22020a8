"""The Task port. Must not know torch, nodes, versions or how a prompt is tokenized."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from p2p.errors import UsageError

ChatMessage = Mapping[str, Any]
"""A chat message as chat templates and OpenAI's routes have it: "role", "content", and where there are any "tool_calls", "name",
"tool_call_id"."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. `text` is what the model reads: raw text, or the user turn when `chat` is set (the tokenizer's chat
    template is then applied). `entry` is whatever the task needs to score an answer; of a row of data, its columns by name."""

    index: int
    text: str
    entry: Any
    chat: bool = False
    held_out: bool = False
    messages: tuple[ChatMessage, ...] = ()
    """the whole prompt as chat messages, in place of `text` as the one user turn; only with `chat`"""
    where: str = ""
    """where it was read, for a person: "train.jsonl, row 17"; "" where it was made"""


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """What a reward function may read of a problem: its row's columns, or what its task needs as the column "answer"."""
    if isinstance(prompt.entry, Mapping):
        return {str(name): value for name, value in prompt.entry.items()}
    return {"answer": prompt.entry}


def listed(columns: Collection[str]) -> str:
    """The columns there are, for a message."""
    return f"it has: {', '.join(list(map(str, columns))[:12]) or 'none'}"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a task's chat prompts become text, beside the tokenizer's own template."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """further arguments of the template, as `enable_thinking`"""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the model may call"""


class EpisodeEnd(NamedTuple):
    """How an episode of several turns came to its end, and what its tools did."""

    over: str = ""
    """the limit that ended it: "length", "turns", "time"; "": its environment called it done"""
    calls: int = 0
    """tool calls in it, those that cannot be read included"""
    errors: int = 0
    """of these, the ones that were answered with an error"""


@dataclass(frozen=True, slots=True)
class Score:
    """What an answer is worth."""

    reward: float
    """any finite number"""
    exact: bool
    """fully right, by the task's own notion"""
    parts: Mapping[str, float] = field(default_factory=dict)
    """named parts of the reward, before their weights, where it has several"""
    end: EpisodeEnd | None = None
    """of an episode of several turns, where whoever ran it says so"""


def check_score(score: object) -> Score:
    """The score itself. ValueError for what is none, and for a reward that is no finite number: a person's code makes them."""
    if not isinstance(score, Score):
        raise ValueError(f"a {type(score).__name__} where a Score belongs")
    if not isinstance(score.reward, (int, float)) or not math.isfinite(score.reward):
        raise ValueError(f"a reward of {score.reward!r:.40}")
    return score


@dataclass(frozen=True, slots=True)
class Confined:
    """How a process that may be killed makes a task again, to score its answers there (`learner/rewards/scoring.py`)."""

    name: str
    seed: int
    options: dict[str, Any]
    runs_answers: bool
    """the scorer may run an answer as code: it must not happen where files can be read or written"""


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """How another process makes the environment that answers a task's turns (docs/environments.md)."""

    name: str
    """the class: "package.module:Class", or "file.py:Class" """
    options: Mapping[str, Any] = field(default_factory=dict)
    """keyword arguments of the class, as plain values"""
    unconfinable: str = ""
    """why it cannot run in the sandbox, for a person; "" where it can, or nobody knows"""


class Task:
    """Problems numbered from 0; the same (task, seed, index) gives the same problem in every process, for ever.

    Training draws indices 0, 1, 2, ...; held-out problems come from `held_out`, which never repeats a training
    problem where the task can promise that, and draws from a separate seed where it cannot.
    """

    name: str
    chat_format: ChatFormat = ChatFormat()
    stop: tuple[str, ...] = ()
    """strings that end a completion, beside the tokenizer's end of a turn"""
    confined: Confined | None = None
    """None: `score` is our own code and safe anywhere. Otherwise it must only be called through a Scorer."""
    environment: EnvironmentSource | None = None
    """None: a completion is one turn, and `score` rewards it. Otherwise an environment answers each turn, and rewards the
    episode; it begins with the prompt's `entry`, which must then be made of plain values."""

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Digests of the data that problems are read from, by source; none where they are made. A resumed run is told when they
        changed."""
        return {}

    @property
    def held_out_count(self) -> int | None:
        """How many held-out problems there are; None: no end of them."""
        return None

    def prompt(self, index: int) -> Prompt:
        raise NotImplementedError

    def held_out(self, index: int) -> Prompt:
        raise NotImplementedError

    def fit(self, tokens: Callable[[Prompt], int], most: int) -> None:
        """Leave out problems whose prompt has more than `most` tokens, or UsageError, where the task can tell them all. Called
        before the first problem is asked for; again where prompts became longer, by the tools of an environment."""

    def need(self, columns: Collection[str], who: str) -> None:
        """UsageError where a problem lacks one of these columns, which `who`, a reward function, cannot do without; or leave it
        out, where the task can. Called before the first problem is asked for."""
        have = columns_of(self.prompt(0))
        for column in columns:
            if column not in have:
                raise UsageError(
                    f"task.reward: {who} needs the column {column!r}, which task {self.name} does not have ({listed(have)})"
                )

    def score(self, prompt: Prompt, completion: str) -> Score:
        """Reward of a completion's text (special tokens stripped). Must not raise on any text: bad answers score low."""
        raise NotImplementedError

    def solution(self, prompt: Prompt) -> str | None:
        """A fully right completion, for a supervised warm-up; None when the task cannot tell."""
        return None

    def transcript(self, prompt: Prompt) -> Sequence[str]:
        """An episode as texts for a supervised warm-up: the model's turn, the environment's, the model's, and so on, the model's
        last. Empty when the task cannot tell, or has no environment."""
        return ()

    def characters(self) -> Sequence[str]:
        """Characters that prompts and solutions use, for building a small vocabulary; empty when unbounded."""
        return ()
