"""Problems from the reasoning-gym package, one of its data sets per task. Must not know torch or tokenizers.

A reasoning-gym data set makes item i from the generator seed + i, so streams of nearby seeds overlap: the held-out
stream starts 2**30 generator seeds away, out of reach of any training index.

Some of its scorers evaluate an answer as Python, and some never end on some answers. So `score` runs in a process of its own
(`learner/rewards/scoring.py`), never in the learner's.
"""

from __future__ import annotations

import contextlib
import io
import types
from collections.abc import Iterator
from typing import Any

from learner.tasks.port import Confined, Prompt, Score, Task
from p2p.errors import UsageError
from p2p.verbs import nearest

SIZE = 1 << 20
"""Problems of a data set unless the options say otherwise: a bound, since indices wrap at it. Some data sets build a table of
this length when they are made (8 MB)."""

HELD_OUT_OFFSET = 1 << 30
"""Generator seeds between the two streams: far more than SIZE, so that no training index reaches a held-out problem."""

_EVALUATORS = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "simplify", "S"}
"""Names of functions, Python's and sympy's, that run a string as code."""


class ReasoningGymTask(Task):
    """`dataset` with reasoning-gym's own options. `chat` marks prompts as user turns for the chat template.

    The answer is what stands in the last <answer>...</answer> of a completion, or the whole text where there is none.
    """

    def __init__(self, dataset: str, seed: int, chat: bool = True, size: int = SIZE, **options: Any) -> None:
        self.name = f"reasoning_gym:{dataset}"
        try:
            import reasoning_gym
            from reasoning_gym.utils import extract_answer
        except ModuleNotFoundError as error:
            need = "which is not installed: pip install '.[reasoning-gym]' from Shoal's checkout"
            raise UsageError(f"task {self.name} needs the package reasoning-gym, {need} ({error})") from None
        if not isinstance(chat, bool):
            raise UsageError(f"task {self.name}: chat = {chat!r} is neither true nor false")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"task {self.name}: size = {size!r} is not a number of problems above 0")
        self.chat = chat
        self.size = size
        self._extract = extract_answer
        try:
            self._train = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **options)
            self._held_out = reasoning_gym.create_dataset(dataset, size=size, seed=seed + HELD_OUT_OFFSET, **options)
            self.prompt(0)  # some options are only found wrong when a problem is made of them
        except Exception as error:  # they are a person's options in somebody's code: it may raise anything
            what = " ".join(str(error).split()) or type(error).__name__
            from reasoning_gym.factory import DATASETS

            meant = "" if dataset in DATASETS else nearest(dataset, DATASETS)
            raise UsageError(f"task {self.name}: {what}{meant}") from error
        self.confined = Confined(self.name, seed, {**options, "chat": chat, "size": size}, runs_answers(type(self._train)))

    def prompt(self, index: int) -> Prompt:
        entry = self._train[index % self.size]
        return Prompt(index, entry["question"], entry, self.chat)

    def held_out(self, index: int) -> Prompt:
        entry = self._held_out[index % self.size]
        return Prompt(index, entry["question"], entry, self.chat, held_out=True)

    def score(self, prompt: Prompt, completion: str) -> Score:
        """See `Task.score`: the data set's own score, cut to 0..1; 0 where its scorer raises."""
        dataset = self._held_out if prompt.held_out else self._train
        answer = self._extract(completion) or completion.strip()
        try:
            # Some scorers print what they could not parse; a model's babble must not fill the learner's log.
            with contextlib.redirect_stdout(io.StringIO()):
                reward = min(max(float(dataset.score_answer(answer, prompt.entry)), 0.0), 1.0)
        except Exception:  # the port promises never to raise; the scorers evaluate free text and raise anything
            reward = 0.0
        return Score(reward, reward >= 1.0)

    def solution(self, prompt: Prompt) -> str | None:
        answer = prompt.entry.get("answer")
        return answer if isinstance(answer, str) else None


def runs_answers(dataset: type) -> bool:
    """Whether this data set's scorer may run an answer as code: it, or a function of reasoning-gym's that it may call,
    names an evaluator or anything of sympy's (which evaluates strings in many places). Errs towards yes."""
    if dataset.__name__ == "CompositeDataset":
        return True  # it hands answers to scorers that it finds by name
    seen: set[object] = set()
    todo: list[Any] = [dataset.score_answer]  # type: ignore[attr-defined]
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in _names(function.__code__):
            found = function.__globals__.get(name, getattr(dataset, name, None))
            home = getattr(found, "__module__", None) or getattr(found, "__name__", "")
            if name in _EVALUATORS or str(home).split(".")[0] == "sympy":
                return True
            if isinstance(found, types.FunctionType) and str(home).split(".")[0] == "reasoning_gym":
                todo.append(found)
    return False


def _names(code: types.CodeType) -> Iterator[str]:
    """Every name that a function's code looks up, nested functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
