"""A learner that dies while nodes generate: the next one goes on from the last journaled token, on a mock clock.

Nodes answer by hand, so that each test says which tokens there were when the learner died.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import trio

from learner.client.messages import CommitStep
from learner.journal.journal import Journal
from learner.journal.token_writer import JOURNAL_S, JOURNAL_SEQUENCE
from learner.rollouts.group import ATTEMPTS
from learner.trajectory import Group
from p2p.errors import first_of
from p2p.protocol.generation import GenerateRequest, Rejected, Tokens
from p2p.protocol.rollout import TokenEvent
from p2p.version import Version
from tests.support.database import read_rows
from tests.support.harness import WALL
from tests.swarm.test_head import STOP, Bench, Node, check_books, good, open_head, publish, silent

EPOCH_1, EPOCH_2 = Version(1, 0), Version(2, 0)


def token_of(request: GenerateRequest, position: int) -> int:
    """As an engine draws it: by seed and position alone."""
    return 1 + (request.seed + position) % 9


async def say(node: Node, request: GenerateRequest, count: int, *, start: int | None = None, name: str = "") -> None:
    """`count` tokens of a request, from where its prefix ends."""
    start = len(request.prefix_ids) // 4 if start is None else start
    ids = tuple(token_of(request, start + i) for i in range(count))
    event = TokenEvent.of(name or request.request_id, start, ids, np.full(count, -0.3, np.float32), node.version)
    await node.say(Tokens((event,)))


async def two_tokens(node: Node, request: GenerateRequest) -> None:
    await say(node, request, 2)


async def to_the_end(node: Node, request: GenerateRequest) -> None:
    await say(node, request, request.max_new_tokens - len(request.prefix_ids) // 4)


def kill(bench: Bench) -> None:
    """What follows is as after SIGKILL: the journal gets nothing more."""
    bench.head.rollouts.tokens.write = lambda: None  # type: ignore[method-assign]


def prefix(request: GenerateRequest) -> list[int]:
    return np.frombuffer(request.prefix_ids, "<u4").tolist()


async def test_a_killed_learner_goes_on_from_the_last_journaled_token(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        node = await bench.join(two_tokens)
        await bench.until(lambda: len(node.requests) == 5)
        await trio.sleep(2 * JOURNAL_S)
        for request in node.requests:
            await say(node, request, 1, start=2)  # accepted, and not journaled
        rollouts = bench.head.rollouts
        await bench.until(lambda: rollouts.collector.unwritten.tokens == 5)
        before = {r.request_id: r for r in node.requests}
        kill(bench)
    async with open_head(tmp_path / "run") as bench:
        assert bench.head.status()["resumed"] == {"groups": 3, "tokens": 10}
        node = await bench.join(silent)
        await bench.until(lambda: len(node.requests) == 5)
        for request in node.requests:
            group, member, attempt = request.request_id.split(".")
            old = before.get(f"{group}.{member}.0")
            assert int(attempt) == ATTEMPTS + 1
            if old is None:  # the sixth had no node yet
                continue
            assert request.seed == old.seed and request.prompt_ids == old.prompt_ids and request.min_version == EPOCH_1
            assert prefix(request) == [token_of(old, 0), token_of(old, 1)]
            # This node still has the old request at work, and sends its next token as if nothing had happened.
            await say(node, old, 1, start=2, name=old.request_id)
            await node.say(Rejected(old.request_id, EPOCH_2, "the engine died", False))
        await trio.sleep(1)
        assert bench.head.rollouts.collector.unwritten.tokens == 0 and not bench.head.reports and not node.closed
        node._on_request = to_the_end  # the node answers otherwise from here on
        for request in list(node.requests):
            await to_the_end(node, request)
        groups = await bench.batch(0, 30)
        for group in groups:
            for member, t in enumerate(group.trajectories):
                old = before.get(f"{group.group_id}.{member}.0")
                if old is not None:
                    assert t.completion_ids == tuple(token_of(old, i) for i in range(4))
                    assert [(s.version, s.start, s.stop) for s in t.spans] == [(EPOCH_1, 0, 2), (EPOCH_2, 2, 4)]
        assert {g.group_id for g in groups} <= {0, 1, 2}
        assert bench.head.status()["trajectories"]["aborted"] == {}
        check_books(bench.head)


async def test_an_orderly_end_journals_the_last_tokens(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        node = await bench.join(two_tokens)
        await bench.until(lambda: len(node.requests) == 5)
        await trio.sleep(2 * JOURNAL_S)
        for request in node.requests:
            await say(node, request, 1, start=2)
        await bench.until(lambda: bench.head.rollouts.collector.unwritten.tokens == 5)
    async with open_head(tmp_path / "run") as bench:
        assert bench.head.status()["resumed"]["tokens"] == 15


async def test_no_trajectory_has_more_than_a_few_tokens_at_risk(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", max_new_tokens=1000) as bench:
        node = await bench.join(silent)
        await bench.until(lambda: len(node.requests) == 5)
        waiting = bench.head.rollouts.collector.unwritten
        for position in range(100):
            for request in node.requests:
                await say(node, request, 1, start=position)
            assert waiting.longest <= JOURNAL_SEQUENCE
            await trio.sleep(0.002)
        await trio.sleep(2 * JOURNAL_S)
        assert waiting.tokens == 0
        assert sum(g.tokens for g in bench.head.journal.unfinished()) == 500


async def test_what_had_its_last_token_and_no_reward_yet_gets_it(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        gone: list[object] = []

        async def never(group):
            gone.append(group)
            await trio.sleep_forever()

        bench.head.rollouts.buffers.score = never
        await bench.join(to_the_end, capacity=8)
        await bench.until(lambda: bool(gone))
        await trio.sleep(2 * JOURNAL_S)
        kill(bench)
    async with open_head(tmp_path / "run") as bench:
        groups = await bench.batch(0, 5)  # no node is there
        assert len(groups) == 2 and {g.group_id for g in groups} <= {0, 1, 2, 3}
        assert bench.head.status()["trajectories"]["aborted"] == {}
        check_books(bench.head)


async def test_tokens_are_not_mixed_with_those_of_other_settings(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        node = await bench.join(two_tokens)
        await bench.until(lambda: len(node.requests) == 5)
        await trio.sleep(2 * JOURNAL_S)
    async with open_head(tmp_path / "run", max_new_tokens=5) as bench:
        assert bench.head.status()["resumed"] == {"groups": 0, "tokens": 0}
        assert bench.head.status()["trajectories"]["aborted"] == {"restart": 6}
        await bench.join(to_the_end)
        groups = await bench.batch(0, 30)
        assert {g.task_index for g in groups} <= {0, 1, 2} and not {g.group_id for g in groups} & {0, 1, 2}
        assert all(len(t.completion_ids) == 5 for g in groups for t in g.trajectories)
        check_books(bench.head)


async def train(bench: Bench, steps: int, seen: dict[int, tuple[Group, ...]]) -> None:
    """The trainer's part up to `steps`; `seen` gets the groups of each committed step."""
    for step in range(bench.version.step, steps):
        groups = await bench.batch(step, 60)
        bench.head.trainer_requests.on_commit(CommitStep(step + 1, f"c{step + 1}"))
        seen[step] = groups
        await publish(bench.head, step + 1)
        bench.version = Version(bench.head.epoch, step + 1)
        for node in bench.nodes:
            node.version = bench.version


