"""One piece of work at a time in a thread beside its owner's. Must not know what the work is."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Beside:
    """Work beside the thread that owns this: begun with `start`, over once `settle` returns.

    The thread ends with the process: what it does must be sound wherever it is cut off.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether the work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], object]) -> None:
        """Begin; RuntimeError while the work before has not been settled."""
        if self._thread is not None:
            raise RuntimeError(f"{self._name}: the work before is not settled")
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait for the work to be over, and raise what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def check(self) -> None:
        """Raise what the work raised, if it is over; never waits."""
        if not self.busy:
            self.settle()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
