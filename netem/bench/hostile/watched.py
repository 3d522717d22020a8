"""`python -m netem.bench.hostile.watched LOG learner ...`: the `shoal` command, with what its head learns of nodes in LOG.

One JSON line each; times are CLOCK_MONOTONIC:

    ["trained", {peer: [tokens, nats]}, time]     what the trainer says of a step
    ["expelled", peer, why, time]                 as the head's log has it
"""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import sys
import time

from learner.head.trust import Trust

EXPELLED = re.compile(r"node (\S+) is expelled: (.*)", re.DOTALL)
"""The head's log line about it: who, and why."""


class NodeWatch(logging.Handler):
    """Writes expulsions down."""

    def __init__(self, log: int) -> None:
        super().__init__()
        self._log = log

    def write(self, *values: object) -> None:
        os.write(self._log, (json.dumps(values) + "\n").encode())

    def emit(self, record: logging.LogRecord) -> None:
        if found := EXPELLED.fullmatch(record.getMessage()):
            self.write("expelled", *found.groups(), time.monotonic())


def watch(log: int) -> None:
    """From here on this process writes down what its head learns of nodes."""
    handler, trained_on = NodeWatch(log), Trust.trained_on
    logging.getLogger("shoal.head").addHandler(handler)

    def trained(self: Trust, by_node: object) -> None:
        handler.write("trained", by_node, time.monotonic())
        trained_on(self, by_node)

    Trust.trained_on = trained  # type: ignore[method-assign]


if __name__ == "__main__":
    watch(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("shoal", run_name="__main__")
