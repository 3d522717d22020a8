"""Groups while they are generated, as the journal keeps them: reservations, and pieces of trajectories. Pure.

Must not know SQLite, the ledger or who is asked to generate. Accepted tokens wait in `Unwritten` for a fraction of a second, in
the very arrays that came off the wire; a piece is what follows each other of one trajectory, made by one node under one version,
or given by an environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p.protocol.rollout import TokenEvent
from p2p.version import Version


@dataclass(frozen=True, slots=True)
class Piece:
    """Completion tokens [start, start + len(self)) of one member of a group, as the journal keeps them."""

    group_id: int
    member: int
    start: int
    version: Version | None
    """None: an environment gave them"""
    ids: bytes
    """little-endian int32, one a token"""
    logprobs: bytes
    """little-endian float32 (nats), one a token, as on the wire: nothing is rounded. Empty where they were given"""
    node: str
    """who made them; "" where they were given"""

    def __len__(self) -> int:
        return len(self.ids) // 4

    @property
    def stop(self) -> int:
        return self.start + len(self)

    def event(self) -> TokenEvent:
        """As it came from the node, without its request id. ValueError for what no node made."""
        if self.version is None:
            raise ValueError(f"tokens {self.start} to {self.stop} of group {self.group_id} were given, no node made them")
        return TokenEvent("", self.start, self.ids, self.logprobs, version=self.version, finish="", message="")


@dataclass(frozen=True, slots=True)
class ReservedGroup:
    """A group about to be generated, as it is written down before its first request leaves."""

    group_id: int
    task_index: int
    version: Version
    samples: int
    """members that it will have when it is whole"""
    spec_digest: int = 0
    """tells prompt, seeds and sampling: who goes on with its tokens must have the same"""
    extra: int = 0
    """members that are generated beyond those: whichever end first are kept"""

    @property
    def members(self) -> int:
        return self.samples + self.extra


@dataclass(frozen=True, slots=True)
class UnfinishedGroup:
    """A reserved group as a crash left it: what each member had in the journal, in order and without gaps."""

    group: ReservedGroup
    members: tuple[tuple[Piece, ...], ...]

    @property
    def group_id(self) -> int:
        return self.group.group_id

    @property
    def tokens(self) -> int:
        return sum(len(piece) for pieces in self.members for piece in pieces)


@dataclass(slots=True)
class _UnwrittenRun:
    """A piece while it grows."""

    start: int
    stop: int
    version: Version | None
    node: str
    ids: list[bytes]
    logprobs: list[bytes]


class Unwritten:
    """Accepted tokens that are not in the journal yet. `tokens` counts them, `longest` is the most of one trajectory
    (never too low; a `drop` may leave it too high until the next `take`)."""

    def __init__(self) -> None:
        self.tokens = self.longest = 0
        self._groups: dict[int, dict[int, list[_UnwrittenRun]]] = {}
        """group -> member -> what waits of it, in order and without gaps"""

    def add(
        self, group_id: int, member: int, node: str, start: int, version: Version | None, ids: bytes, logprobs: bytes
    ) -> None:
        """Tokens that were accepted, as in a `Piece`. Those of one trajectory follow each other without a gap."""
        runs = self._groups.setdefault(group_id, {}).setdefault(member, [])
        count = len(ids) // 4
        if runs and runs[-1].version == version and runs[-1].node == node:
            last = runs[-1]
            last.stop += count
            last.ids.append(ids)
            last.logprobs.append(logprobs)
        else:
            runs.append(_UnwrittenRun(start, start + count, version, node, ids=[ids], logprobs=[logprobs]))
        self.tokens += count
        if (longest := runs[-1].stop - runs[0].start) > self.longest:
            self.longest = longest

    def drop(self, group_id: int) -> None:
        """The group is over: the journal has it whole, or needs it no more."""
        self.tokens -= sum(map(_tokens, self._groups.pop(group_id, {}).values()))

    def drop_member(self, group_id: int, member: int) -> None:
        """It begins anew."""
        self.tokens -= _tokens(self._groups.get(group_id, {}).pop(member, []))

    def take(self) -> list[Piece]:
        """Everything that waits, joined where it follows on, in order of group, member and start; nothing waits then."""
        out = [
            Piece(
                group_id, member, run.start, version=run.version, ids=b"".join(run.ids), logprobs=b"".join(run.logprobs),
                node=run.node,
            )
            for group_id, members in sorted(self._groups.items())
            for member, runs in sorted(members.items())
            for run in runs
        ]  # fmt: skip
        self._groups, self.tokens, self.longest = {}, 0, 0
        return out


def _tokens(runs: list[_UnwrittenRun]) -> int:
    """Of one trajectory: they follow each other."""
    return runs[-1].stop - runs[0].start if runs else 0
