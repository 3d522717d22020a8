"""`python -m tests.support.cheating_node HOW OPTIONS...`: `shoal node OPTIONS...` whose engine cheats (`cheating_child`)."""

from __future__ import annotations

import os
import sys

import node.engine.process
from shoal import main

if __name__ == "__main__":
    os.environ["SHOAL_CHEAT"] = sys.argv[1]
    node.engine.process.CHILD = "tests.support.cheating_child"
    sys.exit(main(["node", *sys.argv[2:]]))
