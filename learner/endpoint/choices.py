"""One sequence as a client gets it: its tokens in order, its text, what ended it, which versions made it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from learner.endpoint.text import SequenceText
from learner.requests.port import Made
from p2p.version import Version


class VersionSpan(NamedTuple):
    """Tokens that one version made: start <= position < end."""

    version: Version
    start: int
    end: int


class Delta(NamedTuple):
    """What a choice got since the last one."""

    choice: int
    """its index"""
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    """"stop" or "length" with the choice's last, "" before"""


class Choice:
    """One answer of a request."""

    def __init__(
        self, index: int, text: SequenceText, *, own_stops: Collection[int], stop_ids: Collection[int], include_stop: bool
    ) -> None:
        """`own_stops` are token ids that the client wants to be stopped at; `stop_ids` those and the model's."""
        self.index = index
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []
        self.finish = ""
        self.stop_reason: str | int | None = None
        """the stop string, or the one of the client's token ids, that ended it"""
        self._text = text
        self._parts: list[str] = []
        self._own_stops, self._stop_ids, self._include_stop = own_stops, stop_ids, include_stop

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._parts)

    def take(self, made: Made) -> Delta:
        """Further tokens. After one with a `finish` there are no more: a stop string ends the sequence before its node does."""
        ids, finish = made.ids, made.finish
        ended_by = ids[-1] if finish == "stop" and ids and ids[-1] in self._stop_ids else None
        hidden = ended_by is not None and not self._include_stop
        piece = self._text.add(ids[:-1] if hidden else ids)
        text, stop = piece.text, piece.stop
        if stop:
            ids = ids[: piece.used]
        elif finish:
            rest = self._text.end()
            text, stop = text + rest.text, rest.stop
        if stop:
            finish, self.stop_reason = "stop", stop
        elif ended_by in self._own_stops:
            self.stop_reason = ended_by
        self._keep(made, len(ids))
        self._parts.append(text)
        self.finish = finish
        return Delta(self.index, text, ids, made.logprobs[: len(ids)], finish)

    def _keep(self, made: Made, count: int) -> None:
        start = len(self.ids)
        self.ids += made.ids[:count]
        self.logprobs += made.logprobs[:count]
        if not count:
            return
        if self.spans and self.spans[-1].version == made.version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(made.version, start, len(self.ids)))
