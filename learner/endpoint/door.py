"""The endpoint's routes: who may ask, what is asked, and the answer. Must not know sockets or nodes.

It has no policy of its own: what is sampled where, and how many at once, is `learner.requests`' business.
"""

from __future__ import annotations

import hmac
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import trio

from learner.endpoint.choices import Delta
from learner.endpoint.errors import ApiError, bad_request
from learner.endpoint.http import ClientGone, RequestHead, Responder
from learner.endpoint.reader import AskReader, Offer, SamplingJob, WantedVersions, no_model
from learner.endpoint.sampling import sample_all
from learner.endpoint.settings import EndpointSection
from learner.local_names import is_local_name
from learner.requests.port import Busy, Made, NoSuchVersion
from p2p.errors import ShoalError
from p2p.version import Version

MIN_VERSION, EXACT_VERSION = "x-shoal-min-version", "x-shoal-exact-version"
"""Headers that say which weights may answer: EPOCH.STEP, as answers name them, or STEP alone, of the present epoch."""

GENERATE = "/inference/v1/generate"
"""vLLM's route: tokens in, tokens out."""

POSTS = ("/v1/completions", "/v1/chat/completions", GENERATE)
"""Routes that sample."""

OPEN_PATHS = ("/health", "/liveness")
"""Routes that take no key: what watches over a process has none."""

SOON_S = 2
"""Seconds after which a client that was told to come later may: a version takes some of them, a node's place less."""

MOST_STEP = 1 << 53
"""The largest number of a step or an epoch in a header: every program's numbers hold it."""


