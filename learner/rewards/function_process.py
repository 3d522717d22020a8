"""A process that calls a person's reward function, started anew when it had to be killed. Blocking; must not know groups.

What runs there is `learner/rewards/function_worker.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from learner.rewards.confined import START_S
from learner.rewards.scoring_process import ProcessGone, ScoringProcess
from p2p.errors import ShoalError, UsageError
from p2p.processes import child_environment

WORKER = "learner.rewards.function_worker"
"""The module that the process runs."""


class FunctionProcess:
    """One reward function in one process. One call at a time; `close` may come from another thread."""

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        self.function, self._options = function, dict(options)
        self._lock = threading.Lock()
        self._process: ScoringProcess | None = None
        self._closed = False
        self.whole = False
        """whether it takes the completions of a group in one call; known once it was started"""

    def start(self) -> None:
        """Have the function loaded. UsageError when it cannot be."""
        with self._lock:
            if self._process is None:
                self._start()

    def close(self) -> None:
        """Ends the process; a call in another thread then raises ShoalError. Idempotent."""
        self._closed = True
        process = self._process
        if process is not None:
            process.end()

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """{values}, or {error} where the function gave none."""
        with self._lock:
            if self._process is None:
                try:
                    self._start()
                except UsageError as error:  # it did load once: this costs a group, and only several in a row the run
                    return {"error": str(error)}
            assert self._process is not None
            try:
                return self._process.ask(request, limit_s)
            except ValueError as error:
                return {"error": str(error)}
            except ProcessGone as error:
                said = self._process.last_line()
                self._drop()
                return {"error": f"{error}; it said: {said:.200}" if said != "nothing" else str(error)}

    def _start(self) -> None:
        if self._closed:
            raise ShoalError("the scorer is closed")
        process = self._process = ScoringProcess(WORKER, child_environment(), own_folder=False)
        if self._closed:  # `close` came while the process was being made and did not see it
            process.end()
        try:
            ready = process.ask({"function": self.function, "options": self._options}, START_S)
        except (ProcessGone, ValueError) as error:
            said = process.last_line()
            self._drop()
            raise UsageError(f"task.reward: {self.function} does not load: {error}; it said: {said:.200}") from None
        if "refused" in ready:
            self._drop()
            raise UsageError(str(ready["refused"]))
        self.whole = ready.get("whole") is True

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None
        if self._closed:
            raise ShoalError("the scorer is closed")
