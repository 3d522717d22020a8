"""The verbs `shoal learner`, `config`, `status`, `report` and `export`: their flags, and what they print.

Must not know the other verbs, exit statuses or how errors are told: each returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from p2p.verbs import AddVerb

COMMON_FLAGS = ("-h", "--help", "--json", "-v", "--verbose")
"""Flags that every verb takes (`shoal.py`)."""

_LEARNER_FLAGS = ("--resume", "--dry-run")
"""The learner's flags that are no settings."""

_SHORT = {
    "--budget": "--activation.budget_usd", "--max-usd-per-hour": "--activation.max_usd_per_hour", "--audit": "--audit.share",
}  # fmt: skip
"""Flags of the learner that are short names of settings."""


def add_verbs(verbs: Any, verb: AddVerb) -> None:
    """`verbs`: argparse's subparsers of the whole command."""
    p = verb("learner", _learner, "run the learner: head and trainer", verbs)
    p.add_argument("config", metavar="CONFIG.toml", help="the run's settings (shoal config init writes a first file)")
    p.add_argument("--resume", action="store_true", help="go on with the run in run_dir, from its last commit")
    p.add_argument("--dry-run", action="store_true",
                   help="check settings, task, model, disk, memory and ports, print the settings resolved, and stop")
    p.add_argument("--budget", metavar="USD", help="most dollars for the whole run (activation.budget_usd)")
    p.add_argument("--max-usd-per-hour", metavar="USD", help="most dollars an hour (activation.max_usd_per_hour)")
    p.add_argument("--audit", metavar="SHARE", help="share of a proven node's completions that are checked (audit.share)")
    p.set_defaults(takes_settings=True, interrupted_hint=": go on with --resume")
    p.epilog = (
        "Any setting of the file can be given as a flag: --rollout.max_staleness 3 --trainer.lr 1e-6 --preset dapo. "
        "shoal config explain tells what there is."
    )

    p = verb("config", _config_docs, "explain the settings of a learner, and write a first file of them", verbs)
    actions = p.add_subparsers(dest="action", required=True, metavar="ACTION")
    p = verb("explain", _config_explain, "explain a setting or a section: type, unit, default, paper", actions)
    p.add_argument("key", metavar="KEY", nargs="?", default="", help="a key or a section (default: all sections)")
    p = verb("init", _config_init, "write a commented file of settings for a first run", actions)
    p.add_argument("file", metavar="FILE", nargs="?", type=Path, default=Path("run.toml"), help="where to (default run.toml)")
    p.add_argument("--all", action="store_true", help="every setting, those at their defaults as comments")
    verb("presets", _config_presets, "show the settings by name: GRPO, DAPO, GSPO, ...", actions)
    verb("docs", _config_docs, "print every setting, its type, default and meaning, as Markdown", actions)
    verb("objectives", _config_objectives, "print every objective, its formula and its settings, as Markdown", actions)
    verb("metrics", _config_metrics, "print every metric, its unit and meaning, as Markdown", actions)

    p = verb("status", _status, "show what a running learner is doing", verbs)
    p.add_argument("run_dir", type=Path, help="the run's directory")
    p.add_argument("--watch", action="store_true", help="go on showing it until the run ends, as the learner's own terminal does")

    p = verb("report", _report, "write a run's report: its curve, nodes, cost and faults on one page", verbs)
    p.add_argument("run_dir", type=Path, help="the run's directory")

    p = verb("export", _export, "write a run's newest checkpoint as a Hugging Face folder", verbs)
    p.add_argument("run_dir", type=Path, help="the run's directory")
    p.add_argument("out", type=Path, help="the folder to write")
    p.add_argument("--adapter", action="store_true", help="of a run with trainer.lora the adapter alone, as peft loads it")


class SplitArguments(NamedTuple):
    """A command line's arguments."""

    verbs: list[str]
    """for argparse"""
    settings: list[str]
    """of a learner: --section.key VALUE"""


def split_settings(argv: Sequence[str]) -> SplitArguments:
    """argparse would take the value of a flag that it does not know for the config file. A flag without a dot takes no file of
    settings for its value: it is a misspelt flag of the learner's."""
    ours, settings = list(argv), list[str]()
    if not ours or ours[0] != "learner":
        return SplitArguments(ours, settings)
    ours, rest = ours[:1], ours[1:]
    known = {*COMMON_FLAGS, *_LEARNER_FLAGS}
    while rest:
        token = rest.pop(0)
        if token in known or not token.startswith("--"):
            ours.append(token)
            continue
        name, equals, value = token.partition("=")
        settings.append(_SHORT.get(name, name) + equals + value)
        free = bool(rest) and rest[0] not in known and not rest[0].startswith("--")
        takes_value = free and ("." in name or not rest[0].endswith(".toml"))
        if "=" not in token and takes_value:
            settings.append(rest.pop(0))
    return SplitArguments(ours, settings)


