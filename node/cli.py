"""The verbs `shoal node` and `doctor`: their flags, and what they print.

Must not know the other verbs, exit statuses or how errors are told: each returns the object that --json prints. Imports what
it needs when it runs, for `shoal --help` reads this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.membership.admission import Ticket
    from p2p.verbs import AddVerb



def add_verbs(verbs: Any, verb: AddVerb) -> None:
    """`verbs`: argparse's subparsers of the whole command."""
    p = verb("node", _node, "join a run and generate for it; or drain: have a node leave, or limit: change its limits", verbs)
    p.add_argument("action", nargs="?", choices=["drain", "limit"],
                   help="drain: end the node that runs in --dir, as SIGTERM does; none of its tokens is lost. limit: change what "
                   "it may use to what the flags say, or show it")
    _of_ticket(p, "whoever may see this machine's processes sees a ticket on the command line")
    p.add_argument("--dir", type=Path,
                   help="folder of this node's key, weights and chunks (default: one of the run's under "
                   "~/.local/share/shoal/nodes that no other node holds; the first log line says which)")
    p.add_argument("--listen", action="append", metavar="ADDR",
                   help="multiaddr to listen on (default: all of IPv4, and of IPv6 where there is any)")
    p.add_argument("--no-listen", action="store_true", help="only dial out: no other node opens a connection to this one")
    p.add_argument("--map-port", action="store_true", help="ask the router (PCP, NAT-PMP, UPnP) to lead a port here, for others")
    p.add_argument("--name", default="",
                   help="name of this node on the learner's pages; without --dir it also finds the folder that it had before")
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
    _of_limits(p)
    p.add_argument("--base-model", type=Path, metavar="DIR",
                   help="folder with the model that the run began with, so that only the changes since are downloaded")
    p.add_argument("--stay", action="store_true", help="keep waiting for the learner after the run is over")

    p = verb("doctor", _doctor, "say whether a node would run here, with which engines, and what to do where not", verbs)
    p.add_argument("--engine-python", default="", metavar="PATH", help="as for shoal node")
    p.add_argument("--dir", type=Path, help="as for shoal node: whether there is room")
    _of_ticket(p, "its learner is dialled: which of its addresses answer, what it sees of this machine, its clock")
    p.add_argument("--listen", action="append", metavar="ADDR", help="as for shoal node: whether others could dial it")
    p.add_argument("--run-dir", type=Path, default=Path("runs"), metavar="DIR",
                   help="where a learner here would keep its runs: whether there is room (default runs)")


