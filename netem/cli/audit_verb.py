"""The verb `shoal bench audit`: its flags.

Must not know the other verbs, exit statuses or how errors are told: it returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verb(actions: Any, verb: AddVerb) -> None:
    """`actions`: the subparsers of `shoal bench`."""
    what = "what checks of seeded draws find, after how many tokens, and how often they wrong an honest node: a small model"
    p = verb("audit", _bench_audit, what, actions)
    p.add_argument("--tokens", type=int, default=400_000, metavar="N", help="honest tokens of each engine (default 400000)")
    p.add_argument("--repeats", type=int, default=20, metavar="N", help="runs of each cheat (default 20)")


def _bench_audit(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.audit.bench import run
    from p2p.errors import UsageError

    if args.tokens < 1000 or args.repeats < 1:
        raise UsageError("--tokens must be at least 1000, and --repeats at least 1")
    result = run(args.tokens, args.repeats, lambda line: print(line, file=sys.stderr, flush=True))
    if not args.json:
        _print(result)
    return result


def _print(result: dict[str, Any]) -> None:
    print("| honest engine | tokens | nodes caught | exact | further than 0.005 | than 0.05 | most evidence (10,000 is caught) |")
    print("|---|---|---|---|---|---|---|")
    for row in result["honest"]:
        caught = f"{row['caught']} of {row['nodes']}"
        shares = f"{row['exact']} | {row['near']:.2g} | {row['far']:.2g}"
        print(f"| {row['engine']} | {row['tokens']:,} | {caught} | {shares} | {row['most_evidence']} |")
    print("\n| cheat | tokens until caught, median (p90): engine known | any engine allowed | by |")
    print("|---|---|---|---|")
    for row in result["cheats"]:
        known, wide = (f"{_or(row[f'{c} median'])} ({_or(row[f'{c} p90'])})" for c in ("float32", "any engine"))
        print(f"| {row['cheat']} | {known} | {wide} | {row['float32 why']} |")
    cost = result["cost"]
    seconds = f"{cost['check_s']} s for {cost['generate_s']} s of processor time"
    print(f"\nChecking costs {cost['ratio']:.3f} of generating ({seconds}).")


def _or(tokens: int | None) -> str:
    return "not found" if tokens is None else f"{tokens:,}"
