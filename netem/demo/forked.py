"""A process that is a fork of this one, seen as subprocess.Popen sees its own. Must not know what it runs."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable


class ForkedProcess:
    """`run()` in a child process that ends with what it returns. To be made by the main thread: what other threads held at that
    moment stays held in the child."""

    def __init__(self, run: Callable[[], int]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _child(run)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None and self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        deadline = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _child(run: Callable[[], int]) -> None:
    """Never returns: the frames above belong to the parent, and so do its handlers and what it would do at exit."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        code = run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
