"""An answer's own process: runs its code, and does what the tests ask of it. It is a stranger's from its first line on.

It has a socket to whoever examines it and nothing else: the pipe that a reward goes through is not there. So an answer may say
what it likes about its functions' results, and cannot say what it is worth. Must not know tests or rewards.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping
from typing import Any

from learner.rewards.frames import Stream, receive_frame, send_frame
from learner.rewards.plain_values import from_plain, to_plain

MOST_OBJECTS = 100_000
"""Objects of an answer that its tests may hold at once: a bound on memory that a loop in a test would fill."""

_CHANGED = (list, dict, set, bytearray)
"""Types of arguments that a function may change in place, which its caller then sees."""


class _Objects:
    """What is not plain stays here and goes by number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def refer(self, value: Any) -> int:
        if len(self._objects) >= MOST_OBJECTS:
            raise TypeError(f"more than {MOST_OBJECTS} objects")
        self._objects.append(value)
        return len(self._objects) - 1

    def of(self, number: Any) -> Any:
        return self._objects[number]


class Examinee:
    """One answer. Each request is {do, ...}; the answer {value} or {raised, text}."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._names: dict[str, Any] = {}
        self._objects = _Objects()

    def serve(self, sock: Stream) -> None:
        """Until the other side is gone."""
        while True:
            try:
                request = receive_frame(sock)
            except EOFError:
                return
            send_frame(sock, self._done(request))

    def _done(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return getattr(self, f"_{request['do']}")(request)
        except BaseException as error:  # an answer may raise anything: SystemExit as well
            return {"raised": type(error).__name__, "text": str(error)[:500]}

    def _begin(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the code; which of `names` it has made, by what they are."""
        self._names, self._objects = {"__name__": "answer"}, _Objects()
        exec(compile(self._code, "<answer>", "exec"), self._names)
        return {"value": {n: self._plain(self._names[n]) for n in request["names"] if n in self._names}}

    def _print(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run the code as a program; what it prints, until it ends itself."""
        said, stdin = io.StringIO(), sys.stdin
        sys.stdin = io.StringIO(request["given"])
        try:
            with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                exec(compile(self._code, "<answer>", "exec"), {"__name__": "__main__"})
        finally:
            sys.stdin = stdin
        return {"value": said.getvalue()}

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call an object; `changed` are its arguments afterwards, where it may have changed them."""
        given = [from_plain(value, self._objects.of) for value in request["given"]]
        named = {name: from_plain(value, self._objects.of) for name, value in request["named"].items()}
        value = self._objects.of(request["that"])(*given, **named)
        changed = [self._plain(value) if type(value) in _CHANGED else None for value in given]
        return {"value": self._plain(value), "changed": changed}

    def _get(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"value": self._plain(getattr(self._objects.of(request["that"]), request["name"]))}

    def _list(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"value": self._plain(list(self._objects.of(request["that"])))}

    def _length(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"value": len(self._objects.of(request["that"]))}

    def _item(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"value": self._plain(self._objects.of(request["that"])[from_plain(request["name"], self._objects.of)])}

    def _plain(self, value: Any) -> Any:
        return to_plain(value, self._objects.refer)
