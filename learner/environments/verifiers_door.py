"""Where the model calls of verifiers' rollouts arrive: OpenAI's chat route on loopback, for one process of environments. asyncio.

Must not know verifiers, tokens or nodes. An environment samples over HTTP as it does anywhere else; which episode a call
belongs to is told by the header that verifiers sends for routing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from learner.environments.verifiers_calls import MODEL, Conversation, WrongCall, as_events

SESSION = "X-Session-ID"
"""verifiers' header that names a rollout: the same in all of its calls."""

MAX_BODY = 16 << 20
"""Bytes of one call: as much as a message between the head and this process (learner/environments/wire.py)."""


class DoorAnswer(NamedTuple):
    """What a call is answered with."""

    status: int
    """of HTTP"""
    body: dict[str, Any]


class ModelSeat:
    """The model's side of one episode: a call waits here until the model's turn is there."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.on_refused: Callable[[str], None] = lambda over: None
        """called when a call is refused because the episode is over, with why"""
        self._waiting: asyncio.Future[dict[str, Any]] | None = None
        self._heard: asyncio.Queue[list[dict[str, Any]] | WrongCall] = asyncio.Queue()
        self._over, self._wrong = "", ""

    async def ask(self, body: Mapping[str, Any]) -> DoorAnswer:
        """The answer to a call, once there is one."""
        if self._wrong or self._over:
            return self._refused()
        try:
            if self._waiting is not None:
                raise WrongCall("it made a call before its last was answered: calls at once are not supported")
            new = self._conversation.heard(body)
        except WrongCall as wrong:
            self.fail(str(wrong))
            return self._refused()
        self._waiting = asyncio.get_running_loop().create_future()
        self._heard.put_nowait(new)
        answer = await self._waiting
        return DoorAnswer(200, answer) if answer else self._refused()

    def fail(self, why: str) -> None:
        """The episode cannot go on."""
        if not self._wrong:
            self._wrong = why
            self._heard.put_nowait(WrongCall(why))

    async def heard(self) -> list[dict[str, Any]]:
        """The new messages of the next call. WrongCall when the episode cannot go on."""
        found = await self._heard.get()
        if isinstance(found, WrongCall):
            raise found
        return found

    def answer(self, text: str, over: str = "") -> None:
        """The model's turn; with `over` it gets no further one."""
        assert self._waiting is not None
        waiting, self._waiting = self._waiting, None
        self._over = over
        waiting.set_result(self._conversation.answer(text, over))

    def end(self, over: str) -> None:
        """The model gets no further turn, also not the one that is waited for."""
        self._over = over
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set_result({})

    def _refused(self) -> DoorAnswer:
        if self._over and not self._wrong:
            self.on_refused(self._over)
        # What vLLM says of a prompt that is too long: clients know it, and none tries again.
        text = self._wrong or f"This model's maximum context length is reached ({self._over})"
        return DoorAnswer(400, {"error": {"message": text, "type": "invalid_request_error", "code": "context_length_exceeded"}})


class ModelDoor:
    """The route, on a port of its own. `open` it in the loop that the environments run in."""

    def __init__(self) -> None:
        self.seats: dict[str, ModelSeat] = {}
        """by what `SESSION` says"""
        self.key = secrets.token_urlsafe(24)
        self.url = ""
        """base URL, once it is open"""

    async def open(self) -> None:
        """Serve until the process ends."""
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        seat = self.seats.get(request.headers.get(SESSION, ""))
        if request.headers.get("Authorization") != f"Bearer {self.key}" or seat is None:
            return web.json_response({"error": {"message": "no such episode", "type": "invalid_request_error"}}, status=401)
        try:
            body = json.loads(await request.read())
            if not isinstance(body, dict):
                raise ValueError("no object")
        except ValueError as error:
            return web.json_response({"error": {"message": f"no JSON: {error}", "type": "invalid_request_error"}}, status=400)
        status, answer = await seat.ask(body)
        if status == 200 and body.get("stream"):
            return web.Response(body=as_events(answer), content_type="text/event-stream")
        return web.json_response(answer, status=status)
