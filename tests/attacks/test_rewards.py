"""Strangers whose answers make a reward function of the user's raise, against a live head with honest nodes, on a mock clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from learner.rewards.function_process import FunctionProcess
from learner.rewards.group_scorer import PooledScorer
from learner.rewards.settings import RewardPart, RewardSettings
from learner.tasks.registry import make_task
from p2p.errors import ShoalError
from p2p.protocol.generation import GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from tests.attacks.test_withholding import BEGUN_S, LEAST, MEASURED_S, honest, open_run
from tests.support.harness import inline
from tests.support.nightly import HOW_MANY, cases
from tests.swarm.test_head import STOP, Node, Tokenizer

BREAKS = 2
"""A token that honest nodes do not make: the function raises on what it stands for."""


class Texts(Tokenizer):
    def decode(self, ids: Any, **_: Any) -> str:
        return "broken" if BREAKS in list(ids) else "a=1"


class InThisProcess(FunctionProcess):
    """As the real one, without a process: real time does not pass on a mock clock."""

    def start(self) -> None:
        self.whole = self.function.endswith("whole")

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            return {"values": [float(text.partition("=")[2]) for text in request["completions"]]}
        except ValueError as error:
            return {"error": f"it raised {error}"}


async def breaks(node: Node, request: GenerateRequest) -> None:
    """An answer of the right form, at once."""
    made = np.array([-1.0, -1.0], np.float32)
    await node.say(Tokens((TokenEvent.of(request.request_id, 0, (BREAKS, STOP), made, node.version, "stop"),)))


@pytest.fixture
def make_scorer(monkeypatch) -> Callable[..., PooledScorer]:
    monkeypatch.setattr("learner.rewards.group_scorer.FunctionProcess", InThisProcess)

    async def at_once(pool: object, work: Callable[[], Any]) -> Any:
        return work()

    monkeypatch.setattr("learner.rewards.pool.ScoringPool._in_thread", at_once)

    def make(shape: str) -> PooledScorer:
        settings = RewardSettings(reward=[RewardPart(function=f"r.py:{shape}")])
        return PooledScorer(make_task("reverse"), settings, in_thread=inline)

    return make


@pytest.mark.parametrize("shape", cases(["whole"], "single"))
@pytest.mark.parametrize("count", HOW_MANY)
async def test_the_run_goes_on_at_its_pace(tmp_path: Path, autojump_clock, make_scorer, shape: str, count: int) -> None:
    """Two honest nodes are proven, the strangers are not: each group that had an answer of theirs was lost, and sixteen in a row
    ended the run."""
    with make_scorer(shape) as scorer:
        async with trio.open_nursery() as nursery, open_run(
            tmp_path, nursery, standing={"proven_tokens": 10**9}, scorer=scorer, tokenizer=Texts()
        ) as run:
            head = run.bench.head
            scorer.lost.proven = head.trust.proven_here
            for node in run.nodes:
                head.trust.standing.ended(node.peer, 10**9)
            await trio.sleep(20)
            alone = await run.pace(MEASURED_S)
            for _ in range(count):
                nursery.start_soon(run.keep_coming, await run.join(breaks), breaks)
            await trio.sleep(BEGUN_S)
            under_attack = await run.pace(MEASURED_S)
            print(f"{shape} {count}: {under_attack:.2f} of {alone:.2f}; {head.rollouts.buffers.unscored_groups} groups lost")
            assert under_attack >= LEAST * alone
            assert "of node" in scorer.lost.blame(), "their answers did reach the function"


async def test_strangers_who_were_there_first_do_not_end_the_run(tmp_path: Path, autojump_clock, make_scorer) -> None:
    """Nobody is proven yet, and all groups are theirs."""
    with make_scorer("single") as scorer:
        async with trio.open_nursery() as nursery, open_run(
            tmp_path, nursery, honest_nodes=0, standing={"proven_tokens": 10**9}, scorer=scorer, tokenizer=Texts()
        ) as run:
            scorer.lost.proven = run.bench.head.trust.proven_here
            for _ in range(8):
                nursery.start_soon(run.keep_coming, await run.join(breaks), breaks)
            await trio.sleep(20)
            assert run.bench.head.rollouts.buffers.unscored_groups > 2 * scorer.settings.reward_failures and not run.steps
            for _ in range(2):
                await run.join(honest)
            await trio.sleep(BEGUN_S)
            assert run.steps > 0


async def test_a_function_that_raises_on_everything_ends_the_run(tmp_path: Path, autojump_clock, make_scorer) -> None:
    """As soon as a node is proven: its answers raise as well."""
    with make_scorer("single") as scorer:
        with pytest.raises(ExceptionGroup) as ended:
            async with trio.open_nursery() as nursery, open_run(
                tmp_path, nursery, honest_nodes=0, standing={"proven_tokens": 60}, scorer=scorer, tokenizer=Texts()
            ) as run:
                scorer.lost.proven = run.bench.head.trust.proven_here
                await run.join(breaks)
                await trio.sleep(60)
        assert ended.group_contains(ShoalError, match=r"^16 groups in a row could not be scored .*failed: \d+ of node")
