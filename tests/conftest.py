"""For all tests: programs that they start can be interrupted, however the suite itself was started."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a script's background jobs; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
