"""Who is to blame for what it gave up, once another node has made it. Pure: times in.

An engine that dies gives up all that it holds at once, and others may take minutes to make that: what counts is when it was given
up. Must not know what a doubt does to a node's standing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from learner.rollouts.group import member_name
from p2p.forgetting import forget_oldest

ONE_EVENT_S = 10.0
"""What a node gives up within so many seconds is one event, and one doubt: for one that has delivered something. A stranger has
few chances, and each thing that it gives up is one."""


@dataclass(slots=True)
class _Event:
    began: float
    doubted: bool = False


class GivenUp:
    """Told who gave up what, and what others made of that."""

    def __init__(self) -> None:
        self._latest: dict[str, _Event] = {}
        """node -> what it gives up at the time"""
        self._of: dict[str, _Event] = {}
        """node/group.member -> when it gave that up"""

    def gave_up(self, node: str, request_id: str, now: float) -> None:
        """`node` says that it cannot do this."""
        event = self._latest.get(node)
        if event is None or now - event.began >= ONE_EVENT_S:
            event = self._latest[node] = _Event(now)
            forget_oldest(self._latest)
        self._of[_key(node, request_id)] = event
        forget_oldest(self._of)

    def made(
        self, request_id: str, by: str, gave_up: Iterable[str], delivered: Callable[[str], bool]
    ) -> list[str]:
        """`by` made it: those of `gave_up`, who could not, that are to be doubted. Each is so once for one sequence, however many
        turns of it others make."""
        blamed: list[str] = []
        for node in gave_up:
            event = self._of.pop(_key(node, request_id), None)
            if node == by or event is None or (event.doubted and delivered(node)):
                continue
            event.doubted = True
            blamed.append(node)
        return blamed


def _key(node: str, request_id: str) -> str:
    return f"{node}/{member_name(request_id)}"
