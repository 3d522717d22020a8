"""The engine's own process: `python -m node.engine.child FD KIND SETTINGS`. Must not know trio, peers or versions.

A plain loop over one inherited socket: take the commands that have arrived (waiting for one when there is nothing to
decode), make a step, send its events. At most EVENT_WINDOW event batches are under way to an agent that has not taken
them; then it decodes no further but still answers commands. It ends with its agent: on the socket's end of file, or
killed by the kernel (Linux; its starter asked for that).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from node.engine.pipe import METHODS, Call, CallRefused, Credit, Events, Failed, Farewell, Message, PipeDecoder, Reply, encode
from node.engine.port import EngineBroken, EngineCore
from p2p.errors import Refusal

MOST_LOG, KEPT_LOG = 16 << 20, 1 << 20
"""Bytes of an engine's log from which on the next engine keeps the last of it, and how much. What an engine writes is its own, as
it is; nobody bounds it while it runs."""

EVENT_WINDOW = 64
"""Event batches, one for each step, that may be sent and not yet taken: 0.2 s at the fastest step measured, 3 ms."""


def make_core(kind: str, settings: dict[str, Any]) -> EngineCore:
    """A core of the engine `kind`, from plain settings (JSON). ValueError for an unknown kind, TypeError for an unknown
    setting."""
    settings = dict(settings)
    threads = settings.pop("threads", 1)
    if kind == "fake":
        from node.engine.fake import ScriptedCore, ScriptedSettings

        return ScriptedCore(ScriptedSettings(**settings))
    if kind == "transformers":
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model folder is all there is; never ask a hub
        import torch

        torch.set_num_threads(threads)
        from node.engine.transformers import TransformersCore, TransformersSettings

        return TransformersCore(TransformersSettings(**settings))
    if kind == "vllm":
        from node.engine.vllm.compat import prepare

        prepare(threads)
        from node.engine.settings import VllmSettings
        from node.engine.vllm.engine import VllmCore

        return VllmCore(VllmSettings(**settings))
    raise ValueError(f"engine kind {kind!r} is none of transformers, vllm, fake")


class EngineChild:
    """One core behind one blocking stream socket."""

    def __init__(self, core: EngineCore, sock: socket.socket) -> None:
        self._core, self._sock = core, sock
        self._decoder = PipeDecoder()
        self._room = EVENT_WINDOW
        """event batches that may still be sent before the agent takes one"""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def run(self) -> None:
        """Until the agent closes its end. An exception from `step`, or EngineBroken, passes through: the core is broken then."""
        while True:
            busy = self._core.has_work() and self._room > 0
            if self._poll.poll(0 if busy else None):
                data = self._sock.recv(1 << 16)
                if not data:
                    return
                for message in self._decoder.feed(data):
                    self._take(message)
            elif busy:
                self._send_events(self._core.step())

    def _send(self, message: Message) -> None:
        self._sock.sendall(encode(message))

    def _send_events(self, events: list[Any]) -> None:
        if events:
            self._room -= 1
            self._send(Events(events))

    def _take(self, message: Message) -> None:
        match message:
            case Credit(batches):
                self._room += batches
            case Call():
                self._answer(message)
            case _:
                raise ValueError(f"unexpected {type(message).__name__} from the agent")

    def _answer(self, call: Call) -> None:
        try:
            if call.method not in METHODS:
                raise ValueError(f"no such method: {call.method}")
            value = getattr(self._core, call.method)(*call.args)
        except Refusal as refusal:
            self._send(CallRefused(call.id, refusal.reason, refusal.version, refusal.cause))
            return
        except EngineBroken:
            raise  # the core must not make another token
        except Exception as error:
            traceback.print_exc()
            kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
            self._send(Failed(call.id, f"{kind}{error}"))
            return
        if call.method == "interrupt":
            self._send_events(value)  # before the reply: whoever awaits the reply finds them sent
            value = []
        self._send(Reply(call.id, call.method, value))


def _shorten(log: Path) -> None:
    """Keep the end of a long log."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > MOST_LOG:
            with log.open("rb+") as file:
                file.seek(-KEPT_LOG, os.SEEK_END)
                kept = file.read()
                file.seek(0)
                file.write(kept)
                file.truncate()


def main(argv: list[str]) -> int:
    """FD KIND SETTINGS(JSON). Exit status 0 when the agent closed, 1 when the engine broke."""
    fd, kind, settings = int(argv[0]), argv[1], json.loads(argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C goes to the whole group; the agent ends us in order
    if log := settings.pop("log", ""):
        _shorten(Path(log))
        out = os.open(Path(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
    with socket.socket(fileno=fd) as sock:
        sock.setblocking(True)
        try:
            child = EngineChild(make_core(kind, settings), sock)
            child.run()
        except (BrokenPipeError, ConnectionResetError):
            return 0
        except Exception as error:
            traceback.print_exc()
            with suppress(OSError):  # the agent may be gone as well, and the log has it
                sock.sendall(encode(Farewell(f"{type(error).__name__}: {error}")))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
