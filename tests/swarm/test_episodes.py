"""Episodes through head, nodes and journal, on a mock clock: slow environments hold no engine, and no life loses a turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import trio

from learner.environments.port import Episode, EpisodeKey, Turn, TurnAnswer
from learner.journal.token_writer import JOURNAL_S
from learner.rollouts.outcomes import Sampling, TurnLimits
from learner.tasks.port import Score
from learner.trajectory import Gap
from p2p.errors import ShoalError
from p2p.protocol.generation import Abort, GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent, unpack_ids
from tests.swarm.test_head import STALL_S, STOP, Node, check_books, open_head, silent

TOOL_S = 20 * STALL_S
"""Seconds that the environment takes for an answer: longer than any node may be silent."""

EPISODES = Sampling(40, (STOP,), turns=TurnLimits(4, 4))
TOLD = (6, STOP, 7)


class Runner:
    """Answers a first turn with TOLD, `after` seconds later, and scores a second one."""

    def __init__(self, after: float) -> None:
        self._after = after
        self._send, self.answers = trio.open_memory_channel[TurnAnswer](1000)
        self.asked: list[Episode] = []
        self.due: list[tuple[float, Episode]] = []
        self.forgotten: list[EpisodeKey] = []

    def respond(self, episode: Episode) -> None:
        self.asked.append(episode)
        self.due.append((trio.current_time() + self._after, episode))

    def forget(self, keys: Sequence[EpisodeKey]) -> None:
        self.forgotten += keys

    async def run(self) -> None:
        while True:
            await trio.sleep(0.1)
            ready = [e for at, e in self.due if at <= trio.current_time()]
            self.due = [(at, e) for at, e in self.due if at > trio.current_time()]
            for e in ready:
                n = len(e.turns)
                score = Score(float(e.key.member), True) if n == 2 else None
                self._send.send_nowait(TurnAnswer(e.key, n, TOLD if score is None else (), score))


async def turn(node: Node, request: GenerateRequest) -> None:
    """The end of a turn: one token and the stop token."""
    await trio.sleep(0.05)
    start = len(unpack_ids(request.prefix_ids))
    event = TokenEvent.of(request.request_id, start, (1, STOP), np.array([-1.0, -1.0], np.float32), node.version, "stop")
    await node.say(Tokens((event,)))


async def test_a_slow_environment_holds_no_engine_and_is_no_stall(tmp_path, autojump_clock) -> None:
    runner = Runner(TOOL_S)
    async with open_head(tmp_path / "run", sampling=EPISODES, runner=runner) as bench:
        bench.nursery.start_soon(runner.run)
        nodes = [await bench.join(turn, capacity=1), await bench.join(turn, capacity=1)]
        await bench.until(lambda: len(runner.asked) == 8)  # two steps' groups: far more than the nodes have places
        collector = bench.head.rollouts.collector
        assert all(collector.load(node.peer) == 0 for node in nodes) and collector.pending() == []
        assert {e.turns for e in runner.asked} == {(Turn((1, STOP)),)}
        assert len({e.key for e in runner.asked}) == 8
        groups = await bench.batch(0, 4 * TOOL_S)
        assert len(groups) == 2
        for group in groups:
            assert group.rewards == [0.0, 1.0]  # the environment's: the task's own scorer was not asked
            for t in group.trajectories:
                assert t.completion_ids == (1, STOP, *TOLD, 1, STOP) and t.given == (Gap(2, 5),)
                assert t.makers == (), "its second turn went to the node that holds its prefix"
        assert not any("no token" in text for text in bench.head.reports)
        assert not any(isinstance(m, Abort) for node in nodes for m in node.heard)
        check_books(bench.head)


async def test_a_learner_that_dies_asks_again_with_every_turn(tmp_path, autojump_clock) -> None:
    runner, again = Runner(TOOL_S), Runner(1.0)
    async with open_head(tmp_path / "run", sampling=EPISODES, runner=runner) as bench:
        await bench.join(turn)
        await bench.until(lambda: len(runner.asked) == 8)
        bench.head.rollouts.on_answer(TurnAnswer(runner.asked[0].key, 1, TOLD))
        await bench.until(lambda: len(runner.asked) == 9)
        await trio.sleep(2 * JOURNAL_S)
        bench.head.rollouts.tokens.write = lambda: None  # type: ignore[method-assign]  # killed: the journal gets nothing more
    async with open_head(tmp_path / "run", sampling=EPISODES, runner=again) as bench:
        assert sorted(again.asked, key=lambda e: e.key) == sorted(
            (e for e in runner.asked[1:]), key=lambda e: e.key
        )  # the very turns, the second of the first episode included
        bench.nursery.start_soon(again.run)
        node = await bench.join(turn)
        groups = await bench.batch(0, 600.0)
        assert all(t.completion_ids == (1, STOP, *TOLD, 1, STOP) for g in groups for t in g.trajectories)
        assert all(unpack_ids(r.prefix_ids) == (1, STOP, *TOLD) for r in node.requests if r.request_id.startswith("0."))
        check_books(bench.head)


async def test_a_node_that_dies_in_a_second_turn_costs_no_turn(tmp_path, autojump_clock) -> None:
    runner = Runner(1.0)

    async def first_only(node: Node, request: GenerateRequest) -> None:
        await (silent if request.prefix_ids else turn)(node, request)

    async with open_head(tmp_path / "run", sampling=EPISODES, runner=runner) as bench:
        bench.nursery.start_soon(runner.run)
        node = await bench.join(first_only)
        await bench.until(lambda: sum(bool(r.prefix_ids) for r in node.requests) >= 4)
        other = await bench.join(turn)
        bench.switch.kill(node.peer)
        groups = await bench.batch(0, 600.0)
        trajectories = [t for g in groups for t in g.trajectories]
        assert all(t.completion_ids == (1, STOP, *TOLD, 1, STOP) for t in trajectories)
        assert {[m.node for m in t.makers][-1] for t in trajectories if t.makers} == {other.peer}
        assert all([m.start for m in t.makers] == [0, 5] for t in trajectories if t.makers)
        check_books(bench.head)


async def test_an_environment_that_always_fails_stops_the_run(tmp_path, autojump_clock) -> None:
    class Failing(Runner):
        def respond(self, episode: Episode) -> None:
            self._send.send_nowait(TurnAnswer(episode.key, len(episode.turns), failed="problem 3: KeyError: 'wanted'"))

    stopped = pytest.RaisesExc(ShoalError, match="groups in a row failed in their environment; .*problem 3")
    with pytest.RaisesGroup(stopped, flatten_subgroups=True):
        async with open_head(tmp_path / "run", sampling=EPISODES, runner=Failing(0.0)) as bench:
            await bench.join(turn, capacity=4)
            await trio.sleep_forever()