class EndpointDoor:
    """`learner.endpoint.http.Door` of one run."""

    def __init__(
        self, settings: EndpointSection, offer: Offer, key: str, *, wall: Callable[[], float] = time.time
    ) -> None:
        self.answered: Counter[int] = Counter()
        """requests by the status that they got"""
        self.now = 0
        """requests that are sampled now"""
        self._settings, self._offer = settings, offer
        self._key = key.encode()
        self._reader = AskReader(settings, offer, wall)
        self._began = int(wall())

    # --- `Door` ------------------------------------------------------------------------------------------------------

    def knows(self, head: RequestHead) -> bool:
        return hmac.compare_digest(self._shown_key(head), self._key)

    async def refuse(self, head: RequestHead, reply: Responder) -> bool:
        """By host, key, route and method."""
        error = self._refusal(head)
        if error is not None:
            await self._say(error, reply)
        return error is not None

    async def answer(self, head: RequestHead, body: bytes, reply: Responder) -> None:
        """Within `request_s`."""
        if head.method == "GET":
            await self._look(head.path, reply)
            return
        self.now += 1
        try:
            with trio.fail_after(self._settings.request_s):
                await self._sample(head, body, reply)
        except ApiError as error:
            await self._say(error, reply)
        except trio.TooSlowError:
            if reply.begun:
                raise ClientGone from None  # a status can no longer be told: the client sees an answer that was cut
            limit = f"the answer was not whole within {self._settings.request_s:g} s (endpoint.request_s)"
            await self._say(ApiError(504, limit, code="timeout"), reply)
        finally:
            self.now -= 1

    async def fault(self, status: int, message: str, reply: Responder) -> None:
        await self._say(ApiError(status, message, code="internal_error" if status == 500 else "refused"), reply)

    # --- who may ask -------------------------------------------------------------------------------------------------

    def _refusal(self, head: RequestHead) -> ApiError | None:
        host = head.headers.get("host", "")
        if not is_local_name(host) and _host_name(host) not in self._settings.hosts:
            return ApiError(
                421, "ask by an address, localhost, a name without a dot, or one of endpoint.hosts", code="wrong_host"
            )
        if head.path in OPEN_PATHS:
            return None if head.method == "GET" else _not_allowed("GET")
        if not self.knows(head):
            return ApiError(
                401, "no such key: send the one of endpoint.key in the run directory as Authorization: Bearer KEY",
                code="invalid_api_key",
            )  # fmt: skip
        if head.path in POSTS:
            return None if head.method == "POST" else _not_allowed("POST")
        if head.path == "/v1/models" or head.path.startswith("/v1/models/"):
            return None if head.method == "GET" else _not_allowed("GET")
        return ApiError(404, f"no such route: {head.path[:100]}", code="not_found")

    def _shown_key(self, head: RequestHead) -> bytes:
        kind, _, key = head.headers.get("authorization", "").partition(" ")
        return key.strip().encode() if kind.lower() == "bearer" else b""

    # --- what there is -----------------------------------------------------------------------------------------------

    async def _look(self, path: str, reply: Responder) -> None:
        if path == "/liveness":
            await self._tell({}, reply)
        elif path == "/health":
            if self._offer.version() is None:
                await self._say(_no_version(), reply)
            else:
                await self._tell({}, reply)
        elif path == "/v1/models":
            await self._tell({"object": "list", "data": [self._card()]}, reply)
        elif unquote(path.removeprefix("/v1/models/")) == self._reader.model:
            await self._tell(self._card(), reply)
        else:
            await self._say(no_model(unquote(path.removeprefix("/v1/models/")), self._reader.model), reply)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._reader.model, "object": "model", "created": self._began, "owned_by": "shoal", "root": self._offer.model,
            "parent": None, "max_model_len": self._reader.length, "permission": [],
        }  # fmt: skip

    # --- what is asked -----------------------------------------------------------------------------------------------

    async def _sample(self, head: RequestHead, body: bytes, reply: Responder) -> None:
        current = self._offer.version()
        if current is None:
            raise _no_version()
        least = _version_header(head, MIN_VERSION, current)
        exact = _version_header(head, EXACT_VERSION, current)
        if least is not None and exact is not None and exact < least:
            raise bad_request(f"{EXACT_VERSION} is older than {MIN_VERSION}", EXACT_VERSION)
        read = self._reader.completion, self._reader.chat, self._reader.generate
        job = await read[POSTS.index(head.path)](body, WantedVersions(least, exact))
        await (self._stream if job.stream else self._whole)(job, reply)

    # --- the answer --------------------------------------------------------------------------------------------------

    async def _whole(self, job: SamplingJob, reply: Responder) -> None:
        def hear(index: int, made: Made) -> bool:
            return not job.choices[index].take(made).finish

        try:
            await sample_all(self._offer.requests, job.asks, hear, lambda: None)
        except ShoalError as error:
            raise _refused(error) from None
        await self._tell(job.form.whole(job.choices, job.n), reply)

    async def _stream(self, job: SamplingJob, reply: Responder) -> None:
        """Server-sent events. The status is sent when the sequences are taken: until then they may be refused."""
        send, receive = trio.open_memory_channel[Delta | None](math.inf)
        failed: list[ApiError] = []

        def hear(index: int, made: Made) -> bool:
            delta = job.choices[index].take(made)
            send.send_nowait(delta)
            return not delta.finish

        async def sample() -> None:
            try:
                await sample_all(self._offer.requests, job.asks, hear, lambda: send.send_nowait(None))
            except ShoalError as error:
                failed.append(_refused(error))
            finally:
                send.close()

        gone = False
        with receive:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sample)
                try:
                    await self._pass_on(job, receive, reply, failed)
                except ClientGone:
                    gone = True
                    nursery.cancel_scope.cancel()
        if gone:
            raise ClientGone
        if failed:
            raise failed[0]

    async def _pass_on(
        self, job: SamplingJob, deltas: trio.MemoryReceiveChannel[Delta | None], reply: Responder,
        failed: list[ApiError],
    ) -> None:  # fmt: skip
        begun = False
        async for one in deltas:
            if not begun:
                begun = True
                self.answered[200] += 1
                await reply.begin(200, {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
                for part in job.form.opening():
                    await reply.more(_event(part))
            if one is not None:
                await reply.more(_event(job.form.part(job.choices[one.choice], one)))
        if not begun:
            return
        for part in [failed.pop().body()] if failed else job.form.closing(job.choices, job.n):
            await reply.more(_event(part))
        await reply.more(b"data: [DONE]\n\n")
        await reply.more(b"")

    async def _tell(self, values: Mapping[str, Any], reply: Responder) -> None:
        self.answered[200] += 1
        await reply.whole(200, msgspec.json.encode(values), {"Content-Type": "application/json"})

    async def _say(self, error: ApiError, reply: Responder) -> None:
        self.answered[error.status] += 1
        headers = {"Content-Type": "application/json"}
        if error.retry_after:
            headers["Retry-After"] = str(error.retry_after)
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        await reply.whole(error.status, msgspec.json.encode(error.body()), headers)


def _event(values: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(values) + b"\n\n"


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _not_allowed(method: str) -> ApiError:
    return ApiError(405, f"this route takes {method}", code="method_not_allowed")


def _no_version() -> ApiError:
    return ApiError(503, "no version of the weights is published yet: come later", code="no_version", retry_after=SOON_S)


def _refused(error: ShoalError) -> ApiError:
    """What a client is told of a request that was not sampled."""
    if isinstance(error, Busy):
        return ApiError(429, str(error), code="rate_limit_exceeded", retry_after=SOON_S)
    if isinstance(error, NoSuchVersion):
        return ApiError(409, str(error), code="no_such_version", retry_after=SOON_S if error.later else 0)
    return ApiError(500, str(error), code="not_sampled")


def _version_header(head: RequestHead, name: str, current: Version) -> Version | None:
    text = head.headers.get(name, "").strip()
    if not text:
        return None
    try:
        found = Version.parse(text if "." in text else f"{current.epoch}.{text}")
    except ValueError:
        raise bad_request(f"{name}: {text[:40]!r} is no version: want EPOCH.STEP, or STEP of the present epoch", name) from None
    if max(found.epoch, found.step) > MOST_STEP:
        raise bad_request(f"{name}: a version has no such numbers", name)
    return found
