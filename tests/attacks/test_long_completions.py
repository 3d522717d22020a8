"""Proven nodes that go on where their seed drew the end: each token is made as quickly as others make theirs, and all wait for
the last one. Only an audit tells that from a long answer. Against a live head with its audits, on a mock clock."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from learner.audit.calibration import Calibration
from learner.audit.deviations import Deviations, OwnDeviations
from learner.audit.wire import Frames, read_claims, score_answer
from learner.head.audits import Audits
from p2p.errors import ChannelClosed
from p2p.protocol.generation import GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from tests.attacks.test_withholding import BEGUN_S, LEAST, MEASURED_S, Behaviour, Run, open_run
from tests.support.nightly import HOW_MANY, NIGHTLY
from tests.swarm.test_head import STOP, Node
from tests.swarm.test_rechecks import SoundAuditor

DRAWN = 20
"""Tokens after which the draw ends a sequence, in the median."""

TOKENS_PER_S = 100.0
"""Of one sequence at an honest node."""

CHUNK_S = 0.1
"""Seconds of tokens that a node sends together."""

Lengths = Callable[[int], int]
"""The length at which a sequence's draw says the end, by its seed."""


def fixed(seed: int) -> int:
    return DRAWN


def spread(seed: int) -> int:
    """Log-normal: one in a hundred is ten times as long as the median."""
    return max(2, min(300, round(DRAWN * math.exp(np.random.default_rng(seed).normal()))))


def stream(lengths: Lengths, rate: float, beyond: int, goes_beyond: bool = False) -> Behaviour:
    """Its tokens, a few at a time, the last of them the end. What others began is gone on with; where they went beyond the end up
    to `beyond` tokens, for so the draws go on from there."""

    async def make(node: Node, request: GenerateRequest) -> None:
        start, made, ends_at = len(request.prefix_ids) // 4, 0, lengths(request.seed)
        left = max(1, (beyond if start >= ends_at or goes_beyond else ends_at) - start)
        parts = max(1, round(left / rate / CHUNK_S))
        for part in range(parts):
            await trio.sleep(left / rate / parts)
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
    """Knows where the draw says the end: what stands there in its place is wrong, and what comes behind is as one would draw it
    after that. Honest nodes round as bfloat16 does."""

    def __init__(self, lengths: Lengths) -> None:
        super().__init__()
        self._lengths = lengths

    async def ask(self, request: bytes) -> dict[str, Any]:
        [message] = Frames().feed(request)
        if message["do"] == "follow":
            return {"ok": True}
        await trio.sleep(0.1)
        rng = np.random.default_rng(0)

        def found(first: int, ids: tuple[int, ...], seed: int) -> Deviations:
            """Of tokens from place `first` on."""
            claimed, distance, shift = np.full(len(ids), -1.0), np.zeros(len(ids)), np.zeros(len(ids))
            at = self._lengths(seed) - 1 - first
            if 0 <= at < len(ids) and ids[at] != STOP:
                distance[at], shift[at] = 0.6, 2.0
            return Deviations(distance, claimed, claimed + rng.normal(0, 0.01, len(ids)), shift)

        parts = [[found(c.first, c.completion_ids[c.first : c.stop], c.seed) for _, c in of] for of in read_claims(message)]
        own, asked = found(0, (STOP,) * message["bfloat16"], 0), message["bfloat16"]
        measured = OwnDeviations(own, np.zeros(asked, bool), np.arange(asked, dtype=float))
        [answer] = Frames().feed(score_answer(parts, measured, cpu_s=0.0))
        return answer


class GoesOn:
    """As others until `on`; then it goes on to so many tokens at so many a second, in one sequence of `one_in`."""

    def __init__(self, lengths: Lengths, tokens: int, rate: float, one_in: int) -> None:
        self.on, self._one_in, self._asked = False, one_in, 0
        self._as_drawn = stream(lengths, TOKENS_PER_S, tokens)
        self._beyond = stream(lengths, rate, tokens, goes_beyond=True)

    async def __call__(self, node: Node, request: GenerateRequest) -> None:
        self._asked += self.on
        await (self._beyond if self.on and self._asked % self._one_in == 0 else self._as_drawn)(node, request)


@asynccontextmanager
async def audited_run(path: Path, nursery: trio.Nursery, lengths: Lengths, beyond: int) -> AsyncIterator[tuple[Run, Audits]]:
    """Two honest nodes, both proven. What went beyond its end goes on to so many tokens."""
    start: Any = partial(DrawsAuditor, lengths)
    async with open_run(path, nursery, honest_nodes=0, stall_s=120.0, max_new_tokens=1024) as run:
        audits = Audits(run.bench.head, start, Calibration(), share=0.02, window=3, false_alarm=1e-4)
        run.bench.head.audit(audits)
        nursery.start_soon(audits.run)
        honest = stream(lengths, TOKENS_PER_S, beyond)
        nodes, standing = [await run.join(honest) for _ in range(2)], run.bench.head.trust.standing
        await run.bench.until(lambda: all(standing.proven(node.peer) for node in nodes), 60)
        await trio.sleep(20)
        yield run, audits


USUAL = [(fixed, 80, 33.0, 1), (spread, 1000, 100.0, 10)]
"""Whose draws end when; up to how many tokens the attackers go on, at how many a second, in one sequence of how many."""

MORE = [
    (fixed, 1000, 100.0, 1), (fixed, 1000, 100.0, 10), (fixed, 160, 55.0, 1), (fixed, 58, 20.0, 8), (spread, 1000, 100.0, 1),
    (spread, 1000, 100.0, 4), (spread, 1000, 100.0, 20),
]  # fmt: skip
"""By night as well."""


@pytest.mark.parametrize(
    ("count", "lengths", "tokens", "rate", "one_in"),
    [(count, *how) for count in HOW_MANY for how in USUAL + MORE * NIGHTLY],
)
async def test_who_goes_on_where_its_draw_said_the_end(
    tmp_path: Path, autojump_clock, count: int, lengths: Lengths, tokens: int, rate: float, one_in: int
) -> None:
    """Of what a proven node makes one completion in fifty is checked, and eight such nodes left 0.44 of the pace for minutes."""
    async with trio.open_nursery() as nursery, audited_run(tmp_path, nursery, lengths, tokens) as (run, audits):
        alone, honest_nodes = await run.pace(MEASURED_S), list(run.nodes)
        turned = GoesOn(lengths, tokens, rate, one_in)
        nodes, standing = [await run.join(turned) for _ in range(count)], run.bench.head.trust.standing
        for node in nodes:  # they have worked for their standing
            standing.ended(node.peer, 100)
            standing.checked(node.peer, 100)
            nursery.start_soon(run.keep_coming, node, turned)
        await trio.sleep(20)
        before, turned.on = await run.pace(20), True
        first = [await run.pace(BEGUN_S / 3) for _ in range(3)]
        later = [await run.pace(MEASURED_S / 6) for _ in range(6)]
        under_attack = sum(later) / len(later)
        records = [standing.of(node.peer) for node in nodes]
        found = [sum(record.doubted > 0 for record in records), sum(record.expelled > 0 for record in records)]
        what = f"{lengths.__name__}, {count} go on to {tokens} at {rate:.0f}/s, 1 in {one_in}"
        print(f"{what}: {under_attack:.2f} of {alone:.2f} ({before:.2f} with them); {first}, then {later}; "
              f"found, expelled {found}; {dict(audits.plan.counts)}")  # fmt: skip
        assert under_attack >= LEAST * alone
        assert not any(node.closed for node in honest_nodes) and not any(standing.of(n.peer).expelled for n in honest_nodes)
