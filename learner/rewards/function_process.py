"""A process that calls a person's reward function, started anew when it had to be killed. Blocking; must not know groups.

What runs there is `learner/rewards/function_worker.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from learner.rewards.confined import START_S
from learner.rewards.scoring_process import KeptProcess, ProcessGone
from p2p.errors import UsageError
from p2p.processes import child_environment

WORKER = "learner.rewards.function_worker"
"""The module that the process runs."""


class FunctionProcess(KeptProcess):
    """One reward function in one process. One call at a time; `close` may come from another thread."""

    def __init__(self, function: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.function, self._options = function, dict(options)
        self.whole = False
        """whether it takes the completions of a group in one call; known once it was started"""
        self.columns: tuple[str, ...] = ()
        """columns of the data that it needs; known then, too"""

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
        process = self._make(WORKER, child_environment(), own_folder=False)
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
        self.columns = tuple(map(str, ready.get("columns", ())))