def _learner(args: argparse.Namespace) -> dict[str, Any]:
    from learner.config import read_config, resolved
    from learner.preflight.checks import check
    from learner.preflight.gather import gather
    from p2p.errors import UsageError

    read = read_config(args.config, args.settings, (*COMMON_FLAGS, *_LEARNER_FLAGS, *_SHORT))
    config = read.config
    args.where = config.run_dir
    facts = gather(config, read.wrong, resume=args.resume, thorough=args.dry_run)
    found = check(config, facts, read.wrong)
    if problems := (*read.problems, *found.problems):
        raise UsageError(*problems)
    if args.dry_run or args.verbose:
        for note in found.notes:
            print(f"note: {note}", file=sys.stderr)
    if args.dry_run:
        for line in (*found.memory, *found.table):
            print(line, file=sys.stderr)
        if not args.json:
            print(resolved(config), end="")
        return {"ok": True, "config": config.model_dump(), "notes": list(found.notes), "memory": list(found.memory)}
    from learner.service import run_learner
    from learner.status.outcome import RunConsole
    from p2p.termination import run_terminable

    args.interrupted_hint = f": go on with --resume (what there is: shoal report {config.run_dir})"
    with RunConsole(Path(config.run_dir), page=not args.json) as console:

        untold = list(found.memory)

        def hear(*told: Any, **more: Any) -> None:
            while untold:  # not before the run begins: what is refused is told alone
                logging.getLogger("shoal.learner").info("%s", untold.pop(0))
            console.hear(*told, **more)

        return console.end(run_terminable(partial(run_learner, config, resume=args.resume, announce=hear)))


def _config_docs(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from learner.config_docs import markdown, sections

    if not args.json:
        print(markdown(), end="")
    return {"ok": True, "settings": [asdict(one) for section in sections() for one in section.settings]}


def _config_objectives(args: argparse.Namespace) -> dict[str, Any]:
    from learner.trainer.objectives.docs import objective_rows, objectives_markdown

    if not args.json:
        print(objectives_markdown(), end="")
    return {"ok": True, "objectives": objective_rows()}


def _config_metrics(args: argparse.Namespace) -> dict[str, Any]:
    from learner.status.metrics_docs import metrics_markdown, metrics_rows

    if not args.json:
        print(metrics_markdown(), end="")
    return {"ok": True, "metrics": metrics_rows()}


def _config_explain(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from learner.config_help import explain, explained

    lines = explain(args.key)
    if not args.json:
        print("\n".join(lines))
    return {"ok": True, "settings": [asdict(one) for one in explained(args.key)]}


def _config_init(args: argparse.Namespace) -> dict[str, Any]:
    from learner.config_help import first_file
    from p2p.errors import UsageError

    text = first_file(args.all)
    try:
        with open(args.file, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{args.file} is there already: name another file (shoal config init FILE), or remove it") from None
    except OSError as error:
        raise UsageError(f"cannot write {args.file}: {error.strerror}") from None
    if not args.json:
        print(f"wrote {args.file}: look at run_dir, model and task, then\n  shoal learner {args.file} --dry-run")
    return {"ok": True, "file": str(args.file)}


def _config_presets(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from learner.config_help import presets
    from learner.presets import PRESETS

    if not args.json:
        print("\n".join(presets()))
    return {"ok": True, "presets": {name: asdict(preset) for name, preset in PRESETS.items()}}


def _status(args: argparse.Namespace) -> dict[str, Any]:
    from learner.status.run_state import RunState
    from learner.status.source import fetch_status
    from learner.status.terminal import print_status

    if args.watch:
        from learner.status.outcome import watch

        return watch(args.run_dir, page=not args.json)
    status = fetch_status(args.run_dir)
    if not args.json:
        print_status(RunState.of(status))
    return status


def _report(args: argparse.Namespace) -> dict[str, Any]:
    from learner.status.outcome import report_of

    page = report_of(args.run_dir)
    if not args.json:
        print(f"report: {page}")
    return {"ok": True, "report": str(page)}


def _export(args: argparse.Namespace) -> dict[str, Any]:
    from learner.trainer.export import export_run

    result = export_run(args.run_dir, args.out, adapter=args.adapter)
    if not args.json:
        print(f"step {result['step']} exported to {result['folder']}")
    return result
