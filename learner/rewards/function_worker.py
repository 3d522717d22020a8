"""A process that calls a person's reward function, or the judge. It is not confined: the function is the person's own code, and
only reads what strangers wrote.

Its parent kills it when a call takes too long. It ends by itself when its parent does. Must not know groups or weights.
"""

from __future__ import annotations

import asyncio  # in a process of its own, for a person's function that is async
import inspect
import math
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner.rewards.built_in import JUDGE
from learner.rewards.frames import receive_frame, send_frame
from learner.rewards.judge import make_judge
from learner.rewards.loading import LoadedFunction, load_function, offered, prepared
from p2p.errors import UsageError

OURS = Path(__file__).resolve().parent
"""Where our own code for reward functions lies: its frames do not say where a person's function raised."""

MAX_TOLD = 300
"""Characters of an error's text that go to the log: a line."""


class BadReturn(Exception):
    """The function returned something that is no reward."""


def main() -> int:
    """The parent's socket is standard input; its first message {function, options} says what to call. Answers {whole, columns}
    when ready, {refused} where it cannot be had; then each request with {values} or {error}."""
    with socket.socket(fileno=os.dup(0)) as sock:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)  # the function's standard input is not our socket
        threading.Thread(target=_end_with_parent, args=(sock.fileno(),), daemon=True).start()
        try:
            setup = receive_frame(sock)
            try:
                function = _load(setup["function"], setup["options"])
            except UsageError as error:
                send_frame(sock, {"refused": str(error)})
                return 2
            send_frame(sock, {"whole": function.whole, "columns": sorted(function.columns)})
            while True:
                send_frame(sock, _answer(function, receive_frame(sock)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the parent is gone
    return 0


def _load(text: str, options: Mapping[str, Any]) -> LoadedFunction:
    if text == JUDGE:
        return prepared(make_judge(options), JUDGE, {})
    return load_function(text, options)


def _answer(function: LoadedFunction, request: dict[str, Any]) -> dict[str, Any]:
    try:
        returned = function.call(**function.arguments(offered(request, whole=function.whole)))
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        return {"values": _values(returned, len(request["completions"]), whole=function.whole)}
    except (UsageError, BadReturn) as error:
        return {"error": str(error)[:MAX_TOLD]}
    except BaseException as error:  # it is a person's code: SystemExit as well
        where = _where(error)
        return {"error": f"it raised {type(error).__name__}: {' '.join(str(error).split())}"[: MAX_TOLD - len(where)] + where}


def _where(error: BaseException) -> str:
    """The line of the person's file that raised it: " (rewards.py:12)"; "" where none of theirs did."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((str(OURS), "<"))]
    own = [f for f in frames if not f.filename.startswith((sys.prefix, sys.base_prefix))] or frames
    return f" ({os.path.basename(own[-1].filename)[-60:]}:{own[-1].lineno})" if own else ""


async def _awaited(returned: Any) -> Any:
    return await returned


def _values(returned: Any, count: int, *, whole: bool) -> list[float | None]:
    """A number or None for each completion. BadReturn for anything else."""
    if not whole:
        return [_number(returned)]
    try:
        values = list(returned)
    except TypeError:
        raise BadReturn(f"it returned {returned!r:.80}, not a list with a number for each completion") from None
    if len(values) != count:
        raise BadReturn(f"it returned {len(values)} values for {count} completions")
    return [_number(value) for value in values]


def _number(value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadReturn(f"it returned {value!r:.80}, which is no number") from None
    if not math.isfinite(number):
        raise BadReturn(f"it returned {number}, which is no reward")
    return number


def _end_with_parent(sock: int) -> None:
    """Ends this process when the other end of its socket is closed, also in the middle of a call."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))  # other systems than Linux: POLLHUP, always watched
    while not any(events & (getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR) for _, events in poll.poll()):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
