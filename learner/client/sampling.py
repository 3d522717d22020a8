"""A trainer's other door: a synchronous client of the run's endpoint, for a trainer that chooses its prompts itself.

    client, sampling = LearnerClient.connect(run_dir), SamplingClient.connect(run_dir)
    ...
    client.publish(step, tensors)
    answers = sampling.sample(prompts, max_tokens=64, min_step=step, seed=step)     # one a prompt, in their order

Token ids in, token ids out, each with the log probability of the distribution that it was drawn from. With `min_step` no token
is of older weights: after `publish(step)` that is exactly the policy that was published, since nothing newer exists while the
trainer waits here. `rollout.groups_per_step = 0` keeps the nodes free for this; else `requests.serving_share` is what it has.

**Errors.** A node that dies costs time, and nothing of it is seen here. NotSampled says that a sequence cannot be had: nodes
refuse it, or none had a place for it within `requests.wait_s`. HeadGone as with `LearnerClient`. Whatever is raised, Ctrl-C too,
cancels the rest of the call.

Must not know torch, libp2p or trio: a connection a sequence in flight, each in a thread of its own.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import threading
import time
import tomllib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from learner.client.connection import HeadGone
from learner.endpoint.keys import ADDRESS_FILE, KEY_FILE
from p2p.errors import ShoalError, UsageError
from p2p.protocol.rollout import Span
from p2p.version import Version

AT_ONCE = 256
"""Sequences in flight at the most: the places of some nodes. Each takes a thread and a connection."""

TRIES = 3
"""Connections in a row that may break before the head is taken for gone: one that was idle may always be found closed."""

LATER_S = 2.0
"""Seconds until the next try where the endpoint says "later" and not when."""

SLACK_S = 30.0
"""Seconds beyond the endpoint's own limit for a request after which it is taken for gone."""

GENERATE = "/inference/v1/generate"
"""The endpoint's route for token ids."""


class NotSampled(ShoalError):
    """The endpoint answered that a sequence cannot be sampled, and why."""


class Sampled(NamedTuple):
    """One sequence."""

    ids: tuple[int, ...]
    """the stop token, where it ended with one, among them"""
    logprobs: tuple[float, ...]
    """nats, one a token, under the distribution that it was drawn from"""
    spans: tuple[Span, ...]
    """which version made which tokens; versions never go back"""
    finish: str
    """"stop" or "length" """


