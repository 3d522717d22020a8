"""The chat demo's questions as a task of the study: a real chat model learns to answer in one word. Must not know torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from random import Random
from typing import Any

from learner.tasks.port import Prompt, Score, Task
from netem.demo.recipes import CHAT, RECIPES

HELD_OUT = 48
"""Questions that are not trained on: as many as the demo evaluates."""


class ChatTask(Task):
    """The demo's rows, in an order of the seed; its reward function is called in this process, for it is the project's own."""

    name = "chat"

    def __init__(self, seed: int) -> None:
        rows = [json.loads(line) for line in (CHAT / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
        Random(0).shuffle(rows)  # what is held out is the same for every seed
        self._held_out, self._rows = rows[:HELD_OUT], rows[HELD_OUT:]
        Random(seed).shuffle(self._rows)
        self._system = RECIPES["chat"].learner["task"]["system_prompt"]
        self._reward = _reward_function(CHAT / "rewards.py")

    @property
    def held_out_count(self) -> int:
        return HELD_OUT

    def prompt(self, index: int) -> Prompt:
        return self._asked(index, self._rows[index % len(self._rows)])

    def held_out(self, index: int) -> Prompt:
        return self._asked(index, self._held_out[index % HELD_OUT])

    def _asked(self, index: int, row: dict[str, str]) -> Prompt:
        turns = ({"role": "system", "content": self._system}, {"role": "user", "content": row["prompt"]})
        return Prompt(index, row["prompt"], row, chat=True, messages=turns)

    def score(self, prompt: Prompt, completion: str) -> Score:
        reward = float(self._reward(completion, answer=prompt.entry["answer"]))
        return Score(reward, exact=reward >= 1.0)


def _reward_function(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("shoal_chat_rewards", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score
