"""Proven nodes that make some of their sequences slowly, token by token, so that these are never silent, and the others as
quickly as anybody. No token is wrong. Against a live head with honest nodes, on a mock clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from p2p.errors import ChannelClosed
from p2p.protocol.generation import GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from tests.attacks.test_long_completions import TOKENS_PER_S, Lengths, audited_run, fixed, spread, stream
from tests.attacks.test_withholding import BEGUN_S, LEAST, MEASURED_S
from tests.support.nightly import HOW_MANY, NIGHTLY
from tests.swarm.test_head import STOP, Node


class Slowly:
    """As others until `on`; then of one sequence in so many come so many tokens each so many seconds."""

    def __init__(self, lengths: Lengths, tokens: int, each_s: float, one_in: int) -> None:
        self.on, self._asked = False, 0
        self._lengths, self._tokens, self._each_s, self._one_in = lengths, tokens, each_s, one_in
        self._quickly = stream(lengths, TOKENS_PER_S, 1000)

    async def __call__(self, node: Node, request: GenerateRequest) -> None:
        self._asked += self.on
        if self.on and self._asked % self._one_in == 0 and len(request.prefix_ids) // 4 < self._lengths(request.seed):
            node.nursery.start_soon(self._make, node, request)
        else:
            await self._quickly(node, request)

    async def _make(self, node: Node, request: GenerateRequest) -> None:
        ends_at = self._lengths(request.seed)
        for first in range(len(request.prefix_ids) // 4, ends_at, self._tokens):
            await trio.sleep(self._each_s)
            count = min(self._tokens, ends_at - first)
            ends = first + count == ends_at
            ids = (1,) * (count - ends) + (STOP,) * ends
            event = TokenEvent.of(request.request_id, first, ids, (-1.0,) * count, node.version, "stop" if ends else "")
            try:
                await node.say(Tokens((event,)))
            except ChannelClosed:
                return


USUAL = [(spread, 1, 0.1, 10)]
"""Whose sequences end when; so many tokens each so many seconds, in one sequence of how many."""

MORE = [(fixed, 7, 0.65, 2), (spread, 1, 0.1, 4), (spread, 6, 0.6, 4), (fixed, 5, 0.65, 4), (fixed, 1, 0.1, 4)]
"""By night as well."""


@pytest.mark.parametrize(
    ("count", "lengths", "tokens", "each_s", "one_in"),
    [(count, *how) for count in HOW_MANY for how in USUAL + MORE * NIGHTLY],
)
async def test_who_makes_some_slowly(
    tmp_path: Path, autojump_clock, count: int, lengths: Lengths, tokens: int, each_s: float, one_in: int
) -> None:
    """Progress was no silence, and a node was looked at as a whole: eight such nodes left 0.21 to 0.67 of the pace for good."""
    async with trio.open_nursery() as nursery, audited_run(tmp_path, nursery, lengths, 1000) as (run, _):
        alone, honest_nodes = await run.pace(MEASURED_S), list(run.nodes)
        turned = Slowly(lengths, tokens, each_s, one_in)
        standing = run.bench.head.trust.standing
        for _ in range(count):
            node = await run.join(turned)
            standing.ended(node.peer, 100)
            standing.checked(node.peer, 100)
            nursery.start_soon(run.keep_coming, node, turned)
        await trio.sleep(20)
        turned.on = True
        paces = [await run.pace(10) for _ in range(9)]
        after = paces[round(BEGUN_S / 10) :]
        under_attack = sum(after) / len(after)
        what = f"{lengths.__name__}, {count} make one in {one_in} by {tokens} each {each_s} s"
        print(f"{what}: {under_attack:.2f} of {alone:.2f}; {paces}; {[standing.of(n.peer).doubted for n in honest_nodes]}")
        assert under_attack >= LEAST * alone
        assert not any(node.closed for node in honest_nodes) and not any(standing.of(n.peer).expelled for n in honest_nodes)
