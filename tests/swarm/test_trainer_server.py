"""The trainer's socket: segments are told without an answer, and a refused one is what the trainer hears next."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from learner.client.beside import Beside
from learner.client.client import LearnerClient
from learner.client.connection import HeadConnection, HeadGone
from learner.client.messages import (
    BESIDE_SOCKET,
    Begin,
    Begun,
    CommitStep,
    Finish,
    NextBatch,
    Ok,
    Resume,
    SealVersion,
    SegmentDone,
    Start,
    socket_path,
)  # fmt: skip
from learner.head.trainer_server import serve_trainer
from p2p.errors import ShoalError
from tests.support.watchdog import PATIENCE_S, patience


def drive(run_dir: Path, asked: list[object], segments: int) -> str:
    """A trainer that tells `segments` and goes on; what it heard."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        with socket_path(run_dir) as name:
            sock.connect(name)
        connection = HeadConnection(sock)
        client = LearnerClient(connection, run_dir)
        for index in range(segments):
            # A segment without the encoding that `publish` does before it.
            connection.tell(SegmentDone(b"m", index, 1, b"d" * 32, 1, 1))
        with pytest.raises(HeadGone) as caught:
            client.commit(1, run_dir)
        asked.append("raised")
        client.finish()
        return str(caught.value)


async def test_a_refused_segment_is_the_answer_to_the_next_request(tmp_path: Path) -> None:
    asked: list[object] = []
    gone: list[str] = []

    async def answer(request: object) -> object:
        asked.append(request)
        if isinstance(request, SegmentDone) and request.index == 3000:
            raise ShoalError("segment 3000 has no chunks")
        return Ok()

    with patience():
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_trainer, tmp_path, answer, gone.append)
            heard = await trio.to_thread.run_sync(drive, tmp_path, asked, 5000)
            while not gone:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert heard == "the head refused CommitStep: segment 3000 has no chunks"
    assert [r.index for r in asked if isinstance(r, SegmentDone)] == list(range(3001)), "nothing more of it is taken"
    assert not any(isinstance(r, CommitStep) for r in asked)
    assert asked[-2:] == ["raised", Finish(0)] and gone == ["it closed the connection"]


async def test_a_version_and_a_commit_pass_a_trainer_that_waits_for_groups(tmp_path: Path) -> None:
    """Groups may come only once the version is out: over one connection both would wait for each other."""
    (tmp_path / "versions").mkdir()
    sealed, committed, refused = trio.Event(), trio.Event(), list[str]()

    def drive() -> None:
        client = LearnerClient.connect(tmp_path, PATIENCE_S)
        client.resume()
        client.publish(1, {"w": ("bfloat16", np.zeros(8, np.uint16))}, wait=False)
        beside = Beside("commit")
        beside.start(lambda: client.commit(1, tmp_path))
        with pytest.raises(HeadGone, match="no groups here"):
            next(client.batches(1))
        beside.settle()
        client.finish()
        client.close()

    def answers(which: str) -> Callable[[object], Awaitable[object]]:
        async def answer(request: object) -> object:
            match request:
                case Resume():
                    return Start(1, 0, "", 1 << 16, 100, 0)
                case NextBatch():
                    assert which == "first"
                    await sealed.wait()
                    await committed.wait()
                    raise ShoalError("no groups here")
                case Begin():
                    assert which == "second"
                    return Begun(b"m", 1 << 14)
                case SealVersion():
                    sealed.set()
                case CommitStep():
                    assert which == "second"
                    committed.set()
                case Finish() | SegmentDone():
                    pass
                case _:
                    refused.append(type(request).__name__)
            return Ok()

        return answer

    with patience():
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_trainer, tmp_path, answers("second"), socket=BESIDE_SOCKET))
            await nursery.start(serve_trainer, tmp_path, answers("first"))
            await trio.to_thread.run_sync(drive)
            nursery.cancel_scope.cancel()
    assert sealed.is_set() and committed.is_set() and not refused