STEPS = 12


def fill_disk(journal: Journal, writes: int) -> None:
    """The transaction after so many finds no room when it commits, as do all that follow."""
    transaction = journal._transaction  # the disk is full at the commit of this very transaction
    left = iter(range(writes))

    @contextmanager
    def scarce(*, durable: bool = False) -> Iterator[None]:
        with transaction(durable=durable):
            yield
            if next(left, None) is None:
                error = sqlite3.OperationalError("database or disk is full")
                error.add_note(str(journal._path))  # as the journal itself adds it
                raise error

    journal._transaction = scarce  # type: ignore[method-assign]


@pytest.mark.parametrize("writes", [*range(12), 20, 31, 42, 53, 64])
async def test_a_full_disk_ends_the_run_and_costs_nothing(writes: int, tmp_path, autojump_clock) -> None:
    """Whichever write is the first to find no room: a reservation, tokens, a reward, a commit, a node's name."""
    seen: dict[int, tuple[Group, ...]] = {}
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_head(tmp_path / "run", max_new_tokens=400) as bench:
            fill_disk(bench.head.journal, writes)
            bench.nodes = [await bench.join(slowly) for _ in range(2)]
            await train(bench, STEPS, seen)
    error = first_of(caught.value)
    assert isinstance(error, sqlite3.OperationalError) and "full" in str(error)
    assert str(tmp_path / "run" / "journal.sqlite") in error.__notes__
    assert len(seen) < STEPS
    async with open_head(tmp_path / "run", max_new_tokens=400) as bench:
        assert bench.version.step == len(seen)
        check_books(bench.head)
        bench.nodes = [await bench.join(slowly) for _ in range(2)]
        await train(bench, STEPS, seen)
        check_books(bench.head)
        assert bench.head.status()["trajectories"]["aborted"] == {}
    rows = read_rows(tmp_path / "run" / "journal.sqlite", "SELECT group_id, step FROM consumed ORDER BY step, group_id")
    groups = [(g.group_id, step + 1) for step in range(STEPS) for g in sorted(seen[step], key=lambda g: g.group_id)]
    assert rows == groups and len({g for g, _ in groups}) == 2 * STEPS


