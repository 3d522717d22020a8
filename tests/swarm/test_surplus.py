"""The real head with more than it needs, and with patience that ends: on a mock clock, over the memory network.

Nodes answer by hand: which sequences end, and which do not, is the test's to say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import trio

from learner.client.messages import CommitStep, Log
from learner.journal.journal import Journal
from learner.journal.token_writer import JOURNAL_S
from learner.trajectory import Group
from p2p.protocol.generation import Abort, GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version
from tests.support.harness import RUN
from tests.swarm.test_head import Bench, Node, Run, check_books, good, open_head, publish


def group_of(request: GenerateRequest) -> int:
    return int(request.request_id.split(".")[0])


def member_of(request: GenerateRequest) -> int:
    return int(request.request_id.split(".")[1])


def aborted(node: Node) -> set[str]:
    return {name for message in node.heard if isinstance(message, Abort) for name in message.request_ids}


async def say(node: Node, request: GenerateRequest, count: int) -> None:
    """So many tokens, none of which ends it."""
    start = len(request.prefix_ids) // 4
    ids = tuple(1 + (request.seed + start + i) % 9 for i in range(count))
    event = TokenEvent.of(request.request_id, start, ids, np.full(count, -0.3, np.float32), node.version)
    await node.say(Tokens((event,)))


async def take_step(bench: Bench, step: int, groups: tuple[Group, ...]) -> None:
    assert len(groups) == 2
    bench.head.trainer_requests.on_commit(CommitStep(step + 1, f"c{step + 1}"))
    await publish(bench.head, step + 1)
    bench.version = Version(bench.head.epoch, step + 1)


async def logged(bench: Bench, step: int) -> dict[str, object]:
    bench.head.trainer_requests.on_log(Log(step, "{}"))
    return bench.head.trainer_requests.latest


async def test_the_groups_that_end_first_make_the_step_and_the_other_comes_again(tmp_path, autojump_clock) -> None:
    slow: list[GenerateRequest] = []

    async def all_but_one_group(node: Node, request: GenerateRequest) -> None:
        if group_of(request) == 0:
            slow.append(request)
            await say(node, request, 1)
        else:
            await good(node, request)

    async with open_head(tmp_path / "run", staleness=0, max_new_tokens=50, extra_groups=1) as bench:
        node = await bench.join(all_but_one_group, capacity=8)
        groups = await bench.batch(0, 20)
        assert {g.group_id for g in groups} == {1, 2}
        assert bench.head.status()["trajectories"]["aborted"] == {"surplus": 2}
        await bench.until(lambda: aborted(node) == {r.request_id for r in slow})
        metrics = await logged(bench, 0)
        assert metrics["redundancy/surplus_groups"] == 1 and metrics["redundancy/surplus_tokens"] == 2
        assert metrics["redundancy/kept_mean_length"] == 2.0 and metrics["redundancy/cut_mean_length"] == 1.0
        for request in slow:
            await say(node, request, 3)  # it has not heard yet: nobody minds
        await take_step(bench, 0, groups)
        node.version = bench.version
        assert bench.head.journal.tasks_to_retry() == (0,)
        groups = await bench.batch(1, 20)
        assert 0 in {g.task_index for g in groups}  # the prompt comes again, as another group
        assert not bench.head.reports
        # Every step opens three groups and takes two.
        assert (await logged(bench, 1))["redundancy/surplus_groups"] == 1
        assert bench.head.status()["redundancy"]["surplus_groups"] == 2
        assert set(bench.head.journal.tasks_to_retry()) == bench.head.rollouts.buffers.redundancy.spared != {0}
        check_books(bench.head)


async def test_the_members_that_end_first_make_the_group(tmp_path, autojump_clock) -> None:
    late: list[str] = []

    async def all_but_the_second(node: Node, request: GenerateRequest) -> None:
        if member_of(request) == 1:
            late.append(request.request_id)
            await say(node, request, 3)
        else:
            await trio.sleep(0.3)
            await good(node, request)

    async with open_head(tmp_path / "run", staleness=0, max_new_tokens=50, extra_samples=1) as bench:
        node = await bench.join(all_but_the_second, capacity=8)
        groups = await bench.batch(0, 20)
        assert [len(g.trajectories) for g in groups] == [2, 2] and len(late) == 2
        await bench.until(lambda: aborted(node) == set(late))
        assert bench.head.status()["trajectories"]["aborted"] == {} and not bench.head.reports
        metrics = await logged(bench, 0)
        assert metrics["redundancy/surplus_sequences"] == 2 and metrics["redundancy/surplus_tokens"] == 6
        assert metrics["redundancy/surplus_groups"] == 0
        assert metrics["redundancy/kept_mean_length"] == 2.0 and metrics["redundancy/cut_mean_length"] == 3.0
        await take_step(bench, 0, groups)
        check_books(bench.head)
        assert bench.head.journal.counts().trajectories.consumed == 4


async def test_what_alone_keeps_a_step_waiting_is_cut_where_it_is(tmp_path, autojump_clock) -> None:
    begun: dict[str, GenerateRequest] = {}

    async def never_ends(node: Node, request: GenerateRequest) -> None:
        begun[request.request_id] = request
        if request.request_id != "1.1.0":
            await say(node, request, 2 + member_of(request))

    async with open_head(tmp_path / "run", staleness=0, max_new_tokens=50, truncate_stuck_s=5.0) as bench:
        node = await bench.join(never_ends, capacity=8)
        await bench.until(lambda: len(begun) == 4)
        await trio.sleep(15)  # nobody waits
        assert bench.head.status()["redundancy"]["truncated"] == 0
        start, got = trio.current_time(), list[Group]()

        async def train() -> None:
            got.extend(await bench.batch(0, 60))

        bench.nursery.start_soon(train)
        await trio.sleep(4.5)
        assert aborted(node) == set()
        await trio.sleep(2)
        # One group is cut. The other has a member without a token: that goes on until it has one.
        assert aborted(node) == {"0.0.0", "0.1.0"} and not got
        await say(node, begun["1.1.0"], 1)
        await bench.until(lambda: bool(got))
        assert trio.current_time() - start < 8 and aborted(node) == set(begun)
        made = {(g.group_id, m): t for g in got for m, t in enumerate(g.trajectories)}
        assert {k: len(t.completion_ids) for k, t in made.items()} == {(0, 0): 2, (0, 1): 3, (1, 0): 2, (1, 1): 1}
        assert {t.finish for t in made.values()} == {"truncated"}
        metrics = await logged(bench, 0)
        assert metrics["redundancy/truncated"] == 4 and metrics["redundancy/cut_mean_length"] == 2.0
        assert "redundancy/kept_mean_length" not in metrics
        await take_step(bench, 0, tuple(got))
        check_books(bench.head)


async def test_only_as_many_groups_are_cut_as_the_step_lacks(tmp_path, autojump_clock) -> None:
    async def one_ends(node: Node, request: GenerateRequest) -> None:
        if group_of(request) == 2:
            await good(node, request)
        else:
            await say(node, request, 10 * (group_of(request) == 0) + 2)

    async with open_head(tmp_path / "run", staleness=1, max_new_tokens=400, truncate_stuck_s=5.0) as bench:
        node = await bench.join(one_ends, capacity=16)
        groups = await bench.batch(0, 30)
        assert len({g.group_id for g in groups}) == 2 and 2 in {g.group_id for g in groups}
        assert sum(t.finish == "truncated" for g in groups for t in g.trajectories) == 2
        await bench.until(lambda: len(aborted(node)) == 2)  # two groups more are under way, for the step after it
        assert len(bench.head.rollouts.collector.outstanding) == 2
        check_books(bench.head)


async def test_the_last_step_is_not_waited_for_for_ever(tmp_path, autojump_clock) -> None:
    """There the ledger has room for more, and training has no use for it: what is under way is all that can come."""

    async def two_tokens(node: Node, request: GenerateRequest) -> None:
        await say(node, request, 2)

    async with open_head(tmp_path / "run", staleness=3, max_new_tokens=50, truncate_stuck_s=5.0) as bench:
        bench.head.rollouts.buffers.stop_at(1)
        await bench.join(two_tokens, capacity=16)
        groups = await bench.batch(0, 30)
        assert all(t.finish == "truncated" for g in groups for t in g.trajectories)
        assert not bench.head.rollouts.ledger.stuck()


async def test_a_learner_that_died_before_it_aborted_the_surplus_does_so_when_it_comes_back(tmp_path, autojump_clock) -> None:
    async def all_but_one_group(node: Node, request: GenerateRequest) -> None:
        await (say(node, request, 2) if group_of(request) == 0 else good(node, request))

    settings = {"staleness": 0, "max_new_tokens": 50, "extra_groups": 1}
    async with open_head(tmp_path / "run", **settings) as bench:
        rollouts = bench.head.rollouts
        rollouts.buffers.drop_surplus = lambda: None  # type: ignore[method-assign]  # it dies first
        await bench.join(all_but_one_group, capacity=8)
        await bench.until(lambda: rollouts.ledger.ready(0))
        await trio.sleep(2 * JOURNAL_S)
        assert bench.head.status()["trajectories"]["aborted"] == {}
    async with open_head(tmp_path / "run", **settings) as bench:
        assert bench.head.status()["trajectories"]["aborted"] == {"surplus": 2}
        assert bench.head.status()["redundancy"]["surplus_tokens"] == 4
        groups = await bench.batch(0, 5)  # no node is there
        assert {g.group_id for g in groups} == {1, 2} and bench.head.rollouts.buffers.redundancy.spared == {0}
        await take_step(bench, 0, groups)
        await bench.join(good, capacity=8)
        assert 0 in {g.task_index for g in await bench.batch(1, 20)}
        check_books(bench.head)


async def test_finished_groups_move_forward_when_a_learner_comes_back_and_what_that_leaves_over_is_surplus(
    tmp_path, autojump_clock
) -> None:
    """Group 2 may be trained on in the step of which group 0, older and unfinished, has the last place without extra ones."""
    settings: dict[str, Any] = {"staleness": 1, "groups": 1, "extra_groups": 1}
    with Journal.open(tmp_path / "journal.sqlite", RUN) as journal:
        run = Run(journal, **settings)
        run.open(0)
        run.open(0)
        run.finish(1, 0)
        run.rollouts.buffers.commit(1, "c1")
        run.open(1)
        run.open(1)
        run.finish(2, 1)  # and it dies before it looks for surplus
        assert run.rollouts.ledger.surplus() is not None
    with Journal.open(tmp_path / "journal.sqlite", RUN) as journal:
        rollouts = Run(journal, **settings).rollouts
        assert rollouts.ledger.ready(1) and rollouts.ledger.surplus() is None
        assert rollouts.collector.outstanding == (3,) and journal.counts().groups.aborted == {"surplus": 1}
        assert rollouts.buffers.retry == [0] and list(journal.tasks_to_retry()) == [0]


async def test_a_group_that_is_surplus_while_it_waits_for_its_reward_is_forgotten(tmp_path, autojump_clock) -> None:
    """Its last tokens too: the journal takes none of a group that was aborted."""
    async with open_head(tmp_path / "run", staleness=0, max_new_tokens=50, extra_groups=1) as bench:
        rollouts, waiting = bench.head.rollouts, trio.Event()
        score = rollouts.buffers.score

        async def later(group: Group) -> Group:
            await waiting.wait()
            return await score(group)

        rollouts.buffers.score = later
        await bench.join(good, capacity=8)
        await bench.until(lambda: len(rollouts.buffers.scoring) == 3)
        unwritten = rollouts.collector.unwritten
        rollouts.tokens.write = lambda: None  # type: ignore[method-assign]
        for group_id in range(3):
            unwritten.add(group_id, 0, "n", 2, bench.version, bytes(4), bytes(4))
        waiting.set()
        assert len(await bench.batch(0, 20)) == 2
        await bench.until(lambda: bench.head.journal.counts().groups.aborted == {"surplus": 1})
        assert unwritten.tokens == 0
        await trio.sleep(1)
        assert rollouts.buffers.scoring == {} and bench.head.status()["redundancy"]["surplus_tokens"] == 4
        check_books(bench.head)


async def test_a_group_whose_members_had_ended_is_whole_after_a_crash(tmp_path, autojump_clock) -> None:
    async def all_but_the_first(node: Node, request: GenerateRequest) -> None:
        await (say(node, request, 3) if member_of(request) == 0 else good(node, request))

    async def never(*_: object) -> None:
        await trio.sleep_forever()

    settings = {"staleness": 0, "max_new_tokens": 50, "extra_samples": 1}
    async with open_head(tmp_path / "run", **settings) as bench:
        bench.head.rollouts.buffers.score = never
        await bench.join(all_but_the_first, capacity=8)
        await bench.until(lambda: len(bench.head.rollouts.buffers.scoring) == 2)
        await trio.sleep(2 * JOURNAL_S)
    # It may even come back with other settings: a group's own numbers count.
    async with open_head(tmp_path / "run", staleness=0, max_new_tokens=50) as bench:
        groups = await bench.batch(0, 5)  # no node is there
        assert {g.group_id for g in groups} == {0, 1} and [len(g.trajectories) for g in groups] == [2, 2]
        assert bench.head.status()["trajectories"]["aborted"] == {}
        check_books(bench.head)


async def test_a_group_that_was_cut_and_not_rewarded_goes_on_after_a_crash(tmp_path, autojump_clock) -> None:
    async def two_tokens(node: Node, request: GenerateRequest) -> None:
        await say(node, request, 2)

    async def never(*_: object) -> None:
        await trio.sleep_forever()

    settings = {"staleness": 0, "max_new_tokens": 50, "truncate_stuck_s": 2.0}
    async with open_head(tmp_path / "run", **settings) as bench:
        bench.head.rollouts.buffers.score = never
        await bench.join(two_tokens, capacity=8)
        bench.nursery.start_soon(bench.batch, 0, 60.0)
        await bench.until(lambda: len(bench.head.rollouts.buffers.scoring) == 2)
        await trio.sleep(2 * JOURNAL_S)
    async with open_head(tmp_path / "run", **settings) as bench:
        assert bench.head.status()["resumed"] == {"groups": 2, "tokens": 8}
        await bench.join(good, capacity=8)
        groups = await bench.batch(0, 20)
        assert {t.finish for g in groups for t in g.trajectories} == {"stop"}
        assert all(len(t.completion_ids) == 4 for g in groups for t in g.trajectories)
        check_books(bench.head)
