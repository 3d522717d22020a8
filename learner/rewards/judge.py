"""A reward by a judge: a language model behind an OpenAI-compatible URL that gives each completion a number. Runs in a process of
its own (`learner/rewards/function_worker.py`). Must not know groups or weights."""

from __future__ import annotations

import asyncio  # in a process of its own
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from p2p.errors import UsageError

TEMPLATE = """\
Rate how good the answer is, from 0 (useless) to {most} (perfect). Reply with the number alone.

Question:
{prompt}

Right answer, if known:
{answer}

Answer to rate:
{completion}
"""
"""What the judge reads where the options have no template of their own."""

REQUEST_S = 60.0
"""Seconds that one request to the judge may take; `task.reward_s` bounds all of a group's."""

TRIES = 3
"""Times that a completion is sent to a judge that is busy or away."""

AT_ONCE = 16
"""Requests to the judge that one process has under way."""

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
"""A rating in the judge's reply."""


class BadVerdict(Exception):
    """The judge did not give a number."""


class Judge:
    """Asks for one rating a completion; its options are the keyword arguments."""

    def __init__(
        self, *, url: str, model: str, key_env: str = "", template: str = TEMPLATE, most: float = 10, column: str = "answer",
        max_tokens: int = 16,
    ) -> None:  # fmt: skip
        if most <= 0:
            raise UsageError(f"task.reward: judge: most = {most}: is to be above 0")
        if key_env and key_env not in os.environ:
            raise UsageError(f"task.reward: judge: the environment has no variable {key_env}, which key_env names")
        self.url, self.model, self.template, self.most = url.rstrip("/") + "/chat/completions", model, template, most
        self.column, self.max_tokens = column, max_tokens
        self._headers = {"Authorization": f"Bearer {os.environ[key_env]}"} if key_env else {}

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[float]:
        """The ratings, from 0 to 1."""
        answers = columns.get(self.column) or [""] * len(completions)
        room = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(headers=self._headers, timeout=REQUEST_S) as client:

            async def rate(prompt: Any, completion: Any, answer: Any) -> float:
                async with room:
                    texts = {"prompt": as_text(prompt), "completion": as_text(completion)}
                    values = {**texts, "answer": answer, "most": f"{self.most:g}"}
                    return await self._rating(client, filled(self.template, values))

            return await asyncio.gather(*map(rate, prompts, completions, answers))

    async def _rating(self, client: httpx.AsyncClient, text: str) -> float:
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": self.max_tokens,
        }  # fmt: skip
        for tried in range(1, TRIES + 1):
            try:
                reply = await client.post(self.url, json=body)
                if reply.status_code not in (408, 429) and reply.status_code < 500:
                    break
                why = f"status {reply.status_code}"
            except httpx.TransportError as error:
                why = f"{type(error).__name__} {error}"
            if tried == TRIES:
                raise BadVerdict(f"the judge at {self.url} does not answer: {why}")
            await asyncio.sleep(tried)
        if reply.status_code >= 400:
            raise BadVerdict(f"the judge at {self.url} refused with status {reply.status_code}: {reply.text:.100}")
        return self.reading(reply.json()["choices"][0]["message"]["content"] or "")

    def reading(self, said: str) -> float:
        """The last number of a reply, as a share of the highest rating. BadVerdict when there is none."""
        numbers = NUMBER.findall(said)
        if not numbers:
            raise BadVerdict(f"the judge said {said!r:.80}, which has no number")
        return min(max(float(numbers[-1]) / self.most, 0.0), 1.0)


def filled(template: str, values: Mapping[str, Any]) -> str:
    """The template with {name} replaced, all at once: what a completion says is not read as a template."""
    return re.sub(r"\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), template)


def as_text(value: Any) -> str:
    """A prompt or completion as text: of chat messages, their contents."""
    return value if isinstance(value, str) else "\n\n".join(str(message.get("content", "")) for message in value)


def make_judge(options: Mapping[str, Any]) -> Callable[..., Any]:
    """A judge with these options. UsageError when they are not its."""
    try:
        return Judge(**options)
    except TypeError as error:
        raise UsageError(f"task.reward: judge with the options {', '.join(options) or 'none'}: {error}") from None
