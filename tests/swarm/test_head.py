"""The real head against nodes that break, hoard, decline or lie, on a mock clock: training goes on with the others."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import trio
import trio.testing

from learner.client.messages import Begin, CommitStep, Discard, Log, NextBatch, Resume, SealVersion, SegmentDone
from learner.config import build_config
from learner.environments.port import EpisodeRunner
from learner.evaluation.problems import Evaluation
from learner.head.head import Head
from learner.head.node_state import MAX_CAPACITY
from learner.journal.journal import Journal
from learner.rewards.port import GroupScorer
from learner.rollouts.controller import Rollouts
from learner.rollouts.group_spec import RolloutSettings
from learner.rollouts.outcomes import GroupAborted, Sampling
from learner.status.run_state import RunState
from learner.tasks.registry import make_task
from learner.trajectory import Group, Trajectory, unpack_groups
from p2p.errors import ChannelClosed, Refusal, ShoalError
from p2p.identity import Identity
from p2p.membership.admission import Membership, sign_membership
from p2p.protocol.generation import Abort, Assign, GenerateRequest, NodeStatus, Rejected, Tokens
from p2p.protocol.rollout import Span, TokenEvent, unpack_ids
from p2p.protocol.versions import Installed
from p2p.version import Version
from p2p.weights.encode import encode_version
from tests.support.harness import LAYOUT, RUN, WALL, identity, inline, make_state
from tests.support.memory_network import MemoryNetwork, MemorySwitch
from tests.support.rogue import Rogue

STOP, STALL_S = 0, 30.0
DIGEST = make_state(1).digest()
"""of every version that `publish` makes"""
HEAD = identity(200)


class Tokenizer:
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1, 2, 3]

    def decode(self, ids: Any, **_: Any) -> str:
        return "x"


class Node(Rogue):
    """A node by hand: `on_request(node, request)` answers every request it is given."""

    def __init__(self, network, version: Version, capacity: int, on_request: Callable[..., Awaitable[None]]) -> None:
        super().__init__(network, HEAD.peer_id)
        self.nursery: trio.Nursery
        self.version, self.capacity, self.behaviour = version, capacity, on_request
        self.requests: list[GenerateRequest] = []
        self.kv_tokens = 0
        self.digest = DIGEST

    async def work(self) -> None:
        try:
            await self._work()
        except ChannelClosed:
            pass

    async def _work(self) -> None:
        done, proved = 0, None
        while not self.closed:
            if proved != self.version:
                await self.say(installed(self.version, self.digest))
                proved = self.version
            status = NodeStatus(True, self.version, 0, 0, self.capacity, 0, 0.0, 1, 1, kv_tokens=self.kv_tokens)
            await self.say(status)
            for _ in range(10):
                await trio.sleep(0.1)
                while done < len(self.heard):  # more may come while one is answered
                    message, done = self.heard[done], done + 1
                    if isinstance(message, Assign):
                        for request in message.requests:
                            self.requests.append(request)
                            await self.behaviour(self, request)

    async def finish(self, request: GenerateRequest) -> None:
        start = len(unpack_ids(request.prefix_ids))
        event = TokenEvent.of(request.request_id, start, (1, STOP), np.array([-1.0, -1.0], np.float32), self.version, "stop")
        await self.say(Tokens((event,)))


def installed(version: Version, digest: bytes = DIGEST) -> Installed:
    """What a node says that has a version in place."""
    return Installed(version, digest, pause_s=0.0, apply_s=0.0, transfer_s=0.0, bytes_from_head=0, bytes_from_peers=0)


async def good(node: Node, request: GenerateRequest) -> None:
    await trio.sleep(0.05)
    await node.finish(request)


async def silent(node: Node, request: GenerateRequest) -> None:
    pass


async def decline(node: Node, request: GenerateRequest) -> None:
    await node.say(Rejected(request.request_id, node.version, "no engine serves yet", True))


class Bench:
    """A head with one published version; `join` brings nodes."""

    def __init__(self, head: Head, switch: MemorySwitch, nursery: trio.Nursery) -> None:
        self.head, self.switch, self.nursery = head, switch, nursery
        last = head.journal.last_commit()
        self.version = Version(head.epoch, last.step if last else 0)
        self._count = 0

    async def join(self, behave=good, *, capacity: int = 4, who: Identity | None = None) -> Node:
        self._count += 1
        who = who or identity(self._count)
        network = await self.nursery.start(self._host, who.peer_id)
        return await self._connect(network, behave, capacity)

    async def again(self, node: Node, behave=good) -> Node:
        """A node whose link ended comes over the same network. AssertionError when it is turned away."""
        return await self._connect(node.network, behave, node.capacity)

    async def _connect(self, network: MemoryNetwork, behave: Callable[..., Awaitable[None]], capacity: int) -> Node:
        proof = sign_membership(HEAD, Membership(RUN, self.head.epoch, network.peer_id, int(WALL + 1e6)))
        node = Node(network, self.version, capacity, behave)
        node.nursery = self.nursery
        await node.connect(self.nursery, proof)
        self.nursery.start_soon(node.work)
        return node

    async def _host(self, peer: str, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        async with self.switch.network(peer) as network:
            task_status.started(network)
            await trio.sleep_forever()

    async def batch(self, step: int, seconds: float) -> tuple[Group, ...]:
        """All groups of one step, as the trainer gets them."""
        groups: list[Group] = []
        with trio.fail_after(seconds):
            while True:
                answer = await self.head.trainer_requests.on_next(NextBatch(step, len(groups)))
                groups += unpack_groups((self.head.run_dir / answer.file).read_bytes())
                if answer.last:
                    return tuple(groups)

    async def until(self, what: Callable[[], bool], seconds: float = 60.0) -> None:
        with trio.fail_after(seconds):
            while not what():
                await trio.sleep(0.05)


async def publish(head: Head, step: int) -> None:
    state = make_state(1)
    (head.run_dir / "layout").write_bytes(msgpack.packb(LAYOUT.to_wire()))
    begun = head.trainer_requests.on_begin(Begin(step, "anchor", None, "layout"))
    mid, segment_bytes = begun.mid, head.config.swarm.segment_bytes
    for s in encode_version(state, None, head.store, segment_bytes=segment_bytes, chunk_bytes=begun.chunk_bytes):
        head.publisher.segment(SegmentDone(mid, s.index, s.size, b"".join(s.digests), s.changed, s.words))
    await head.trainer_requests.on_seal(SealVersion(mid, b"".join(state.tensor_digests()), state.digest(), 0.0))


@asynccontextmanager
async def open_head(
    run_dir: Path, *, staleness: int = 1, finish_s: float = 0.0, max_new_tokens: int = 4,
    wall: Callable[[], float] = lambda: WALL, scorer: GroupScorer | None = None, activation: dict[str, Any] | None = None,
    publish_every: int = 0, own: str = "", local_engine: dict[str, Any] | None = None, samples_per_step: int = 4,
    tokenizer: object = None, runner: EpisodeRunner | None = None, evaluations: Sequence[Evaluation] = (), steps: int = 200,
    standing: dict[str, Any] | None = None, **more: Any,
) -> AsyncIterator[Bench]:
    """Every node is trusted unless `standing` says otherwise. `more` are further rollout settings."""
    await trio.Path(run_dir).mkdir(exist_ok=True)
    rollout = {"max_staleness": staleness, "publish_every": publish_every}
    values = {"run_dir": str(run_dir), "model": "unused", "rollout": rollout, "activation": activation or {}}
    values["local_engine"], values["status"] = local_engine or {}, {"samples_per_step": samples_per_step}
    values["standing"] = {"trusted": ["*"]} if standing is None else standing
    config = build_config(values | {"trainer": {"steps": steps}}, "test")
    switch = MemorySwitch(latency=0.001, rate=1e8)
    with Journal.open(run_dir / "journal.sqlite", RUN) as journal:
        async with switch.network(HEAD.peer_id) as network, trio.open_nursery() as nursery:
            settings = RolloutSettings(
                max_staleness=staleness, groups_per_step=2, samples=2, seed=0, sampling=Sampling(max_new_tokens, (STOP,)),
                micro_batch_groups=99, stall_s=STALL_S, finish_s=finish_s,
            )  # fmt: skip
            settings = replace(settings, **more)
            head = Head(
                config=config, run=RUN, run_dir=run_dir, identity=HEAD, network=network, journal=journal, wall=wall,
                open_rollouts=lambda head: Rollouts(
                    settings, journal, make_task("reverse"), tokenizer or Tokenizer(), 10, epoch=head.epoch, send=head.send,
                    nodes=head.node_views, report=head.report, conduct=head.trust, in_thread=inline, scorer=scorer, runner=runner,
                ),
            )  # fmt: skip
            if own:
                head.expect_local_engine(own)
            head.evaluate(evaluations)
            await nursery.start(head.run)
            await trio.sleep(1)  # a mock clock starts at 0, which the publisher takes for "not yet"
            bench = Bench(head, switch, nursery)
            await publish(head, bench.version.step)
            yield bench
            nursery.cancel_scope.cancel()


def check_books(head: Head) -> None:
    status = head.status()["trajectories"]
    assert status["lost"] == 0
    assert status["reserved"] == status["consumed"] + sum(status["aborted"].values()) + status["outstanding"]


async def test_a_node_that_sits_on_its_work_loses_it(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        bad = await bench.join(silent)
        await bench.until(lambda: bool(bad.requests))
        ok = await bench.join(good)
        groups = await bench.batch(0, 3 * STALL_S)
        assert len(groups) == 2 and {t.node for g in groups for t in g.trajectories} == {ok.peer}
        assert any(isinstance(m, Abort) for m in bad.heard)
        assert any("sequences go elsewhere" in text and bad.peer in text for text in bench.head.reports)
        assert not bad.closed  # it may recover: its link, and its part in the broadcast, stay
        check_books(bench.head)


async def test_one_withheld_sequence_does_not_hold_up_training(tmp_path, autojump_clock) -> None:
    withheld: list[str] = []

    async def withhold_one(node: Node, request: GenerateRequest) -> None:
        if not withheld:
            withheld.append(request.request_id)
        else:
            await good(node, request)

    async def one_step_after_another(bench: Bench) -> None:
        for step in range(400):
            await bench.batch(step, 12 * STALL_S)
            await trio.sleep(1)  # the trainer trains
            bench.head.trainer_requests.on_commit(CommitStep(step + 1, ""))
            await publish(bench.head, step + 1)
            for node in nodes:
                node.version = Version(1, step + 1)

    async with open_head(tmp_path / "run") as bench:
        nodes = [await bench.join(withhold_one), await bench.join(good)]
        await bench.until(lambda: bool(withheld))
        start = trio.current_time()
        await one_step_after_another(bench)
        assert trio.current_time() - start < 400 * 2 + 12 * STALL_S
        again = withheld[0].rpartition(".")[0] + ".1"
        assert [r.request_id for n in nodes for r in n.requests if r.request_id == again] == [again]
        check_books(bench.head)


async def test_a_node_that_declines_everything_does_not_draw_everything(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        bad = await bench.join(decline, capacity=10**6)
        await bench.join(good)
        groups = await bench.batch(0, 20)
        assert len(groups) == 2
        assert bench.head.nodes[bad.peer].capacity == MAX_CAPACITY
        before = len(bad.requests)
        await trio.sleep(120)
        assert len(bad.requests) - before <= 8 * 5  # tried again, ever more rarely
        check_books(bench.head)


async def test_a_node_that_could_not_take_work_once_gets_it_later(tmp_path, autojump_clock) -> None:
    refused: list[str] = []

    async def busy_at_first(node: Node, request: GenerateRequest) -> None:
        if len(refused) < 3:
            refused.append(request.request_id)
            await decline(node, request)
        else:
            await good(node, request)

    async with open_head(tmp_path / "run") as bench:
        await bench.join(busy_at_first)
        assert len(await bench.batch(0, 30)) == 2
        assert bench.head.status()["trajectories"]["aborted"] == {}


async def test_what_a_node_says_of_its_bytes_cannot_end_the_head(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        for _ in range(2):
            liar = await bench.join(silent)
            for _ in range(3):
                await liar.say(Installed(bench.version, b"x" * 32, 0.0, 0.0, 0.0, (1 << 64) - 1, (1 << 64) - 1))
            await trio.sleep(1)
            await liar.control.aclose("bye")
            await bench.until(lambda liar=liar: liar.peer not in bench.head.nodes)
        await bench.join(good)
        assert len(await bench.batch(0, 60)) == 2
        assert bench.head.status()["nodes"]


class Run:
    """Rollouts without nodes: groups are opened, finished and aborted by hand."""

    def __init__(self, journal: Journal, staleness: int = 2, groups: int = 2, **more: Any) -> None:
        settings = RolloutSettings(
            max_staleness=staleness, groups_per_step=groups, samples=1, seed=0, sampling=Sampling(4, (STOP,)),
            micro_batch_groups=99,
        )  # fmt: skip
        settings = replace(settings, **more)
        self.rollouts = Rollouts(
            settings, journal, make_task("reverse"), Tokenizer(), 10, epoch=journal.new_epoch(),
            send=lambda *_: None, nodes=lambda: [], report=lambda *_: None, in_thread=inline,
        )  # fmt: skip
        self.opened: dict[int, int] = {}

    def open(self, step: int) -> None:
        self.rollouts.published(Version(1, step))
        self.rollouts._open_group(Version(1, step))  # without waiting for a node that has room
        for group_id in self.rollouts.collector.outstanding:
            self.opened.setdefault(group_id, step)

    def finish(self, group_id: int, step: int) -> None:
        rollouts = self.rollouts
        rollouts.collector.abort_group(group_id)
        span = Span(Version(1, step), 0, 1)
        only = Trajectory(
            prompt_ids=(1,), completion_ids=(2,), logprobs=(-1.0,), spans=(span,), reward=1.0, finish="stop", node="n", seed=0
        )
        group = Group(group_id, group_id, (only,))
        rollouts.journal.record_finished(group)
        rollouts.ledger.occupy(group_id, step)
        rollouts.buffers.finished[group_id] = group
        rollouts.buffers.wake()


async def test_an_abort_that_completes_a_buffer_wakes_the_trainer(tmp_path, autojump_clock) -> None:
    """Finished groups of later buffers move up into the place of the aborted one. Random lives; some show it."""
    completed = 0
    for seed in range(120):
        rng = random.Random(seed)
        with Journal.open(tmp_path / f"{seed}.sqlite", RUN) as journal:
            run = Run(journal)
            rollouts, ledger = run.rollouts, run.rollouts.ledger
            for _ in range(60):
                alive, dice = list(rollouts.collector.outstanding), rng.random()
                if dice < 0.5:
                    run.open(rng.randint(max(0, ledger.step - 2), ledger.step))
                elif dice < 0.85 and alive:
                    group_id = rng.choice(alive)
                    run.finish(group_id, rng.randint(run.opened[group_id], ledger.step))
                elif alive and not ledger.ready(ledger.step):
                    got: list[object] = []

                    async def trainer(rollouts=rollouts, step=ledger.step, got=got) -> None:
                        got.append(await rollouts.buffers.next_groups(step, 0))

                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(trainer)
                        await trio.testing.wait_all_tasks_blocked()
                        group_id = rng.choice(alive)
                        cancel = rollouts.collector.abort_group(group_id)
                        # What the eighth failure of a sequence brings about.
                        rollouts._aborted(GroupAborted(group_id, "it broke", cancel, Refusal("broke", peer="n")))
                        await trio.testing.wait_all_tasks_blocked()
                        assert bool(got) == ledger.ready(ledger.step)
                        completed += bool(got)
                        nursery.cancel_scope.cancel()
                elif ledger.ready(ledger.step):
                    rollouts.buffers.advance(ledger.step + 1)
    assert completed > 3


async def test_groups_that_the_trainer_failed_on_are_not_given_out_again(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        await bench.join(good)
        groups = await bench.batch(0, 30)
        ids = tuple(g.group_id for g in groups)
        bench.head.trainer_requests.on_discard(Discard(0, ids, "gradient norm is nan"))
        assert any("gradient norm is nan" in text for text in bench.head.reports)
        assert bench.head.status()["trajectories"]["aborted"] == {"diverged": 4}
        check_books(bench.head)
    async with open_head(tmp_path / "run") as bench:
        await bench.join(good)
        again = await bench.batch(0, 30)
        assert not {g.group_id for g in again} & set(ids)
        assert not {g.task_index for g in again} & {g.task_index for g in groups}


async def test_a_trainer_out_of_step_is_refused_and_changes_nothing(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run") as bench:
        head = bench.head
        for request in (NextBatch(1, 0), CommitStep(1, ""), Begin(2, "anchor", None, "layout")):
            with pytest.raises(ShoalError, match="out of order: the run stands at step 0, whose groups are not all"):
                await head.trainer_requests.answer(request)
        await bench.join(good)
        assert len(await bench.batch(0, 30)) == 2
        with pytest.raises(ShoalError, match="step 2 is out of order: the run stands at step 0, whose groups are all"):
            await head.trainer_requests.on_next(NextBatch(2, 0))
        head.trainer_requests.on_commit(CommitStep(1, ""))
        with pytest.raises(ShoalError, match="commit of step 1 comes after that of step 1"):
            head.trainer_requests.on_commit(CommitStep(1, ""))
        with pytest.raises(ShoalError, match="step 0 is out of order: the run stands at step 1"):
            await head.trainer_requests.on_next(NextBatch(0, 0))
        assert len(await bench.batch(1, 3 * STALL_S)) == 2
        check_books(head)


async def test_a_new_epoch_leaves_no_chunk_of_the_old_one(tmp_path, autojump_clock) -> None:
    sizes = []
    for _ in range(3):
        async with open_head(tmp_path / "run") as bench:
            sizes.append(bench.head.store.total)
            on_disk = sum(p.stat().st_size for p in (tmp_path / "run" / "versions" / "chunks").rglob("*") if p.is_file())
            assert on_disk == bench.head.store.total
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_status_counts_the_journal_only_now_and_then(tmp_path) -> None:
    async def main() -> None:
        async with open_head(tmp_path / "run") as bench:
            head, calls = bench.head, []
            count = head.journal.counts

            def slow():
                calls.append(1)
                return count()

            head.journal.counts = slow  # type: ignore[method-assign]
            tally = head.tally
            tally.made, tally.cost, tally.tally = head.now(), 1.0, count().trajectories  # as after a count that took a second
            for _ in range(50):
                head.status()
            assert not calls
            tally.made = head.now() - 21  # as 21 seconds later
            head.status()
            assert calls == [1]

    trio.run(main)


async def test_the_status_has_the_runs_steps_those_of_earlier_lives_too(tmp_path) -> None:
    said = lambda reward: json.dumps({"reward/mean": reward, "time/step": 2.0, "time/wait_for_batch": 1.0})
    async with open_head(tmp_path / "run") as bench:
        for step in (1, 2, 3):
            bench.head.trainer_requests.on_log(Log(step, said(step / 10)))
        state = RunState.of(bench.head.status())
        assert [row.step for row in state.recent] == [1, 2, 3] and state.last == state.recent[-1] and state.busy == 0.5
    async with open_head(tmp_path / "run") as bench:
        assert [row.reward for row in RunState.of(bench.head.status()).curve] == [0.1, 0.2, 0.3]
        bench.head.trainer_requests.on_resume(Resume(1))  # nothing was committed: they are taken again
        assert RunState.of(bench.head.status()).curve == ()
