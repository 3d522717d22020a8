"""The command line: verbs only; those of the emulated network and of measurements are in `netem.cli.verbs`,
those of planning in `netem.cli.planning_verbs`.

Each verb imports what it needs when it runs, so that `shoal --help` is instant.

Every verb takes --json and then prints one JSON object as its last line. Exit status: 0 it did what it says, 1 it could not
finish, 2 bad input (one clear line, no traceback), 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_COMMON_FLAGS = ("-h", "--help", "--json", "-v", "--verbose")
_LEARNER_FLAGS = ("--resume", "--dry-run")
"""The learner's flags that are no settings."""

_SHORT = {"--budget": "--activation.budget_usd", "--max-usd-per-hour": "--activation.max_usd_per_hour"}
"""Flags of the learner that are short names of settings."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    from p2p.errors import ShoalError, UsageError, first_of

    parser = _parser()
    ours, settings = _split_settings(sys.argv[1:] if argv is None else argv)
    args, rest = parser.parse_known_args(ours)
    if rest and not getattr(args, "takes_settings", False):
        asked = " ".join(filter(None, (args.verb, getattr(args, "action", ""))))
        return _complain(f"unknown argument {rest[0]!r} (see: shoal {asked} --help)")
    args.settings = [*rest, *settings]
    _set_up_logging(args)
    signal.signal(signal.SIGTERM, _on_terminate)  # a service manager's; where trio runs, the verb receives it there
    try:
        result = args.run(args)
    except BaseException as error:
        cause = first_of(error)
        if isinstance(cause, UsageError):
            return _complain(str(cause))
        if isinstance(cause, KeyboardInterrupt):
            return _interrupted(args, cause)
        if isinstance(cause, ShoalError):
            print(f"shoal {args.verb}: {cause}", file=sys.stderr)
            return 1
        if isinstance(cause, (OSError, sqlite3.Error)):  # a full disk, a missing permission: no bug of ours
            if args.verbose:
                traceback.print_exception(error)
            print(f"shoal {args.verb}: {_outside_fault(cause, getattr(args, 'where', None))}", file=sys.stderr)
            return 1
        raise
    if args.json:
        print(json.dumps(result), flush=True)
    return 0 if result.get("ok", True) else 1


def _on_terminate(number: int, frame: object) -> None:
    from p2p.errors import Terminated

    raise Terminated


def _interrupted(args: argparse.Namespace, error: KeyboardInterrupt) -> int:
    from p2p.errors import Terminated

    word, status = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
    print(f"{word}{getattr(args, 'interrupted_hint', '')}", file=sys.stderr)
    return status


def _split_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what argparse reads, a learner's settings). argparse would take the value of a flag that it does not know for the
    config file."""
    ours, settings = list(argv), list[str]()
    if not ours or ours[0] != "learner":
        return ours, settings
    ours, rest = ours[:1], ours[1:]
    known = {*_COMMON_FLAGS, *_LEARNER_FLAGS}
    while rest:
        token = rest.pop(0)
        if token in known or not token.startswith("--"):
            ours.append(token)
            continue
        name, equals, value = token.partition("=")
        settings.append(_SHORT.get(name, name) + equals + value)
        if "=" not in token and rest and rest[0] not in known:
            settings.append(rest.pop(0))
    return ours, settings


def _outside_fault(error: OSError | sqlite3.Error, where: object) -> str:
    """One line that names what and where: the error's own path, or else where this verb writes (a failed write knows none)."""
    if isinstance(error, OSError):
        paths = [str(p) for p in (error.filename, error.filename2) if p is not None]
        text = error.strerror or str(error) or type(error).__name__
    else:
        paths, text = [*getattr(error, "__notes__", [])], str(error)
    return " ".join(": ".join([text, *(paths or ([str(where)] if where else []))]).split())


def _complain(text: str) -> int:
    print(f"shoal: {' '.join(text.split())}", file=sys.stderr)
    return 2


