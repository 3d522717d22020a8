"""Proven nodes that go on where their seed drew the end: each token is made as quickly as others make theirs, and all wait for
the last one. Only an audit tells that from a long answer. Against a live head with its audits, on a mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from learner.audit.calibration import Calibration
from learner.audit.plan import Deviations
from learner.audit.wire import Frames, read_claims, score_answer
from learner.head.audits import Audits
from p2p.errors import ChannelClosed
from p2p.protocol.generation import GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from tests.attacks.test_withholding import BEGUN_S, LEAST, MEASURED_S, Behaviour, Run, open_run
from tests.support.nightly import HOW_MANY
from tests.swarm.test_head import STOP, Node
from tests.swarm.test_rechecks import SoundAuditor

DRAWN = 20
"""Tokens after which the draw ends each sequence."""

QUICK_S = 0.2
"""Seconds in which an honest node makes them."""

CHUNK_S = 0.1
"""Seconds of tokens that a node sends together."""


def stream(tokens: int, seconds: float, beyond: int = 0) -> Behaviour:
    """So many tokens in so many seconds, a few at a time, the last of them the end. What others began is gone on with; where they
    went beyond the end up to `beyond` tokens, for so the draws go on from there."""

    async def make(node: Node, request: GenerateRequest) -> None:
        start, made = len(request.prefix_ids) // 4, 0
        left = max(1, (beyond if start >= DRAWN else tokens) - start)
        lasts_s = left / tokens * seconds
        parts = max(1, round(lasts_s / CHUNK_S))
        for part in range(parts):
            await trio.sleep(lasts_s / parts)
            count = left * (part + 1) // parts - made
            ends = made + count == left
            ids = (1,) * (count - ends) + (STOP,) * ends
            if node.closed or not ids:
                continue
            event = TokenEvent.of(request.request_id, start + made, ids, (-1.0,) * count, node.version, "stop" if ends else "")
            try:
                await node.say(Tokens((event,)))
            except ChannelClosed:
                return
            made += count

    async def behave(node: Node, request: GenerateRequest) -> None:
        node.nursery.start_soon(make, node, request)

    return behave


class DrawsAuditor(SoundAuditor):
    """Knows that the draw says the end at place DRAWN - 1: what stands there in its place is wrong, and what comes behind is as
    one would draw it after that. Honest nodes round as bfloat16 does."""

    async def ask(self, request: bytes) -> dict[str, Any]:
        [message] = Frames().feed(request)
        if message["do"] == "follow":
            return {"ok": True}
        await trio.sleep(0.1)
        rng = np.random.default_rng(0)

        def found(first: int, ids: tuple[int, ...]) -> Deviations:
            """Of tokens from place `first` on."""
            claimed, distance, shift = np.full(len(ids), -1.0), np.zeros(len(ids)), np.zeros(len(ids))
            at = DRAWN - 1 - first
            if 0 <= at < len(ids) and ids[at] != STOP:
                distance[at], shift[at] = 0.6, 2.0
            return Deviations(distance, claimed, claimed + rng.normal(0, 0.01, len(ids)), shift)

        parts = [[found(c.first, c.completion_ids[c.first : c.stop]) for _, c in of] for of in read_claims(message)]
        [answer] = Frames().feed(score_answer(parts, found(0, (STOP,) * message["bfloat16"]), cpu_s=0.0))
        return answer


class GoesOn:
    """As others until `on`; then it goes on to so many tokens, which take it so long."""

    def __init__(self, tokens: int, seconds: float) -> None:
        self.on = False
        self._quick, self._long = stream(DRAWN, QUICK_S), stream(tokens, seconds, tokens)

    async def __call__(self, node: Node, request: GenerateRequest) -> None:
        await (self._long if self.on else self._quick)(node, request)


@asynccontextmanager
async def audited_run(path: Path, nursery: trio.Nursery, tokens: int) -> AsyncIterator[tuple[Run, Audits]]:
    """Two honest nodes, both proven. What went beyond its end goes on to so many tokens."""
    start: Any = DrawsAuditor
    async with open_run(path, nursery, honest_nodes=0, stall_s=120.0, max_new_tokens=1024) as run:
        audits = Audits(run.bench.head, start, Calibration(), share=0.02, window=3, false_alarm=1e-4)
        run.bench.head.audit(audits)
        nursery.start_soon(audits.run)
        quick = stream(DRAWN, QUICK_S, tokens)
        nodes, standing = [await run.join(quick) for _ in range(2)], run.bench.head.trust.standing
        await run.bench.until(lambda: all(standing.proven(node.peer) for node in nodes), 60)
        await trio.sleep(20)
        yield run, audits


@pytest.mark.parametrize(("tokens", "seconds"), [(80, 2.4), (160, 2.9), (1000, 10.0)])
@pytest.mark.parametrize("count", HOW_MANY)
async def test_who_goes_on_where_its_draw_said_the_end(
    tmp_path: Path, autojump_clock, tokens: int, seconds: float, count: int
) -> None:
    """Of what a proven node makes one completion in fifty is checked, and eight such nodes left 0.44 of the pace for minutes."""
    async with trio.open_nursery() as nursery, audited_run(tmp_path, nursery, tokens) as (run, audits):
        alone, honest_nodes = await run.pace(MEASURED_S), list(run.nodes)
        turned = GoesOn(tokens, seconds)
        nodes, standing = [await run.join(turned) for _ in range(count)], run.bench.head.trust.standing
        for node in nodes:  # they have worked for their standing
            standing.ended(node.peer, 100)
            standing.checked(node.peer, 100)
            nursery.start_soon(run.keep_coming, node, turned)
        await trio.sleep(20)
        turned.on = True
        first = [await run.pace(BEGUN_S / 3) for _ in range(3)]
        under_attack = await run.pace(MEASURED_S)
        expelled = sum(standing.of(node.peer).expelled > 0 for node in nodes)
        print(f"goes on to {tokens} in {seconds} s, {count}: {under_attack:.2f} of {alone:.2f}; at first {first}; "
              f"{expelled} expelled, checked {dict(audits.plan.counts)}")  # fmt: skip
        assert under_attack >= LEAST * alone
        assert not any(node.closed for node in honest_nodes) and not any(standing.of(n.peer).expelled for n in honest_nodes)
