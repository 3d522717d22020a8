"""What environments say of episodes under way, and what follows for their groups. Pure: answers in, outcomes out.

The other half of the collector, over the same books: nodes' events are the `collector`'s, and it says when a turn has ended.
What is then asked of an environment, and whether its answer can be used, is in `episodes`. Must not know nodes' messages.
"""

from __future__ import annotations

from learner.environments.answers import episode_finish
from learner.environments.port import TurnAnswer
from learner.rollouts.episodes import LIVES, wrong_answer
from learner.rollouts.group_books import GroupBooks
from learner.rollouts.outcomes import Accepted, BegunAnew, Cancel, EnvironmentWork, GroupAborted, Ignored, Outcome
from learner.trajectory import TRUNCATED
from p2p.protocol.rollout import pack_ids


class EpisodeAnswers:
    """The episodes among the outstanding groups of `books`. `vocab_size` bounds token ids."""

    def __init__(self, books: GroupBooks, vocab_size: int | None) -> None:
        self._books, self._vocab_size = books, vocab_size

    def take_work(self) -> EnvironmentWork:
        """What came up since the last call: for whoever runs the episodes."""
        return self._books.take_environment_work()

    def answered(self, answer: TurnAnswer) -> Outcome:
        """An environment's answer to the last turn of an episode. What is late or doubled (another life, another turn, a group
        that is over, tokens for an episode that was told that it is over) is ignored."""
        key, books = answer.key, self._books
        group = books.groups.get(key.group_id)
        if group is None or not 0 <= key.member < len(group.members):
            return Ignored(f"{key.group_id}.{key.member}")
        index, member = key.member, group.members[key.member]
        request_id = group.request_name(index)
        if not member.asked or key.life != member.life or answer.number != len(member.given) + 1:
            return Ignored(request_id)
        wrong = wrong_answer(group, answer, self._vocab_size)
        if answer.anew and not wrong and member.life + 1 >= LIVES:
            wrong = f"begun anew {LIVES} times, last because {answer.anew}"
        if wrong:
            return GroupAborted(group.group_id, f"member {index}: {wrong}", books.abort(group.group_id))
        if answer.anew:
            member.life += 1
            member.attempt += 1
            member.begin(group.sampling)
            books.unwritten.drop_member(group.group_id, index)
            return BegunAnew(group.group_id, index, group.request_name(index), answer.anew)
        if answer.score is not None:
            member.score, member.asked = answer.score, False
            member.finish = TRUNCATED if member.cut else episode_finish(answer.score, member.over)
            return Accepted(request_id, 0, books.whole(group))
        if member.over:
            return Ignored(request_id)
        start = len(member.completion.ids)
        if start + len(answer.given) >= group.sampling.max_new_tokens:  # no room for a turn after it
            books.ask(group, index, "length")
            return Accepted(request_id, 0)
        member.give(answer.given, group.sampling)
        member.asked, member.prefer = False, member.last_node
        books.unwritten.add(
            group.group_id, index, node="", start=start, version=None, ids=pack_ids(answer.given), logprobs=b""
        )
        return Accepted(request_id, 0)

    def cut(self, group_id: int) -> Cancel | None:
        """As `Collector.cut`, of a group of episodes: those that it needs make no token more, and their environment is asked to
        score what there is. The (node, request id) that must stop; None when all of them were told before that they are over. The
        group is whole with the last score.
        """
        books = self._books
        group, cancel, changed = books.groups[group_id], [], False
        for index in books.longest(group):
            member = group.members[index]
            if member.over:
                continue
            if member.node:
                cancel.append(books.release(group, index))
            member.drop_unused()
            member.cut = changed = True
            books.ask(group, index, "time")
        return tuple(cancel) if changed else None
