"""From a request's body to the sequences that are asked for, and the form of the answer. Must not know HTTP or who asks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

from learner.endpoint.choices import Choice
from learner.endpoint.errors import ApiError, bad_request
from learner.endpoint.forms import AnswerFacts, AnswerForm, ChatForm, CompletionForm, GenerateForm
from learner.endpoint.prompts import PromptReader
from learner.endpoint.sampling import seed_of
from learner.endpoint.schemas import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    GenerateParams,
    SamplingFields,
    StreamOptions,
    read_body,
    read_json,
)
from learner.endpoint.settings import EndpointSection
from learner.endpoint.text import SequenceText
from learner.requests.port import Ask, Requests
from learner.tasks.port import ChatFormat
from p2p.limits import MAX_FRAME
from p2p.version import Version

MOST_LENGTH = MAX_FRAME // 4 - 4096
"""Tokens of prompt and answer together: a node is sent both in one message, four bytes a token, where a node goes away."""

UNKNOWN_LENGTH = 8192
"""Tokens of prompt and answer together where neither the model's config nor a setting says how many."""

KNOWN_TOKENS = 1 << 16
"""Tokens whose text is kept: log probabilities name each, and a few thousand tokens are most of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the endpoint offers, and on whose behalf."""

    requests: Requests
    version: Callable[[], Version | None]
    """the newest that was published; None before the first"""
    tokenizer: Any
    vocab_size: int
    stop_ids: tuple[int, ...]
    """tokens that end an answer, as in training"""
    model: str
    context: int = 0
    """most tokens of prompt and answer by the model's config; 0 where that is not known"""
    chat_format: ChatFormat = field(default_factory=ChatFormat)


class SamplingJob(NamedTuple):
    """A request that was understood."""

    asks: Sequence[Ask]
    choices: Sequence[Choice]
    form: AnswerForm
    stream: bool
    n: int
    """choices a prompt"""


class WantedVersions(NamedTuple):
    """Weights that may answer; None: any."""

    least: Version | None
    exact: Version | None


