"""The command line: the frame around the verbs, which `learner.cli`, `learner.limit_verb`, `learner.admission.verbs`,
`node.cli` and `netem.cli` add.

Each verb imports what it needs when it runs, so that `shoal --help` is instant.

Every verb takes --json and then prints one JSON object as its last line. Exit status: 0 it did what it says, 1 it could not
finish, 2 bad input (one clear line, no traceback), 130 interrupted, 141 nobody reads what it prints (`| head`), 143 terminated.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import sqlite3
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p.findings import DoctorFinding
    from p2p.verbs import Run


CLOSED = 141
"""Exit status when nobody reads what is printed: what a shell says of a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    from learner.cli import split_settings
    from p2p.errors import ShoalError, UsageError, first_of

    parser = _parser()
    ours, settings = split_settings(sys.argv[1:] if argv is None else argv)
    args, rest = parser.parse_known_args(ours)
    if rest and not getattr(args, "takes_settings", False):
        return _complain(f"unknown argument {rest[0]!r} (see: {args.prog} --help)")
    args.settings = [*rest, *settings]
    _set_up_logging(args)
    signal.signal(signal.SIGTERM, _on_terminate)  # a service manager's; where trio runs, the verb receives it there
    try:
        result = args.run(args)
    except BaseException as error:
        cause = first_of(error)
        if isinstance(cause, BrokenPipeError) and _stdout_is_closed():
            _give_up_stdout()
            return CLOSED
        if isinstance(cause, UsageError):
            return _complain(*cause.problems)
        if isinstance(cause, KeyboardInterrupt):
            return _interrupted(args, cause)
        if isinstance(cause, ShoalError):
            print(f"shoal {args.verb}: {_one_line(str(cause))}", file=sys.stderr)
            return 1
        if isinstance(cause, (OSError, sqlite3.Error)):  # a full disk, a missing permission: no bug of ours
            if args.verbose:
                traceback.print_exception(error)
            print(f"shoal {args.verb}: {_one_line(_outside_fault(cause, getattr(args, 'where', None)))}", file=sys.stderr)
            return 1
        raise
    return _said(args, result) or (0 if result.get("ok", True) else 1)


def _said(args: argparse.Namespace, result: dict[str, Any]) -> int:
    """Print what is still to be printed; 0, or the exit status where --json's result could not be."""
    if sys.stdout is None:  # it was closed from the beginning
        return 0
    try:
        if args.json:
            print(json.dumps(result))
        sys.stdout.flush()  # not at the interpreter's end, where a closed pipe is a traceback
    except BrokenPipeError:
        _give_up_stdout()
        return CLOSED if args.json else 0
    except OSError as error:
        _give_up_stdout()
        print(f"shoal {args.verb}: stdout: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _stdout_is_closed() -> bool:
    """Whether nobody reads what we print: a broken pipe may be another one."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
        return any(found & select.POLLERR for _, found in poll.poll(0))
    except (OSError, ValueError):
        return False


def _give_up_stdout() -> None:
    """What is still to be printed goes nowhere, without complaint at the interpreter's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(text: str) -> str:
    """What a stranger said may be quoted in it."""
    from p2p.printable import LOGGED, printable

    return printable(text, LOGGED)


def _on_terminate(number: int, frame: object) -> None:
    from p2p.errors import Terminated

    raise Terminated


def _interrupted(args: argparse.Namespace, error: KeyboardInterrupt) -> int:
    from p2p.errors import Terminated

    word, status = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
    print(f"{word}{getattr(args, 'interrupted_hint', '')}", file=sys.stderr)
    return status


def _outside_fault(error: OSError | sqlite3.Error, where: object) -> str:
    """One line that names what and where: the error's own path, or else where this verb writes (a failed write knows none)."""
    if isinstance(error, OSError):
        paths = [str(p) for p in (error.filename, error.filename2) if p is not None]
        text = error.strerror or str(error) or type(error).__name__
    else:
        paths, text = [*getattr(error, "__notes__", [])], str(error)
    return " ".join(": ".join([text, *(paths or ([str(where)] if where else []))]).split())


def _complain(*problems: str) -> int:
    for problem in problems:
        print(f"shoal: {_one_line(problem)}", file=sys.stderr)
    return 2


class _OneLineParser(argparse.ArgumentParser):
    """Errors as one line, without the usage block, and with the nearest word that would have been right."""

    def error(self, message: str) -> Any:
        sys.exit(_complain(f"{message} (see: {self.prog} --help)"))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's. An unknown flag is named before anything else: argparse would miss an argument first, or take the flag's
        value for one."""
        words = sys.argv[1:] if args is None else list(args)
        if not self.get_default("takes_settings"):
            self._check_flags(words)
        return super().parse_known_args(words, namespace)

    def _check_flags(self, words: Sequence[str]) -> None:
        from p2p.verbs import nearest

        known = self._option_string_actions
        ours = [action for action in self._actions if not action.option_strings]
        for word in words:
            if word == "--" or (not word.startswith("-") and any(a.nargs in (argparse.PARSER, argparse.REMAINDER) for a in ours)):
                return  # what follows is another parser's, or another program's
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                self.error(f"unknown flag {flag!r}{nearest(flag, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, which lists all choices however many they are."""
        from p2p.verbs import nearest

        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        near = nearest(str(value), known) or f": {', '.join(known)}"
        raise argparse.ArgumentError(action, f"no such choice as {str(value)[:60]!r}{near}")


class _ShowVersion(argparse.Action):
    """--version: the release, and the protocol, in which all peers of a run must agree."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from p2p.limits import PROTOCOL_VERSION
        from p2p.release import release

        print(f"shoal {release()} (protocol {PROTOCOL_VERSION})")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    import learner.admission.verbs
    import learner.cli
    import learner.limit_verb
    import netem.cli.demo_verb
    import netem.cli.planning_verbs
    import netem.cli.verbs
    import node.cli

    parser = _OneLineParser(
        prog="shoal", description="Peer-to-peer weight broadcast and rollout network for RL post-training."
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the release and the protocol, and stop")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Run, help: str, under: Any) -> argparse.ArgumentParser:
        sub = under.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        sub.add_argument("-v", "--verbose", action="store_true", help="log what happens, and where an error arose, to stderr")
        sub.set_defaults(run=run, prog=sub.prog)
        return sub

    # The doctor is the node's; what the learner needs beside that it hears from here, for neither imports the other.
    parser.set_defaults(examine_learner=_examine_learner)
    for room in (
        learner.cli, learner.admission.verbs, learner.limit_verb, node.cli, netem.cli.demo_verb, netem.cli.planning_verbs,
        netem.cli.verbs,
    ):  # fmt: skip
        room.add_verbs(verbs, verb)
    return parser


def _examine_learner(run_dir: Path) -> list[DoctorFinding]:
    from learner.doctor import examine_learner

    return examine_learner(run_dir)


def _set_up_logging(args: argparse.Namespace) -> None:
    from p2p.printable import CleanFormatter
    from p2p.stages import LOGGER as STAGES

    level = logging.INFO if args.verbose or args.verb in ("learner", "node") else logging.WARNING
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(CleanFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("shoal").setLevel(level)
    if args.verbose and args.verb in ("learner", "node"):
        logging.getLogger(STAGES).setLevel(logging.DEBUG)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # processes fork after tokenizers were used


if __name__ == "__main__":
    sys.exit(main())
