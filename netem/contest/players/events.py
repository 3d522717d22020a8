"""The protocol between a contest and its players: one JSON object for each line, commands on stdin, events on stdout.

A player is one process on one host that takes part in broadcasts, whatever program it drives underneath. Must not know
networks, namespaces or any peer-to-peer program. The first half is pure; `serve` is the loop that all players share.

| command | who | answer |
|---|---|---|
| (start) | all | `ready` |
| `links` | all | `linked`: connected to whomever it wants to be connected to before there is a payload |
| `prepare` round, bytes, seed | source | `prepared` digest and whatever nodes need to know beforehand |
| `expect` round, digest, bytes, and that as `extra` | nodes | `expecting` |
| `publish` round | source | `published` at |
| | nodes | `verified` at, digest, sent, received, duplicates: once the payload is whole and its BLAKE3 was checked |
| `account` round | all | `account` sent, received, duplicates, cpu_s; of ours also reports, banned, whence (host -> bytes) |
| `turn` to | a node of ours | `turned`: from now on it corrupts or withholds what it sends |
| `stop`, or the end of stdin | all | exit status 0 |

`failed` with a `why` may come at any time, and exit status 1 follows. Times are CLOCK_MONOTONIC, which all processes of a
machine share. Bytes are of payload: `received` counts all that came, `duplicates` those of them that were not needed.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec
from blake3 import blake3

from netem.contest.players.payload import payload_bytes
from p2p.errors import ShoalError, UsageError

POLL_S = 0.005
"""Seconds between two looks of a player whether its payload is whole; a measured time is too long by at most this."""

class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of one player. `hosts` maps the name of every host to its IPv4 address, in the order of the profile."""

    role: Literal["source", "node"]
    name: str
    address: str
    directory: str
    """an empty folder of its own"""
    hosts: dict[str, str]
    source: str
    """the source's name"""
    options: dict[str, Any] = {}
    late: list[str] = []
    """hosts whose players start only in the middle of a round"""
    site: str = ""
    """hosts of one site share a fast LAN; "" for no site"""

    @property
    def nodes(self) -> list[str]:
        return [name for name in self.hosts if name != self.source]

    def text(self) -> str:
        """The role as JSON, which a player gets in argv[1]."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def parse(text: str) -> Role:
        """Read what `text` made. UsageError for anything else."""
        try:
            role = msgspec.json.decode(text, type=Role)
        except msgspec.DecodeError as error:
            raise UsageError(f"role: {error}") from None
        if role.name not in role.hosts or role.source not in role.hosts or (role.role == "source") != (role.name == role.source):
            raise UsageError(f"role: {role.name} as {role.role}, the source being {role.source}, of {', '.join(role.hosts)}")
        return role


class _Message(msgspec.Struct, forbid_unknown_fields=True, tag_field="do"):
    """A command; its class keyword `tag` is the value of `do`."""


class Links(_Message, tag="links"):
    """Connect to whomever there is to connect to."""


class Prepare(_Message, tag="prepare"):
    """Make the payload of a round: `bytes` bytes from `seed`."""

    round: int
    bytes: int
    seed: int


class Expect(_Message, tag="expect"):
    """Get ready to receive the payload of a round."""

    round: int
    digest: str
    """BLAKE3 of the payload, hex"""
    bytes: int
    extra: dict[str, Any]
    """what the source's `prepare` returned"""


class Publish(_Message, tag="publish"):
    """Start the broadcast of a round."""

    round: int


class AskAccount(_Message, tag="account"):
    """Say what a round cost."""

    round: int


class TurnRogue(_Message, tag="turn"):
    """Cheat the others from now on."""

    to: Literal["corrupt", "withhold"]


class EndPlayer(_Message, tag="stop"):
    """End."""


Command = Links | Prepare | Expect | Publish | AskAccount | TurnRogue | EndPlayer


def parse_command(line: str | bytes) -> Command:
    """Read one line. UsageError when it is no command."""
    try:
        return msgspec.json.decode(line, type=Command)
    except msgspec.DecodeError as error:
        raise UsageError(f"no command: {line[:200]!r} ({error})") from None


