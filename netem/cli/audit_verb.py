"""The verb `shoal bench audit`: its flags.

Must not know the other verbs, exit statuses or how errors are told: it returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verb(actions: Any, verb: AddVerb) -> None:
    """`actions`: the subparsers of `shoal bench`."""
    what = "what checks of seeded draws find on real engines, after how many tokens, and how often they wrong an honest node"
    p = verb("audit", _bench_audit, what, actions)
    p.add_argument("--folder", type=Path, default=Path("runs") / "bench-audit", metavar="DIR",
                   help="models and tokens are kept here: a run that was cut off goes on (default runs/bench-audit)")  # fmt: skip
    p.add_argument("--model", choices=("tiny", "chat"), default="tiny",
                   help="a small model in training, or SmolLM2-135M-Instruct (`make demo-chat` installs it)")  # fmt: skip
    p.add_argument("--engines", default="transformers/float32,transformers/bfloat16", metavar="LIST",
                   help="engine/type, separated by commas; also vllm/float32, vllm/bfloat16")  # fmt: skip
    p.add_argument("--engine-python", default="", metavar="PY", help="Python of vLLM's environment (default: this one)")
    p.add_argument("--tokens", type=int, default=400_000, metavar="N", help="honest tokens in sum (default 400000)")
    p.add_argument("--cheat-tokens", type=int, default=6_000, metavar="N", help="tokens of each cheat and engine (default 6000)")
    p.add_argument("--mild-tokens", type=int, default=18_000, metavar="N",
                   help="the same of cheats that are hard to find: older and rounded weights (default 18000)")  # fmt: skip
    p.add_argument("--suspected", type=int, default=40_000, metavar="N",
                   help="of these and of honest tokens so many are read under suspected weights too (default 40000)")  # fmt: skip
    p.add_argument("--in-run", type=int, metavar="STEPS",
                   help="measure instead what audits cost a run of so many steps whose nodes are all proven, beside generating")
    p.add_argument("--seed", type=int, default=0, metavar="N",
                   help="of prompts and draws, each seed's kept apart; with --in-run, of that run (default 0)")  # fmt: skip


def _bench_audit(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.audit.bench import AuditBench, bench_audit
    from netem.bench.audit.making import TokenGoals
    from netem.bench.audit.world import MOST_SEED
    from p2p.errors import UsageError

    if args.in_run is not None:
        return _in_run(args)
    if min(args.tokens, args.cheat_tokens, args.mild_tokens, args.suspected) < 1000:
        raise UsageError("--tokens, --cheat-tokens, --mild-tokens and --suspected must be at least 1000")
    if not 0 <= args.seed <= MOST_SEED:
        raise UsageError(f"--seed must be 0 to {MOST_SEED}, and is {args.seed}")
    bench = AuditBench(
        args.model, tuple(args.engines.split(",")), args.engine_python or sys.executable,
        TokenGoals(args.tokens, args.cheat_tokens, args.mild_tokens), args.suspected, seed=args.seed,
    )  # fmt: skip
    result = bench_audit(bench, args.folder, _say)
    if not args.json:
        from netem.bench.audit.table import tables

        print(tables(result))
    return result


def _in_run(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.audit.in_run import audited_run

    with tempfile.TemporaryDirectory(prefix="shoal-audit-") as folder:
        result = audited_run(args.in_run, args.seed, Path(folder), _say)
    if not args.json:
        from netem.bench.audit.table import cost_line

        print(cost_line(result))
    return result


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