class _OneLineParser(argparse.ArgumentParser):
    """Errors as one line, without the usage block."""

    def error(self, message: str) -> Any:
        sys.exit(_complain(f"{message} (see: {self.prog} --help)"))


def _parser() -> argparse.ArgumentParser:
    from netem.cli.planning_verbs import add_verbs as add_planning_verbs
    from netem.cli.verbs import add_verbs

    parser = _OneLineParser(
        prog="shoal", description="Peer-to-peer weight broadcast and rollout network for RL post-training."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(
        name: str, run: Callable[[argparse.Namespace], dict[str, Any]], help: str, under: Any = verbs
    ) -> argparse.ArgumentParser:
        sub = under.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        sub.add_argument("-v", "--verbose", action="store_true", help="log what happens, and where an error arose, to stderr")
        sub.set_defaults(run=run)
        return sub

    p = verb("learner", _learner, "run the learner: head and trainer")
    p.add_argument("config", metavar="CONFIG.toml", help="the run's settings (shoal config docs describes them)")
    p.add_argument("--resume", action="store_true", help="go on with the run in run_dir, from its last commit")
    p.add_argument("--dry-run", action="store_true", help="check the configuration, print it resolved, and stop")
    p.add_argument("--budget", metavar="USD", help="most dollars for the whole run (activation.budget_usd)")
    p.add_argument("--max-usd-per-hour", metavar="USD", help="most dollars an hour (activation.max_usd_per_hour)")
    p.set_defaults(takes_settings=True, interrupted_hint=": go on with --resume")
    p.epilog = "Any setting of the file can be given as a flag: --rollout.max_staleness 3 --trainer.lr 1e-6"

    p = verb("config", _config, "describe the settings of a learner")
    p.add_argument("action", choices=["docs"], help="docs: print every setting, its type, default and meaning, as Markdown")

    p = verb("node", _node, "join a run and generate for it, or drain: let a running node hand over its work and leave")
    p.add_argument("action", nargs="?", choices=["drain"],
                   help="drain: end the node that runs in --dir, as SIGTERM does; none of its tokens is lost")
    p.add_argument("--join", metavar="TICKET", help="the learner's ticket, or a file that holds it")
    p.add_argument("--dir", type=Path, help="folder of this node's key, weights and chunks")
    p.add_argument("--listen", action="append", metavar="ADDR", help="multiaddr to listen on (default /ip4/0.0.0.0/tcp/0)")
    p.add_argument("--no-listen", action="store_true", help="only dial out (behind NAT)")
    p.add_argument("--name", default="", help="name of this node on the learner's pages")
    p.add_argument("--engine", default="transformers", help="engine: transformers (default), vllm, or fake")
    p.add_argument("--engine-python", default="", metavar="PATH",
                   help="the Python of the environment that the engine runs in (default: this one)")
    p.add_argument("--engine-set", action="append", default=[], metavar="KEY=VALUE",
                   help="another setting of the engine's own, e.g. kv_bytes=2000000000 (may be repeated)")
    p.add_argument("--kv-policy", default="recompute", choices=["recompute", "keep"],
                   help="what new weights do to running sequences: recompute their keys and values (exact), or keep them (fast)")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="device of the engine (default auto)")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                   help="type that the engine computes in (default auto)")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of the engine (default 1)")
    p.add_argument("--capacity", type=int, default=64, help="sequences decoded at once (default 64)")
    p.add_argument("--usd-per-hour", type=float, default=0.0, metavar="USD",
                   help="what an hour of this node costs while it generates (default 0)")
    p.add_argument("--idle-usd-per-hour", type=float, default=0.0, metavar="USD",
                   help="what an hour of it costs while it does not (default 0)")
    p.add_argument("--usd-per-gb", type=float, default=0.0, metavar="USD",
                   help="what 10^9 bytes that leave this node cost (default 0)")
    p.add_argument("--site", default="", metavar="NAME", help="name of this node's LAN: nodes that give the same name share it")
    p.add_argument("--store-gib", type=float, default=8.0, help="most GiB of disk for chunks (default 8)")
    p.add_argument("--base-model", type=Path, metavar="DIR",
                   help="folder with the model that the run began with, so that only the changes since are downloaded")
    p.add_argument("--stay", action="store_true", help="keep waiting for the learner after the run is over")

    p = verb("doctor", _doctor, "say which engines would run on this machine, and what keeps the others from it")
    p.add_argument("--engine-python", default="", metavar="PATH", help="as for shoal node")

    p = verb("status", _status, "show what a running learner is doing")
    p.add_argument("run_dir", type=Path, help="the run's directory")

    p = verb("export", _export, "write a run's newest checkpoint as a Hugging Face folder")
    p.add_argument("run_dir", type=Path, help="the run's directory")
    p.add_argument("out", type=Path, help="the folder to write")

    p = verb("demo", _demo, "run a learner and three nodes on this machine, with a small model")
    p.add_argument("--run-dir", type=Path, default=None,
                   help="directory of the demo (default runs/demo; an earlier demo there is replaced)")
    p.add_argument("--steps", type=int, default=None, help="learner steps (default the recipe's, 120 or 4; with --spot 100)")
    p.add_argument("--nodes", type=int, default=None, help="number of nodes (default 3; with --spot 6)")
    p.add_argument("--seed", type=int, default=0, help="seed of the demo (default 0)")
    p.add_argument("--recipe", default="reverse", choices=["reverse", "sparse"],
                   help="reverse (default), or sparse: a few steps of a 20 M model at lr 1e-6, whose deltas are small")
    p.add_argument("--chaos", action="store_true", help="kill one node in the middle and start another")
    p.add_argument("--spot", action="store_true",
                   help="nodes come and go every few seconds, some with notice and some killed, by a trace drawn from --seed")
    p.add_argument("--resume", action="store_true", help="go on with the demo in --run-dir after its learner was killed")

    add_planning_verbs(verbs, verb)
    add_verbs(verbs, verb)
    return parser


