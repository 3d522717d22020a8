"""The verb `shoal bench graphs`: its flags.

Must not know the other verbs, exit statuses or how errors are told: it returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from netem.cli.flags import add_folder, add_value, say, told

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verb(actions: Any, verb: AddVerb) -> None:
    """`actions`: the subparsers of `shoal bench`."""
    what = "what CUDA graphs bring a vLLM node, and whether its tokens are of the version that they claim"
    p = verb("graphs", _bench_graphs, what, actions)
    p.add_argument("--engine-python", default="", metavar="PATH", help="as for shoal node")
    add_value(p, "--ways", "none,decode,compiled,transformers", "A,B",
              "values of the vLLM engine's setting graphs, or transformers: that engine")
    add_value(p, "--model", "0.6b", "MODEL", "a shape of shoal bench engine")
    add_value(p, "--dtype", "bfloat16", "TYPE", "type that the engine computes in")
    add_value(p, "--rank", 0, "N", "rank of an adapter, which then is what changes; 0: every weight does")
    add_value(p, "--sequences", "8,64,256", "A,B", "sequences that run at once")
    add_value(p, "--new", 128, "N", "tokens made for each prompt of 40 tokens")
    add_value(p, "--kv", "16 GiB", "SIZE", "memory for keys and values")
    add_folder(p)


def _bench_graphs(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.engine.graphs import GraphsBench, bench_graphs, describe_graphs
    from netem.contest.scenario import payload_size
    from p2p.errors import UsageError

    try:
        counts = tuple(int(text) for text in args.sequences.split(","))
    except ValueError as error:
        raise UsageError(f"--sequences {args.sequences!r}: {error}") from error
    bench = GraphsBench(
        ways=tuple(args.ways.split(",")), model=args.model, dtype=args.dtype, rank=args.rank, sequences=counts, new=args.new,
        kv_bytes=payload_size(args.kv, "--kv"), python=args.engine_python or sys.executable,
    )  # fmt: skip
    return told(args, bench_graphs(bench, args.where, say), describe_graphs)
