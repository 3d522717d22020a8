"""A stop string of several tokens, on a mock clock: a real head, and a node by hand that goes on until it is told to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import trio

from learner.requests.port import Ask, Made
from learner.rollouts.outcomes import Sampling
from learner.rollouts.stop_strings import StopStrings
from p2p.protocol.generation import Abort, GenerateRequest, Tokens
from p2p.protocol.rollout import TokenEvent
from tests.swarm.test_head import Node, check_books, open_head


def digits(ids: Sequence[int]) -> str:
    return "".join(map(str, ids))


async def endless(node: Node, request: GenerateRequest) -> None:
    await node.say(Tokens((TokenEvent.of(request.request_id, 0, (3, 3, 1), (-1.0,) * 3, node.version),)))
    await node.say(Tokens((TokenEvent.of(request.request_id, 3, (2, 3, 3, 3), (-1.0,) * 4, node.version),)))


async def test_it_ends_completions_and_requests_and_the_node_has_its_place_back(tmp_path, autojump_clock) -> None:
    stop = StopStrings(digits, ["12"])
    async with open_head(tmp_path / "run", sampling=Sampling(60, (0,), stop=stop)) as bench:
        node = await bench.join(endless, capacity=2)
        batch = await bench.batch(0, 30)
        made = [t for group in batch for t in group.trajectories]
        assert {(t.completion_ids, t.finish) for t in made} == {((3, 3, 1, 2), "stop")} and len(made) == 4
        pieces: list[Made] = []
        ask = Ask(request_class="evaluation", prompt_ids=(1,), max_new_tokens=60, stop_ids=(0,), seed=1, stop=stop)
        with trio.fail_after(30):
            async with bench.head.requests.sample(ask) as tokens:
                pieces += [one async for one in tokens]
            async with bench.head.requests.sample(replace(ask, stop=None, max_new_tokens=7)) as tokens:
                whole = [one async for one in tokens]
        assert [token for one in pieces for token in one.ids] == [3, 3, 1, 2] and pieces[-1].finish == "stop"
        assert [token for one in whole for token in one.ids] == [3, 3, 1, 2, 3, 3, 3]
        await trio.sleep(1)
        aborted = {name for m in node.heard if isinstance(m, Abort) for name in m.request_ids}
        assert aborted == {r.request_id for r in node.requests if r.max_new_tokens != 7}  # the last one ended by itself
        assert bench.head.rollouts.load(node.peer) == 0 and not bench.head.reports
        check_books(bench.head)
