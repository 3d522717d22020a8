"""The verbs `shoal netem ...` and `shoal bench ...`: their flags, and what they print.

Must not know the other verbs, exit statuses or how errors are told: each returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netem.cli.flags import add_backend, add_folder, add_value, say, told

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verbs(verbs: Any, verb: AddVerb) -> None:
    """`verbs`: argparse's subparsers of the whole command."""
    from netem.cli.audit_verb import add_verb as add_audit
    from netem.cli.graphs_verb import add_verb as add_graphs
    from netem.cli.hostile_verb import add_verb as add_hostile
    from netem.cli.networks_verb import add_verb as add_networks
    from netem.cli.staleness_verb import add_verb as add_staleness
    from netem.cli.trainer_verbs import add_verbs as add_trainer_verbs

    what = "emulate a wide-area network on this machine, to run programs in (needs root)"
    netem = verbs.add_parser("netem", help=what, description=what, allow_abbrev=False)
    actions = netem.add_subparsers(dest="action", required=True, metavar="up|exec|down|run")
    p = verb("up", _netem_up, "bring a profile's network up", actions)
    p.add_argument("profile", metavar="PROFILE.toml", type=Path, help="file with the hosts and links of the network")
    add_backend(p)
    p = verb("exec", _netem_exec, "run a command on one of its hosts", actions)
    p.add_argument("network", metavar="NETWORK", help="name of the network, or its profile's file")
    p.add_argument("host", metavar="HOST", help="name of a host of the network")
    p.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="command to run there, with its arguments")
    p = verb("down", _netem_down, "take a network down", actions)
    p.add_argument("network", metavar="NETWORK", help="name of the network, or its profile's file")
    p = verb("run", _netem_run, "run a scenario (network, payload, faults) and say whether what it requires holds", actions)
    p.add_argument("scenario", metavar="SCENARIO", help="a file, or the name of one that comes with shoal (- lists them)")
    add_backend(p)

    what = "measure Shoal, and others beside it"
    bench = verbs.add_parser("bench", help=what, description=what, allow_abbrev=False)
    actions = bench.add_subparsers(dest="action", required=True, metavar="NAME")
    what = "compare our broadcast with star, chain, tree, shardcast and libtorrent on the same emulated links (needs root)"
    p = verb("broadcast", _bench_broadcast, what, actions)
    p.add_argument("--scenario", action="extend", nargs="+", metavar="NAME_OR_FILE",
                   help="scenarios to run (default: the README's five)")
    p.add_argument("--policies", metavar="A,B", help="systems to compare (default: all)")
    add_value(p, "--repeat", 3, "N", "runs of shoal, shardcast and libtorrent")
    p.add_argument("--mtu", type=int, metavar="N", help="MTU of all links, instead of the scenarios'")
    add_backend(p)
    p.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (PNG, SVG or PDF)")
    p.add_argument("--markdown", type=Path, metavar="FILE", help="write a Markdown table")
    what = "compare the delta codec with PULSE's format, XOR, LEB128 and zipnn, on updates of models that really train"
    p = verb("codec", _bench_codec, what, actions)
    p.add_argument("--cases", metavar="A,B", help="updates to encode (default: all of minilm-..., demo, 8b-layer)")
    p.add_argument("--codecs", metavar="A,B", help="codecs to compare (default: all)")
    what = "instead of the cases: bytes of the second checkpoint for a node that has the first"
    p.add_argument("--pair", nargs=2, type=Path, metavar=("OLD.safetensors", "NEW.safetensors"), help=what)
    what = "check that the learner waits where the capacity model says so: real nodes, paced engines, emulated links (needs root)"
    p = verb("capacity", _bench_capacity, what, actions)
    add_value(p, "--factors", "1.15,0.8", "A,B", "tokens per second of the nodes over what the learner needs, a run each")
    add_value(p, "--steps", 30, "N", "learner steps, of which six are not counted")
    add_value(p, "--nodes", 4, "N", "number of nodes")
    add_value(p, "--staleness", 3, "S", "bound in learner steps")
    what = "give the learner a local engine that makes X times what it needs and takes turns with the trainer (default 0: none)"
    p.add_argument("--local-engine", type=float, default=0.0, metavar="X", help=what)
    what = "let nodes come and go: there for S seconds in the mean, away for half of that (default 0: they stay)"
    p.add_argument("--spot", type=float, default=0.0, metavar="S", help=what)
    add_value(p, "--seed", 0, "N", "seed of comings and goings")
    add_value(p, "--link", "home-cable", "NAME", "access link of all hosts")
    add_backend(p)
    add_folder(p)
    p = verb("chaos", _bench_chaos, "kill nodes and learner of a real run with SIGKILL, and say what it cost", actions)
    add_value(p, "--steps", 24, "N", "learner steps")
    add_value(p, "--nodes", 3, "N", "number of nodes")
    add_value(p, "--node-kills", 6, "N", "kills of nodes")
    add_value(p, "--learner-kills", 2, "N", "kills of the learner")
    add_value(p, "--engine-kills", 0, "N", "kills of engines, whose nodes stay")
    p.add_argument("--task", default="reverse", choices=["reverse", "guess_digits"],
                   help="reverse (default), or guess_digits: episodes of several turns, killed in their midst")
    add_value(p, "--engine", "transformers", "KIND", "engine of all nodes")
    p.add_argument("--engine-python", metavar="PATH", help="the Python of the engine's environment (default: this one)")
    add_value(p, "--seed", 0, "N", "seed of the kills")
    p.add_argument("--temperature", type=float, default=1.0, metavar="T",
                   help="sampling temperature (default 1; 0.0001 is as good as greedy)")
    p.add_argument("--train", action="store_true", help="change the weights from step to step (default: frozen)")
    what = "in place of all that: N short lives of a learner without nodes, each killed at a random moment (default 0: none)"
    p.add_argument("--lives", type=int, default=0, metavar="N", help=what)
    add_value(p, "--every", 1, "N", "steps between the checkpoints of --lives")
    p.add_argument("--beside", action="store_true", help="write checkpoints beside training, as the learner does by default")
    p.add_argument("--compare", action="store_true",
                   help="compare completions with those of a second run, which nothing disturbs")
    add_folder(p)
    what = "a thousand clients at once before a real run's endpoint, of whom many leave early: what training keeps, what is left"
    p = verb("endpoint", _bench_endpoint, what, actions)
    add_value(p, "--clients", 1000, "N", "clients that ask at once")
    add_value(p, "--leave", 0.3, "SHARE", "share of them that leaves before its answer is whole")
    add_value(p, "--nodes", 2, "N", "number of nodes")
    add_value(p, "--capacity", 16, "N", "sequences at once of each node")
    add_value(p, "--share", 0.25, "SHARE", "requests.serving_share: places that clients may take from training")
    add_value(p, "--tokens", 16, "N", "most tokens of an answer")
    add_value(p, "--seconds", 30.0, "S", "seconds of training alone, before and after each round of clients")
    add_value(p, "--rounds", 2, "N", "rounds of clients")
    add_folder(p)
    what = "compare a node's engine with vLLM itself: pauses for new weights by size of the model, and tokens per second"
    p = verb("engine", _bench_engine, what, actions)
    p.add_argument("--engine", default="vllm", choices=["vllm", "transformers"], help="engine to compare (default vllm)")
    p.add_argument("--engine-python", default="", metavar="PATH", help="as for shoal node")
    add_value(p, "--rounds", 5, "N", "turns in which each is measured")
    add_value(p, "--pauses", 5, "N", "weight updates in a turn")
    p.add_argument("--pause", default="0.45m", metavar="MODEL",
                   help="model whose pauses are compared ('' for none; default 0.45m)")
    p.add_argument("--sizes", default="0.45m,2m,10m,57m", metavar="A,B",
                   help="models whose updates are measured (default 0.45m to 57m; also 270m, 0.6b, 1.2b)")
    add_value(p, "--throughput", "0.45m,57m", "A,B", "models whose tokens are counted")
    add_value(p, "--prompts", 64, "N", "prompts of a turn")
    p.add_argument("--new", type=int, default=0, metavar="TOKENS",
                   help="tokens made for each prompt of 40 tokens (default 512, or 64 from 20 M parameters on)")
    add_value(p, "--running", 32, "N", "sequences that run at once")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"],
                   help="type that the engine computes in (default float32)")
    add_folder(p)
    what = "what evaluations on the nodes cost the trainer and its groups, in one real run, step by step"
    p = verb("evaluation", _bench_evaluation, what, actions)
    add_value(p, "--steps", 96, "N", "learner steps that are counted")
    add_value(p, "--prompts", 64, "N", "trainer.eval_size: prompts of an evaluation")
    add_value(p, "--every", 12, "N", "trainer.eval_every: steps between two evaluations")
    add_value(p, "--nodes", 2, "N", "number of nodes")
    add_value(p, "--capacity", 16, "N", "sequences at once of each node")
    add_folder(p)
    what = "check that the head keeps up with many nodes that stream tokens, on one core (two processes over loopback)"
    p = verb("head", _bench_head, what, actions)
    add_value(p, "--nodes", 1000, "N", "number of nodes")
    add_value(p, "--rate", 50.0, "TOKENS", "tokens per second from each node")
    add_value(p, "--seconds", 20.0, "S", "seconds that are measured")
    add_value(p, "--sequences", 4, "N", "sequences at once on each node")
    add_value(p, "--length", 400.0, "TOKENS", "mean tokens of a completion")
    p.add_argument("--flush", type=float, default=0.25, metavar="S",
                   help="seconds that a node gathers tokens before it sends them (default 0.25; 0 sends every step by itself)")
    add_folder(p)
    what = "measure the memory that a source and a node take for one large version (over loopback)"
    p = verb("memory", _bench_memory, what, actions)
    add_value(p, "--payload", "1 GiB", "SIZE", "size of the version")
    add_folder(p)
    what = "compare rollouts on simulated fleets: ours, synchronous, one step off, AReaL's, ROLL's and StaleFlow's"
    p = verb("rollouts", _bench_rollouts, what, actions)
    p.add_argument("--workloads", metavar="A,B", help="workloads to run (default: all of skewed, tight, scarce, even, spot)")
    p.add_argument("--policies", metavar="A,B", help="systems to compare (default: all)")
    add_value(p, "--staleness", 3, "S", "bound in learner steps")
    add_value(p, "--steps", 20, "N", "learner steps, of which the first 4 are not counted")
    add_value(p, "--seed", 0, "N", "seed of lengths and preemptions")
    p.add_argument("--no-ablations", action="store_true", help="leave out our variants with strategies switched off")
    p.add_argument("--real", action="store_true", help="add a short run of real processes, as `shoal bench chaos` does")
    add_networks(actions, verb)
    add_trainer_verbs(actions, verb)
    add_staleness(actions, verb)
    add_audit(actions, verb)
    add_graphs(actions, verb)
    add_hostile(actions, verb)
    what = "time one sparse update of a large model, stage by stage (real processes over loopback)"
    p = verb("update", _bench_update, what, actions)
    add_value(p, "--layers", 4, "N", "layers with an 8B model's shapes, 0.44 GB each")
    add_value(p, "--nodes", 2, "N", "number of nodes")
    add_value(p, "--changed", 0.01, "SHARE", "share of all values that change")
    add_folder(p)


