"""A twin of what samples on the swarm's nodes: it makes scripted tokens, and counts who is there and who left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from learner.requests.port import Ask, Busy, Made, NoSuchVersion
from p2p.version import Version

CHAT_TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}"
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if loud %}!{% endif %}"
)
"""Names what it is given, so that a test reads it in the prompt."""


def byte_tokenizer() -> Any:
    """A Hugging Face tokenizer of one token a byte: every character beyond ASCII is several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def logprob_of(position: int) -> float:
    """What the twin says of the token at a position."""
    return -(position % 7) / 8


class RequestTwin:
    """`learner.requests.port.Requests` without nodes. Every answer is `answer(ask)`, cut at the ask's length, `batch` tokens at a
    time, the n-th batch by `versions[n]` or the last of them."""

    def __init__(self, answer: Callable[[Ask], Sequence[int]], *, batch: int = 3, pause_s: float = 0.0) -> None:
        self.answer, self.batch, self.pause_s = answer, batch, pause_s
        self.versions = [Version(1, 4)]
        self.most = 10_000
        """sequences at once, before it is Busy"""
        self.broken: Exception | None = None
        """raised after the first batch"""
        self.active = self.finished = self.cancelled = 0
        self.asked: list[Ask] = []

    @asynccontextmanager
    async def sample(self, ask: Ask) -> AsyncIterator[AsyncIterator[Made]]:
        self.asked.append(ask)
        if self.active >= self.most:
            raise Busy(f"{self.active} requests of class {ask.request_class} wait already")
        if ask.exact_version is not None and ask.exact_version not in self.versions:
            later = ask.exact_version > max(self.versions)
            raise NoSuchVersion(f"no node serves version {ask.exact_version}", later=later)
        if ask.min_version is not None and ask.min_version > max(self.versions):
            raise NoSuchVersion(f"no node serves version {ask.min_version} or a newer one", later=True)
        self.active += 1
        ended = False

        async def make() -> AsyncIterator[Made]:
            nonlocal ended
            ids = tuple(self.answer(ask))[: ask.max_new_tokens]
            finish = "stop" if ids and ids[-1] in ask.stop_ids else "length"
            for n, start in enumerate(range(0, len(ids), self.batch)):
                await trio.sleep(self.pause_s)
                part = ids[start : start + self.batch]
                last = start + self.batch >= len(ids)
                ended = ended or last
                version = self.versions[min(n, len(self.versions) - 1)]
                yield Made(part, tuple(logprob_of(start + i) for i in range(len(part))), version, finish if last else "")
                if self.broken is not None:
                    raise self.broken

        try:
            yield make()
        finally:
            self.active -= 1
            self.finished += ended
            self.cancelled += not ended
