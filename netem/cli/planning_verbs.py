"""The verbs `shoal simulate` and `shoal plan`: their flags, and what they print. As netem.cli.verbs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.verbs import AddVerb


def add_verbs(verbs: Any, verb: AddVerb) -> None:
    """`verbs`: argparse's subparsers of the whole command."""
    what = "simulate what a run would cost: a fleet with prices, a model and a learner, or the setting of a paper"
    p = verb("simulate", _simulate, what, verbs)
    p.add_argument("scenario", nargs="?", metavar="SCENARIO.toml", type=Path, help="file with fleet, model and learner")
    p.add_argument("--preset", metavar="NAME", help="run the setting of a paper, its system beside ours (- lists them)")
    p.add_argument("--explain", action="store_true", help="with --preset: say where each of its numbers is from, and run nothing")
    p.add_argument("--steps", type=int, metavar="N", help="learner steps, instead of the scenario's")
    p.add_argument("--seed", type=int, metavar="N", help="seed, instead of the scenario's")
    p.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (PNG, SVG or PDF)")
    p.add_argument("--no-knobs", action="store_true", help="leave out the runs that show what would change the answer")
    p.add_argument("--jobs", type=int, metavar="N", help="processes that run at once (default: one for each core)")
    _add_example(p)
    what = "find the cheapest set of nodes for a step time, and the expected bill"
    p = verb("plan", _plan, what, verbs)
    p.add_argument("fleet", nargs="?", metavar="FLEET.csv", type=Path, help="file with the kinds of node that can be had")
    p.add_argument("--step-time", type=float, metavar="S", help="seconds that a learner step may take")
    p.add_argument("--scenario", type=Path, metavar="FILE",
                   help="file with model, lengths, learner and rules (default: an 8B model's)")
    p.add_argument("--groups", type=int, metavar="N", help="groups of a step (default 128)")
    p.add_argument("--samples", type=int, metavar="N", help="completions of a group (default 16)")
    p.add_argument("--median-length", type=float, metavar="TOKENS", help="median tokens of a completion (default 2600)")
    p.add_argument("--staleness", type=int, metavar="S", help="bound in learner steps (default 3)")
    p.add_argument("--max-usd-per-hour", type=float, metavar="USD", help="most dollars an hour for nodes")
    _add_example(p)


def _add_example(p: argparse.ArgumentParser) -> None:
    p.add_argument("--example", nargs="?", const=Path(), type=Path, metavar="FOLDER",
                   help="write a scenario and its fleet to start from, into the current folder or this one, and stop")


def _simulate(args: argparse.Namespace) -> dict[str, Any]:
    if args.example is not None:
        return _example(args)
    from netem.cli.progress import watching
    from netem.planning.cost_scenario import load_preset, load_scenario, preset_names
    from netem.planning.interrupts import CutShort
    from netem.planning.report import print_explained, print_preset, print_simulation, write_plot
    from netem.planning.runner import explained, run_preset, simulate
    from p2p.errors import UsageError

    if args.preset == "-":
        if not args.json:
            print("\n".join(preset_names()))
        return {"ok": True, "presets": preset_names()}
    if bool(args.preset) == bool(args.scenario):
        raise UsageError("give a SCENARIO.toml or --preset NAME, one of them; --example writes a scenario to start from")
    scenario = load_preset(args.preset) if args.preset else load_scenario(args.scenario)
    if args.explain:
        rows = explained(scenario)
        if not args.json:
            print_explained(scenario.name, rows)
        return {"ok": True, "name": scenario.name, "assumptions": rows}
    for key in ("steps", "seed"):
        if getattr(args, key) is not None:
            scenario = scenario.with_value(key, getattr(args, key))
    if args.plot is not None:
        args.where = args.plot
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        _check_writable(args.plot)
    jobs = args.jobs or len(os.sched_getaffinity(0))
    if jobs < 1:
        raise UsageError("--jobs must be at least 1")
    preset = bool(scenario.file.systems)
    try:
        with watching("simulating", scenario.file.steps, "runs" if preset else "steps") as watch:
            if preset:
                result = run_preset(scenario, watch.say, not args.no_knobs, jobs, watch.ran)
            else:
                result = simulate(scenario, watch.tell, not args.no_knobs, jobs, watch.ran)
    except CutShort as cut:  # what there is, and then the exit status of whoever ended it
        (print_preset if preset else print_simulation)(cut.result) if not args.json else print(json.dumps(cut.result), flush=True)
        raise cut.cause from None
    if not args.json:
        (print_preset if preset else print_simulation)(result)
    if args.plot is not None:
        write_plot(result, args.plot)
    return result


def _check_writable(file: Path) -> None:
    """OSError when the file cannot be written, before the work whose result goes there. Leaves everything as it was."""
    was_there = file.exists()
    open(file, "ab").close()
    if not was_there:
        file.unlink()


def _example(args: argparse.Namespace) -> dict[str, Any]:
    from netem.planning.example import FLEET, SCENARIO, STEP_S, write_example

    paths = write_example(args.example)
    there = [str(path) for path in paths]
    if not args.json:
        print(f"wrote {there[0]} and {there[1]}, the scenario and its fleet. Each runs as it is:")
        print(f"  shoal simulate {there[0]}")
        print(f"  shoal plan {there[1]} --step-time {STEP_S} --scenario {there[0]}")
        print(f"{SCENARIO} says what every key is, {FLEET} every column.")
    return {"ok": True, "files": there}


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    if args.example is not None:
        return _example(args)
    from netem.planning.cost_scenario import load_scenario
    from netem.planning.plan import plan, scenario_of_fleet, with_fleet
    from netem.planning.report import print_plan
    from p2p.errors import UsageError

    if args.fleet is None:
        raise UsageError("give a FLEET.csv; --example writes one to start from")
    if args.step_time is None:
        raise UsageError("give --step-time S, the seconds that a learner step may take")
    given = {
        "learner": {"groups": args.groups, "samples": args.samples}, "lengths": {"median": args.median_length},
        "policy": {"staleness": args.staleness}, "activation": {"max_usd_per_hour": args.max_usd_per_hour},
    }  # fmt: skip
    settings = {name: {k: v for k, v in section.items() if v is not None} for name, section in given.items()}
    if args.scenario is not None:
        scenario = with_fleet(load_scenario(args.scenario), args.fleet).changed(settings)
    else:
        scenario = scenario_of_fleet(args.fleet, settings)
    result = plan(scenario, args.step_time)
    if not args.json:
        print_plan(result)
    return result
