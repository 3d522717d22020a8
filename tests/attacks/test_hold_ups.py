"""Nodes that hold the trainer up a little, again and again, each time for less than would be a fault by itself: they give back
all that they are given, asked or not, or make it late. Against a live head with honest nodes, on a mock clock. And honest fleets
whose nodes differ, pause, or have long prompts: what is done about the former must cost those little."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path

import pytest
import trio

import p2p.protocol.rollout as causes
from p2p.errors import ChannelClosed
from p2p.protocol.generation import GenerateRequest, Interrupt, Rejected, Tokens
from p2p.protocol.rollout import TokenEvent
from tests.attacks.test_turning import check_pace_beside_proven
from tests.attacks.test_withholding import BEGUN_S, LEAST, MEASURED_S, TOKEN_S, Behaviour, honest, late, open_run
from tests.support.nightly import HOW_MANY, NIGHTLY, cases
from tests.swarm.test_head import Node


def gives_back(cause: str, after_s: float) -> Behaviour:
    """Everything, so many seconds after it came, and nothing made of it."""

    async def behave(node: Node, request: GenerateRequest) -> None:
        async def give_back() -> None:
            await trio.sleep(after_s)
            start = len(request.prefix_ids) // 4
            back: object = Tokens((TokenEvent.of(request.request_id, start, (), (), node.version, "interrupt"),))
            if cause != "interrupt":
                back = Rejected(request.request_id, node.version, "busy", True, getattr(causes, cause))
            if not node.closed:
                await node.say(back)

        node.nursery.start_soon(give_back)

    return behave


class GivesBackWhenAsked:
    """Ends one sequence as asked; holds each after it until it is asked for it, and gives it back, empty, just in time."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._asked: Counter[str] = Counter()
        self._watched: set[int] = set()

    async def __call__(self, node: Node, request: GenerateRequest) -> None:
        if id(node) not in self._watched:
            self._watched.add(id(node))
            node.nursery.start_soon(self._watch, node)
        self._asked[node.peer] += 1
        if self._asked[node.peer] == 1:
            await honest(node, request)

    async def _watch(self, node: Node) -> None:
        read = 0
        while not node.closed:
            await trio.sleep(0.05)
            for message in node.heard[read:]:
                read += 1
                for request_id in message.request_ids if isinstance(message, Interrupt) else ():
                    node.nursery.start_soon(self._give_back, node, request_id)

    async def _give_back(self, node: Node, request_id: str) -> None:
        await trio.sleep(self._after_s)
        try:
            await node.say(Tokens((TokenEvent.of(request_id, 0, (), (), node.version, "interrupt"),)))
        except ChannelClosed:
            pass  # it left meanwhile


@pytest.mark.parametrize("count", HOW_MANY)
async def test_who_ended_one_sequence_and_gives_back_when_it_is_asked(tmp_path: Path, autojump_clock, count: int) -> None:
    """It was asked again for each, and waited for: one such stranger cost 0.6 of the pace."""
    attack = GivesBackWhenAsked(0.85)
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, stall_s=120.0) as run:
        await trio.sleep(20)
        alone = await run.pace(MEASURED_S)
        for _ in range(count):
            nursery.start_soon(run.keep_coming, await run.join(attack), attack)
        await trio.sleep(BEGUN_S)
        under_attack = await run.pace(MEASURED_S)
        print(f"gives back when asked, {count}: {under_attack:.2f} of {alone:.2f}")
        assert under_attack >= LEAST * alone


@pytest.mark.parametrize(
    ("cause", "after_s", "count"),
    [("UPDATING", 2.5, count) for count in HOW_MANY]
    + [("interrupt", 0.45, count) for count in HOW_MANY]
    + ([(cause, 0.5, count) for cause in ("RESTING", "BEHIND") for count in HOW_MANY] if NIGHTLY else [])
    + ([("interrupt", 2.5, count) for count in HOW_MANY] if NIGHTLY else []),
)
async def test_proven_nodes_that_give_everything_back(
    tmp_path: Path, autojump_clock, cause: str, after_s: float, count: int
) -> None:
    """That was free: eight such nodes left 0.1 steps a second of 1.5."""
    await check_pace_beside_proven(tmp_path, f"{cause} after {after_s} s", count, badly=gives_back(cause, after_s))


