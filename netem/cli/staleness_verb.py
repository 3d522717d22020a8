"""The verb `shoal bench staleness`: its flags.

Must not know the other verbs, exit statuses or how errors are told: it returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verb(actions: Any, verb: AddVerb) -> None:
    """`actions`: the subparsers of `shoal bench`."""
    what = "how learning depends on the age of what is trained on, by objective: a small model, exact ages, no network"
    p = verb("staleness", _bench_staleness, what, actions)
    p.add_argument("--parts", metavar="A,B",
                   help="of matrix (default), hot, rules, caps, add, sort, equal, lengths, chat, unseen: see bench/staleness.md")
    p.add_argument("--objectives", metavar="A,B",
                   help="of grpo, grpo-keep, tis, prime_rl, cispo, gspo, topr, m2po, icepop, gepo (default: the part's own)")
    p.add_argument("--staleness", metavar="S,S", help="only these ages, in steps (the matrix has 0,1,3,6,11,16,32)")
    p.add_argument("--seeds", metavar="N,N", help="only these seeds (the matrix has 0,1,2,3,4)")
    p.add_argument("--processes", type=int, default=2, metavar="N", help="runs at once, of one thread each (default 2)")
    p.add_argument("--results", type=Path, default=Path("runs/staleness/results.jsonl"), metavar="FILE",
                   help="where results are kept; what is there is not run again (default runs/staleness/results.jsonl)")
    p.add_argument("--report", action="store_true", help="run nothing: sum up what --results has of these")
    p.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables in Markdown")
    p.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (PNG, SVG or PDF)")


def _bench_staleness(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.staleness.cases import OBJECTIVES, check_names
    from netem.bench.staleness.parts import PARTS
    from netem.bench.staleness.study import read_results, run_study
    from netem.bench.staleness.summary import summary
    from netem.bench.staleness.table import markdown, print_summary, write_plot
    from p2p.errors import UsageError

    if args.processes < 1:
        raise UsageError("--processes must be at least 1")
    parts = check_names("--parts", (args.parts or "matrix").split(","), PARTS)
    names = check_names("--objectives", args.objectives.split(","), OBJECTIVES) if args.objectives else None
    ages, seeds = _numbers("--staleness", args.staleness), _numbers("--seeds", args.seeds)
    cases = {case.key: case for part in parts for case in PARTS[part].make(names)}
    wanted = [c for c in cases.values() if (not ages or c.staleness in ages) and (not seeds or c.seed in seeds)]
    if not wanted:
        raise UsageError(f"no run of {', '.join(parts)} has these --staleness and --seeds")
    known = read_results(args.results)
    if args.report:  # what there is of these
        rows = [row for row in known if row["key"] in {case.key for case in wanted}]
        if not rows:
            raise UsageError(f"--report: {args.results} has no result of these runs")
    else:
        rows = run_study(wanted, args.results, args.processes, _say)
    result = summary(rows)
    if not args.json:
        print_summary(result)
    if args.markdown is not None:
        args.markdown.write_text(markdown(result), encoding="utf-8")
    if args.plot is not None:
        write_plot(result, rows, args.plot)
    return result


def _numbers(flag: str, text: str | None) -> tuple[int, ...]:
    from p2p.errors import UsageError

    try:
        return () if text is None else tuple(int(one) for one in text.split(","))
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not a list of whole numbers") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
