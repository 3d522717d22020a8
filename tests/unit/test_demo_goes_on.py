"""The command that goes on with a demo which was stopped."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from netem.cli.demo_verb import add_verbs
from netem.demo.recipes import RECIPES
from netem.demo.run import NODES, SPOT_NODES, Demo
from netem.processes.children import Children


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser()

    def verb(name, run, text, verbs):
        return verbs.add_parser(name)

    add_verbs(top.add_subparsers(), verb)
    return top


@pytest.mark.parametrize(
    "flags",
    ["", "--steps 9", "--recipe game --seed 3", "--nodes 2 --chaos", "--spot", "--spot --nodes 4 --steps 20", "--lora 16"],
)
@pytest.mark.parametrize("folder", ["runs/demo", "a folder/demo"])
def test_says_what_must_be_said_again(tmp_path: Path, flags: str, folder: str) -> None:
    args = parser().parse_args(["demo", *flags.split()])
    given = args.nodes
    args.nodes = args.nodes or (SPOT_NODES if args.spot else NODES)
    with Children(tmp_path) as children:
        demo = Demo(args, RECIPES[args.recipe], 120, run_dir=Path(folder), children=children, began=0.0)
        again = parser().parse_args(shlex.split(demo.go_on)[1:])
    assert again.resume and again.run_dir == Path(folder) and not again.chaos
    assert (again.recipe, again.steps, again.seed, again.spot) == (args.recipe, args.steps, args.seed, args.spot)
    assert again.nodes == given, "and no more"