@pytest.mark.parametrize(
    ("seconds", "count"), [(seconds, n) for seconds in cases([2.9], 1.0, 2.5, 8.5) for n in HOW_MANY]
)
async def test_proven_nodes_that_make_everything_late(tmp_path: Path, autojump_clock, seconds: float, count: int) -> None:
    """By less than is a fault by itself: two such nodes left 0.3 to 0.8 steps a second of 1.5, and nobody was to blame."""
    await check_pace_beside_proven(tmp_path, f"all late by {seconds} s", count, badly=late(seconds))


class OneLate:
    """Honest until `on`; then each node always holds one sequence for so many seconds, and makes the others at once."""

    def __init__(self, seconds: float) -> None:
        self.on, self._seconds = False, seconds
        self._holds: Counter[str] = Counter()

    async def __call__(self, node: Node, request: GenerateRequest) -> None:
        if not self.on or self._holds[node.peer]:
            await (late(TOKEN_S / 5) if self.on else honest)(node, request)
            return
        self._holds[node.peer] += 1
        node.nursery.start_soon(self._hold, node, request)

    async def _hold(self, node: Node, request: GenerateRequest) -> None:
        await trio.sleep(self._seconds)
        self._holds[node.peer] -= 1
        if not node.closed:
            await node.finish(request)


@pytest.mark.parametrize(
    ("seconds", "count"), [(seconds, n) for seconds in ([1.0, 1.1, 1.2, 1.3, 1.4, 1.6] if NIGHTLY else [1.2]) for n in HOW_MANY]
)
async def test_proven_nodes_that_always_hold_one(tmp_path: Path, autojump_clock, seconds: float, count: int) -> None:
    """For just less than what is moved early: that was a second, and eight such nodes left 0.67 of the pace."""
    attack = OneLate(seconds)
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, stall_s=120.0) as run:
        await trio.sleep(20)
        alone = await run.pace(MEASURED_S)
        for _ in range(count):
            node = await run.join(attack)
            run.bench.head.trust.standing.ended(node.peer, 100)
            nursery.start_soon(run.keep_coming, node, attack)
        await trio.sleep(5)
        attack.on = True
        await trio.sleep(BEGUN_S)
        under_attack = await run.pace(MEASURED_S)
        print(f"one late by {seconds} s, {count}: {under_attack:.2f} of {alone:.2f}")
        assert under_attack >= LEAST * alone


def long_prompts(seconds: float, one_in: int) -> Behaviour:
    """All members of one group in so many take so long to begin, wherever they are."""

    async def behave(node: Node, request: GenerateRequest) -> None:
        group = request.request_id.partition(".")[0]
        await late(2 * TOKEN_S if zlib.crc32(b"x" + group.encode()) % one_in else seconds)(node, request)

    return behave


@pytest.mark.parametrize(
    ("what", "fleet", "least"),
    cases(
        [
            ("two quick ones and six slow ones", [late(0.2)] * 2 + [late(2.9)] * 6, 1.2),  # 0.55 before slow ones gave way
            ("a long prompt in 33", [long_prompts(5.0, 33)] * 6, 0.9),  # 1.10 without moving anything early
        ],
        ("long prompts, three in eight", [long_prompts(3.0, 8)] * 6, 0.6),  # 0.73
        ("all are slow", [late(3.0)] * 6, 0.4),  # 0.43
    ),
)
async def test_honest_fleets_go_on(tmp_path: Path, autojump_clock, what: str, fleet: list[Behaviour], least: float) -> None:
    async with trio.open_nursery() as nursery, open_run(tmp_path, nursery, honest_nodes=0, stall_s=120.0) as run:
        nodes = [await run.join(behave) for behave in fleet]
        await trio.sleep(10)
        standing = run.bench.head.trust.standing
        for node in nodes:
            standing.ended(node.peer, 100)
        await trio.sleep(50)
        pace = await run.pace(2 * MEASURED_S)
        doubted = [standing.of(node.peer).doubted for node in nodes]
        print(f"{what}: {pace:.2f} steps/s, doubted {doubted}")
        assert pace >= least and not any(standing.of(node.peer).expelled for node in nodes)
        assert not any(doubted) or what.startswith("two quick"), "pauses and prompts that all have are nobody's fault"