async def slowly(node: Node, request: GenerateRequest) -> None:
    """A few tokens at a time, and then the end."""
    start = len(request.prefix_ids) // 4
    for position in range(start, 60, 20):
        await say(node, request, 20, start=position)
        await trio.sleep(0.02)
    event = TokenEvent.of(request.request_id, max(start, 60), (STOP,), np.array([-1.0], np.float32), node.version, "stop")
    await node.say(Tokens((event,)))


async def test_a_wall_clock_that_jumps_by_an_hour_costs_nothing(tmp_path, autojump_clock) -> None:
    """Back and forth at every step, with nodes that come, go and are killed, and a learner that is."""
    seen: dict[int, tuple[Group, ...]] = {}
    jumps = itertools.cycle([-3600.0, 7200.0, 0.0, -7200.0, 3600.0])
    moving = {"at": WALL}

    async def jump() -> None:
        while True:
            await trio.sleep(0.07)
            moving["at"] = WALL + next(jumps)

    for steps in (STEPS // 2, STEPS):
        async with open_head(tmp_path / "run", max_new_tokens=400, wall=lambda: moving["at"]) as bench:
            bench.nursery.start_soon(jump)
            bench.nodes = [await bench.join(slowly) for _ in range(2)]
            await train(bench, steps - 2, seen)
            await bench.nodes[0].control.aclose("gone")
            bench.nodes.append(await bench.join(slowly))
            await train(bench, steps, seen)
            assert not bench.head.reports and bench.head.status()["trajectories"]["aborted"] == {}
            check_books(bench.head)
            kill(bench)
    assert len(seen) == STEPS and len({g.group_id for groups in seen.values() for g in groups}) == 2 * STEPS


async def test_a_full_disk_is_nobodys_fault(tmp_path, autojump_clock) -> None:
    """It shows in a node's own task first, where any other failure would cost that node its link and the run nothing."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with open_head(tmp_path / "run") as bench:
            node = await bench.join(good)
            bench.head.rollouts.tokens.write = fail  # type: ignore[method-assign]
            bench.head.rollouts.dispatch = fail  # type: ignore[method-assign]
            await trio.sleep(60)
    assert isinstance(first_of(caught.value), sqlite3.OperationalError)
    assert not bench.head.reports and not node.closed


def fail() -> None:
    raise sqlite3.OperationalError("database or disk is full")
