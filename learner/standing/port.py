"""What those who deal with nodes tell of them, and ask. Must not know how a record is kept."""

from __future__ import annotations

from typing import Protocol


class NodeConduct(Protocol):
    """How nodes conduct themselves. A peer that is expelled by what is told here is gone soon after."""

    def ended(self, peer: str, tokens: int) -> None:
        """Sequences with so many tokens of its making ended as asked."""

    def doubt(self, peer: str, why: str) -> None:
        """It withheld, was slow without reason, gave up what others did, or ignored what it was told."""

    def credible(self, peer: str) -> bool:
        """Whether its word counts: it is proven and not on trial again; while nobody is, who has delivered something
        and was not doubted since."""

    def anybody_proven(self) -> bool:
        """Whether a proven node is there that takes work and is not on trial again."""

    def on_alert(self) -> bool:
        """Whether several proven nodes were found wrong lately."""

    def doubted(self, peer: str) -> bool:
        """Whether it is on trial again since it was doubted lately."""

    def held_up(self, peer: str, now: float) -> None:
        """The trainer waited for something that was taken from it. If a check found some of what it made grossly wrong, and not
        enough was sound since, it gets nothing for twice as long as the last time. `now` is of the head's clock."""

    def leaves(self, peer: str) -> bool:
        """Whether it has said that it leaves, and is given nothing any more."""

    def delivered(self, peer: str) -> bool:
        """Whether it ended anything as asked since it was last expelled."""


class NobodyDoubted(NodeConduct):
    """Every node's word counts, and nothing is kept."""

    def ended(self, peer: str, tokens: int) -> None:
        pass

    def doubt(self, peer: str, why: str) -> None:
        pass

    def credible(self, peer: str) -> bool:
        return True

    def anybody_proven(self) -> bool:
        return True

    def on_alert(self) -> bool:
        return False

    def doubted(self, peer: str) -> bool:
        return False

    def held_up(self, peer: str, now: float) -> None:
        pass

    def leaves(self, peer: str) -> bool:
        return False

    def delivered(self, peer: str) -> bool:
        return True
