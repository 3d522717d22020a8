"""What clients may ask for, field by field, and what becomes of the fields that we do not have. Pure.

Three kinds of fields are not ours. What changes nothing that a client gets is ignored (HARMLESS). What would change it is taken
with the value that changes nothing (NEUTRAL). Everything else is refused, by name: an answer that was sampled in another way than
was asked for would be trained on without anybody knowing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import FailFast, Field
from pydantic_core import from_json

from learner.endpoint.errors import bad_request
from learner.section import AnySection, Section, check_section, wrong_keys
from p2p.errors import UsageError

HARMLESS = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_salt",
    "priority", "parallel_tool_calls", "prediction", "detokenize", "output_kind", "spaces_between_special_tokens", "skip_clone",
    "output_text_buffer_length", "_all_stop_token_ids", "skip_reading_prefix_cache", "routed_experts_prompt_start", "request_id",
))  # fmt: skip
"""Fields of OpenAI's and vLLM's requests that say nothing of what is sampled or returned."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1), "min_p": (0,), "typical_p": (1,), "repetition_penalty": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "length_penalty": (1,), "best_of": (1,), "use_beam_search": (False,), "ignore_eos": (False,),
    "min_tokens": (0,), "logit_bias": ({},), "bad_words": ([],), "allowed_token_ids": ([],), "echo": (False,), "suffix": ("",),
    "early_stopping": (False,), "response_format": ({"type": "text"},), "modalities": (["text"],), "functions": ([],),
    "function_call": ("none", "auto"), "structured_outputs": ({},), "logits_processors": ([],), "truncate_prompt_tokens": (-1,),
    "extra_args": ({},), "features": ({},), "content_parts": ([],), "flat_logprobs": (False,), "return_routed_experts": (False,),
    "output_mode": ("tokens",), "kv_transfer_params": ({},), "ec_transfer_params": ({},), "documents": ([],),
    "tool_choice": ("auto", "none"), "prompt_logprobs": (False,), "include_reasoning": (True,),
}  # fmt: skip
"""Fields that nodes do not have, each with the values under which an answer is what it is without them."""

MOST_STOPS = 32
"""Stop strings of a request, and stop token ids beyond the model's: renderers name some ten."""

LONGEST_STOP = 1000
"""Characters of a stop string: each new piece of text is looked through for it."""

MOST_LOGPROBS = 1
"""Log probabilities a position: nodes tell that of the token that was drawn, and of no other."""


class StreamOptions(Section):
    """How a stream is told."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SamplingFields(Section):
    """What all routes have of sampling."""

    max_tokens: int = Field(default=0, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Any = ()
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MOST_STOPS)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class RequestFields(SamplingFields):
    """What OpenAI's routes have in common."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool = False


class CompletionBody(RequestFields):
    """Of /v1/completions. Its default of `max_tokens` is OpenAI's."""

    prompt: Any
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    add_special_tokens: bool = True


class ChatBody(RequestFields):
    """Of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(min_length=1)
    max_completion_tokens: int = Field(default=0, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)
    tools: Annotated[list[dict[str, Any]], FailFast()] = Field(default_factory=list)
    tool_choice: str = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class GenerateParams(SamplingFields):
    """`sampling_params` of /inference/v1/generate. The default of `max_tokens` is vLLM's."""

    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)


class GenerateBody(Section):
    """Of /inference/v1/generate."""

    token_ids: Annotated[list[int], FailFast()] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str = ""
    request_id: str = Field(default="", max_length=256)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


def read_json(body: bytes) -> dict[str, Any]:
    """A request's body. ApiError when it is no JSON object."""
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise bad_request("the body is no JSON object", code="invalid_json")
    return values


def read_body(kind: type[AnySection], values: Mapping[str, Any], prefix: str = "") -> AnySection:
    """The fields of a request. ApiError, one line, for what cannot be had. `prefix` is where in the body they are."""
    known = kind.model_fields
    kept = {}
    for key, value in values.items():
        if value is None or (key not in known and key in HARMLESS):
            continue
        if key not in known and key in NEUTRAL:
            if value not in NEUTRAL[key]:
                wanted = " or ".join(repr(one) for one in NEUTRAL[key])
                raise bad_request(f"{prefix}{key}: nodes do not have it; leave it out, or {wanted}", prefix + key,
                                  code="unsupported_parameter")  # fmt: skip
            continue
        kept[key] = value
    if len(kept) > MOST_FIELDS:  # to say of each what is wrong with it takes seconds
        wrong = next(key for key in kept if key not in known)
        raise bad_request(f"{prefix}{wrong:.80}: unknown parameter, one of more than {MOST_FIELDS}", prefix + wrong[:80],
                          code="unknown_parameter")  # fmt: skip
    try:
        found = check_section(kind, kept, "", unknown="unknown parameter, and it might change the answer")
    except UsageError as error:
        first = wrong_keys(kind, kept)[0]
        code = "unknown_parameter" if first.unknown else "invalid_value"
        raise bad_request(prefix + "; ".join(error.problems)[:MOST_SAID], prefix + first.key, code=code) from None
    if isinstance(found, SamplingFields):
        _check_stops(found, prefix)
    return found


MOST_FIELDS = 64
"""Fields of a request, those aside that are ignored; no kind has so many."""

MOST_SAID = 1000
"""Characters of a refusal that says what is wrong with a request: several fields' worth."""


def _check_stops(fields: SamplingFields, prefix: str) -> None:
    stops = fields.stop
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, (list, tuple)) or len(stops) > MOST_STOPS or not all(
        isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in stops
    ):
        raise bad_request(
            f"{prefix}stop: want a string or up to {MOST_STOPS} of them, of 1 to {LONGEST_STOP} characters", f"{prefix}stop"
        )
