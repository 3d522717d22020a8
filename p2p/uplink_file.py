"""How fast this host's uplink was, kept from one start to the next: the pace of a first version need not be found out again.

Must not know what is sent. A file that cannot be read or written costs the memory alone.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Protocol

import trio

from p2p.allowance.limits import MBIT
from p2p.files import write_whole

log = logging.getLogger("shoal.swarm")

UPLINK_FILE = "uplink.json"
"""In the folder of a node or a run."""

KEEP_S = 60.0
"""Seconds between two looks whether the rate changed."""

CHANGED = 0.1
"""A rate that differs by less than this part from the one that is kept is not written."""

TCP_PART = 0.95
"""The part of a line's rate that TCP delivers over it: the rest is heads of packets."""

FASTEST = 1e12
"""Bytes/s. More than that in the file is nonsense."""


class Sends(Protocol):
    """Whose uplink it is."""

    @property
    def found_uplink(self) -> float:
        """Bytes/s that the uplink was seen to carry and that are worth remembering; 0 for none."""

    def expect_uplink(self, rate: float, *, told: bool) -> None:
        """What the uplink carries, in bytes/s, as far as is known before anything is sent."""


def recall_uplink(folder: Path, swarm: Sends, told_mbit: float = 0.0) -> None:
    """Tell `swarm`, before it sends anything, what its uplink carries: `told_mbit` (Mbit/s on the line) by its owner, or what is
    kept in `folder`; nothing where neither is known."""
    if told_mbit:
        swarm.expect_uplink(TCP_PART * told_mbit * MBIT, told=True)
    elif kept := read_uplink(folder):
        swarm.expect_uplink(kept, told=False)


def read_uplink(folder: Path) -> float:
    """Bytes/s that were kept in `folder`; 0 where nothing readable is."""
    try:
        rate = float(json.loads((folder / UPLINK_FILE).read_bytes())["bytes_per_s"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return 0.0
    return rate if 0 < rate <= FASTEST else 0.0


async def keep_uplink(folder: Path, swarm: Sends) -> None:
    """Keep in `folder` what the uplink of `swarm` carries, for ever and when this ends."""
    kept = read_uplink(folder)

    def keep() -> None:
        nonlocal kept
        rate = swarm.found_uplink
        if rate and abs(rate - kept) > CHANGED * kept:
            kept = rate
            try:
                write_whole(folder / UPLINK_FILE, json.dumps({"bytes_per_s": round(rate)}))
            except OSError as error:
                log.warning("%s cannot be written: %s", folder / UPLINK_FILE, error)

    try:
        while True:
            await trio.sleep(KEEP_S)
            keep()
    finally:
        keep()