def _set_up_logging(args: argparse.Namespace) -> None:
    level = logging.INFO if args.verbose or args.verb in ("learner", "node") else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("shoal").setLevel(level)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes fork after tokenizers were used


def _learner(args: argparse.Namespace) -> dict[str, Any]:
    from learner.config import dump_toml, load_config

    config = load_config(args.config, args.settings)
    args.where = config.run_dir
    if args.dry_run:
        print(dump_toml(config.model_dump()), end="")
        return {"ok": True, "config": config.model_dump()}
    import trio

    from learner.service import run_learner

    def announce(event: str, facts: dict[str, Any]) -> None:
        print(f"run {facts['run']} in {facts['run_dir']}, status on http://127.0.0.1:{facts['status_port']}/status")
        print(f"nodes join with:\n  shoal node --join {facts['ticket']}", flush=True)

    async def go() -> dict[str, Any]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_terminated)
            result = await run_learner(config, resume=args.resume, announce=announce)
            nursery.cancel_scope.cancel()
        return result

    return trio.run(go)


def _config(args: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    from learner.config_docs import markdown, sections

    if not args.json:
        print(markdown(), end="")
    return {"ok": True, "settings": [asdict(one) for section in sections() for one in section.settings]}


async def _until_terminated() -> None:
    import trio

    from p2p.errors import Terminated

    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            raise Terminated


def _node(args: argparse.Namespace) -> dict[str, Any]:
    from node.agent import NodeSettings
    from node.install.base_model import BaseModel
    from node.service import NodeOptions, default_directory, run_node
    from p2p.errors import UsageError
    from p2p.limits import GIB
    from p2p.membership.admission import read_ticket
    from p2p.protocol.prices import MAX_PRICE, Terms

    if args.action == "drain" and args.dir is not None:
        return _drain(args, args.dir)
    text = args.join
    if text is None:
        need = "--dir DIR or --join TICKET" if args.action else "--join TICKET"
        raise UsageError(f"node {args.action + ' ' if args.action else ''}needs {need} (see: shoal node --help)")
    if not text.startswith("shoal1"):
        path = Path(text)
        try:
            is_file = path.is_file()
        except OSError:  # a pasted text can be too long for a name
            is_file = False
        if not is_file:
            raise UsageError(f"--join: {text[:80]!r} is neither a ticket nor a file that holds one")
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--join: {path} cannot be read as a ticket: {error}") from None
    ticket = read_ticket(text)
    if args.action == "drain":
        return _drain(args, default_directory(ticket.run))
    for name in ("threads", "capacity", "store_gib"):
        if not getattr(args, name) > 0:  # NaN is not, either
            raise UsageError(f"--{name.replace('_', '-')} must be above 0")
    for name in ("usd_per_hour", "idle_usd_per_hour", "usd_per_gb"):
        if not 0 <= getattr(args, name) <= MAX_PRICE:
            raise UsageError(f"--{name.replace('_', '-')} is from 0 to {MAX_PRICE:,.0f} dollars")
    if args.idle_usd_per_hour > args.usd_per_hour:
        raise UsageError("--idle-usd-per-hour is at most --usd-per-hour")
    import trio

    settings = NodeSettings(
        ticket, args.dir or default_directory(ticket.run), args.name, capacity=args.capacity,
        store_limit=int(args.store_gib * GIB), dialable=not args.no_listen, exit_when_done=not args.stay, site=args.site,
        base_model=BaseModel(args.base_model) if args.base_model else None,
        terms=Terms(args.usd_per_hour, args.idle_usd_per_hour, args.usd_per_gb),
    )  # fmt: skip
    options = NodeOptions(
        settings, tuple(args.listen or ["/ip4/0.0.0.0/tcp/0"]), engine=args.engine, engine_python=args.engine_python,
        engine_set=_settings(args.engine_set), kv_policy=args.kv_policy, device=args.device, dtype=args.dtype,
        threads=args.threads,
    )  # fmt: skip
    args.where = settings.directory
    result = trio.run(run_node, options)
    if not args.json:
        print(f"{result['name']}: {result['tokens']} tokens, last version {result['version']} ({result['reason']})")
    return result


def _settings(pairs: list[str]) -> tuple[tuple[str, Any], ...]:
    """KEY=VALUE as TOML would read it."""
    import tomllib

    from p2p.errors import UsageError

    out = []
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"--engine-set: {pair!r} is not KEY=VALUE")
        try:
            out.append((key, tomllib.loads(f"v = {text}")["v"]))
        except tomllib.TOMLDecodeError:
            out.append((key, text))
    return tuple(out)


def _doctor(args: argparse.Namespace) -> dict[str, Any]:
    from node.doctor import examine, say

    result = examine(args.engine_python or sys.executable)
    if not args.json:
        print(say(result))
    return result


def _drain(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from node.service import drain_node

    result = drain_node(directory)
    if not args.json:
        print(f"the node in {directory} has handed over and left ({result['seconds']:.1f} s)")
    return result


def _status(args: argparse.Namespace) -> dict[str, Any]:
    from learner.status.view import fetch_status, print_status

    status = fetch_status(args.run_dir)
    if not args.json:
        print_status(status)
    return status


def _export(args: argparse.Namespace) -> dict[str, Any]:
    from learner.trainer.export import export_run

    result = export_run(args.run_dir, args.out)
    if not args.json:
        print(f"step {result['step']} exported to {result['folder']}")
    return result


def _demo(args: argparse.Namespace) -> dict[str, Any]:
    from p2p.errors import UsageError

    for name in ("steps", "nodes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1")
    from netem.demo.run import run_demo

    return run_demo(args)


if __name__ == "__main__":
    sys.exit(main())
