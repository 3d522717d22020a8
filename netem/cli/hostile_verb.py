"""The verb `shoal bench hostile`: its flags.

Must not know the other verbs, exit statuses or how errors are told: it returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netem.cli.flags import add_folder

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verb(actions: Any, verb: AddVerb) -> None:
    """`actions`: the subparsers of `shoal bench`."""
    what = "what a third of hostile capacity does to a run's reward: the demo's model, real processes over loopback"
    p = verb("hostile", _bench_hostile, what, actions)
    p.add_argument("--seeds", default="0,1,2", metavar="N,N", help="seeds of the runs (default 0,1,2)")
    p.add_argument("--cases", metavar="A,B", help="of hostile third, honest nodes alone, all honest (default: all)")
    p.add_argument("--steps", type=int, default=60, metavar="N", help="steps of each run (default 60)")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                   help="a setting of the learner, such as standing.unproven_share=0.1 (may be given again)")
    p.add_argument("--results", type=Path, default=Path("runs/hostile/results.jsonl"), metavar="FILE",
                   help="where results are kept; what is there is not run again (default runs/hostile/results.jsonl)")
    add_folder(p)


def _bench_hostile(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.hostile.bench import CASES, bench_hostile
    from p2p.errors import UsageError

    try:
        seeds = [int(one) for one in args.seeds.split(",")]
    except ValueError:
        raise UsageError(f"--seeds: {args.seeds!r} is not a list of whole numbers") from None
    cases = args.cases.split(",") if args.cases else list(CASES)
    if odd := [case for case in cases if case not in CASES]:
        raise UsageError(f"--cases: {odd[0]!r} is none of {', '.join(CASES)}")
    if args.steps < 1 or any("=" not in pair for pair in args.set):
        raise UsageError("--steps must be at least 1, and --set has the form SECTION.KEY=VALUE")
    result = bench_hostile(
        cases, seeds, steps=args.steps, settings=args.set, results=args.results, folder=args.where, say=_say
    )  # fmt: skip
    if not args.json:
        _print(result)
    return result


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(result: dict[str, Any]) -> None:
    print("| run | reward of the final policy, sampled | greedy | sampled in the last tenth of the steps | seconds a step "
          "| from 30 s on | cores had then |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for case, row in result["cases"].items():
        each = " ".join(f"{x:.2f}" for x in row["final_sampled"])
        later = " ".join("-" if s is None else f"{s:.2f}" for s in row["later_step_s"])
        cores = "; ".join(", ".join(f"{kind} {n:.2f}" for kind, n in of.items()) or "-" for of in row["later_cores"])
        print(f"| {case} | {row['final_sampled_mean']} ({each}) | {row['final_greedy_mean']} | {row['reward_last_mean']} | "
              f"{row['step_s']:.2f} | {later} | {cores} |")  # fmt: skip
    if result["cheats"]:
        print("\n| cheat | share of all tokens that were trained on | identities | expelled | tokens until then, median (most) |")
        print("|---|---|---|---|---|")
    for name, row in result["cheats"].items():
        until = "-" if row["tokens_until_median"] is None else f"{row['tokens_until_median']:,} ({row['tokens_until_most']:,})"
        print(f"| {name} | {row['share']:.2%} | {row['identities']} | {row['expelled']} | {until} |")
