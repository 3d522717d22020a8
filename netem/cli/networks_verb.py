"""The verb `shoal bench networks`: its flags.

Must not know the other verbs, exit statuses or how errors are told: it returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netem.cli.flags import add_value, say

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verb(actions: Any, verb: AddVerb) -> None:
    """`actions`: the subparsers of `shoal bench`."""
    what = "how near the bound versions come on networks drawn at random (production's cores on simulated links)"
    p = verb("networks", _bench_networks, what, actions)
    add_value(p, "--count", 60, "N", "networks to draw")
    add_value(p, "--seed", 1, "S", "seed of the draws")
    p.add_argument("--replay", action="extend", nargs="+", metavar="NAME", default=[],
                   help="only these networks, as net-1-17 is number 17 of seed 1; says every version")
    p.add_argument("--index", type=int, metavar="I", help="only this network of --seed")
    p.add_argument("--nodes", metavar="A,B", help="in place of drawn networks: swarms of so many equal nodes, with their control "
                   "messages, and what simulating them took; 10000 take 11 GiB and hours")
    add_value(p, "--versions", 2, "N", "versions of each swarm of --nodes")
    p.add_argument("--chunk-kib", type=int, default=0, metavar="K", help="KiB of a chunk of --nodes (default: a publisher's)")
    p.add_argument("--known", action="store_true", help="the learner is told its uplink, and nodes remember theirs from "
                   "an earlier run: what first versions lose without a search of the rates")
    p.add_argument("--emulate", action="store_true", help="over real TCP on emulated links (as root), beside the simulator and "
                   "libtorrent: the networks of --replay, or the first --count with steady rates that a small machine carries")
    p.add_argument("--congestion", default="", metavar="NAME", help="TCP congestion control of --emulate (default bbr, as drawn)")
    p.add_argument("--alone", action="store_true", help="--emulate without libtorrent")
    add_value(p, "--jobs", 1, "J", "processes")
    p.add_argument("--write", type=Path, metavar="FILE",
                   help="run nothing: write the one network of --replay as a scenario for shoal netem run")


def _bench_networks(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.networks.bench import bench_networks
    from netem.bench.networks.draw import draw_by_name, name_of
    from netem.bench.networks.table import print_networks, scenario_text
    from p2p.errors import UsageError

    if not args.emulate and (args.congestion or args.alone):
        raise UsageError("--congestion and --alone say how to --emulate")
    if args.known and (args.emulate or args.nodes):
        raise UsageError("--known is for drawn networks in the simulator")
    if args.nodes:
        return _bench_scale(args)
    names = [*args.replay, *([name_of(args.seed, args.index)] if args.index is not None else [])]
    if args.write is not None:
        if len(names) != 1:
            raise UsageError("--write needs one network: --replay NAME")
        args.where = args.write
        args.write.write_text(scenario_text(draw_by_name(names[0])), encoding="utf-8")
        return {"ok": True, "written": str(args.write)}
    if args.emulate:
        from netem.bench.networks.emulate import bench_emulated

        how = {"congestion": args.congestion, "alone": args.alone}
        return bench_emulated(names, count=args.count, seed=args.seed, say=say, **how)
    result = bench_networks(names, count=args.count, seed=args.seed, jobs=args.jobs, say=say, known=args.known)
    if not args.json:
        print_networks(result, each=bool(names))
    return result


def _bench_scale(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.networks.scale import bench_scale
    from p2p.errors import UsageError

    try:
        counts = [int(count) for count in args.nodes.split(",")]
    except ValueError:
        raise UsageError(f"--nodes {args.nodes!r}: want whole numbers with commas between") from None
    return bench_scale(counts, rounds=args.versions, seed=args.seed, chunk=args.chunk_kib << 10, say=say)
