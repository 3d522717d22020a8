"""`shoal node`: one node from its command line to the end of the run. Thin shell; must not import torch (the engine's
process does)."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import trio

from node.agent import Agent, NodeSettings
from node.base_model import BaseModel
from node.engine.process import open_engine_process
from p2p.admission import read_ticket
from p2p.codec import warm
from p2p.errors import UsageError
from p2p.identity import Identity
from p2p.limits import GIB

log = logging.getLogger("shoal.node")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The command line of a node."""

    ticket: str
    directory: Path
    listen: tuple[str, ...]
    name: str = ""
    engine: str = "transformers"
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    capacity: int = 64
    store_gib: float = 8.0
    dialable: bool = True
    site: str = ""
    """nodes that say the same share a fast LAN"""
    base_model: Path | None = None
    """a folder with the model that the run began with"""
    stay: bool = False
    """keep waiting for the learner after the run is over"""


def default_directory(run: str) -> Path:
    """Where a node keeps its key, its shadow and its chunks unless told."""
    root = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(root) / "shoal" / "nodes" / run


async def run_node(options: NodeOptions, announce: Callable[[str, dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Take part until the run is over or a signal comes; what this node did. UsageError when it cannot take part."""
    from p2p.channel.libp2p import open_libp2p_network

    ticket = read_ticket(options.ticket)
    if options.engine not in ("transformers", "fake"):
        raise UsageError(f"unknown engine {options.engine!r}; known: transformers, fake")
    directory = options.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use {directory}: {error.strerror}") from None
    warm()
    with _lock(directory):
        identity = Identity.load_or_create(directory / "node.key")
        settings = NodeSettings(
            ticket=ticket, ticket_text=options.ticket, directory=directory,
            name=options.name or f"{socket.gethostname()}-{identity.peer_id[-6:]}", capacity=options.capacity,
            store_limit=int(options.store_gib * GIB), dialable=options.dialable, exit_when_done=not options.stay,
            site=options.site, base_model=BaseModel(options.base_model) if options.base_model else None,
        )  # fmt: skip
        engine_settings: dict[str, Any] = {"threads": options.threads, "log": str(directory / "engine.log")}
        if options.engine == "transformers":
            engine_settings |= {"device": options.device, "dtype": options.dtype, "max_running": options.capacity}
        listen = list(options.listen) if options.dialable else []
        async with open_libp2p_network(identity, listen) as network:
            agent = Agent(settings, identity, network, lambda: open_engine_process(options.engine, engine_settings))
            if announce is not None:
                announce("started", {"peer": identity.peer_id, "name": settings.name, "addresses": list(network.addresses)})
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_on_signal, agent)
                reason = await agent.run()
                nursery.cancel_scope.cancel()
        version = agent.shadow.version
        return {
            "peer": identity.peer_id, "name": settings.name, "reason": reason, "tokens": agent.tokens,
            "version": str(version) if version else None,
        }  # fmt: skip


async def _stop_on_signal(agent: Agent) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("%s: leaving", signal.Signals(number).name)
            agent.stop(f"this node got {signal.Signals(number).name}")


class _lock:
    """One node process to a directory: two would overwrite each other's shadow."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._file: IO[str] | None = None

    def __enter__(self) -> None:
        self._file = open(self._path, "w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UsageError(f"another node runs in {self._path.parent}: give this one its own --dir") from None

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
