"""Finished episodes of a built-in game, played once more by their tokens alone. Must not know journals, processes or torch.

It reads token ids with the vocabulary in the model's folder and asks the game itself, not the host that ran it: so tokens that an
episode got twice, lost, or got from another one show as other hints or another reward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import trio

from learner.environments.environment import Done, ModelTurn
from learner.tasks.port import Task
from learner.trajectory import Trajectory
from p2p.errors import ShoalError


class GameReplay:
    """`model`: the folder of the model that plays, which has one token a character."""

    def __init__(self, model: Path, task: Task) -> None:
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        self._texts = {i: "" if len(text) > 1 else text for text, i in vocabulary.items()}  # <eos> and the like say nothing
        assert task.environment is not None
        module, _, name = task.environment.name.partition(":")
        self._game, self._task = partial(getattr(import_module(module), name), **task.environment.options), task

    def check(self, task_index: int, episode: Trajectory) -> int:
        """How many turns it had. ShoalError where a token, a mask or the reward is not what the game gives."""
        wrong = trio.run(self._wrong, task_index, episode)
        if wrong:
            raise ShoalError(f"an episode of prompt {task_index} (seed {episode.seed}): {wrong}; ids {episode.completion_ids}")
        return len(episode.given) + 1

    async def _wrong(self, task_index: int, t: Trajectory) -> str:
        given = {at for gap in t.given for at in range(gap.start, gap.stop)}
        sampled = {at for span in t.spans for at in range(span.start, span.stop)} - given
        if sampled | given != set(range(len(t.completion_ids))):
            return "its versions and its gaps leave tokens out"
        if any(t.logprobs[at] != 0.0 for at in given):
            return "a given token has a log probability"
        game, begins = self._game(), 0
        game.begin(self._task.prompt(task_index).entry, 0)
        for number, gap in enumerate(t.given):
            answer = await game.respond(ModelTurn(self._text(t.completion_ids[begins : gap.start]), number))
            if answer != self._text(t.completion_ids[gap.start : gap.stop]):
                return f"turn {number} is answered otherwise: {answer!r:.60}"
            begins = gap.stop
        answer = await game.respond(ModelTurn(self._text(t.completion_ids[begins:]), len(t.given)))
        end = answer if isinstance(answer, Done) else Done(game.reward())
        worth = sum(end.reward.values()) if isinstance(end.reward, dict) else end.reward
        return "" if (t.reward, t.exact) == (worth, bool(end.exact)) else f"its reward is {t.reward}, the game's {worth}"

    def _text(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[i] for i in ids)
