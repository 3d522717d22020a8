"""A member of a group as an episode of several turns: what its environment is asked, and whether an answer can be used. Pure.

The draws of a life begun anew are those of the life before: same seed, same positions. What made it begin anew is the
environment's state and not the answer, so nothing is chosen by that; and where its environment answers otherwise, it goes another
way from there. So a life must not begin anew for ever: LIVES. Must not know nodes, or which groups there are (`collector`).
"""

from __future__ import annotations

from learner.environments.answers import unusable
from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.rollouts.group import RunningGroup, RunningSample

LIVES = 4
"""Lives of one episode in one life of the learner: an environment that cannot be set back three times in a row will not be."""


def key_of(group: RunningGroup, index: int) -> EpisodeKey:
    return EpisodeKey(group.group_id, index, group.members[index].life)


def turns_of(member: RunningSample) -> tuple[Turn, ...]:
    """What was sampled and what was given, in order."""
    ids, at, turns = member.completion.ids, 0, []
    for gap in member.given:
        turns.append(Turn(tuple(ids[at : gap.start]), tuple(ids[gap.start : gap.stop])))
        at = gap.stop
    if at < len(ids):
        turns.append(Turn(tuple(ids[at:])))
    return tuple(turns)


def over(group: RunningGroup, member: RunningSample) -> str:
    """Why no turn can follow the present one; "" when one may. One token for the environment and one for the model are the least
    of another turn."""
    limits = group.sampling.turns
    assert limits is not None
    if len(member.completion.ids) + 2 > group.sampling.max_new_tokens:
        return "length"
    return "turns" if len(member.given) + 1 >= limits.max_turns else ""


def episode(group: RunningGroup, index: int) -> Episode:
    """What the environment is asked to answer."""
    member = group.members[index]
    return Episode(key_of(group, index), group.task_index, turns_of(member), member.over)


def wrong_answer(group: RunningGroup, answer: TurnAnswer, vocab_size: int | None) -> str:
    """Why the group must be given up with this answer; "" when it can be used."""
    return unusable(answer, group.sampling.stop_ids, vocab_size)
