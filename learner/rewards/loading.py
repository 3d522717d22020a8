"""A person's reward function: found by its name, and told by its parameters how it is to be called. Runs in a process of its own;
must not know that process, nor Shoal's tasks."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p.errors import UsageError

TAKEN = ("prompt", "completion", "completion_ids", "prompts", "completions")
"""Names of columns that are not handed on as columns: TRL's own, and ours."""

ABOUT_COMPLETIONS = {"prompts", "completions"}
"""Parameters by which a function that takes a whole group is known."""


OFFERED_SINGLE = frozenset({"prompt", "completion", "completion_ids"})
"""What a function for one completion may take beside columns."""

OFFERED_WHOLE = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""What one for a whole group may take beside columns: what TRL's trainer offers."""


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A reward function, ready to be called."""

    call: Callable[..., Any]
    """with keyword arguments"""
    whole: bool
    """it takes the completions of a group in lists (TRL's way), not one completion"""
    takes: frozenset[str] | None
    """names of its parameters; None: any keyword"""
    needs: frozenset[str]
    """those of them without a default"""

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the data that it cannot do without."""
        return self.needs - (OFFERED_WHOLE if self.whole else OFFERED_SINGLE)

    def arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """What of `offered` it takes. UsageError when something that it needs is not offered."""
        missing = sorted(self.needs - offered.keys())
        if missing:
            have = ", ".join(sorted(offered))
            raise UsageError(f"it needs {', '.join(map(repr, missing))}, which the row does not have (it has: {have})")
        return {name: value for name, value in offered.items() if self.takes is None or name in self.takes}


def load_function(text: str, options: Mapping[str, Any]) -> LoadedFunction:
    """The function of `file.py:function` or `module:function`, with `options` as further arguments. UsageError when it cannot be
    had, one line."""
    home, _, name = text.rpartition(":")
    try:
        module = _from_file(Path(home)) if home.endswith(".py") else _from_path(home)
    except UsageError:
        raise
    except Exception as error:  # it is a person's code: it may raise anything while it is imported
        raise UsageError(f"task.reward: {home} cannot be imported: {_told(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        has = f" (it has: {', '.join(functions)})" if functions else ""
        raise UsageError(f"task.reward: {home} has no function {name!r}{has}")
    return prepared(function, text, options)


def prepared(function: Callable[..., Any], text: str, options: Mapping[str, Any]) -> LoadedFunction:
    """A function with its signature read. UsageError when that is none of the two."""
    given = inspect.signature(function).parameters.values()
    named = {p.name: p for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    anything = any(p.kind is p.VAR_KEYWORD for p in given)
    strange = sorted(options.keys() - named.keys())
    if strange and not anything:
        raise UsageError(f"task.reward: {text} has no parameter {strange[0]!r}, which its options name")
    whole, single = bool(ABOUT_COMPLETIONS & named.keys()), "completion" in named
    if whole and single:
        raise UsageError(f"task.reward: {text} has both completion and completions: which is it to be given?")
    if not single and not whole and not anything:
        raise UsageError(
            f"task.reward: {text} is to take `completions` (all of a group, and return a list) or `completion` (one of them, and "
            f"return a number); its parameters are {', '.join(named) or 'none'}"
        )
    needs = frozenset(name for name, p in named.items() if p.default is p.empty and name not in options)
    takes = None if anything else frozenset(named)
    loaded = LoadedFunction(functools.partial(function, **options), not single, takes, needs)
    for name in sorted(loaded.columns & set(TAKEN)):
        kind = "one completion" if single else "all completions of a group"
        more = ", ".join(sorted(OFFERED_SINGLE if single else OFFERED_WHOLE))
        raise UsageError(f"task.reward: {text} has the parameter {name!r}: who takes {kind} is given columns and {more}")
    return loaded


def offered(request: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """The keyword arguments that a function may take, of {prompt, chat, completions, ids, columns}: the way TRL's GRPOTrainer
    calls it (`whole`), or for one completion."""
    columns = {name: value for name, value in request["columns"].items() if name not in TAKEN}
    completions: Sequence[str] = request["completions"]
    if not whole:
        return {**columns, "prompt": request["prompt"], "completion": completions[0], "completion_ids": request["ids"][0]}
    n = len(completions)
    prompt = request["prompt"]
    if request["chat"] and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return {
        **{name: [value] * n for name, value in columns.items()},
        "prompts": [prompt] * n,
        "completions": [[{"role": "assistant", "content": c}] for c in completions] if request["chat"] else list(completions),
        "completion_ids": [list(ids) for ids in request["ids"]],
        # What TRL's trainer offers besides; nothing of it is kept here.
        "trainer_state": None, "log_extra": _ignored, "log_metric": _ignored,
    }  # fmt: skip


def _ignored(*_: object) -> None:
    """Extra columns and metrics that a function would have logged."""


def _from_file(path: Path) -> Any:
    path = path.absolute()
    if not path.is_file():
        raise UsageError(f"task.reward: no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # for what lies beside it
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _from_path(name: str) -> Any:
    sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
