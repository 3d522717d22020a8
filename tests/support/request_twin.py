"""A twin of what samples on the swarm's nodes: it makes scripted tokens, and counts who is there and who left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from learner.requests.port import Ask, Busy, Made, NoSuchVersion
from p2p.errors import ShoalError
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


STOP = 0
"""A token that ends an answer."""


def one_token(ask: Ask) -> tuple[int, ...]:
    """The least answer."""
    return (1, STOP)


class RequestTwin:
    """`learner.requests.port.Requests` without nodes. Every answer is `answer(ask)`, which may raise ShoalError, cut at the ask's
    length; `batch` tokens every `pause_s`, the n-th batch by `versions[n]` or the last of them; `places` sequences at a time,
    and the others wait."""

    def __init__(
        self, answer: Callable[[Ask], Sequence[int]] = one_token, *, batch: int = 3, pause_s: float = 0.0, places: int = 10_000,
        versions: Sequence[Version] = (Version(1, 4),),
    ) -> None:  # fmt: skip
        self.answer, self.batch, self.pause_s = answer, batch, pause_s
        self.versions = list(versions)
        """served now; none: no node is there"""
        self.coming: set[Version] = set()
        """served later"""
        self.most = 10_000
        """sequences at once, before it is Busy"""
        self.broken: Exception | None = None
        """raised after the first batch"""
        self.active = self.most_active = self.finished = self.cancelled = self.refused = 0
        """`cancelled`: sequences that were given up by who asked, or failed; `refused`: it was Busy"""
        self.asked: list[Ask] = []
        self._places, self._moved = trio.Semaphore(places), trio.Event()

    def serve(self, version: Version | None) -> None:
        """From now on this version alone, or none: what was asked of another exactly is over."""
        self.versions = [version] if version is not None else []
        self._moved.set()
        self._moved = trio.Event()

    def served(self) -> Version | None:
        """The newest version that is served."""
        return max(self.versions, default=None)

    @asynccontextmanager
    async def sample(self, ask: Ask) -> AsyncIterator[AsyncIterator[Made]]:
        """See `Requests.sample`."""
        await trio.lowlevel.checkpoint()
        self._check(ask)
        if self.active >= self.most:
            self.refused += 1
            raise Busy(f"{self.active} requests of class {ask.request_class} wait already")
        self.asked.append(ask)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        ended = placed = False

        async def make() -> AsyncIterator[Made]:
            nonlocal ended, placed
            await self._places.acquire()
            placed = True
            ids = tuple(self.answer(ask))[: ask.max_new_tokens]
            finish = "stop" if ids and ids[-1] in ask.stop_ids else "length"
            for n, start in enumerate(range(0, len(ids), self.batch)):
                with trio.move_on_after(self.pause_s):
                    await self._moved.wait()
                self._check(ask)
                if not self.versions:
                    raise ShoalError("no node")
                part = ids[start : start + self.batch]
                last = start + self.batch >= len(ids)
                ended = ended or last
                logprobs = tuple(logprob_of(start + i) for i in range(len(part)))
                yield Made(part, logprobs, self.versions[min(n, len(self.versions) - 1)], finish if last else "")
                if self.broken is not None:
                    raise self.broken

        try:
            yield make()
        finally:
            if placed:  # here: nobody closes the tokens that are not asked for any more
                self._places.release()
            self.active -= 1
            self.finished += ended
            self.cancelled += not ended

    def _check(self, ask: Ask) -> None:
        newest = self.served()
        if ask.exact_version is not None and ask.exact_version not in self.versions:
            later = ask.exact_version in self.coming or (newest is not None and ask.exact_version > newest)
            raise NoSuchVersion(f"no node serves version {ask.exact_version}", later=later)
        if ask.min_version is not None and newest is not None and ask.min_version > newest:
            raise NoSuchVersion(f"no node serves version {ask.min_version} or a newer one", later=True)


def one_version(
    version: Version | None = None, *, places: int = 8, waiting: int = 1000, answer: Callable[[Ask], Sequence[int]] = one_token
) -> RequestTwin:
    """A twin that serves one version at a time, a token every 0.1 s, and is Busy with so many `waiting`. For a mock clock."""
    twin = RequestTwin(answer, batch=1, pause_s=0.1, places=places, versions=() if version is None else (version,))
    twin.most = waiting
    return twin
