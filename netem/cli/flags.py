"""Flags that several verbs have, and how a verb tells its result. Must not know any verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def say(line: str) -> None:
    """Tell of progress."""
    print(line, file=sys.stderr, flush=True)


def told(args: argparse.Namespace, result: dict[str, Any], describe: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """`result`, printed for people unless it is to be printed as JSON."""
    if not args.json:
        print(describe(result))
    return result


def add_value(sub: argparse.ArgumentParser, flag: str, default: int | float | str, metavar: str, help: str) -> None:
    """A flag with a value of the default's type; its help ends with the default."""
    shown = f"{default:g}" if isinstance(default, float) else default
    sub.add_argument(flag, type=type(default), default=default, metavar=metavar, help=f"{help} (default {shown})")


def add_folder(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--folder", type=Path, metavar="DIR", dest="where",
                     help="folder for the files of the run (default: the system's temporary one)")


def add_backend(sub: argparse.ArgumentParser) -> None:
    what = "how links are emulated: by the kernel's tc netem, or a switch in user space (default: tc where the kernel has it)"
    sub.add_argument("--backend", choices=["auto", "tc", "switch"], default="auto", help=what)
