"""The verbs `shoal bench trainer`, `waiting`, `ranks` and `wan`: what training takes, and what it waits for.

Must not know the other verbs, exit statuses or how errors are told: each returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netem.cli.flags import add_backend, add_folder, add_value, say, told

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


MEMORY, SAVED, SPEED = ("2m:4096", "20m:4096", "135m:1024"), "7b:4096", ("2m:4096", "135m:1024")
"""What `shoal bench trainer` measures of each kind unless it is told. With none of --memory, --saved, --row and --before it
measures the first two, else what it is asked for alone."""

GPU = ("135m:8192", "0.5b:8192", "1.5b:8192", "1.5b:8192:lora16", "3b:8192")
"""What --gpu measures without a value; 80 GB hold all of them."""

LONG_ROW = "2m:32768"
"""The model and the tokens of --row without a value."""


def add_verbs(actions: Any, verb: AddVerb) -> None:
    """`actions`: the subparsers of `shoal bench`."""
    what = "measure the trainer alone: memory of a step against its forecast, tensors kept for the backward, and tokens a second"
    p = verb("trainer", _bench_trainer, what, actions)
    p.add_argument("--memory", nargs="*", metavar="SHAPE:TOKENS",
                   help=f"memory of these models, with the tokens of a forward (without a value {' '.join(MEMORY)})")
    p.add_argument("--saved", nargs="?", metavar="SHAPE:TOKENS", const=SAVED,
                   help=f"what a forward of this model keeps, counted (without a value {SAVED})")
    p.add_argument("--row", nargs="?", metavar="SHAPE:TOKENS", const=LONG_ROW,
                   help=f"a step of two rows that are far longer than a forward: memory and time (without a value {LONG_ROW})")
    p.add_argument("--gpu", nargs="*", metavar="SHAPE:TOKENS[:HOW]",
                   help="instead: steps on a GPU, their memory against the forecast, times and tokens a second; HOW: adamw "
                        f"(default), adamw_host, adamw_8bit, muon, loraN (without a value {' '.join(GPU)})")
    p.add_argument("--alone", action="store_true", help="with --gpu: the trainer alone, its steps neither saved nor published")
    p.add_argument("--before", type=Path, metavar="TREE", help="a tree of commit 1832404, to compare speed with (git archive)")
    p.add_argument("--speed", nargs="*", metavar="SHAPE:TOKENS",
                   help=f"models whose speed is compared with --before (default {' '.join(SPEED)})")
    add_value(p, "--pairs", 5, "N", "steps of each, in turns")
    add_value(p, "--groups", 2, "N", "groups of a step whose speed is compared")
    add_value(p, "--prompt", 100.0, "TOKENS", "mean length of their prompts")
    add_value(p, "--completion", 150.0, "TOKENS", "mean length of their completions, log-normal with sigma 0.7")
    add_value(p, "--threads", 2, "N", "threads of torch")
    p.add_argument("--compute-dtype", default="auto", choices=["auto", "bfloat16", "float32"],
                   help="what this tree computes in; the older one of --before knows float32 alone (default auto)")
    p.add_argument("--forecast", nargs="*", metavar="SHAPE", help="instead: what training takes, by shapes alone (0.5b to 32b)")
    add_value(p, "--tokens", 4096, "N", "tokens of a forward, of the forecast")
    add_value(p, "--devices", 1, "N", "devices that share the model, of the forecast")
    add_folder(p)
    what = "which part of a step the trainer waits for the disk and the encoder, with a checkpoint every step"
    p = verb("waiting", _bench_waiting, what, actions)
    add_value(p, "--model", "57m", "NAME", "a random model: 0.45m, 2m, 10m, 57m, 270m, 0.6b or 1.2b")
    add_value(p, "--steps", 6, "N", "steps, of which the first is not counted")
    add_value(p, "--rows", 16, "N", "rows of a step")
    add_value(p, "--tokens", 256, "N", "tokens of a row")
    p.add_argument("--compare", action="store_true", help="the same again, with waiting for both")
    add_folder(p)
    what = "peak memory of each process of a sharded trainer, and the bytes that they move to publish"
    p = verb("ranks", _bench_ranks, what, actions)
    add_value(p, "--counts", "1,2,4", "A,B", "numbers of processes, a run each")
    add_value(p, "--model", "20m", "SIZE", "random model: 0.4m or 20m")
    what = "time an adapter's and a whole model's update over an emulated WAN, to the last node's first token (needs root)"
    p = verb("wan", _bench_wan, what, actions)
    p.add_argument("--model", type=Path, metavar="DIR", help="folder of the base model (default: random, as SmolLM2-135M)")
    p.add_argument("--ranks", default="16,0", metavar="A,B", help="ranks of adapters; 0: full training (default 16,0)")
    add_value(p, "--versions", 6, "N", "number of timed versions of each")
    add_value(p, "--nodes", 4, "N", "number of nodes")
    p.add_argument("--engine-python", default="", metavar="PATH", help="one node runs vLLM in this environment")
    dtypes = ("auto", "float32", "bfloat16")
    p.add_argument("--dtype", default="auto", choices=dtypes, help="what engines compute in (default auto)")
    what = "nodes whose engine computes; the others' are scripted and take no time of these cores (default all)"
    p.add_argument("--computing", type=int, metavar="N", help=what)
    p.add_argument("--told", action="store_true", help="the learner is told its uplink's rate (swarm.uplink_mbit)")
    add_backend(p)


def _bench_trainer(args: argparse.Namespace) -> dict[str, Any]:
    if args.forecast is not None:
        from learner.trainer.forecast.sizes import QWEN_SIZES
        from netem.bench.trainer.forecasts import describe_forecasts, forecast_sizes

        return told(args, forecast_sizes(args.forecast or list(QWEN_SIZES), args.tokens, args.devices), describe_forecasts)
    if args.gpu is not None:
        from netem.bench.trainer.gpu import bench_on_gpu, describe_on_gpu

        return told(args, bench_on_gpu(args.gpu or list(GPU), args.where, say, alone=args.alone), describe_on_gpu)
    from netem.bench.trainer.bench import TrainerBench, bench_trainer, describe
    from p2p.errors import UsageError

    if args.speed is not None and args.before is None:
        raise UsageError("--speed compares with an older tree: say which with --before TREE")
    asked = not (args.memory is None and args.saved is None and args.before is None and args.row is None)
    bench = TrainerBench(
        memory=() if asked and args.memory is None else tuple(args.memory or MEMORY),
        saved=args.saved or "" if asked else SAVED, before=args.before, speed=tuple(args.speed or SPEED), pairs=args.pairs,
        groups=args.groups, prompt=args.prompt, completion=args.completion, threads=args.threads,
        compute_dtype=args.compute_dtype, rows=(args.row,) if args.row else (),
    )  # fmt: skip
    return told(args, bench_trainer(bench, args.where, say), describe)


def _bench_waiting(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.waiting.bench import bench_waiting, describe

    found = bench_waiting(args.model, args.steps, args.rows, args.tokens, compare=args.compare, folder=args.where, say=say)
    return told(args, found, describe)


def _bench_ranks(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.ranks.bench import bench_ranks, describe

    return told(args, bench_ranks([int(count) for count in args.counts.split(",")], args.model, say), describe)


def _bench_wan(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.wan.bench import bench_wan, describe
    from p2p.errors import UsageError

    try:
        ranks = [int(rank) for rank in args.ranks.split(",")]
    except ValueError:
        raise UsageError(f"--ranks {args.ranks!r}: want whole numbers with commas between") from None
    found = bench_wan(
        args.model, ranks, args.versions, args.nodes, args.engine_python, dtype=args.dtype, told=args.told,
        computing=args.computing, backend=args.backend, say=say,
    )  # fmt: skip
    return told(args, found, describe)
