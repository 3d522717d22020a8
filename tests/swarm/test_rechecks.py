"""More is checked again after a doubt: a live head with its own audits, and a proven node that holds back one sequence among
many, or two of whose tokens are odd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from learner.audit.calibration import Calibration
from learner.audit.deviations import Deviations
from learner.audit.node_tests import LATELY
from learner.audit.wire import Frames, score_answer
from learner.head.audits import Audits
from learner.standing.standing import RECHECK
from learner.trajectory import Group, Trajectory
from p2p.protocol.generation import GenerateRequest
from p2p.protocol.rollout import Span
from tests.attacks.test_withholding import Run, honest, open_run
from tests.swarm.test_audits import HONEST, V, World
from tests.swarm.test_head import Node

RECHECKED = 240
"""Tokens that are checked again: a hundred and twenty of these sequences."""


class SoundAuditor:
    """Finds that everything is as it should be."""

    def __init__(self) -> None:
        self.process = SimpleNamespace(pid=17)

    async def ready(self) -> dict[str, Any]:
        return {"ready": True}

    async def ask(self, request: bytes) -> dict[str, Any]:
        [message] = Frames().feed(request)
        if message["do"] == "follow":
            return {"ok": True}
        found = [
            [Deviations(*(np.full(stop - first, x) for x in (0.0, -1.0, -1.0, 0.0))) for _, _, first, stop in row[5]]
            for row in message["checks"]
        ]
        [answer] = Frames().feed(score_answer(found, cpu_s=0.0))
        return answer

    def end(self) -> None:
        pass


class AuditedRun:
    """Two proven nodes of which `share` is checked; the first one does not answer while `withholds`."""

    def __init__(self, run: Run, nursery: trio.Nursery, share: float) -> None:
        self.run, self.nursery, self.withholds = run, nursery, False
        start: Any = SoundAuditor
        self.audits = Audits(run.bench.head, start, Calibration(), share=share, window=3, false_alarm=1e-4)
        run.bench.head.audit(self.audits)
        self.standing, self.all_of = run.bench.head.trust.standing, self.audits.plan.all_of

    async def begin(self) -> tuple[str, str]:
        """The peer that is told what to do, and another one."""
        self.nursery.start_soon(self.audits.run)
        node, other = (await self.run.join(self.behave)).peer, self.run.nodes[0].peer
        await self.until(lambda: self.standing.proven(node) and self.standing.proven(other))
        assert not self.all_of(node) and not self.all_of(other)
        return node, other

    async def behave(self, node: Node, request: GenerateRequest) -> None:
        """One sequence that is not answered is moved, and no more: it is a doubt when it happens again and again."""
        if not self.withholds:
            await honest(node, request)

    async def until(self, what: Callable[[], bool]) -> None:
        await self.run.bench.until(what, 300)


@asynccontextmanager
async def audited_run(path: Path, share: float) -> AsyncIterator[AuditedRun]:
    async with trio.open_nursery() as nursery, open_run(path, nursery) as run:
        yield AuditedRun(run, nursery, share)
        nursery.cancel_scope.cancel()


async def test_all_of_a_doubted_nodes_tokens_are_checked_for_a_while_whatever_it_ends(
    tmp_path: Path, autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.standing.standing.RECHECK", RECHECKED)
    async with audited_run(tmp_path, share=1e-6) as run:
        node, other = await run.begin()
        record = run.standing.of
        run.withholds = True
        await run.until(lambda: record(node).doubted > 0)
        run.withholds = False
        doubted = record(node)
        await run.until(lambda: record(node).delivered >= doubted.delivered + 20)
        assert not record(node).doubts, "ten sequences ended as asked: the doubt itself is over"
        assert run.all_of(node) and not run.all_of(other)
        await run.until(lambda: not run.all_of(node))
        assert RECHECKED <= record(node).checked - doubted.checked < RECHECKED + 100
        at = record(node).checked
        await trio.sleep(30)
        assert record(node).checked == at and run.standing.proven(node), "it is as before"


async def test_evidence_that_does_not_suffice_has_all_of_a_node_checked(autojump_clock) -> None:
    """Its 25,600 sound tokens do not hide the next two."""
    world = World()
    standing = world.trust.standing

    def ends(group_id: int, tokens: int, *, odd: bool = False) -> None:
        world.trust.ended(HONEST, tokens)
        spans, seed = (Span(V, 0, tokens),), 666 if odd else 1
        made = {"prompt_ids": (1,), "completion_ids": (2,) * tokens, "logprobs": (-0.5,) * tokens}
        t = Trajectory(**made, spans=spans, finish="stop", node=HONEST, seed=seed)
        world.audits.whole(Group(group_id, group_id, (t,)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.audits.run)
        world.trust.checks(True, 0.999_999)
        for i in range(100):
            ends(i, LATELY)
            await trio.sleep(30)
        assert world.audits.plan.counts["checked"] == 100 * LATELY
        assert standing.proven(HONEST) and standing.audit_share(HONEST) < 1
        ends(100, 2, odd=True)
        await trio.sleep(30)
        world.trust.checks(True, 1e-9)
        assert standing.audit_share(HONEST) == 1 and standing.of(HONEST).recheck == RECHECK and not world.expelled
        ends(101, RECHECK - 1)
        await trio.sleep(30)
        assert standing.audit_share(HONEST) == 1 and standing.of(HONEST).recheck == 1
        ends(102, 1)
        await trio.sleep(30)
        assert standing.audit_share(HONEST) == 1e-9 and standing.proven(HONEST) and not standing.of(HONEST).doubted
        nursery.cancel_scope.cancel()
