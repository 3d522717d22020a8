"""The checks that every engine makes before it accepts a request. Must not know torch, caches or processes."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from p2p.errors import Refusal
from p2p.protocol.rollout import BEHIND, PAST, Generate
from p2p.version import Version


def check_tokens(ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Refusal when a token id lies outside [0, vocab_size)."""
    if ids and not (0 <= min(ids) and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise Refusal(f"{what} holds token id {bad}, outside the vocabulary of {vocab_size}")


def check_request(
    request: Generate, *, serving: Version, vocab_size: int, max_context: int, in_use: Container[str]
) -> None:
    """Refusal unless an engine with these bounds can serve `request` (see EngineCore.add for the list).

    A prompt needs room for at least one token after it; a completion that would outgrow the context is cut there
    with finish "length", as transformers and vLLM do.
    """
    name = f"request {request.request_id!r}"
    if request.min_version > serving:
        raise Refusal(
            f"{name} wants version {request.min_version} or later, this engine serves {serving}: retry once it commits",
            version=request.min_version, cause=BEHIND,
        )  # fmt: skip
    exact = request.exact_version
    if exact is not None and exact != serving:
        if exact > serving:
            what, cause = "retry once it commits", BEHIND
        else:
            what, cause = "it never will again", PAST
        raise Refusal(f"{name} wants version {exact} exactly, this engine serves {serving}: {what}", version=exact, cause=cause)
    if request.request_id in in_use:
        raise Refusal(f"{name} is already here", version=serving)
    if not request.prompt_ids:
        raise Refusal(f"{name} has an empty prompt", version=serving)
    if len(request.prompt_ids) >= max_context or len(request.prompt_ids) + len(request.prefix_ids) > max_context:
        length = len(request.prompt_ids) + len(request.prefix_ids)
        raise Refusal(f"{name} of {length} tokens leaves no room in the context of {max_context}", version=serving)
    if request.max_new_tokens < 0:
        raise Refusal(f"{name} wants {request.max_new_tokens} tokens", version=serving)
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise Refusal(f"{name} has temperature {request.temperature}", version=serving)
    if not 0 < request.top_p <= 1:
        raise Refusal(f"{name} has top_p {request.top_p}, want 0 < top_p <= 1", version=serving)
    check_tokens(request.prompt_ids, vocab_size, f"prompt of {name}")
    check_tokens(request.prefix_ids, vocab_size, f"prefix of {name}")


def completion_limit(request: Generate, max_context: int) -> int:
    """Completion tokens at which this request ends with "length": its own budget or the end of the context."""
    return min(request.max_new_tokens, max_context - len(request.prompt_ids))


def finish_before_start(request: Generate, max_context: int) -> str:
    """The finish ("stop" or "length") of a request whose prefix is already complete; "" for one that needs a token."""
    if request.prefix_ids and request.prefix_ids[-1] in request.stop_ids:
        return "stop"
    return "length" if len(request.prefix_ids) >= completion_limit(request, max_context) else ""
