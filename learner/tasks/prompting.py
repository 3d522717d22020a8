"""From a task's prompt to token ids and back; head, evaluation and warm-up share these functions.

Must not know torch or models; the tokenizer is any Hugging Face tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from learner.tasks.port import Prompt
from p2p.errors import UsageError


def encode_prompt(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    """The token ids of a prompt. A chat prompt goes through the tokenizer's chat template; UsageError when it has none."""
    if not prompt.chat:
        return tuple(tokenizer.encode(prompt.text, add_special_tokens=False))
    if not tokenizer.chat_template:
        raise UsageError("the task asks for chat prompts and the tokenizer has no chat template (set chat = false)")
    turns = [{"role": "user", "content": prompt.text}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def decode_prompt(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of a prompt as the model reads it: with the chat template's turns and its special tokens, for a person to see."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def decode_completion(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of a completion, special tokens stripped: what `Task.score` reads."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def stop_ids(tokenizer: Any, generation_eos: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's eos and the generation config's. UsageError when there is none."""
    more = () if generation_eos is None else (generation_eos,) if isinstance(generation_eos, int) else generation_eos
    if not isinstance(more, Sequence) or not all(isinstance(i, int) for i in more):
        raise UsageError(f"the generation config's eos_token_id is no token id: {generation_eos!r:.60}")
    ids = set(more) | ({int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set())
    if not ids:
        raise UsageError("the tokenizer has no eos token: completions could never stop")
    return tuple(sorted(ids))