def _netem_up(args: argparse.Namespace) -> dict[str, Any]:
    from netem.emulation.background import up

    result = up(args.profile, args.backend)
    if result["note"]:
        print(result["note"], file=sys.stderr)
    if not args.json:
        scale = "" if result["scale"] == 1 else f", rates times {result['scale']:g}"
        print(f"network {result['name']} is up ({result['backend']}, MTU {result['mtu']}, TCP {result['congestion']}{scale})")
        if result["congestion"] != result["congestion_asked"]:
            print(f"  this kernel keeps TCP {result['congestion']}; the profile asks for {result['congestion_asked']}")
        for name, host in result["hosts"].items():
            print(f"  {name:<16} {host['address']}")
        print(f"run something there: shoal netem exec {result['name']} HOST COMMAND ...")
    return result


def _netem_exec(args: argparse.Namespace) -> dict[str, Any]:
    from netem.emulation.background import command
    from p2p.errors import UsageError

    if not args.command:
        raise UsageError("no command: shoal netem exec NETWORK HOST COMMAND ...")
    found = command(args.network, args.host, args.command)
    os.execvp(found[0], found)


def _netem_down(args: argparse.Namespace) -> dict[str, Any]:
    from netem.emulation.background import down

    result = down(args.network)
    if not args.json:
        print(f"network {result['name']} is down")
    return result


