"""Where a version is on its way, told with the time: one line of the log for each stage that it reached in this process.

The clock is the machine's monotonic one, which all its processes share: lines of several processes on one machine can be put side
by side (`shoal bench wan` does). Logged at level DEBUG, which learner and node show with `-v`. Must not know who reads it.
"""

from __future__ import annotations

import logging
import re
import time
from typing import NamedTuple

from p2p.version import Version

LOGGER = "shoal.stages"
"""The name of the logger, which `-v` turns on."""

log = logging.getLogger(LOGGER)

_LINE = re.compile(r"stage of version (\d+\.\d+): (.+) at (\d+\.\d+)$", re.MULTILINE)
"""What `reached` logs, at the end of a line."""


class Reached(NamedTuple):
    """One line of `reached`."""

    version: Version
    stage: str
    at_s: float
    """seconds of the machine's monotonic clock"""


def reached(version: Version, stage: str, *, ago_s: float = 0.0) -> None:
    """Say that `version` has reached `stage` in this process, `ago_s` seconds ago."""
    log.debug("stage of version %s: %s at %.4f", version, stage, time.monotonic() - ago_s)


def read_stages(text: str) -> list[Reached]:
    """The stages that a log tells of, in its order."""
    return [Reached(Version.parse(version), stage, float(at)) for version, stage, at in _LINE.findall(text)]
