"""Episodes in the real processes of environments, with a script that writes the model's turns in the place of nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from learner.environments.host import EnvironmentHost
from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.environments.settings import EnvironmentSection
from learner.tasks.port import Task
from learner.tasks.prompting import encode_prompt
from tests.support.request_twin import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS = 256
"""Its only special token."""

PATIENCE_S = 120.0
"""Seconds until an answer is given up: processes start on a busy machine."""


class EpisodeDriver:
    """Takes the rollouts' part: keeps the tokens, samples scripted turns."""

    def __init__(self, task: Task, host: EnvironmentHost) -> None:
        self.task, self.host = task, host
        self.turns: dict[EpisodeKey, tuple[Turn, ...]] = {}

    def text(self, key: EpisodeKey, index: int = 0) -> str:
        """All that the model read and wrote."""
        ids = [*encode_prompt(TOKENIZER, self.task.prompt(index), self.task.chat_format)]
        for turn in self.turns[key]:
            ids += [*turn.sampled, *turn.given]
        return str(TOKENIZER.decode(ids))

    async def says(self, member: int, text: str, over: str = "", index: int = 0) -> TurnAnswer:
        key = EpisodeKey(1, member)
        sampled = (*TOKENIZER.encode(text, add_special_tokens=False), EOS)
        self.turns[key] = (*self.turns.get(key, ()), Turn(sampled))
        self.host.respond(Episode(key, index, self.turns[key], over))
        with trio.fail_after(PATIENCE_S):
            answer = await self.host.answers.receive()
        assert answer.key == key and answer.number == len(self.turns[key])
        *before, last = self.turns[key]
        self.turns[key] = (*before, last._replace(given=answer.given))
        return answer


@asynccontextmanager
async def open_episodes(task: Task, **settings: Any) -> AsyncIterator[EpisodeDriver]:
    host = EnvironmentHost(task, TOKENIZER, [EOS], EnvironmentSection(**settings))
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        yield EpisodeDriver(task, host)
        nursery.cancel_scope.cancel()
