"""`python -m netem.bench.chaos.tapped LOG VERB ...`: the `shoal` command, with what it makes, sends, accepts, journals and
finishes
written to LOG.

A file HOLD beside LOG, with a step's number in it, keeps a learner from training that step or a later one, for as long as it is
there: a run must not be over before its kills.

One JSON line each, before anything else happens to it and by one write, so that SIGKILL loses none; times are CLOCK_MONOTONIC:

    ["made", request id, start, count, time, version]      by a node, as tokens come from its engine
    ["sent", request id, start, count]                     by a node, as it hands them to its link
    ["attached", version, time]                            by a node, whose engine serves that version from here on
    ["received", version, time]                            by a node that has all of a version, checked, before its engine
    ["installed", version, time]                           by a node, once its engine and its disk have that version
    ["relayed", time]                                      by anybody, once a chunk has gone to a neighbour
    ["accepted", group id.member.0, start, count, ids]     by a learner, as its collector takes them
    ["given", group id.member.0, start, count, ids]        the same of tokens that an environment gave, which no node made
    ["journaled", group id.member.0, start, count, time]   by a learner, once the journal's transaction is over
    ["finished", base64 of `pack_groups`, time]            by a learner, as a rewarded group goes to the journal
"""

from __future__ import annotations

import base64
import json
import os
import runpy
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import trio

from learner.journal.journal import Journal
from learner.journal.records import Piece, Unwritten
from learner.rollouts.buffers import StepGroups, TrainingBuffers
from learner.trajectory import Group, pack_groups
from node.agent import Agent
from node.engine.port import CommitResult, Engine, StateFile
from node.install.engine_slot import EngineSlot
from node.serving.batcher import TokenBatcher
from p2p.broadcast.pump_core import PumpCore
from p2p.broadcast.transfer import Job
from p2p.protocol.generation import Tokens
from p2p.protocol.rollout import TokenEvent, unpack_ids
from p2p.version import Version

HOLD = "hold"
"""the name of the file that holds a learner"""


def held(path: Path, step: int) -> bool:
    try:
        return step >= int(path.read_text())
    except FileNotFoundError:
        return False


def hold(path: Path) -> None:
    """From here on this process's learner hands out no groups of a step that `path` withholds."""
    next_groups = TrainingBuffers.next_groups

    async def once_free(self: TrainingBuffers, step: int, seen: int) -> StepGroups:
        while held(path, step):  # noqa: ASYNC110
            await trio.sleep(0.1)
        return await next_groups(self, step, seen)

    TrainingBuffers.next_groups = once_free  # type: ignore[method-assign]


def tap(log: int) -> None:
    """From here on this process writes its tokens down."""
    add, record_finished, to_head = Unwritten.add, Journal.record_finished, Agent._to_head
    record_tokens, take = Journal.record_tokens, TokenBatcher.add
    attach, install, handed = EngineSlot.attach, EngineSlot.commit, PumpCore.count_sent

    def write(*values: object) -> None:
        os.write(log, (json.dumps(values) + "\n").encode())

    def made(self: TokenBatcher, event: TokenEvent, now: float) -> None:
        write(*("made", event.request_id, event.start, event.count, time.monotonic(), str(event.version)))
        take(self, event, now)

    def sent(self: Agent, message: Any) -> None:
        if isinstance(message, Tokens):
            for run in message.runs:
                write("sent", run.request_id, run.start, run.count)
        to_head(self, message)

    async def attached(self: EngineSlot, engine: Engine) -> None:
        await attach(self, engine)
        write("attached", str(self.serving), time.monotonic())

    async def installed(self: EngineSlot, staging: Any, state: StateFile) -> CommitResult:
        write("received", str(state.version), time.monotonic())
        result = await install(self, staging, state)
        write("installed", str(state.version), time.monotonic())
        return result

    def relayed(self: PumpCore, job: Job) -> None:
        handed(self, job)
        write("relayed", time.monotonic())

    def accepted(
        self: Unwritten, group_id: int, member: int, node: str, start: int, version: Version | None, ids: bytes,
        logprobs: bytes,
    ) -> None:  # fmt: skip
        kind = "given" if version is None else "accepted"
        write(kind, f"{group_id}.{member}.0", start, len(ids) // 4, unpack_ids(ids))
        add(self, group_id, member, node, start, version=version, ids=ids, logprobs=logprobs)

    def journaled(self: Journal, pieces: Iterable[Piece]) -> None:
        batch = list(pieces)
        record_tokens(self, batch)
        for piece in (piece for piece in batch if piece.version is not None):
            write("journaled", f"{piece.group_id}.{piece.member}.0", piece.start, len(piece.ids) // 4, time.monotonic())

    def finished(self: Journal, group: Group) -> None:
        write("finished", base64.b64encode(pack_groups((group,))).decode(), time.monotonic())
        record_finished(self, group)

    TokenBatcher.add, Agent._to_head = made, sent  # type: ignore[method-assign]
    EngineSlot.attach, EngineSlot.commit, PumpCore.count_sent = attached, installed, relayed  # type: ignore[method-assign]
    Unwritten.add, Journal.record_tokens, Journal.record_finished = accepted, journaled, finished  # type: ignore[method-assign]


if __name__ == "__main__":
    tap(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    hold(Path(sys.argv[1]).with_name(HOLD))
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("shoal", run_name="__main__")  # by name: the command is above this package
