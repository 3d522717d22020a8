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
    p.add_argument("--steps", type=int, default=None,
                   help="learner steps (default the recipe's: 120, 150, 4 or 40; with --spot 100)")
    p.add_argument("--nodes", type=int, default=None, help="number of nodes (default 3; with --spot 6)")
    p.add_argument("--seed", type=int, default=0, help="seed of the demo (default 0)")
    p.add_argument("--recipe", default="reverse", choices=["reverse", "game", "sparse", "chat"],
                   help="reverse (default); game: digits guessed by hints, in turns; sparse: a few steps of a 20 M model at lr "
                        "1e-6, whose deltas are small; chat: a real chat model of 135 M learns to answer in one word")
    p.add_argument("--lora", type=int, default=0, metavar="RANK",
                   help="train a LoRA adapter of this rank (16 is usual) and not every weight, at ten times the learning rate")
    p.add_argument("--chaos", action="store_true", help="kill one node in the middle and start another")
    p.add_argument("--spot", action="store_true",
                   help="nodes come and go every few seconds, some with notice and some killed, by a trace drawn from --seed")
    p.add_argument("--resume", action="store_true", help="go on with the demo in --run-dir after its learner was killed")


def _demo(args: argparse.Namespace) -> dict[str, Any]:
    from p2p.errors import UsageError

    if not 0 <= args.lora <= 4096:
        raise UsageError("--lora must be between 0 and 4096")
    for name in ("steps", "nodes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1")
    from netem.demo.run import run_demo

    return run_demo(args)
