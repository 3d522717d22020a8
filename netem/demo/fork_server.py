"""A warm parent: it has imported what nodes and their engines need, and forks them. `python -m netem.demo.fork_server` with
requests on stdin.

Starting Python with torch and transformers takes some four seconds of CPU. Where many short-lived nodes share a machine, as in
`shoal demo --spot`, that is all the machine would do. What is forked is `shoal node` as ever: a process of its own, with its
own key, directory, libp2p host, and with its engine in another process, a fork too.

A request is a line of JSON, {"argv", "out", "log"}, argv without the python; the answer is {"pid"}, and {"pid", "status"} when
the process has ended. The parent ends, and all of its processes with it, when its stdin does. CPU engines only: CUDA does not
survive a fork.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import sys
from typing import Any

from netem.demo.forked import ForkedProcess
from node.engine import process as engine_process
from p2p.codec import warm

_PR_SET_PDEATHSIG = 1

MOST_FDS = 65536


def _fork_engine(arguments: list[str], fd: int, environment: dict[str, str]) -> ForkedProcess:
    """In place of `node.engine.process.start_child`."""
    from node.engine import child

    def run() -> int:
        os.closerange(3, fd)  # the node's sockets: while the engine has them, nobody sees that the node is dead
        os.closerange(fd + 1, MOST_FDS)
        return child.main(arguments[arguments.index(child.__name__) + 1 :])

    return ForkedProcess(run)


def _run(request: dict[str, Any]) -> int:
    """In the fork: `python ARGV`, where that is `-m MODULE ARGUMENTS...`."""
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for fd, path in ((0, os.devnull), (1, request["out"]), (2, request["log"])):
        opened = os.open(path, os.O_RDONLY if not fd else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    engine_process.start_child = _fork_engine
    _, module, *arguments = request["argv"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")
    return 0


IMPORTED = ("node.service", "p2p.channel.libp2p", "node.engine.transformers")


def _import_all() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    warm()


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> int:
    _import_all()
    _say({"ready": True})
    running: list[ForkedProcess] = []
    pending = b""
    while True:
        if select.select([0], [], [], 0.05)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return 0
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                process = ForkedProcess(lambda request=request: _run(request))  # type: ignore[misc]
                running.append(process)
                _say({"pid": process.pid})
        for process in [p for p in running if p.poll() is not None]:
            running.remove(process)
            _say({"pid": process.pid, "status": process.returncode})


if __name__ == "__main__":
    sys.exit(main())