def command_line(command: Command) -> bytes:
    """A command as a line, newline included, for `parse_command`."""
    return msgspec.json.encode(command) + b"\n"


@dataclass(frozen=True, slots=True)
class RoundTraffic:
    """Bytes of payload in one round, so far."""

    sent: int
    received: int
    duplicates: int


class Player:
    """One contestant on one host, driven by `serve`: one payload in each round, round numbers rising. An exception that it raises
    ends the player with `failed`.

    `poll` is called about every POLL_S, on the source as well.
    """

    def prepare(self, command: Prepare, payload: bytes, digest: str) -> dict[str, Any]:
        """Source: get ready to publish `payload`. Returns what nodes have to know beforehand (JSON)."""
        raise NotImplementedError

    def expect(self, command: Expect) -> None:
        """Node: get ready to receive. Returns once that is done."""
        raise NotImplementedError

    def publish(self, round: int) -> None:
        """Source: start the broadcast. Returns soon; the measured time begins with the call."""
        raise NotImplementedError

    def poll(self) -> str | None:
        """Node: the digest of this round's payload when it is whole and was checked, once a round; otherwise None."""
        raise NotImplementedError

    def traffic(self) -> RoundTraffic:
        """Bytes of the latest round."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what is held; returns within a second or two."""
        raise NotImplementedError


def serve(argv: list[str], make: Callable[[Role], Player]) -> int:
    """A player's main: role in argv[1], commands until `stop` or the end of stdin. Returns the exit status."""
    events = os.dup(1)
    os.dup2(2, 1)  # what a library prints is not an event

    def emit(event: str, **values: Any) -> None:
        os.write(events, (json.dumps({"event": event, **values}) + "\n").encode())

    player: Player | None = None
    try:
        if len(argv) != 2:
            raise UsageError("a player takes its role as one JSON argument")
        player = make(Role.parse(argv[1]))
        emit("ready")
        _Server(player, emit).run()
    except BrokenPipeError:
        return 1  # nobody listens any more
    except Exception as error:
        emit("failed", why=str(error) if isinstance(error, ShoalError) else repr(error))
        return 1
    finally:
        if player is not None:
            player.close()
    return 0


class _Server:
    def __init__(self, player: Player, emit: Callable[..., None]) -> None:
        self._player, self._emit = player, emit
        self._round, self._cpu = -1, 0.0
        """the latest round, and the CPU time when it was ready to go: making a payload is not the player's work"""

    def run(self) -> None:
        pending = b""
        while True:
            if select.select([0], [], [], POLL_S)[0]:
                got = os.read(0, 1 << 20)
                *lines, pending = (pending + got).split(b"\n")
                commands = [parse_command(line) for line in lines]
                for command in commands:
                    if isinstance(command, EndPlayer):
                        return
                    self._obey(command)
                if not got:
                    return
            digest = self._player.poll()
            if digest is not None:
                at = time.monotonic()
                self._emit("verified", round=self._round, at=at, digest=digest, **asdict(self._player.traffic()))

    def _obey(self, command: Command) -> None:
        match command:
            case Links():
                self._emit("linked")
            case Prepare():
                payload = payload_bytes(command.bytes, command.seed)
                digest = blake3(payload).hexdigest()
                extra = self._player.prepare(command, payload, digest)
                self._begin(command.round)
                self._emit("prepared", round=command.round, digest=digest, **extra)
            case Expect():
                self._player.expect(command)
                self._begin(command.round)
                self._emit("expecting", round=command.round)
            case Publish():
                at = time.monotonic()
                self._player.publish(command.round)
                self._emit("published", round=command.round, at=at)
            case AskAccount():
                traffic = asdict(self._player.traffic())
                self._emit("account", round=command.round, cpu_s=_cpu_s() - self._cpu, **traffic)
            case TurnRogue():
                raise UsageError("this player cannot be turned against the others")

    def _begin(self, number: int) -> None:
        self._round, self._cpu = number, _cpu_s()


def _cpu_s() -> float:
    """Processor seconds of this process and of those of its children that have ended."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def need(module: str) -> None:
    """UsageError that names the extra when a peer's package is not installed."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise UsageError(f"{module} is not installed: pip install 'shoal[peers]'")