def _netem_run(args: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console

    from netem.contest.scenario import builtin_scenarios, find_scenario
    from netem.contest.trial import print_trial, run_scenario

    if args.scenario == "-":
        if not args.json:
            print("\n".join(builtin_scenarios()))
        return {"ok": True, "scenarios": builtin_scenarios()}
    scenario = find_scenario(args.scenario)
    result = run_scenario(scenario, say, args.backend)
    if not args.json:
        print_trial(result, Console(width=None if sys.stdout.isatty() else 110))
    return result


def _bench_broadcast(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.broadcast.bench import DEFAULT_SCENARIOS, POLICIES, bench
    from netem.bench.broadcast.table import print_bench, write_markdown, write_plot

    names = args.scenario or list(DEFAULT_SCENARIOS)
    policies = args.policies.split(",") if args.policies is not None else list(POLICIES)
    for file in (args.plot, args.markdown):  # before half an hour of measurements, not after
        if file is not None:
            args.where = file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    result = bench(names, policies, args.repeat, mtu=args.mtu, say=say, backend=args.backend)
    print_bench(result)
    if args.markdown is not None:
        write_markdown(result, args.markdown)
    if args.plot is not None:
        write_plot(result, args.plot)
    return result


def _bench_codec(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.codec.bench import CODECS, bench_codec, print_codec

    cases, codecs = (text.split(",") if text else () for text in (args.cases, args.codecs))
    result = bench_codec(cases, codecs or CODECS, tuple(args.pair) if args.pair else None, say)
    print_codec(result)
    return result


def _bench_capacity(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.capacity.run import CapacityCase, bench_capacity
    from p2p.errors import UsageError

    try:
        factors = [float(text) for text in args.factors.split(",")]
    except ValueError:
        raise UsageError(f"--factors: {args.factors!r} is not a list of numbers") from None
    case = CapacityCase(
        factor=1.0, nodes=args.nodes, steps=args.steps, staleness=args.staleness, link=args.link, spot_up_s=args.spot,
        seed=args.seed, values=1_000_000 if args.spot else 8_000_000, local_engine=args.local_engine,
    )  # fmt: skip
    return bench_capacity(factors, case, args.backend, args.where, say)


def _bench_chaos(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.chaos.bench import bench_chaos, describe
    from netem.bench.chaos.run import ChaosSettings
    from netem.bench.chaos.short_lives import bench_lives, describe_lives

    if args.lives:
        return told(args, bench_lives(args.lives, args.every, args.seed, args.where, say), describe_lives)
    engine = ("--engine", args.engine, *(("--engine-python", args.engine_python) if args.engine_python else ()))
    settings = ChaosSettings(
        seed=args.seed, steps=args.steps, nodes=args.nodes, node_kills=args.node_kills, learner_kills=args.learner_kills,
        frozen=not args.train, temperature=args.temperature, engine_kills=args.engine_kills, engine=engine, task=args.task,
        beside=args.beside,
    )  # fmt: skip
    return told(args, bench_chaos(settings, args.compare, args.where, say), describe)


def _bench_endpoint(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.beside.endpoint import EndpointBench, bench_endpoint, describe

    bench = EndpointBench(
        clients=args.clients, leave=args.leave, nodes=args.nodes, capacity=args.capacity, share=args.share, tokens=args.tokens,
        seconds=args.seconds, rounds=args.rounds,
    )  # fmt: skip
    return told(args, bench_endpoint(bench, args.where, say), describe)


def _bench_engine(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.engine.bench import EngineBench, bench_engine
    from netem.bench.engine.table import describe

    sizes, throughput = (tuple(filter(None, text.split(","))) for text in (args.sizes, args.throughput))
    bench = EngineBench(
        engine=args.engine, python=args.engine_python or sys.executable, rounds=args.rounds, pauses=args.pauses,
        throughput=throughput, sizes=sizes, count=args.prompts, length=40, new=args.new, running=args.running,
        dtype=args.dtype, pause_model=args.pause,
    )  # fmt: skip
    return told(args, bench_engine(bench, args.where, say), describe)


def _bench_evaluation(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.beside.evaluation import EvaluationBench, bench_evaluation, describe

    bench = EvaluationBench(
        steps=args.steps, prompts=args.prompts, every=args.every, nodes=args.nodes, capacity=args.capacity
    )
    return told(args, bench_evaluation(bench, args.where, say), describe)


def _bench_head(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.head.bench import HeadBench, bench_head, describe

    bench = HeadBench(
        nodes=args.nodes, rate=args.rate, seconds=args.seconds, sequences=args.sequences, length=args.length, flush_s=args.flush
    )
    return told(args, bench_head(bench, args.where, say), describe)


def _bench_memory(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.node_memory import describe, measure_memory
    from netem.contest.scenario import payload_size

    return told(args, measure_memory(payload_size(args.payload, "--payload"), args.where), describe)


def _bench_rollouts(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.rollouts import POLICIES, bench_rollouts, cases, print_rollouts
    from netem.rollout_sim.sim import SimSettings

    settings = SimSettings(staleness=args.staleness, steps=args.steps, seed=args.seed)
    names = args.workloads.split(",") if args.workloads else list(cases(args.seed))
    policies = args.policies.split(",") if args.policies else list(POLICIES)
    result = bench_rollouts(names, policies, settings, ablate=not args.no_ablations, jobs=len(os.sched_getaffinity(0)), say=say)
    print_rollouts(result)
    if args.real:
        from netem.bench.chaos.bench import bench_chaos, describe
        from netem.bench.chaos.run import ChaosSettings

        result["real"] = bench_chaos(ChaosSettings(seed=args.seed), False, None, say)
        result["ok"] = result["ok"] and result["real"]["ok"]
        print(describe(result["real"]), file=sys.stderr)
    return result


def _bench_update(args: argparse.Namespace) -> dict[str, Any]:
    from netem.bench.update import bench_update, describe

    return told(args, bench_update(args.layers, args.nodes, args.changed, args.where, say), describe)