class SamplingClient:
    """Samples over the endpoint at `url`, with its `key`. `request_s` is the endpoint's limit for one request."""

    def __init__(self, url: str, key: str, request_s: float = 3600.0, at_once: int = AT_ONCE) -> None:
        self._key, self._timeout, self._at_once = key, request_s + SLACK_S, at_once
        self._host, self._port = _address(url)

    @classmethod
    def connect(cls, run_dir: str | os.PathLike[str], timeout: float = 30.0) -> SamplingClient:
        """The endpoint of the run in `run_dir`. UsageError when the run has none; HeadGone when it does not answer within
        `timeout` seconds."""
        path, deadline = Path(run_dir), time.monotonic() + timeout
        while True:
            try:
                settings = tomllib.loads((path / "config.toml").read_text())["endpoint"]
                if not settings["listen"]:
                    raise UsageError(f"the run in {path} has no endpoint to sample from: set endpoint.listen = \"127.0.0.1:0\"")
                name = settings["key_env"]
                key = os.environ.get(name, "") if name else (path / KEY_FILE).read_text().strip()
                client = cls(json.loads((path / ADDRESS_FILE).read_text())["url"], key, settings["request_s"])
                client._look()
                return client
            except (OSError, http.client.HTTPException, KeyError, ValueError) as error:  # its files come one after the other
                if time.monotonic() > deadline:
                    raise HeadGone(
                        f"no endpoint answers in {path}: {error} (is `shoal learner` running there?)"
                    ) from None
                time.sleep(0.05)

    def sample(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float = 1.0, top_p: float = 1.0,
        min_step: int | None = None, seed: int = 0,
    ) -> list[Sampled]:  # fmt: skip
        """A sequence for each of `prompts` (token ids), in their order; a prompt that comes several times gets as many.

        At most `max_tokens` tokens each, fewer where the model's context ends. The same prompts, `seed` and version give the same
        tokens; a prompt's own seed follows from `seed` and its place. No token is of weights before `min_step`, a step that was
        published in this life of the run; None: of whatever the nodes serve."""
        params = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "logprobs": 0}
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        if min_step is not None:
            headers["X-Shoal-Min-Version"] = str(min_step)
        waiting = deque(
            _Job(i, json.dumps({"token_ids": list(map(int, ids)), "sampling_params": params | {"seed": _seed(seed, i)}}))
            for i, ids in enumerate(prompts)
        )
        found: dict[int, Sampled] = {}
        errors: list[Exception] = []
        lines = [_Line(self._host, self._port, self._timeout) for _ in range(min(len(waiting), self._at_once))]

        def next_job() -> _Job | None:
            with suppress(IndexError):
                return waiting.popleft()
            return None

        def work(line: _Line) -> None:
            try:
                while (job := next_job()) is not None:
                    found[job.place] = line.ask(job.body, headers)
            except Exception as error:
                errors.append(error)
                waiting.clear()
                for other in lines:
                    other.cut()
            finally:
                line.close()

        threads = [threading.Thread(target=work, args=(line,), daemon=True) for line in lines]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for line in lines:
                line.cut()
        if errors:
            raise errors[0]
        return [found[i] for i in range(len(prompts))]

    def _look(self) -> None:
        """Whether the endpoint is there and takes the key."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=SLACK_S)
        try:
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {self._key}"})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        if answer.status == 401:
            raise UsageError(f"the endpoint does not take this key: {_reason(said)}")
        if answer.status != 200:
            raise HeadGone(f"the endpoint answers {answer.status}: {_reason(said)}")


class _Job(NamedTuple):
    """A sequence that is to be asked for."""

    place: int
    body: str


class _Line:
    """One connection, which one thread uses and any other may cut."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout)
        self._cut = threading.Event()

    def ask(self, body: str, headers: dict[str, str]) -> Sampled:
        """One sequence, however often it has to be asked for. NotSampled, HeadGone."""
        broken = 0
        while True:
            try:
                if self._connection.sock is None:
                    self._connection.connect()
                if self._cut.is_set():  # after it has a socket: `cut` shuts whatever socket there is
                    raise HeadGone("the call was given up")
                self._connection.request("POST", GENERATE, body, headers)
                answer = self._connection.getresponse()
                said = answer.read()
            except TimeoutError:
                raise HeadGone(f"the endpoint has not answered for {self._connection.timeout:.0f} s") from None
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                broken += 1
                if self._cut.is_set() or broken == TRIES:
                    raise HeadGone(f"the endpoint is gone: {error or type(error).__name__}") from None
                continue
            if answer.status == 200:
                return _sampled(said)
            if answer.status not in (429, 503):
                raise NotSampled(f"the endpoint answers {answer.status}: {_reason(said)}")
            broken = 0
            if self._cut.wait(float(answer.headers.get("Retry-After") or LATER_S)):
                raise HeadGone("the call was given up")

    def cut(self) -> None:
        """End what it waits for: the endpoint then cancels it on the node."""
        self._cut.set()
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ValueError(f"no endpoint's URL: {url!r}")
    return parts.hostname, parts.port


def _seed(seed: int, place: int) -> int:
    """63 bits, the most that nodes take, that follow from both."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest()) >> 1


def _sampled(said: bytes) -> Sampled:
    choice: dict[str, Any] = json.loads(said)["choices"][0]
    spans = [Span(Version.parse(one["version"]), one["start"], one["end"]) for one in choice["weight_versions"]]
    logprobs = tuple(float(one["logprob"]) for one in choice["logprobs"]["content"])
    return Sampled(tuple(choice["token_ids"]), logprobs, tuple(spans), choice["finish_reason"])


def _reason(said: bytes) -> str:
    """The endpoint's own words, where they are to be had."""
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return repr(said[:200])
