"""From a task's prompt to token ids and back; head, evaluation and warm-up share these functions.

Must not know torch or models; the tokenizer is any Hugging Face tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from learner.tasks.port import ChatFormat, Prompt, Task
from p2p.errors import UsageError

PLAIN_CHAT = ChatFormat()
"""A chat template without arguments of its own: what a task has unless it says otherwise."""


def encode_prompt(tokenizer: Any, prompt: Prompt, form: ChatFormat = PLAIN_CHAT) -> tuple[int, ...]:
    """The token ids of a prompt. A chat prompt goes through the tokenizer's chat template, as `form` says. UsageError, which
    names the row, when it has no template or its template does not take these messages."""
    if not prompt.chat:
        return tuple(tokenizer.encode(prompt.text, add_special_tokens=False))
    if not tokenizer.chat_template:
        raise UsageError("the task asks for chat prompts and the tokenizer has no chat template (set task.chat = false)")
    turns = [dict(message) for message in prompt.messages] or [{"role": "user", "content": prompt.text}]
    tools = {"tools": [dict(tool) for tool in form.tools]} if form.tools else {}
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **tools, **form.options)
    except Exception as error:  # a template is a model's own program: it may raise anything
        raise UsageError(_refused(error, turns, prompt.where)) from error
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _refused(error: Exception, turns: Sequence[Mapping[str, Any]], where: str) -> str:
    what = " ".join(str(error).split())[:200] or type(error).__name__
    system = any(turn["role"] in ("system", "developer") for turn in turns)
    advice = "; it may not know system messages: empty task.system_prompt, put its text into the prompt" if system else ""
    return f"{where + ': ' if where else ''}the tokenizer's chat template does not take these messages: {what}{advice}"


def unused_options(tokenizer: Any, form: ChatFormat) -> tuple[str, ...]:
    """Those of the template's arguments that the template nowhere names: they do nothing."""
    template = tokenizer.chat_template
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    return tuple(name for name in form.options if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts))


def fit_prompts(task: Task, tokenizer: Any, context: int) -> None:
    """Let the task leave out prompts that a model with so much context (tokens; 0: not known) has no room to answer. UsageError
    where it refuses them."""
    if context:
        task.fit(lambda prompt: len(encode_prompt(tokenizer, prompt, task.chat_format)), context - 1)


def decode_prompt(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of a prompt as the model reads it: with the chat template's turns and its special tokens, for a person to see."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def decode_completion(tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Text of a completion, special tokens stripped, up to the first of the strings that end it: what `Task.score` reads."""
    return cut(str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)), stop)


def cut(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of these strings in it."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def stop_tokens(tokenizer: Any, stop: Sequence[str]) -> tuple[int, ...]:
    """The tokens among the strings that end a completion: those of one token. Nodes stop at tokens and know no strings."""
    ids = (tokenizer.encode(text, add_special_tokens=False) for text in stop)
    return tuple(sorted({int(found[0]) for found in ids if len(found) == 1}))


def stop_ids(tokenizer: Any, generation_eos: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's eos and the generation config's. UsageError when there is none."""
    more = () if generation_eos is None else (generation_eos,) if isinstance(generation_eos, int) else generation_eos
    if not isinstance(more, Sequence) or not all(isinstance(i, int) for i in more):
        raise UsageError(f"the generation config's eos_token_id is no token id: {generation_eos!r:.60}")
    ids = set(more) | ({int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set())
    if not ids:
        raise UsageError("the tokenizer has no eos token: completions could never stop")
    return tuple(sorted(ids))
