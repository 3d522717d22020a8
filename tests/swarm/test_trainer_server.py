"""The trainer's socket: segments are told without an answer, and a refused one is what the trainer hears next."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from learner.client.client import HeadGone, LearnerClient
from learner.client.messages import CommitStep, Finish, Ok, SegmentDone, socket_path
from learner.head.trainer_server import serve_trainer
from p2p.errors import ShoalError
from tests.support.watchdog import PATIENCE_S, patience


def drive(run_dir: Path, asked: list[object], segments: int) -> str:
    """A trainer that tells `segments` and goes on; what it heard."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        with socket_path(run_dir) as name:
            sock.connect(name)
        client = LearnerClient(sock, run_dir)
        for index in range(segments):
            # A segment without the encoding that `publish` does before it.
            client._tell(SegmentDone(b"m", index, 1, b"d" * 32, 1, 1))
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
