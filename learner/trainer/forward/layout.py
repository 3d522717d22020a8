"""How the rows of a forward lie one behind the other, without padding. Pure; must not know torch, rewards or groups.

A prompt that several rows share lies there once, and their completions attend to it. The prompt's last token predicts the first
token of each completion; the last token of a completion predicts nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from learner.trajectory import Gap
from p2p.few_sizes import filled_up

ALIKE = 0.75
"""Segments are padded to each other, for their attention alone, where the shorter has this share of the longer's tokens."""

LARGEST_MASK = 1 << 24
"""Entries of an attention mask. Completions behind a shared prompt need one of T x (P + T); where it would be larger, the prompt
lies before each of them again, since plain causal attention needs none."""


class RowTokens(NamedTuple):
    """One sequence."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    given: tuple[Gap, ...] = ()
    """ranges of the completion that an environment wrote: read, and not predicted"""


class Stretch(NamedTuple):
    """Tokens [start, stop) of the layout that follow each other in one row."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of like lengths, whose attention is computed together."""

    stretches: tuple[Stretch, ...]
    """longest first"""
    prefix: Stretch | None
    """the shared prompt that they all attend to besides"""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows as one sequence of L tokens."""

    ids: list[int]
    """[L]"""
    positions: list[int]
    """[L], of each token in its row"""
    buckets: tuple[Bucket, ...]
    """every token is in one stretch of one bucket, but for those of no row, which lie last"""
    predicts: list[int]
    """[N]: where the token lies that predicts each sampled token, row after row"""
    targets: list[int]
    """[N]: the sampled tokens"""
    multiple: int = 1
    """of which the numbers of queries and keys are multiples, in attention; L is one, too"""


class PromptLoad(NamedTuple):
    """Rows of one prompt in a forward, counted. Whether they share it is decided here, for the layout and for the budget."""

    prompt: int
    """its tokens"""
    rows: int = 0
    tails: int = 0
    """tokens of all completions that are laid: each without its last"""
    longest: int = 0
    """tokens of the longest of them"""

    def plus(self, tail: int) -> PromptLoad:
        """With one more row, of `tail` laid tokens."""
        return PromptLoad(self.prompt, self.rows + 1, self.tails + tail, max(self.longest, tail))

    @property
    def can_share(self) -> bool:
        """Its tokens may lie there once."""
        return self.rows > 1 and self.longest * (self.prompt + self.longest) <= LARGEST_MASK

    def tokens(self, share_prompts: bool) -> int:
        """Laid tokens."""
        return self.tails + self.prompt * (1 if share_prompts and self.can_share else self.rows)


def prompt_loads(rows: Iterable[RowTokens]) -> dict[tuple[int, ...], PromptLoad]:
    """By prompt, in the rows' order."""
    loads: dict[tuple[int, ...], PromptLoad] = {}
    for row in rows:
        loads[row.prompt] = loads.get(row.prompt, PromptLoad(len(row.prompt))).plus(len(row.completion) - 1)
    return loads


def packed(rows: Sequence[RowTokens], *, share_prompts: bool = True, multiple: int = 1) -> PackedRows:
    """The layout of `rows`, which are not empty and have a prompt and a completion each. Tokens of no row fill it up
    (`filled_up`)."""
    loads = prompt_loads(rows)
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(rows):
        by_prompt.setdefault(row.prompt, []).append(number)
    ids, positions = list[int](), list[int]()
    whole = list[Stretch]()
    tails = list[tuple[Stretch, list[Stretch]]]()
    first = [0] * len(rows)
    """of a row: where the token lies that predicts its completion's first"""
    second = [0] * len(rows)
    """of a row: where its completion begins"""

    def lay(tokens: tuple[int, ...], position: int) -> Stretch:
        start = len(ids)
        ids.extend(tokens)
        positions.extend(range(position, position + len(tokens)))
        return Stretch(start, len(ids))

    for prompt, numbers in by_prompt.items():
        if share_prompts and loads[prompt].can_share:
            head = lay(prompt, 0)
            whole.append(head)
            behind = list[Stretch]()
            for n in numbers:
                tail = lay(rows[n].completion[:-1], len(prompt))
                first[n], second[n] = head.stop - 1, tail.start
                if tail.size:
                    behind.append(tail)
            tails.append((head, behind))
        else:
            for n in numbers:
                alone = lay((*prompt, *rows[n].completion[:-1]), 0)
                whole.append(alone)
                first[n], second[n] = alone.start + len(prompt) - 1, alone.start + len(prompt)
    buckets = [Bucket(stretches, None) for stretches in _alike(whole)]
    buckets += [Bucket(stretches, head) for head, behind in tails for stretches in _alike(behind)]

    predicts, targets = list[int](), list[int]()
    for n, row in enumerate(rows):
        for at in _sampled(row):
            predicts.append(first[n] if at == 0 else second[n] + at - 1)
            targets.append(row.completion[at])
    fill = filled_up(len(ids), multiple) - len(ids)
    nothing = [0] * fill
    return PackedRows(ids + nothing, positions + nothing, tuple(buckets), predicts, targets, multiple=multiple)


def packed_tokens(rows: Iterable[RowTokens], *, share_prompts: bool = True) -> int:
    """Tokens that a forward over these rows computes."""
    return sum(load.tokens(share_prompts) for load in prompt_loads(rows).values())


def _sampled(row: RowTokens) -> Iterator[int]:
    at = 0
    for gap in sorted(row.given):
        yield from range(at, gap.start)
        at = gap.stop
    yield from range(at, len(row.completion))


def _alike(stretches: Sequence[Stretch]) -> Iterator[tuple[Stretch, ...]]:
    """Segments in buckets, longest first."""
    bucket = list[Stretch]()
    for stretch in sorted(stretches, key=lambda s: -s.size):
        if bucket and stretch.size < ALIKE * bucket[0].size:
            yield tuple(bucket)
            bucket = []
        bucket.append(stretch)
    if bucket:
        yield tuple(bucket)
