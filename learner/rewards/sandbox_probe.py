"""What of the sandbox for scorers this machine has. There is no way back from any of it, so it is tried in a process of its own.

That process runs this module and prints, as JSON, the words for what could not be had. Must not know tasks or answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from learner.rewards import sandbox
from p2p.processes import child_environment, python_command

PROBE = "learner.rewards.sandbox_probe"
"""This module, as the program that gives everything up."""

ANSWER_S = 60.0
"""Seconds that it may take: it imports the standard library only, on a machine that may be busy."""

CANNOT_TELL = "an answer"
"""What is missing where the process itself did not end well."""


def missing_layers() -> list[str]:
    """The layers that could not be had; [] where scorers are confined by all of them."""
    try:
        asked = subprocess.run(
            python_command(PROBE), env=child_environment(), capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
        return [str(word) for word in json.loads(asked.stdout)]
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return [CANNOT_TELL]


def main() -> None:
    """Give everything up, and say what that lacked."""
    missing = [*sandbox.leave_network(), *sandbox.confine([sys.prefix, sys.base_prefix]), *sandbox.seal()]
    os.write(1, json.dumps(missing).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
