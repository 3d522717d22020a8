"""An environment of the package verifiers, played unchanged: its own rollout makes model calls, and each is a turn.

`learner/tasks/verifiers.py` is its task. Must not know tokens; verifiers itself is imported in `verifiers_kinds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from learner.environments.environment import Done, Environment, ModelTurn, Reply
from learner.environments.verifiers_calls import Conversation, WrongCall
from learner.environments.verifiers_door import ModelSeat
from learner.environments.verifiers_kinds import load_kind
from learner.environments.verifiers_stage import VerifiersStage
from learner.tasks.port import ChatMessage

_STAGES: dict[str, VerifiersStage] = {}
"""This process's stages by what is played there: one, since a process runs the episodes of one task."""


class VerifiersEnvironment(Environment):
    """One episode. The row says which of the environment's rows, and the prompt that the model was given for it."""

    def __init__(self, name: str, options: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], tool_parser: str) -> None:
        """`tools`: the schemas in the prompt. They are the environment's to call, so `Environment.tools` stays empty."""
        key = f"{name} {options!r}"
        if key not in _STAGES:
            _STAGES[key] = VerifiersStage(load_kind(name, options))
        self._stage, self._schemas, self.tool_parser = _STAGES[key], tools, tool_parser
        self._seat: ModelSeat | None = None
        self._played: asyncio.Task[Done] | None = None

    async def begin(self, row: Any, seed: int) -> None:
        """Start the environment's own rollout, until it makes its first model call."""
        await self._stage.ready()
        self._seat = ModelSeat(Conversation(row["messages"], self._schemas, self.tool_parser))
        self._played = self._stage.play(row["row"], row["held_out"], self._seat)
        if isinstance(await self._next(), Done):
            raise RuntimeError("the rollout ended without a model call")

    async def respond(self, turn: ModelTurn) -> Reply:
        """Hand the turn to the call that waits for it; the next call has the answer."""
        assert self._seat is not None
        self._seat.answer(turn.text, turn.over)
        found = await self._next()
        return found if isinstance(found, Done) else [_given(message) for message in found]

    async def reward(self) -> Done:
        """What the environment makes of an episode whose next call is refused."""
        assert self._seat is not None
        self._seat.end("over")
        found = await self._next()
        assert isinstance(found, Done)
        return found

    async def close(self) -> None:
        if self._played is not None and not self._played.done():
            self._played.cancel()
            await asyncio.wait([self._played])

    async def _next(self) -> Done | list[dict[str, Any]]:
        """The new messages of the next call, or the end. Raises what went wrong there."""
        assert self._seat is not None and self._played is not None
        heard = asyncio.ensure_future(self._seat.heard())
        try:
            await asyncio.wait([heard, self._played], return_when=asyncio.FIRST_COMPLETED)
            if heard.done():  # also a wrong call that ended the rollout: it is the reason
                return heard.result()
            return self._played.result()
        except WrongCall as wrong:
            raise RuntimeError(str(wrong)) from None
        finally:
            heard.cancel()


def _given(message: ChatMessage) -> dict[str, Any]:
    """As chat templates know it."""
    kept = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    return {"role": message["role"], "content": message["content"], **kept}
