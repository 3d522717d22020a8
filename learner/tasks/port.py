"""The Task port. Must not know torch, nodes, versions or how a prompt is tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. `text` is what the model reads: raw text, or the user turn when `chat` is set (the tokenizer's chat
    template is then applied). `entry` is whatever the task needs to score an answer."""

    index: int
    text: str
    entry: Any
    chat: bool = False
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    reward: float
    exact: bool
    """fully right, by the task's own notion"""


@dataclass(frozen=True, slots=True)
class Confined:
    """How a process that may be killed makes a task again, to score its answers there (`learner/rewards/scoring.py`)."""

    name: str
    seed: int
    options: dict[str, Any]
    runs_answers: bool
    """the scorer may run an answer as code: it must not happen where files can be read or written"""


class Task:
    """Problems numbered from 0; the same (task, seed, index) gives the same problem in every process, for ever.

    Training draws indices 0, 1, 2, ...; held-out problems come from `held_out`, which never repeats a training
    problem where the task can promise that, and draws from a separate seed where it cannot.
    """

    name: str
    confined: Confined | None = None
    """None: `score` is our own code and safe anywhere. Otherwise it must only be called through a Scorer."""

    def prompt(self, index: int) -> Prompt:
        raise NotImplementedError

    def held_out(self, index: int) -> Prompt:
        raise NotImplementedError

    def score(self, prompt: Prompt, completion: str) -> Score:
        """Reward of a completion's text (special tokens stripped). Must not raise on any text: bad answers score low."""
        raise NotImplementedError

    def solution(self, prompt: Prompt) -> str | None:
        """A fully right completion, for a supervised warm-up; None when the task cannot tell."""
        return None

    def characters(self) -> Sequence[str]:
        """Characters that prompts and solutions use, for building a small vocabulary; empty when unbounded."""
        return ()
