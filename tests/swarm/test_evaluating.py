"""A head whose nodes evaluate its versions beside training, on a mock clock: lines of metrics, a resumed run, the run's end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trio

from learner.client.messages import CommitStep, Log
from learner.evaluation.plan import EvalPlan
from learner.evaluation.problems import Evaluation, make_evaluation
from learner.evaluation.runner import NOBODY_S
from learner.head.evaluating import ARRIVE_S
from learner.head.farewell import FAREWELL_S, farewell
from learner.rewards.group_scorer import PooledScorer
from learner.status.catalogue import entries
from learner.tasks.registry import make_task
from p2p.identity import Identity
from p2p.version import Version
from tests.support.harness import inline
from tests.swarm.test_head import STOP, Tokenizer, good, open_head, publish

LOCAL_ENGINE = Identity.from_seed(b"\x78" * 32)


def evaluation(name: str = "", **changes: Any) -> Evaluation:
    values: dict[str, Any] = {
        "prompts": 3, "samples": 1, "every": 2, "at_start": True, "at_end": True, "temperature": 0.0, "top_p": 1.0,
        "max_new_tokens": 4, "stop_ids": (STOP,), "seed": 0,
    }  # fmt: skip
    task = make_task("reverse")
    plan = EvalPlan(name=name, **(values | changes))
    score = PooledScorer(task, in_thread=inline).score_prompt
    return make_evaluation(plan, task, Tokenizer(), held_out=True, score=score)


def lines(run_dir: Path, key: str = "eval/exact/mean") -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    return [line for line in map(json.loads, file.read_text().splitlines()) if key in line] if file.exists() else []


async def test_versions_are_evaluated_beside_training(tmp_path, autojump_clock) -> None:
    run_dir = tmp_path / "run"
    own = evaluation("own", samples=2, temperature=1.0)
    async with open_head(run_dir, staleness=4, evaluations=[evaluation(), own]) as bench:
        head = bench.head
        node = await bench.join(good)
        await bench.until(lambda: len(lines(run_dir)) == 1 and len(lines(run_dir, "eval/own/pass@2")) == 1)
        for step in range(4):
            await bench.batch(step, 60)
            head.trainer_requests.on_commit(CommitStep(step + 1, ""))
            await publish(head, step + 1)
            node.version = Version(1, step + 1)
            head.trainer_requests.on_log(Log(step + 1, json.dumps({"loss/mean": 1.0})))
            await trio.sleep(5)
        found = lines(run_dir)
        assert [line["step"] for line in found] == [0, 2, 4] and {line["epoch"] for line in found} == {1}
        assert set(found[0]) == {e.key for e in entries("evaluation") if not e.is_family} | {"step", "epoch", "time"}
        status = head.status()
        assert status["evals"] == {"0": 0.0, "2": 0.0, "4": 0.0} and [row["step"] for row in status["held_out"]] == [0, 2, 4]
        assert status["metrics"]["loss/mean"] == 1.0 and status["metrics"]["eval/step"] == 4.0
        assert status["metrics"]["eval/own/avg@2"] == 0.0 and status["evaluations"] == []
        assert status["trajectories"]["consumed"] == 16, "none of an evaluation's"

    async with open_head(run_dir, staleness=4, evaluations=[evaluation()]) as bench:
        await bench.join(good)
        await trio.sleep(30)
        assert len(lines(run_dir)) == 3, "version 2.4 was evaluated as 1.4"


async def test_the_run_ends_when_its_last_version_is_evaluated(tmp_path, autojump_clock) -> None:
    run_dir = tmp_path / "run"
    async with open_head(run_dir, staleness=4, evaluations=[evaluation(at_start=False)], steps=1) as bench:
        node = await bench.join(good)
        await bench.batch(0, 60)
        bench.head.trainer_requests.on_commit(CommitStep(1, ""))
        bench.head.rollouts.buffers.stop_at(1)
        await publish(bench.head, 1)
        assert not lines(run_dir)

        async def catch_up() -> None:
            await trio.sleep(60)  # longer than anybody else is waited for
            node.version = Version(1, 1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(catch_up)
            await farewell(bench.head, "training is complete")
        assert [line["step"] for line in lines(run_dir)] == [1]


async def test_the_local_engine_alone_evaluates_the_last_version(tmp_path, autojump_clock) -> None:
    run_dir = tmp_path / "run"
    ours = [evaluation(at_start=False)]
    async with open_head(run_dir, staleness=4, evaluations=ours, steps=1, own=LOCAL_ENGINE.peer_id) as bench:
        node = await bench.join(good, who=LOCAL_ENGINE)
        await bench.batch(0, 60)
        bench.head.trainer_requests.on_commit(CommitStep(1, ""))
        bench.head.rollouts.buffers.stop_at(1)
        await publish(bench.head, 1)
        node.version = Version(1, 1)
        await trio.sleep(10)
        assert not lines(run_dir), "it is the trainer's turn"
        await farewell(bench.head, "training is complete")
        assert [line["step"] for line in lines(run_dir)] == [1]


async def test_a_run_without_nodes_ends_all_the_same(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", evaluations=[evaluation()], steps=0) as bench:
        with trio.fail_after(NOBODY_S + FAREWELL_S):
            await farewell(bench.head, "training is complete")
        assert not lines(tmp_path / "run")


async def test_a_node_that_never_serves_the_last_version_does_not_keep_the_run(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", evaluations=[evaluation(at_start=False)], steps=1) as bench:
        await bench.join(good)
        await bench.batch(0, 60)
        await publish(bench.head, 1)
        with trio.fail_after(ARRIVE_S + NOBODY_S + 2 * FAREWELL_S):
            await farewell(bench.head, "training is complete")
        assert not lines(tmp_path / "run")