class AskReader:
    """Reads the bodies of one run's requests. ApiError for what cannot be had."""

    def __init__(self, settings: EndpointSection, offer: Offer, wall: Callable[[], float]) -> None:
        self.model = settings.model or offer.model
        self.length = min(settings.max_model_len or offer.context or UNKNOWN_LENGTH, MOST_LENGTH)
        """most tokens of prompt and answer"""
        self._settings, self._offer, self._wall = settings, offer, wall
        self._prompts = PromptReader(offer.tokenizer, offer.vocab_size, offer.chat_format)
        self._token_text = lru_cache(KNOWN_TOKENS)(lambda token: self._decode((token,), special=True))

    async def completion(self, body: bytes, versions: WantedVersions) -> SamplingJob:
        """Of /v1/completions."""
        asked = read_body(CompletionBody, read_json(body))
        self._check_model(asked.model)
        self._check_count(asked.n, asked.prompt)
        prompts = await self._prompts.completion(asked, len(body))
        facts = self._facts(
            "cmpl-", prompts, asked, stream=asked.stream_options, token_ids=asked.return_token_ids,
            logprobs=asked.logprobs is not None, tokens_as_ids=asked.return_tokens_as_token_ids,
        )  # fmt: skip
        form = CompletionForm(facts, self._token_text)
        return self._job(facts, asked, form, asked.stream, most=asked.max_tokens, versions=versions)

    async def chat(self, body: bytes, versions: WantedVersions) -> SamplingJob:
        """Of /v1/chat/completions."""
        asked = read_body(ChatBody, read_json(body))
        self._check_model(asked.model)
        self._check_count(asked.n, "")
        prompts = await self._prompts.chat(asked, len(body))
        facts = self._facts(
            "chatcmpl-", prompts, asked, stream=asked.stream_options, token_ids=asked.return_token_ids,
            logprobs=asked.logprobs, tokens_as_ids=asked.return_tokens_as_token_ids,
        )  # fmt: skip
        form = ChatForm(facts, self._token_text, top=asked.top_logprobs > 0)
        most = asked.max_completion_tokens or asked.max_tokens
        return self._job(facts, asked, form, asked.stream, most=most, versions=versions)

    async def generate(self, body: bytes, versions: WantedVersions) -> SamplingJob:
        """Of /inference/v1/generate."""
        asked = read_body(GenerateBody, read_json(body))
        params = read_body(GenerateParams, asked.sampling_params, "sampling_params.")
        self._check_model(asked.model)
        self._check_count(params.n, "")
        prompts = [self._prompts.checked(asked.token_ids, "token_ids")]
        facts = self._facts(
            "", prompts, params, stream=asked.stream_options, token_ids=asked.return_token_ids,
            logprobs=params.logprobs is not None, name=asked.request_id,
        )  # fmt: skip
        return self._job(facts, params, GenerateForm(facts), asked.stream, most=params.max_tokens, versions=versions)

    def _check_model(self, name: str) -> None:
        if name and name != self.model:
            raise no_model(name, self.model)

    def _check_count(self, n: int, prompt: object) -> None:
        several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        count = n * (len(prompt) if several and isinstance(prompt, list) else 1)
        if count > self._settings.sequences:
            raise bad_request(
                f"n: {count} sequences in one request, and {self._settings.sequences} are the most (endpoint.sequences)", "n"
            )

    def _facts(
        self, kind: str, prompts: Sequence[tuple[int, ...]], asked: SamplingFields, *, stream: StreamOptions, token_ids: bool,
        logprobs: bool, tokens_as_ids: bool = False, name: str = "",
    ) -> AnswerFacts:  # fmt: skip
        return AnswerFacts(
            id=name or kind + secrets.token_hex(16), model=self.model, created=int(self._wall()),
            prompts=[prompt for prompt in prompts for _ in range(asked.n)], logprobs=logprobs, token_ids=token_ids,
            usage=stream.include_usage, tokens_as_ids=tokens_as_ids,
        )  # fmt: skip

    def _job(
        self, facts: AnswerFacts, asked: SamplingFields, form: AnswerForm, stream: bool, *, most: int, versions: WantedVersions
    ) -> SamplingJob:
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        stop_ids = tuple(sorted({*self._offer.stop_ids, *asked.stop_token_ids}))
        decode = partial(self._decode, special=not asked.skip_special_tokens)
        asks, choices = [], []
        for index, prompt in enumerate(facts.prompts):
            room = self.length - len(prompt)
            if room < max(most, 1):
                raise bad_request(
                    f"the model takes {self.length} tokens of prompt and answer, and {len(prompt)} of the prompt and "
                    f"{max(most, 1)} of the answer are more", "max_tokens", code="context_length_exceeded",
                )  # fmt: skip
            asks.append(Ask(
                request_class="serving", prompt_ids=prompt, max_new_tokens=most or room, stop_ids=stop_ids,
                seed=seed_of(seed, index), temperature=asked.temperature, top_p=asked.top_p, min_version=versions.least,
                exact_version=versions.exact,
            ))  # fmt: skip
            text = SequenceText(decode, asked.stops, include=asked.include_stop_str_in_output)
            choices.append(Choice(
                index, text, own_stops=frozenset(asked.stop_token_ids), stop_ids=frozenset(stop_ids),
                include_stop=asked.include_stop_str_in_output,
            ))  # fmt: skip
        return SamplingJob(asks, choices, form, stream, asked.n)

    def _decode(self, ids: Sequence[int], *, special: bool) -> str:
        if not ids:
            return ""
        found = self._offer.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return str(found)


def no_model(name: str, model: str) -> ApiError:
    """The client asked for another model than `model`."""
    return ApiError(404, f"there is no model {name[:100]!r} here, only {model!r}", code="model_not_found", param="model")
