"""A program for a fork: a node's process that puts another core in the place of its engine's, which writes into `FILE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import trio

from node.engine import child
from node.engine.port import EngineCore
from node.engine.process import open_engine_process


async def open_and_close() -> None:
    async with open_engine_process("fake", {}):
        pass


if __name__ == "__main__":
    honest = child.make_core

    def make_core(kind: str, settings: dict[str, Any]) -> EngineCore:
        Path(sys.argv[1]).write_text(f"{kind} {os.getpid()} {os.getppid()}")
        return honest(kind, settings)

    child.make_core = make_core
    print(os.getpid())
    trio.run(open_and_close)
