"""A process that loads an environment of verifiers once, for the head: its rows, and what its first call looks like.

Reads a `RowsAsk` as JSON from standard input, and writes a `RowsSaid` to standard output. So the head imports nothing of what an
environment needs, and what is wrong with it is found before a run starts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from learner.environments.tools import PARSERS
from learner.environments.verifiers_calls import Conversation, WrongCall, checked_messages, plain, said
from learner.environments.verifiers_door import DoorAnswer, ModelSeat
from learner.environments.verifiers_kinds import VerifiersFailed, VerifiersKind, VerifiersRow, load_kind
from learner.environments.verifiers_stage import VerifiersStage
from learner.user_code import told
from p2p.errors import UsageError
from p2p.verbs import nearest

FIRST_CALL_S = 300.0
"""Seconds until an environment's first episode makes its first model call: some build an environment for their program first."""

RUNTIME = 'where programs run is an option: task.options.agent = {runtime = {type = "subprocess"}} is this machine'
"""What to say to a person whose environment asks for verifiers' own cloud, as it does unless its author or its user says else."""


class RowsAsk(msgspec.Struct, frozen=True):
    """What to load."""

    name: str
    options: dict[str, Any]
    tool_parser: str
    limit: int


class RowsSaid(msgspec.Struct, frozen=True):
    """What was found; or `error`, one line, says why nothing was."""

    error: str = ""
    train: list[list[dict[str, Any]]] = []
    """the messages of each row's prompt"""
    held_out: list[list[dict[str, Any]]] = []
    """those of its evaluation data, where it has such"""
    tools: list[dict[str, Any]] = []
    """JSON schemas of its tools"""


class _FirstCall(ModelSeat):
    """Keeps a first call, and answers it never."""

    def __init__(self) -> None:
        super().__init__(Conversation([], [], "hermes"))
        self.body: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()

    async def ask(self, body: Mapping[str, Any]) -> DoorAnswer:
        if not self.body.done():
            self.body.set_result(body)
        return await asyncio.get_running_loop().create_future()


async def first_call(kind: VerifiersKind) -> Mapping[str, Any]:
    """The first model call that the episode of row 0 makes. UsageError when it makes none."""
    stage = VerifiersStage(kind)
    try:
        async with asyncio.timeout(FIRST_CALL_S):
            await stage.ready()
            seat = _FirstCall()
            playing = stage.play(0, False, seat)
            either: list[asyncio.Future[Any]] = [playing, seat.body]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not seat.body.done():
                playing.result()
                raise UsageError("its first episode ended without a model call")
            playing.cancel()
            await asyncio.wait([playing])
            return seat.body.result()
    except TimeoutError:
        raise UsageError(f"its first episode made no model call within {FIRST_CALL_S:g} s") from None
    finally:
        await stage.close()


def read_rows(ask: RowsAsk) -> RowsSaid:
    """All of it. UsageError, one line, for what cannot be played."""
    if ask.tool_parser not in PARSERS:
        raise UsageError(f"tool_parser = {ask.tool_parser!r} is not known{nearest(ask.tool_parser, PARSERS)}")
    kind = load_kind(ask.name, ask.options)
    try:
        rows = kind.rows(ask.limit)
        if not any(not row.held_out for row in rows):
            raise UsageError("it has no rows")
        body = asyncio.run(first_call(kind))
        lead = _lead(body, next(row for row in rows if not row.held_out))
        for number, row in enumerate(rows):
            if not row.messages:
                raise UsageError(f"row {number} has no messages")
        sides = {side: [[*lead, *map(plain, row.messages)] for row in rows if row.held_out == side] for side in (False, True)}
    except (WrongCall, VerifiersFailed) as wrong:
        raise UsageError(f"its first episode: {wrong}") from None
    except UsageError:
        raise
    except SystemExit as error:  # what verifiers says without an account
        raise UsageError(f"its first episode ended with {told(error)}; {RUNTIME}") from error
    except Exception as error:  # somebody's code: it may raise anything
        raise UsageError(told(error)) from error
    return RowsSaid(train=sides[False], held_out=sides[True], tools=list(body.get("tools") or ()))


def _lead(body: Mapping[str, Any], row: VerifiersRow) -> list[dict[str, Any]]:
    """The messages that a first call has before its row's: the same for every row, an episode makes sure of it. WrongCall where
    it does not end with the row's."""
    messages = [plain(message) for message in checked_messages(body)]
    wanted = [said(message) for message in row.messages]
    if [said(message) for message in messages[-len(wanted) :]] != wanted:
        roles = ", ".join(message["role"] for message in messages)
        raise WrongCall(f"its first call ({roles}) does not end with its row's prompt, which is not supported")
    return messages[: len(messages) - len(wanted)]


def main() -> int:
    """See above. What the environment prints goes to standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    ask = msgspec.json.decode(sys.stdin.buffer.read(), type=RowsAsk)
    try:
        found = read_rows(ask)
    except UsageError as error:
        found = RowsSaid(error=" ".join(str(error).split()))
    with open(out, "wb") as file:
        file.write(msgspec.json.encode(found))
    sys.stderr.flush()
    os._exit(0)  # threads of the environment's may still run


if __name__ == "__main__":
    sys.exit(main())
