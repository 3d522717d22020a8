"""The verb `shoal demo`: its flags.

Must not know the other verbs, exit statuses or how errors are told: it returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.verbs import AddVerb



def add_verbs(verbs: Any, verb: AddVerb) -> None:
    """`verbs`: argparse's subparsers of the whole command."""
    p = verb("demo", _demo, "run a learner and three nodes on this machine, with a small model", verbs)
    p.add_argument("--run-dir", type=Path, default=None,
                   help="directory of the demo (default runs/demo; an earlier demo there is replaced)")
    p.add_argument("--steps", type=int, default=None, help="learner steps (default the recipe's, 120 or 4; with --spot 100)")
    p.add_argument("--nodes", type=int, default=None, help="number of nodes (default 3; with --spot 6)")
    p.add_argument("--seed", type=int, default=0, help="seed of the demo (default 0)")
    p.add_argument("--recipe", default="reverse", choices=["reverse", "sparse"],
                   help="reverse (default), or sparse: a few steps of a 20 M model at lr 1e-6, whose deltas are small")
    p.add_argument("--chaos", action="store_true", help="kill one node in the middle and start another")
    p.add_argument("--spot", action="store_true",
                   help="nodes come and go every few seconds, some with notice and some killed, by a trace drawn from --seed")
    p.add_argument("--resume", action="store_true", help="go on with the demo in --run-dir after its learner was killed")


def _demo(args: argparse.Namespace) -> dict[str, Any]:
    from p2p.errors import UsageError

    for name in ("steps", "nodes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1")
    from netem.demo.run import run_demo

    return run_demo(args)
