"""A loaded environment of verifiers with its door, in one loop: where episodes are played. asyncio; must not know verifiers."""

from __future__ import annotations

import asyncio
import os

from learner.environments.environment import Done
from learner.environments.verifiers_door import ModelDoor, ModelSeat
from learner.environments.verifiers_kinds import KEY_VARIABLE, VerifiersKind


class VerifiersStage:
    """A loaded environment with its door, in one loop: where episodes are played."""

    def __init__(self, kind: VerifiersKind) -> None:
        self._kind = kind
        self._door = ModelDoor()
        self._ready: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Once it can play. Raises what kept it from it."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._ready))
        await asyncio.shield(self._ready)

    async def close(self) -> None:
        """End what it started; it cannot be used again."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        """One task opens and closes what the environment serves: some of it must be closed where it was opened."""
        try:
            await self._door.open()
            os.environ[KEY_VARIABLE] = self._door.key
            async with self._kind.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def play(self, number: int, held_out: bool, seat: ModelSeat) -> asyncio.Task[Done]:
        """Begin an episode."""
        return asyncio.create_task(self._kind.play(number, held_out, seat, self._door))