def _of_limits(p: argparse.ArgumentParser) -> None:
    p.add_argument("--max-up-mbit", metavar="MBIT", help="most Mbit/s that leave this machine, on the wire (default 0: no limit)")
    p.add_argument("--max-down-mbit", metavar="MBIT", help="most Mbit/s that come to it, on the wire (default 0: no limit)")
    p.add_argument("--max-disk", metavar="GB",
                   help="most GB (10^9 bytes) of its folder: two states of the model, and chunks in what they leave (default 0: "
                   "no limit but --store-gib)")
    p.add_argument("--quota-gb-per-day", metavar="GB",
                   help="GB on the wire in a day, both ways; from nine tenths on it relays nothing, then it rests till midnight "
                   "(default 0: no limit)")
    p.add_argument("--between", metavar="HH:MM-HH:MM",
                   help="hours of its clock in which it takes part, such as 22:00-07:00; when they end it hands over and rests "
                   "(default always)")
    p.add_argument("--yield", dest="gives_way", action=argparse.BooleanOptionalAction, default=None,
                   help="give way while others use the GPU (or the processor) or the uplink (default no)")


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, None where they say nothing, by the names of `HostLimits.as_said`."""
    names = ("max_up_mbit", "max_down_mbit", "max_disk", "quota_gb_per_day", "between")
    return {name: getattr(args, name) for name in names} | {"yield": args.gives_way}


def _of_ticket(p: argparse.ArgumentParser, more: str) -> None:
    p.add_argument("--join", metavar="TICKET", help=f"the learner's ticket, a file that holds it, or - for stdin ({more})")
    p.add_argument("--join-file", type=Path, metavar="FILE",
                   help="file with the ticket; without either, the ticket is in the environment as SHOAL_TICKET")


def _node(args: argparse.Namespace) -> dict[str, Any]:
    from node.agent import NodeSettings
    from node.folders import default_folder
    from node.install.base_model import BaseModel
    from node.service import NodeOptions, run_node
    from p2p.allowance.limits import NO_LIMITS
    from p2p.errors import UsageError
    from p2p.limits import GIB
    from p2p.protocol.prices import MAX_PRICE, Terms

    limits = NO_LIMITS.changed(_limits(args))  # what is wrong is told before anything is begun
    act = _drain if args.action == "drain" else _limit
    if args.action and args.dir is not None:
        return act(args, args.dir)
    ticket = _ticket(args)
    if ticket is None:
        need = "--dir DIR or --join TICKET" if args.action else "--join TICKET, --join-file FILE or SHOAL_TICKET"
        raise UsageError(f"node {args.action + ' ' if args.action else ''}needs {need} (see: shoal node --help)")
    if args.action:
        return act(args, _running(default_folder(ticket.run), args.name))
    for name in ("threads", "capacity", "store_gib"):
        if not getattr(args, name) > 0:  # NaN is not, either
            raise UsageError(f"--{name.replace('_', '-')} must be above 0")
    for name in ("usd_per_hour", "idle_usd_per_hour", "usd_per_gb"):
        if not 0 <= getattr(args, name) <= MAX_PRICE:
            raise UsageError(f"--{name.replace('_', '-')} is from 0 to {MAX_PRICE:,.0f} dollars")
    if args.idle_usd_per_hour > args.usd_per_hour:
        raise UsageError("--idle-usd-per-hour is at most --usd-per-hour")
    import trio

    from p2p.channel.listening import anywhere

    settings = NodeSettings(
        ticket, args.dir or default_folder(ticket.run), args.name, capacity=args.capacity,
        store_limit=int(args.store_gib * GIB), dialable=not args.no_listen, exit_when_done=not args.stay, site=args.site,
        base_model=BaseModel(args.base_model) if args.base_model else None,
        terms=Terms(args.usd_per_hour, args.idle_usd_per_hour, args.usd_per_gb),
    )  # fmt: skip
    options = NodeOptions(
        settings, tuple(args.listen or anywhere()), engine=args.engine, engine_python=args.engine_python,
        engine_set=_settings(args.engine_set), kv_policy=args.kv_policy, device=args.device, dtype=args.dtype,
        threads=args.threads, limits=limits, named_folder=args.dir is not None, map_port=args.map_port,
    )  # fmt: skip
    args.where = settings.directory
    result = trio.run(run_node, options, lambda folder: setattr(args, "where", folder))
    if not args.json:
        print(f"{result['name']}: {result['tokens']} tokens, last version {result['version']} ({result['reason']})")
    return result


def _ticket(args: argparse.Namespace) -> Ticket | None:
    """The ticket that the flags or the environment give; None when they give none."""
    from node.tickets import ticket_of

    return ticket_of(args.join, args.join_file)


def _running(first: Path, name: str) -> Path:
    """The folder of the one node of a run that runs on this machine."""
    from node.folders import running_beside
    from p2p.errors import UsageError

    found = running_beside(first, name)
    if len(found) > 1:
        raise UsageError(f"{len(found)} nodes of this run are here; say which with --dir: {', '.join(map(str, found))}")
    if name and not found:
        raise UsageError(f"no node named {name[:80]!r} runs here")
    return found[0] if found else first


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
    """The learner's findings come through the frame, which may know both (`shoal.py`)."""
    from node.doctor.allowed import examine_limits
    from node.doctor.examination import answer, examine, examine_node, say
    from node.folders import default_folder, nodes_root

    ticket = _ticket(args)
    python = args.engine_python or sys.executable
    _wait(args, f"asking {python} what it has, which takes some seconds ...")
    facts = examine(python)
    folder = args.dir or (default_folder(ticket.run) if ticket else nodes_root())
    findings = examine_node(facts, folder) + examine_limits(folder)
    findings += args.examine_learner(args.run_dir)
    if ticket is not None or args.listen:
        import trio

        from node.doctor.reach import examine_reach

        if ticket is not None:
            _wait(args, "dialling the learner's addresses, half a minute at most ...")
        findings += trio.run(examine_reach, args.listen or (), ticket)
    if not args.json:
        say(findings)
    return answer(facts, findings)


def _wait(args: argparse.Namespace, what: str) -> None:
    """Say what is being done, where a person looks on."""
    if not args.json and sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)


def _drain(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from node.folders import drain_node

    result = drain_node(directory)
    if not args.json:
        print(f"the node in {directory} has handed over and left ({result['seconds']:.1f} s)")
    return result


def _limit(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from node.folders import check_running
    from p2p.allowance.keeper import change_limits, what_holds

    check_running(directory)
    limits = change_limits(directory, _limits(args))
    holds = what_holds(directory)
    if not args.json:
        print(f"the node in {directory}: {limits or 'no limits'}{f' ({holds})' if holds else ''}")
    return {"ok": True, "directory": str(directory), "limits": limits.as_said, "holds": holds}
