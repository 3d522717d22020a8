"""Problems from the reasoning-gym package, one of its data sets per task. Must not know torch or tokenizers.

A reasoning-gym data set makes item i from the generator seed + i, so streams of nearby seeds overlap: the held-out
stream starts 2**30 generator seeds away, out of reach of any training index.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

from learner.tasks.base import Prompt, Score, Task
from p2p.errors import UsageError

SIZE = 1 << 20
"""Nominal length. Some data sets build a table of this length when created (8 MB): a bound, not a budget."""

HELD_OUT_OFFSET = 1 << 30


class ReasoningGymTask(Task):
    """`dataset` with reasoning-gym's own options. `chat` marks prompts as user turns for the chat template.

    The answer is what stands in the last <answer>...</answer> of a completion, or the whole text where there is none.
    """

    def __init__(self, dataset: str, seed: int, chat: bool = True, size: int = SIZE, **options: Any) -> None:
        import reasoning_gym
        from reasoning_gym.utils import extract_answer

        self.name = f"reasoning_gym:{dataset}"
        self.chat = chat
        self.size = size
        self._extract = extract_answer
        try:
            self._train = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
            self._held_out = reasoning_gym.create_dataset(dataset, size=size, seed=seed + HELD_OUT_OFFSET, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise UsageError(f"task {self.name}: {error}") from error

    def prompt(self, index: int) -> Prompt:
        entry = self._train[index % self.size]
        return Prompt(index, entry["question"], ("train", entry), self.chat)

    def held_out(self, index: int) -> Prompt:
        entry = self._held_out[index % self.size]
        return Prompt(index, entry["question"], ("held_out", entry), self.chat)

    def score(self, prompt: Prompt, completion: str) -> Score:
        stream, entry = prompt.entry
        dataset = self._train if stream == "train" else self._held_out
        answer = self._extract(completion) or completion.strip()
        try:
            # Some scorers print what they could not parse; a model's babble must not fill the learner's log.
            with contextlib.redirect_stdout(io.StringIO()):
                reward = min(max(float(dataset.score_answer(answer, entry)), 0.0), 1.0)
        except Exception:  # the port promises never to raise; the scorers evaluate free text and raise anything
            reward = 0.0
        return Score(reward, reward >= 1.0)

    def solution(self, prompt: Prompt) -> str | None:
        answer = prompt.entry[1].get("answer")
        return answer if isinstance(answer, str) else None
