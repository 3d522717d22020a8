"""For all tests: programs that they start can be interrupted, however the suite itself was started; what hypothesis prints."""

from __future__ import annotations

import signal

import hypothesis

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a script's background jobs; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A failure is to be had again from its output alone, on any machine: the blob goes into @reproduce_failure.
hypothesis.settings.register_profile("shoal", print_blob=True, deadline=None)
hypothesis.settings.load_profile("shoal")
