"""Samples of a run: written when a step is committed, by whatever trainer; they never hold up or end a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from learner.client.messages import CommitStep
from learner.head.sample_file import append
from tests.swarm.test_head import Bench, Tokenizer, good, open_head
from tests.swarm.test_resume import two_tokens


def written(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "samples.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def train(bench: Bench, first: int, steps: int) -> None:
    """As a trainer of one's own: batches and commits, and nothing said of them."""
    for step in range(first, first + steps):
        await bench.batch(step, 60)
        bench.head.trainer_requests.on_commit(CommitStep(step + 1, f"c{step + 1}"))


async def test_every_committed_step_leaves_some(tmp_path, autojump_clock) -> None:
    run_dir = tmp_path / "run"
    async with open_head(run_dir, staleness=4, samples_per_step=3) as bench:
        await bench.join(good)
        await bench.batch(0, 60)
        await bench.head.samples.settled()
        assert written(run_dir) == [] and bench.head.status()["samples"] == []
        await train(bench, 0, 2)
        await bench.head.samples.settled()
        lines = written(run_dir)
        assert [line["step"] for line in lines] == [1, 1, 1, 2, 2, 2]
        assert {(line["prompt"], line["completion"], line["finish"]) for line in lines} == {("x", "x", "stop")}
        assert all(line["spans"] == [{"version": "1.0", "node": "rogue", "tokens": 2}] for line in lines)
        assert all(isinstance(line["reward"], float) for line in lines)
        shown = bench.head.status()["samples"]
        assert [s["step"] for s in shown] == [1, 1, 1, 2, 2, 2]
        assert shown[0].keys() == {"step", "prompt", "completion", "reward", "finish", "spans"}
    append(run_dir / "samples.jsonl", b'{"step": 3, "prom')  # SIGKILL, in the midst of a line
    async with open_head(run_dir, staleness=4, samples_per_step=3) as bench:
        assert bench.head.status()["samples"] == shown
        await bench.join(good)
        await train(bench, 2, 1)
        await bench.head.samples.settled()
        assert [line["step"] for line in written(run_dir)] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


async def test_a_sample_says_which_nodes_made_it(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", staleness=4) as bench:
        first = await bench.join(two_tokens, capacity=8)
        await bench.until(lambda: bench.head.status()["nodes"][0]["tokens"] >= 16)
        await first.control.aclose("gone")
        await bench.until(lambda: not bench.head.nodes)
        await bench.join(good, capacity=8)
        await train(bench, 0, 1)
        await bench.head.samples.settled()
        spans = [[s["tokens"] for s in line["spans"]] for line in written(tmp_path / "run")]
        assert spans == [[2, 2]] * 4


async def test_none_are_written_when_none_are_asked_for(tmp_path, autojump_clock) -> None:
    async with open_head(tmp_path / "run", staleness=4, samples_per_step=0) as bench:
        await bench.join(good)
        await train(bench, 0, 2)
        await bench.head.samples.settled()
        assert written(tmp_path / "run") == [] and bench.head.status()["samples"] == []


class Broken(Tokenizer):
    def decode(self, ids: Any, skip_special_tokens: bool = True, **_: Any) -> str:
        if not skip_special_tokens:
            raise RuntimeError("this tokenizer decodes no prompt")
        return "x"


async def test_a_run_goes_on_without_samples_that_cannot_be_written(tmp_path, autojump_clock, caplog) -> None:
    async with open_head(tmp_path / "run", staleness=4, tokenizer=Broken()) as bench:
        await bench.join(good)
        await train(bench, 0, 3)
        await bench.head.samples.settled()
        assert bench.head.trainer_requests.step == 3 and written(tmp_path / "run") == []
    assert caplog.text.count("samples cannot be written: this tokenizer decodes no prompt") == 1
