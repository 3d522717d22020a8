"""Runs tests of an answer whose code runs in a process of its own (`examinee`). The tests are ours, the answers a stranger's.

What a test uses of the answer are stand-ins: to call one asks the other process, and what comes back is plain data made anew
here, or a stand-in for an object that stays there. A stand-in is equal to itself alone. Must not know rewards or rows.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from types import CodeType
from typing import Any

from learner.rewards.frames import Stream, receive_frame, send_frame
from learner.rewards.plain_values import from_plain, to_plain


class AnswerGone(Exception):
    """The answer's process has ended, or said what is no answer."""


class AnswerRaised(Exception):
    """The answer raised what is no exception of Python's own."""


class AnswerProcess:
    """The other side of `examinee.Examinee`."""

    def __init__(self, sock: Stream) -> None:
        self._sock = sock

    def passes(self, test: CodeType) -> bool:
        """Whether the code, run anew, passes a test: nothing is raised. What the answer or the test raises goes through."""
        found = self._ask("begin", names=sorted(free_names(test)))
        names: dict[str, Any] = {"__name__": "test"} | {name: self._value(value) for name, value in found.items()}
        exec(test, names)
        return True

    def prints(self, given: str) -> list[str]:
        """The words that the code prints when it is given this."""
        said = self._ask("print", given=given)
        if not isinstance(said, str):
            raise AnswerGone("what it printed is no text")
        return said.split()

    def call(self, that: int, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the answer's object; arguments that it changed are changed here."""
        wire = [to_plain(value, _number) for value in given]
        said = self._said("call", that=that, given=wire, named={k: to_plain(v, _number) for k, v in named.items()})
        for value, changed in zip(given, said.get("changed") or [], strict=False):
            _take_over(value, self._value(changed) if changed is not None else None)
        return self._value(said.get("value"))

    def ask(self, do: str, that: int, name: Any = None) -> Any:
        """One of the examinee's requests about an object."""
        return self._value(self._ask(do, that=that, name=name))

    def _value(self, said: Any) -> Any:
        return from_plain(said, lambda number: StandIn(self, number))

    def _ask(self, do: str, **what: Any) -> Any:
        return self._said(do, **what).get("value")

    def _said(self, do: str, **what: Any) -> dict[str, Any]:
        try:
            send_frame(self._sock, {"do": do, **what})
            said = receive_frame(self._sock)
        except (EOFError, OSError, ValueError) as error:
            raise AnswerGone(str(error)) from None
        if "raised" in said:
            raise _exception(str(said["raised"]), str(said.get("text", "")))
        return said


class StandIn:
    """Something of the answer's that is no plain data: a function, a class, an object, a generator."""

    __slots__ = ("_answer", "_that")

    def __init__(self, answer: AnswerProcess, that: int) -> None:
        self._answer, self._that = answer, that

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._answer.call(self._that, given, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions about our object
            raise AttributeError(name)
        return self._answer.ask("get", self._that, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._answer.ask("list", self._that))

    def __len__(self) -> int:
        return int(self._answer.ask("length", self._that))

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, name: Any) -> Any:
        return self._answer.ask("item", self._that, to_plain(name, _number))


def free_names(code: CodeType) -> set[str]:
    """Names that a test may use and Python does not have: those are the answer's. What Python has stays Python's, so that an
    answer that calls something `abs` or `all` changes no test."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= free_names(constant)
    return {name for name in found if not hasattr(builtins, name) and not name.startswith("__")}


def _number(value: Any) -> int:
    if isinstance(value, StandIn):
        return value._that
    raise TypeError(f"a {type(value).__name__} cannot be given to an answer: plain data and its own objects can")


def _take_over(value: Any, changed: Any) -> None:
    """What a function made of its argument."""
    if type(value) is not type(changed) or changed is None:
        return
    if isinstance(value, (list, bytearray)):
        value[:] = changed
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(changed)


def _exception(name: str, text: str) -> Exception:
    """As the answer raised it, where it is one of Python's own: tests may expect it."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # some want more than a text
            pass
    return AnswerRaised(f"{name}: {text}")
