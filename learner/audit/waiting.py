"""What waits to be checked: bounded, and taken in turn, so that a crowd of strangers keeps nobody else's checks waiting. Pure.

What is to be checked soon (strangers' completions, and long ones) and what has time take turns, and within each kind the nodes
do. What the trainer waits for has each second batch to itself. Must not know how a completion is chosen or checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

PEER_TOKENS = 8_192
"""Tokens of one node that may wait, one completion at least: two answers of the auditor's."""

MOST_TOKENS = 524_288
"""Tokens that may wait in all: as Python's numbers some 50 MB."""


class HasLength(Protocol):
    """What can wait."""

    @property
    def length(self) -> int:
        """Tokens that are read for it."""


Waits = TypeVar("Waits", bound=HasLength)


@dataclass(slots=True)
class _Line(Generic[Waits]):
    """One node's."""

    tokens: int = 0
    items: deque[Waits] = field(default_factory=deque)


@dataclass
class WaitingLines(Generic[Waits]):
    """`dropped(item)` hears of each that lost its place."""

    dropped: Callable[[Waits], None]
    peer_tokens: int = PEER_TOKENS
    most_tokens: int = MOST_TOKENS
    tokens: int = field(default=0, init=False)
    """that wait in all"""
    _kinds: tuple[dict[str, _Line[Waits]], ...] = field(default_factory=lambda: ({}, {}, {}), init=False, repr=False)
    """of what has time, of what is to be checked soon, of what comes first: node -> its line, in the order of turns"""
    _was_first: bool = field(default=False, init=False, repr=False)
    """whether the last batch was of what comes first"""
    _turn: bool = field(default=True, init=False, repr=False)
    """whether it is that of what is to be checked soon"""

    def add(self, node: str, item: Waits, *, soon: bool, first: bool = False) -> None:
        """It waits, unless its node has as much waiting as it may; what comes first takes the place of what does not. When all
        places are taken the kind with most gives one up, and of its nodes the one with most."""
        waits = sum(kind[node].tokens for kind in self._kinds if node in kind)
        for kind in self._kinds[:2] if first and self.takes_first(node, item.length) else ():
            while waits + item.length > self.peer_tokens and node in kind:
                lost = self._take(kind, node, newest=True)
                waits -= lost.length
                self.dropped(lost)
        if waits and waits + item.length > self.peer_tokens:
            self.dropped(item)
            return
        line = self._kinds[2 if first else soon].setdefault(node, _Line())
        line.items.append(item)
        line.tokens += item.length
        self.tokens += item.length
        while self.tokens > self.most_tokens:
            most = max(self._kinds, key=lambda kind: sum(of.tokens for of in kind.values()))
            self.dropped(self._take(most, max(most, key=lambda name: most[name].tokens), newest=True))

    def takes(self, node: str, tokens: int) -> bool:
        """Whether there is room for so many of a node's tokens beside all that waits of it."""
        return sum(kind[node].tokens for kind in self._kinds if node in kind) + tokens <= self.peer_tokens

    def takes_first(self, node: str, tokens: int) -> bool:
        """Whether there is room for so many of a node's tokens beside what comes first of its own."""
        line = self._kinds[2].get(node)
        return line is None or line.tokens + tokens <= self.peer_tokens

    def next(self, most_tokens: int) -> list[Waits]:
        """What has its turn, of so many tokens, one at least. [] when nothing waits."""
        time, soon, first = self._kinds
        self._was_first = bool(first) and not (self._was_first and (time or soon))
        batch, tokens = list[Waits](), 0
        while kind := first if self._was_first else self._kinds[self._turn] or self._kinds[not self._turn]:
            node = next(iter(kind))
            if batch and tokens + kind[node].items[0].length > most_tokens:
                break
            item = self._take(kind, node)
            batch.append(item)
            tokens += item.length
            self._turn = self._turn if self._was_first else not self._turn
            if node in kind:
                kind[node] = kind.pop(node)  # behind the others
        return batch

    def take_out(self, node: str, those: Callable[[Waits], bool]) -> list[Waits]:
        """Of what waits of a node, and does not come first, those: they wait no more."""
        out: list[Waits] = []
        for kind in self._kinds[:2]:
            for _ in range(len(kind[node].items) if node in kind else 0):
                item = self._take(kind, node)
                if those(item):
                    out.append(item)
                else:
                    line = kind.setdefault(node, _Line())
                    line.items.append(item)
                    line.tokens += item.length
                    self.tokens += item.length
        return out

    def drop(self, node: str = "") -> None:
        """Nothing of this node (of any node) waits any more."""
        for kind in self._kinds:
            for name in [node] if node else list(kind):
                while name in kind:
                    self.dropped(self._take(kind, name))

    @property
    def some_soon(self) -> bool:
        """Whether anything waits that is to be checked soon."""
        return bool(self._kinds[1] or self._kinds[2])

    @property
    def first_tokens(self) -> int:
        """That wait of what comes first."""
        return sum(line.tokens for line in self._kinds[2].values())

    def __iter__(self) -> Iterator[Waits]:
        """All that waits, in no order."""
        return (item for kind in self._kinds for line in kind.values() for item in line.items)

    def __len__(self) -> int:
        return sum(len(line.items) for kind in self._kinds for line in kind.values())

    def _take(self, kind: dict[str, _Line[Waits]], node: str, *, newest: bool = False) -> Waits:
        line = kind[node]
        item = line.items.pop() if newest else line.items.popleft()
        line.tokens -= item.length
        self.tokens -= item.length
        if not line.items:
            del kind[node]
        return item
