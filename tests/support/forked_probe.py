"""A program for a fork: says what it finds, then ends with the status that it is told. `FIRST STATUS`"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    print(sys.argv[1], "node.engine.transformers" in sys.modules, os.getsid(0), os.getpgid(0))
    print("leaving", file=sys.stderr)
    sys.exit(int(sys.argv[2]))
