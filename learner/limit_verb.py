"""The verb `shoal limit`: what a running learner's machine may use. Imports what it needs when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verbs(verbs: Any, verb: AddVerb) -> None:
    """`verbs`: argparse's subparsers of the whole command."""
    p = verb("limit", _limit, "change what a running learner's machine may use, or show it (of a node: shoal node limit)", verbs)
    p.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="the run's directory; its learner is running")
    p.add_argument("--max-up-mbit", metavar="MBIT",
                   help="most Mbit/s that leave it for the swarm, until it starts anew (0: no limit; default: as it is)")


def _limit(args: argparse.Namespace) -> dict[str, Any]:
    from p2p.allowance.keeper import change_limits

    limits = change_limits(args.run_dir, {"max_up_mbit": args.max_up_mbit})
    if not args.json:
        print(f"the learner in {args.run_dir}: {limits or 'no limits'}")
    return {"ok": True, "run_dir": str(args.run_dir), "limits": limits.as_said}
