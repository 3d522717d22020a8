"""A task with what the settings put around it, a system prompt and examples; and a user's code with its errors in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from learner.tasks.data.form import led
from learner.tasks.port import Prompt, Score, Task
from learner.tasks.settings import TaskSettings
from learner.user_code import told
from p2p.errors import ShoalError, UsageError


class WrappedTask(Task):
    """`inner` but for its prompts, which have a system prompt and examples before them. Everything that the port does not have
    is `inner`'s own."""

    def __init__(self, inner: Task, settings: TaskSettings) -> None:
        self.inner, self._settings = inner, settings
        self.name, self.chat_format, self.stop, self.confined = inner.name, inner.chat_format, inner.stop, inner.confined
        self.environment = inner.environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def fingerprint(self) -> Mapping[str, str]:
        return self.inner.fingerprint

    @property
    def held_out_count(self) -> int | None:
        return self.inner.held_out_count

    def prompt(self, index: int) -> Prompt:
        return self._dressed(self._asked(f"problem {index}", lambda: self.inner.prompt(index)))

    def held_out(self, index: int) -> Prompt:
        return self._dressed(self._asked(f"held-out problem {index}", lambda: self.inner.held_out(index)))

    def score(self, prompt: Prompt, completion: str) -> Score:
        return self.inner.score(prompt, completion)

    def solution(self, prompt: Prompt) -> str | None:
        return self.inner.solution(prompt)

    def transcript(self, prompt: Prompt) -> Sequence[str]:
        return self.inner.transcript(prompt)

    def characters(self) -> Sequence[str]:
        return self.inner.characters()

    def fit(self, tokens: Callable[[Prompt], int], most: int) -> None:
        self.inner.fit(tokens, most)

    def need(self, columns: Collection[str], who: str) -> None:
        self._asked("problem 0", lambda: self.inner.prompt(0))
        self.inner.need(columns, who)

    def _asked(self, what: str, make: Callable[[], Prompt]) -> Prompt:
        try:
            prompt = make()
        except ShoalError:
            raise
        except Exception as error:  # a user's code: it may raise anything
            raise UsageError(f"task {self.name}: {what}: {told(error)}") from error
        if not isinstance(prompt, Prompt):
            raise UsageError(f"task {self.name}: {what} is a {type(prompt).__name__} and no Prompt")
        return prompt

    def _dressed(self, prompt: Prompt) -> Prompt:
        s = self._settings
        if not (s.system_prompt or s.few_shot):
            return prompt
        if not prompt.chat:
            raise UsageError(f"task {self.name}: task.system_prompt and task.few_shot go with chat prompts, and it has none")
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        return replace(prompt, messages=led(s, messages))
