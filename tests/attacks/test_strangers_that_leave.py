"""Strangers that take what they are given, make a part of it and leave, and are somebody else a second later. What they made is
sound, so others go on with it; or one token of it is not. Against a live head with its audits, on a mock clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from p2p.errors import ChannelClosed
from p2p.identity import Identity
from p2p.protocol.generation import GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from tests.attacks.test_long_completions import CHUNK_S, DRAWN, TOKENS_PER_S, audited_run, fixed
from tests.attacks.test_withholding import BEGUN_S, LEAST, MEASURED_S, Behaviour, Run
from tests.support.nightly import HOW_MANY, NIGHTLY
from tests.swarm.test_head import Node

STAYS_S = 20.0
"""Seconds for which an attacker stays that is given nothing."""


def leaves_after(tokens: int) -> Behaviour:
    """Of each sequence it makes what is lacking of so many tokens, none of them the end; then it leaves."""

    async def make(node: Node, request: GenerateRequest) -> None:
        start = len(request.prefix_ids) // 4
        for first in range(start, tokens, round(TOKENS_PER_S * CHUNK_S)):
            await trio.sleep(CHUNK_S)
            count = min(tokens - first, round(TOKENS_PER_S * CHUNK_S))
            try:
                await node.say(Tokens((TokenEvent.of(request.request_id, first, (1,) * count, (-1.0,) * count, node.version),)))
            except ChannelClosed:
                return
        if not node.closed:
            await node.control.aclose("bye")

    async def behave(node: Node, request: GenerateRequest) -> None:
        node.nursery.start_soon(make, node, request)

    return behave


async def keeps_coming(run: Run, behave: Behaviour) -> None:
    """As somebody else each time."""
    while True:
        try:
            node = await run.join(behave, who=Identity.generate())
        except (AssertionError, ChannelClosed):
            await trio.sleep(1)  # it is told to come later
            continue
        with trio.move_on_after(STAYS_S):
            await node.until_closed(10_000)
        run.nodes.remove(node)
        if not node.closed:
            await node.control.aclose("bye")
        await trio.sleep(1)


@pytest.mark.parametrize("count", HOW_MANY)
@pytest.mark.parametrize("tokens", [1, 10, DRAWN - 1, DRAWN] if NIGHTLY else [DRAWN - 1])
async def test_who_makes_a_part_and_leaves(tmp_path: Path, autojump_clock, tokens: int, count: int) -> None:
    """With DRAWN tokens the last one is wrong: the draw said the end there."""
    async with trio.open_nursery() as nursery, audited_run(tmp_path, nursery, fixed, 1000) as (run, _):
        alone, honest_nodes = await run.pace(MEASURED_S), list(run.nodes)
        for _ in range(count):
            nursery.start_soon(keeps_coming, run, leaves_after(tokens))
        paces = [await run.pace(10) for _ in range(9)]
        after = paces[round(BEGUN_S / 10) :]
        under_attack, standing = sum(after) / len(after), run.bench.head.trust.standing
        print(f"{count} leave after {tokens} of {DRAWN} tokens: {under_attack:.2f} of {alone:.2f}; {paces}")
        assert under_attack >= LEAST * alone
        assert not any(node.closed for node in honest_nodes) and not any(standing.of(n.peer).expelled for n in honest_nodes)
