"""The books of all outstanding groups: who holds which attempt of what, what the journal lacks, what environments must be told.

Pure. Two kinds of events change them: those of nodes (`collector`) and those of environments (`episode_answers`). Must not know
what makes an event right or wrong.
"""

from __future__ import annotations

from typing import NamedTuple

from learner.environments.port import Episode, EpisodeKey
from learner.journal.records import Unwritten
from learner.rollouts.episodes import episode, key_of
from learner.rollouts.group import RunningGroup, RunningSample, parse_request, trajectory
from learner.rollouts.outcomes import Cancel, EnvironmentWork, WholeGroup
from learner.trajectory import Group


class Held(NamedTuple):
    """A member, and where it stands."""

    group: RunningGroup
    number: int
    member: RunningSample


class Stopped(NamedTuple):
    """What a node must stop."""

    node: str
    request_id: str


class CutBack(NamedTuple):
    """A member that goes on from before a node's first token."""

    group_id: int
    member: int
    position: int
    """tokens that it keeps"""
    tokens: int
    """that it loses"""


class CutBacks(NamedTuple):
    """What goes on from before a node's tokens, and what nodes must stop for that."""

    cuts: list[CutBack]
    cancel: Cancel


class GroupBooks:
    """`unwritten` holds what was accepted and is not in the journal yet; whoever keeps a journal empties it."""

    def __init__(self) -> None:
        self.unwritten = Unwritten()
        self.groups: dict[int, RunningGroup] = {}
        """the outstanding groups, oldest first"""
        self.held: dict[str, dict[str, Held]] = {}
        """node -> request id -> what it works on under that"""
        self._to_ask: dict[EpisodeKey, Episode] = {}
        self._to_forget: list[EpisodeKey] = []

    def find(self, request_id: str) -> Held | None:
        """The member whose present attempt bears this name; None for any other text."""
        name = parse_request(request_id)
        group = self.groups.get(name.group_id) if name else None
        if name is None or group is None or name.member >= len(group.members):
            return None
        member = group.members[name.member]
        return Held(group, name.member, member) if member.attempt == name.attempt else None

    def longest(self, group: RunningGroup) -> list[int]:
        """As many unfinished members as the group still needs, those that have made most. ValueError when too few have a
        token."""
        missing = group.needed - sum(bool(m.finish) for m in group.members)
        begun = [i for i, m in enumerate(group.members) if m.completion.ids and not m.finish]
        if len(begun) < missing:
            raise ValueError(f"group {group.group_id} needs {missing} more members, and {len(begun)} have a token")
        return sorted(begun, key=lambda i: -len(group.members[i].completion.ids))[:missing]

    # ---- nodes

    def stop(self, group: RunningGroup, index: int) -> Stopped:
        """Nobody works on the member any more: what is over."""
        member = group.members[index]
        old = Stopped(member.node, group.request_name(index))
        del self.held[old.node][old.request_id]
        member.node = ""
        return old

    def release(self, group: RunningGroup, index: int) -> Stopped:
        """Take the member from its node and start a new attempt: what is over."""
        old = self.stop(group, index)
        group.members[index].attempt += 1
        return old

    def cut_back(self, node: str) -> CutBacks:
        """Every member that has tokens of `node` loses those, and all that were made after them: it waits for a node again, with
        what it had before. And what nodes must stop. Episodes are left alone: their environment has heard those tokens."""
        cuts, stopped = list[CutBack](), list[Stopped]()
        for group in self.groups.values():
            if group.sampling.turns is not None:
                continue
            for index, member in enumerate(group.members):
                first = next((m.start for m in member.makers if m.node == node), None)
                if first is None:
                    continue
                if member.node:
                    stopped.append(self.release(group, index))
                else:
                    member.attempt += 1
                cuts.append(CutBack(group.group_id, index, first, len(member.completion.ids) - first))
                member.cut_to(first)
        return CutBacks(cuts, tuple(stopped))

    def episodes_of(self, node: str) -> list[int]:
        """The groups of episodes that have tokens of this node."""
        return [
            group.group_id for group in self.groups.values()
            if group.sampling.turns is not None and any(m.node == node for member in group.members for m in member.makers)
        ]  # fmt: skip

    # ---- environments

    def ask(self, group: RunningGroup, index: int, over: str) -> None:
        """The member's turn has ended: its environment is to answer it. `over` as in `Episode`."""
        member = group.members[index]
        member.asked, member.over = True, over
        asked = episode(group, index)
        self._to_ask[asked.key] = asked

    def take_environment_work(self) -> EnvironmentWork:
        """What came up since the last call: for whoever runs the episodes."""
        forget = tuple(dict.fromkeys(self._to_forget))
        work = EnvironmentWork(tuple(e for e in self._to_ask.values() if e.key not in forget), forget)
        self._to_ask, self._to_forget = {}, []
        return work

    # ---- the end of a group

    def abort(self, group_id: int) -> Cancel:
        """Forget a group: what nodes still do for it. KeyError when it is not outstanding."""
        group = self.groups[group_id]
        self.unwritten.drop(group_id)
        return self._leaves(group)

    def whole(self, group: RunningGroup) -> WholeGroup | None:
        """The group, which leaves the books, once as many members as it needs have ended. Its last tokens stay in `unwritten`
        until the journal has it as finished: it may wait long for its reward."""
        ended = [m for m in group.members if m.finish]
        if len(ended) < group.needed:
            return None
        cancel = self._leaves(group)
        return WholeGroup(
            Group(group.group_id, group.task_index, tuple(trajectory(group, m) for m in ended)),
            tuple(len(m.completion.ids) for m in group.members if not m.finish),
            cancel,
        )

    def _leaves(self, group: RunningGroup) -> Cancel:
        """What nodes still work on. Its episodes that have no score get none."""
        del self.groups[group.group_id]
        if group.sampling.turns is not None:
            self._to_forget += [key_of(group, index) for index, m in enumerate(group.members) if m.score is None]
        return tuple(self.stop(group, index) for index, member in enumerate(group.members) if member.node)
