"""What a caught node made is made again as far as the trainer does not have it, whoever found it out."""

from __future__ import annotations

import trio

from learner.head.trust import Trust
from learner.journal.journal import Journal
from learner.rollouts.taking_back import TakenBack, take_back
from learner.standing.standing import StandingRules
from learner.trajectory import Group, Maker, Trajectory
from p2p.protocol.rollout import Span, TokenEvent
from p2p.version import Version
from tests.support.harness import RUN, identity
from tests.swarm.test_head import Run

V = Version(1, 0)


def remake(run: Run, group_id: int, *nodes: str) -> None:
    """A finished group of one completion, of which each of these nodes made a token."""
    run.finish(group_id, 0)
    t = Trajectory(
        prompt_ids=(1,), completion_ids=(2,) * len(nodes), logprobs=(-1.0,) * len(nodes), spans=(Span(V, 0, len(nodes)),),
        finish="stop", node=nodes[-1], seed=0, makers=tuple(Maker(i, n) for i, n in enumerate(nodes)), reward=1.0,
    )  # fmt: skip
    run.rollouts.buffers.finished[group_id] = Group(group_id, run.rollouts.buffers.finished[group_id].task_index, (t,))


async def test_what_the_trainer_was_handed_stays_and_the_rest_comes_again(tmp_path, autojump_clock) -> None:
    with Journal.open(tmp_path / "j.sqlite", RUN) as journal:
        run = Run(journal, staleness=2, groups=2, micro_batch_groups=1)
        rollouts, buffers = run.rollouts, run.rollouts.buffers
        for _ in range(5):
            run.open(0)
        remake(run, 0, "cheat")
        with trio.fail_after(1):
            first = await buffers.next_groups(0, 0)
        assert [g.group_id for g in first.groups] == [0] and not first.last
        remake(run, 1, "good", "cheat")
        remake(run, 2, "cheat", "good")
        remake(run, 3, "good")
        back = take_back(rollouts, "cheat")
        assert back == TakenBack(groups=2) and sorted(buffers.finished) == [0, 3]
        assert rollouts.ledger.occupied(0) == [0, 3], "the honest one moved up behind what the trainer has"
        assert [buffers.retry.count(i) for i in (0, 1, 2, 3)] == [0, 1, 1, 0]
        assert journal.counts().groups.aborted == {"caught": 2} and set(journal.tasks_to_retry()) == {1, 2}
        with trio.fail_after(1):
            rest = await buffers.next_groups(0, 1)
        assert [g.group_id for g in rest.groups] == [3] and rest.last
        assert take_back(rollouts, "cheat") == TakenBack()
        buffers.advance(1)
        assert take_back(rollouts, "cheat") == TakenBack(), "what led to a step stays, committed or not"
        buffers.commit(1, "c1")
        assert journal.counts().groups.lost == 0


async def test_completions_under_way_go_on_from_before_the_nodes_first_token(tmp_path, autojump_clock) -> None:
    with Journal.open(tmp_path / "j.sqlite", RUN) as journal:
        run = Run(journal, samples=3)
        rollouts, collector = run.rollouts, run.rollouts.collector
        run.open(0)
        group = collector.books.groups[0]

        def make(member: int, node: str, count: int, finish: str = "") -> None:
            request = collector.assign(group.request_name(member), node)
            event = TokenEvent.of(request.request_id, len(request.prefix_ids), (5,) * count, [-1.0] * count, V, finish)
            collector.tokens(node, event)

        make(0, "good", 2, "interrupt")
        make(0, "cheat", 1, "interrupt")
        make(0, "good", 1)  # at the good node now, after a token of the cheat's
        make(1, "cheat", 1)
        make(2, "good", 4)
        assert group.members[2].finish
        rollouts.tokens.write()
        make_again = take_back(rollouts, "cheat")
        assert make_again == TakenBack(completions=2, tokens=3)
        first, second, third = group.members
        assert first.completion.ids == [5, 5] and [m.node for m in first.makers] == ["good"] and first.waits
        assert second.completion.ids == [] and second.makers == [] and second.waits
        assert third.finish and len(third.completion.ids) == 4
        assert [len(p) for member in journal.unfinished()[0].members for p in member] == [2, 4]
        make(0, "good", 2)
        make(1, "good", 4)
        assert 0 not in collector.books.groups, "it is whole"
        rollouts.tokens.write()
        assert sum(len(p) for member in journal.unfinished()[0].members for p in member) == 12


def test_the_trainers_own_pass_has_the_same_consequence() -> None:
    """`MismatchWatch` and audits end in `Trust.caught`: once a node, with what the trainer has of it."""
    cheat, good = identity(1).peer_id, identity(2).peer_id
    expelled: list[tuple[str, str]] = []
    taken: list[str] = []
    trust = Trust(StandingRules(), {}, wall=lambda: 10.0, expel=lambda peer, why: expelled.append((peer, why)))

    def back(peer: str) -> TakenBack:
        taken.append(peer)
        return TakenBack(3, 2, 40)

    trust.take_back = back
    made = (Maker(0, good), Maker(4, cheat))
    t = Trajectory(
        prompt_ids=(1,), completion_ids=(2,) * 10, logprobs=(-1.0,) * 10, spans=(Span(V, 0, 10),), finish="stop", node=cheat,
        seed=0, makers=made, reward=1.0,
    )  # fmt: skip
    trust.handed([Group(0, 0, (t,)), Group(1, 1, (t,))])
    assert trust.trained == {good: 8, cheat: 12}
    trust.ended(good, 300)
    trust.trained_on({good: [300, 3.0], cheat: [300, 3000.0]})
    assert taken == [cheat] and [peer for peer, _ in expelled] == [cheat]
    assert "12 of its tokens went to the trainer; 3 groups, and 40 tokens of 2 completions" in expelled[0][1]
    said = trust.caught_status()
    assert (said["nodes"], said["trained_tokens"], said["remade_groups"]) == (1, 12, 3)
    trust.checks(True, 0.02)
    trust.answer_for(good)
    trust.caught(good, "it is trusted")
    assert len(expelled) == 1 and trust.standing.rules.checks
