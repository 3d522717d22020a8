"""`python -m netem.bench.hostile.rogue_node CHEAT SEED node ...`: the `shoal` command, whose node has an engine that cheats.

Only in a fork of the warm parent (`netem.processes.forked`): there the engine is a fork of the node and sees what is set here.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from netem.bench.hostile.cheats import CHEATS
from node.engine import child
from node.engine.port import EngineCore

if __name__ == "__main__":
    cheat, seed = CHEATS[sys.argv[1]], int(sys.argv[2])
    honest = child.make_core

    def make_core(kind: str, settings: dict[str, Any]) -> EngineCore:
        return cheat(honest(kind, settings), seed)

    child.make_core = make_core
    sys.argv[1:] = sys.argv[3:]
    runpy.run_module("shoal", run_name="__main__")
